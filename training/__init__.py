"""Conversations, self-generation, the training loop, evaluation."""

import os

# Read when torch makes its first tensor: large CPU tensors on huge pages cost a tenth less time here.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

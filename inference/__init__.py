"""Tree decoding: the engine, tree builders, verification, the decoder."""

from .decoder import DecodeOutput, SpeculativeDecoder
from .trees import TREES, DynamicTree, FixedTree, chain, make_tree

__all__ = ["TREES", "DecodeOutput", "DynamicTree", "FixedTree", "SpeculativeDecoder", "chain", "make_tree"]

"""Tree decoding: the engine, tree builders, verification, the decoder."""

from .decoder import DecodeOutput, SpeculativeDecoder
from .past import Past
from .tree_search import best_fixed_tree
from .trees import TREES, CalibratedTree, DynamicTree, FixedTree, chain, make_tree

__all__ = [
    "TREES",
    "CalibratedTree",
    "DecodeOutput",
    "DynamicTree",
    "FixedTree",
    "Past",
    "SpeculativeDecoder",
    "best_fixed_tree",
    "chain",
    "make_tree",
]

"""Operations that carry tree verification: attention, drafting from a head, acceptance, commit.

Every op is a folder: `reference.py` defines it in torch and is the CPU path, `kernel*.py` is its
Triton kernel, `__init__.py` checks the arguments and picks one of the two. This package knows
nothing about the library that calls it.

Shape letters: B sequences, N tree nodes, M queries (the last M nodes), W = ceil(N / 64) words,
H query heads, K key/value heads, G = H / K, S cache slots, D and Dv key and value head sizes,
V vocabulary, C hidden size.
"""

from .draft_topk import draft_topk
from .exit_confidence import ExitConfidence, exit_confidence
from .kv_commit import kv_commit
from .layout import TreeLayout
from .row_stats import RowStats, keep_mask, row_stats
from .tree_accept import tree_accept, tree_accept_sampled
from .tree_attention import tree_attention

__all__ = [
    "ExitConfidence",
    "RowStats",
    "TreeLayout",
    "draft_topk",
    "exit_confidence",
    "keep_mask",
    "kv_commit",
    "row_stats",
    "tree_accept",
    "tree_accept_sampled",
    "tree_attention",
]

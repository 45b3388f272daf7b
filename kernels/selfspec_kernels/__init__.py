"""Operations that carry tree verification: attention over a token tree, acceptance, commit.

Every op is a folder: `reference.py` defines it in torch and is the CPU path, `kernel.py` is its
Triton kernel, `__init__.py` checks the arguments and picks one of the two. This package knows
nothing about the library that calls it.

Shape letters: B sequences, N tree nodes, M queries (the last M nodes), W = ceil(N / 64) words,
H query heads, K key/value heads, G = H / K, S cache slots, D and Dv key and value head sizes.
"""

from .kv_commit import kv_commit
from .layout import TreeLayout
from .tree_accept import tree_accept
from .tree_attention import tree_attention

__all__ = ["TreeLayout", "kv_commit", "tree_accept", "tree_attention"]

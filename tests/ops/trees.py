"""Random trees, the layouts they give, and attention over them spelt out in float64.

Nothing here shares code with the package: visibility follows parents, not packed bits.
"""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from selfspec_kernels import TreeLayout
from torch import Tensor

# The process that runs the kernels in Triton's interpreter keeps the second, the others the first.
BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.interpret)]


@dataclass(frozen=True)
class Forest:
    """One tree a row: `parents[b][n]`, the prefix it hangs from, and the padding of that."""

    parents: list[list[int]]
    prefix: list[int]
    start: list[int] | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.parents[0])

    def ancestors(self, b: int, node: int) -> list[int]:
        """The node and what is above it, lowest first."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[b][node]
        return found

    def depth(self, b: int, node: int) -> int:
        return len(self.ancestors(b, node)) - 1

    def visible(self, b: int, query: int, window: int = 0) -> list[int]:
        """Slots that node `query` of row b attends."""
        prefix, depth = self.prefix[b], self.depth(b, query)
        position = {slot: slot for slot in range(self.start[b] if self.start else 0, prefix)}
        position |= {prefix + n: prefix + self.depth(b, n) for n in self.ancestors(b, query)}
        return [s for s, p in position.items() if window <= 0 or prefix + depth - p < window]

    def row(self, b: int) -> "Forest":
        """Row b alone."""
        return Forest(
            [self.parents[b]], [self.prefix[b]], None if self.start is None else [self.start[b]]
        )

    def layout(
        self,
        num_queries: int | None = None,
        slack: int = 0,
        block_table: Tensor | None = None,
    ) -> TreeLayout:
        """The layout of the last `num_queries` nodes; `slack` loosens the bound of the prefix."""
        nodes, batch = self.num_nodes, len(self.prefix)
        words = torch.zeros(batch, nodes, math.ceil(nodes / 64), dtype=torch.int64)
        depth = torch.zeros(batch, nodes, dtype=torch.int32)
        for b in range(batch):
            for n in range(nodes):
                depth[b, n] = self.depth(b, n)
                for a in self.ancestors(b, n):
                    bit = 1 << (a % 64)
                    words[b, n, a // 64] += bit - (1 << 64) if bit >> 63 else bit
        return TreeLayout(
            words[:, nodes - (num_queries or nodes) :],
            depth,
            torch.tensor(self.prefix, dtype=torch.int32),
            max(self.prefix) + slack,
            start=None if self.start is None else torch.tensor(self.start, dtype=torch.int32),
            block_table=block_table,
        )


def random_forest(
    num_nodes: int, prefix: list[int], seed: int = 0, start: list[int] | None = None
) -> Forest:
    """Trees of any shape: parents are uniform among a few of the nodes before."""
    rng = random.Random(seed)
    return Forest(
        [
            [-1, *(rng.randrange(max(0, n - 5), n) for n in range(1, num_nodes))]
            for _ in range(len(prefix))
        ],
        prefix,
        start,
    )


def chain(num_nodes: int, prefix: list[int], start: list[int] | None = None) -> Forest:
    return Forest([list(range(-1, num_nodes - 1)) for _ in prefix], prefix, start)


def attention_oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    forest: Forest,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tree attention in float64, a query at a time, over the slots that it sees and no others.

    The second result is the logarithm of the denominators. Keys and values are not paged.
    """
    batch, heads, num_queries, head_size = query.shape
    groups = heads // key.shape[1]
    scale = head_size**-0.5 if scale is None else scale
    out = torch.zeros(batch, heads, num_queries, value.shape[3], dtype=torch.float64)
    lse = torch.zeros(batch, heads, num_queries, dtype=torch.float64)
    for b in range(batch):
        for m in range(num_queries):
            slots = forest.visible(b, forest.num_nodes - num_queries + m, window)
            for h in range(heads):
                scores = key[b, h // groups, slots].double() @ query[b, h, m].double() * scale
                if softcap > 0:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h].double()[None]])
                weights = scores.softmax(0)[: len(slots)]
                out[b, h, m] = weights @ value[b, h // groups, slots].double()
                lse[b, h, m] = scores.logsumexp(0)
    return out, lse

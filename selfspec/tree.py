"""The token tree: the one shape in which every draft travels.

A chain is a tree with one branch; "no draft" is a tree of the root alone. Topology is kept both as
parents, which acceptance walks, and as packed ancestor bits, which attention reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from selfspec.topology import WORD_BITS, chain_topology, topology_of, words_of
from selfspec.tree_rows import GrowingRow, Nodes


@dataclass(frozen=True, eq=False)
class Resume:
    """Work that drafting has already done for verification.

    Attributes:
        layer: Verification starts at this layer; layers before it have run, and their keys and
            values sit in the node slots of the cache. A count of layers, 1..L.
        hidden: [B, N, C] input of that layer for every node (output of the last one if `layer ==
            L`).
    """

    layer: int
    hidden: Tensor


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Draft tokens of B sequences, N nodes each; node 0 is the root.

    The root is the last committed token, whose keys and values are not cached yet. Rows with fewer
    than N nodes are padded: nodes from `num_nodes[b]` on are computed and ignored.

    Attributes:
        tokens: int64 [B, N].
        parents: int32 [B, N]; -1 at the root, parents come before their children.
        depth: int32 [B, N]; 0 at the root.
        ancestors: int64 [B, N, ceil(N/64)]; bit n of word n // 64 is set iff n is the node or an
            ancestor of it.
        num_nodes: int32 [B], the root included.
        log_q: float32 [B, N, V] or None. Row n is the log distribution that the children of node n
            were drawn from. None for deterministic drafts (n-gram, argmax, top-k).
        resume: Layers that drafting has run already, or None.
        given: int32 [B, N] or None. LOSSY: in requests that are plainly greedy, nodes with more
            than 0 are kept whatever the target says of them: the first of a chain, each drafted
            after so many layers. Only of drafters that say of themselves that they are lossy.
        expected: float32 [B, N] or None. Probability that verification comes by each node, as the
            drafter sees it: 1 at the root, no more than its parent's elsewhere. What a list of
            drafters chooses by.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    num_nodes: Tensor
    log_q: Tensor | None = None
    resume: Resume | None = None
    given: Tensor | None = None
    expected: Tensor | None = None
    max_depth: int = field(default=-1)
    max_nodes: int = field(default=-1)
    max_children: int = field(default=-1)  # known wherever there is a log_q

    def __post_init__(self) -> None:
        """Check what can be checked without reading the device.

        Raises:
            ValueError: If shapes or dtypes disagree.
        """
        if self.tokens.ndim != 2 or self.tokens.dtype != torch.int64 or self.tokens.shape[1] < 1:
            raise ValueError(
                "TokenTree.tokens must be int64 [B, N] with N >= 1, "
                f"got {self.tokens.dtype} {tuple(self.tokens.shape)}."
            )
        batch, nodes = self.tokens.shape
        words = -(-nodes // WORD_BITS)
        for name, dtype, shape in (
            ("parents", torch.int32, (batch, nodes)),
            ("depth", torch.int32, (batch, nodes)),
            ("ancestors", torch.int64, (batch, nodes, words)),
            ("num_nodes", torch.int32, (batch,)),
        ):
            value = getattr(self, name)
            if value.dtype != dtype or tuple(value.shape) != shape:
                raise ValueError(
                    f"TokenTree.{name} must be {dtype} {shape} for tokens {(batch, nodes)}, "
                    f"got {value.dtype} {tuple(value.shape)}."
                )
        if self.log_q is not None and tuple(self.log_q.shape[:2]) != (batch, nodes):
            raise ValueError(
                f"TokenTree.log_q must be [B, N, V] with B, N = {(batch, nodes)}, "
                f"got {tuple(self.log_q.shape)}."
            )
        if self.expected is not None and tuple(self.expected.shape) != (batch, nodes):
            raise ValueError(
                f"TokenTree.expected must be [B, N] = {(batch, nodes)}, "
                f"got {tuple(self.expected.shape)}."
            )
        # Host-side bounds; constructors know them, others pay one read.
        if self.max_depth < 0:
            object.__setattr__(self, "max_depth", int(self.depth.max()))
        if self.max_nodes < 0:
            object.__setattr__(self, "max_nodes", int(self.num_nodes.max()))
        if self.max_children < 0 and self.log_q is not None:
            object.__setattr__(self, "max_children", self._count_children())

    def _count_children(self) -> int:
        live = torch.arange(self.width, device=self.parents.device) < self.num_nodes[:, None]
        parents = torch.where(live, self.parents, -1).long() + 1
        counts = parents.new_zeros(self.batch, self.width + 1)
        return int(counts.scatter_add_(1, parents, torch.ones_like(parents))[:, 1:].max())

    @property
    def batch(self) -> int:
        """B, the number of sequences."""
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """N, the number of nodes a row, padding included."""
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        """Whether no row branches (reads the device)."""
        previous = torch.arange(self.width - 1, device=self.parents.device)
        padding = previous + 1 >= self.num_nodes[:, None]
        return bool(((self.parents[:, 1:] == previous) | padding).all())

    # ---------------------------------------------------------------- constructors

    @classmethod
    def root_only(cls, root: Tensor) -> TokenTree:
        """The tree without drafts; `root` is int64 [B]."""
        batch = root.shape[0]
        parents, depth, ancestors = chain_topology(1, root.device)
        return cls(
            tokens=root[:, None],
            parents=parents.expand(batch, -1),
            depth=depth.expand(batch, -1),
            ancestors=ancestors.expand(batch, -1, -1),
            num_nodes=torch.ones(batch, dtype=torch.int32, device=root.device),
            max_depth=0,
            max_nodes=1,
        )

    @classmethod
    def chain(
        cls,
        root: Tensor | int,
        tokens: Tensor | Sequence[int],
        *,
        num_nodes: Tensor | None = None,
        log_q: Tensor | None = None,
        resume: Resume | None = None,
    ) -> TokenTree:
        """One branch a row.

        Args:
            root: int64 [B], or an int for one sequence.
            tokens: int64 [B, N-1], or a list of ints for one sequence.
            num_nodes: int32 [B], root included, for rows that are shorter. Defaults to N.
            log_q: float32 [B, N, V], see the class.
            resume: See the class.
        """
        if not isinstance(root, Tensor):
            root = torch.tensor([root])
        if not isinstance(tokens, Tensor):
            tokens = torch.tensor([list(tokens)], dtype=torch.int64, device=root.device).view(1, -1)
        tokens = torch.cat([root[:, None], tokens], dim=1)
        batch, nodes = tokens.shape
        parents, depth, ancestors = chain_topology(nodes, tokens.device)
        full = num_nodes is None
        if num_nodes is None:
            num_nodes = torch.full((batch,), nodes, dtype=torch.int32, device=tokens.device)
        return cls(
            tokens=tokens,
            parents=parents.expand(batch, -1),
            depth=depth.expand(batch, -1),
            ancestors=ancestors.expand(batch, -1, -1),
            num_nodes=num_nodes,
            log_q=log_q,
            resume=resume,
            max_depth=nodes - 1,
            max_nodes=nodes if full else -1,
            max_children=1,
        )

    @classmethod
    def from_topology(
        cls,
        tokens: Tensor,
        parents: Sequence[Sequence[int]] | Sequence[int],
        *,
        log_q: Tensor | None = None,
    ) -> TokenTree:
        """A tree from tokens and parents.

        Args:
            tokens: int64 [B, N], root first.
            parents: A list of parents for all rows, or one list a row; -1 for the root. Rows may be
                shorter than N; the rest is padding.
            log_q: float32 [B, N, V], see the class.

        Raises:
            ValueError: If a parent does not come before its child, or a row has no root.
        """
        batch, nodes = tokens.shape
        rows: list[list[int]]
        if len(parents) and isinstance(parents[0], int):
            rows = [list(parents) for _ in range(batch)]  # type: ignore[arg-type]
        else:
            rows = [list(row) for row in parents]  # type: ignore[arg-type]
        if len(rows) != batch:
            raise ValueError(f"parents has {len(rows)} rows, tokens has {batch}.")
        return cls(tokens=tokens, log_q=log_q, **topology_of(rows, nodes, tokens.device))

    @classmethod
    def from_paths(
        cls,
        root: Tensor,
        paths: Sequence[Sequence[Sequence[int]]],
        max_draft_tokens: int | None = None,
    ) -> TokenTree:
        """Merge continuations that share prefixes into one tree a row.

        Args:
            root: int64 [B].
            paths: For every row, its continuations (lists of token ids, root not included), the
                most trusted first. Equal prefixes become one node.
            max_draft_tokens: Keep at most this many nodes a row, root not counted. Paths keep their
                order; the last one that fits is cut short.
        """
        if len(paths) != root.shape[0]:
            raise ValueError(f"paths has {len(paths)} rows, root has {root.shape[0]}.")
        limit = float("inf") if max_draft_tokens is None else max_draft_tokens
        if len(paths) == 1 and len(paths[0]) <= 1:  # the common case, without bookkeeping
            chain = list(paths[0][0]) if paths[0] else []
            return cls.chain(root, chain[: int(min(limit, len(chain)))])
        rows = [GrowingRow(token) for token in root.tolist()]
        for row, continuations in zip(rows, paths, strict=True):
            for continuation in continuations:
                node = 0
                for token in continuation:
                    child = row.child(node, token)
                    if child is None:
                        if len(row) > limit:
                            break
                        child = row.add(node, token)
                    node = child
        return cls.from_rows(root, [Nodes(row.tokens, row.parents, None) for row in rows])

    @classmethod
    def from_rows(cls, root: Tensor, rows: Sequence[Nodes]) -> TokenTree:
        """A tree from what every row has on the host.

        Args:
            root: int64 [B]; says on which device the tree is.
            rows: Of B rows. If the first says what it expects, all of them have to.
        """
        nodes = max(len(row.tokens) for row in rows)
        padded = [row.tokens + [row.tokens[0]] * (nodes - len(row.tokens)) for row in rows]
        expected = None
        if rows[0].expected is not None:
            values = [[*(row.expected or ()), *[0.0] * (nodes - len(row.tokens))] for row in rows]
            expected = torch.tensor(values, dtype=torch.float32, device=root.device)
        tokens = torch.tensor(padded, device=root.device)
        if all(row.parents == list(range(-1, nodes - 1)) for row in rows):
            return replace(cls.chain(root, tokens[:, 1:]), expected=expected)
        topology = topology_of([row.parents for row in rows], nodes, root.device)
        return cls(tokens=tokens, expected=expected, **topology)

    @classmethod
    def merge(cls, trees: Sequence[TokenTree], max_draft_tokens: int | None = None) -> TokenTree:
        """Join the drafts of several drafters; earlier trees have priority.

        Equal children of one node become one node. Shared early layers (`resume`) are given up: a
        node of one drafter has not run through the layers of another.

        Raises:
            ValueError: If a tree was sampled. Which siblings survive a merge would depend on
                sampled tokens, and the output would no longer follow the target's distribution.
        """
        if any(tree.log_q is not None for tree in trees):
            raise ValueError("TokenTree.merge joins deterministic drafts only; a tree has log_q.")
        if len(trees) == 1:
            return trees[0]
        paths = [
            [path for row in rows for path in row]
            for rows in zip(*(tree.paths() for tree in trees), strict=True)
        ]
        return cls.from_paths(trees[0].tokens[:, 0], paths, max_draft_tokens)

    # ---------------------------------------------------------------- views and checks

    def rows(self) -> list[Nodes]:
        """Every row's nodes, padding left out (reads the device)."""
        counts, tokens, parents = self.num_nodes, self.tokens, self.parents
        expected = [None] * self.batch if self.expected is None else self.expected.tolist()
        return [
            Nodes(ids[:count], above[:count], said and said[:count])
            for count, ids, above, said in zip(
                counts.tolist(), tokens.tolist(), parents.tolist(), expected, strict=True
            )
        ]

    def paths(self) -> list[list[list[int]]]:
        """Root-to-leaf token paths of every row, root not included (reads the device)."""
        result = []
        for tokens, parents, _ in self.rows():
            leaves = set(range(len(tokens))) - set(parents)
            row = []
            for leaf in sorted(leaves - {0}):
                path, node = [], leaf
                while node > 0:
                    path.append(tokens[node])
                    node = parents[node]
                row.append(path[::-1])
            result.append(row)
        return result

    def first_chains(self) -> TokenTree:
        """The first branch of every row alone (reads the device): from node to lowest child."""
        rows = []
        for tokens, parents, _ in self.rows():
            chain, node = [], 0
            for n in range(1, len(tokens)):
                if parents[n] == node:
                    chain.append(tokens[n])
                    node = n
            rows.append([chain])
        return TokenTree.from_paths(self.tokens[:, 0], rows)

    def validate(self, root: Tensor, vocab_size: int, max_draft_tokens: int) -> None:
        """Check a draft before it is verified (reads the device).

        Raises:
            ValueError: If the tree does not belong to this state or cannot be walked.
        """
        if self.batch != root.shape[0]:
            raise ValueError(f"draft has {self.batch} rows, the batch has {root.shape[0]}.")
        if self.max_nodes - 1 > max_draft_tokens or self.max_depth > max_draft_tokens:
            raise ValueError(
                f"draft has {self.max_nodes - 1} tokens to depth {self.max_depth}; "
                f"the budget was {max_draft_tokens}."
            )
        roots, tokens = root.tolist(), self.tokens.tolist()
        counts, parents = self.num_nodes.tolist(), self.parents.tolist()
        depths, bits = self.depth.tolist(), self.ancestors.tolist()
        for b, count in enumerate(counts):
            if not 1 <= count <= self.width:
                raise ValueError(f"num_nodes of row {b} is {count}, outside 1..{self.width}.")
            if tokens[b][0] != roots[b]:
                raise ValueError(
                    f"node 0 of row {b} is token {tokens[b][0]}; it must be the root {roots[b]}."
                )
            if parents[b][0] != -1 or depths[b][0] != 0:
                raise ValueError(f"node 0 of row {b} must have parent -1 and depth 0.")
            if not all(0 <= depth <= self.max_depth for depth in depths[b]):
                raise ValueError(f"depth of row {b} has values outside 0..{self.max_depth}.")
            for n, token in enumerate(tokens[b]):
                if not 0 <= token < vocab_size:
                    raise ValueError(
                        f"token {token} of node {n}, row {b}, is outside the vocabulary "
                        f"(0..{vocab_size - 1})."
                    )
            words = -(-self.width // WORD_BITS)
            expected = [1]
            for n in range(1, count):
                parent = parents[b][n]
                if not 0 <= parent < n:
                    raise ValueError(
                        f"node {n} of row {b} has parent {parent}; parents come before children."
                    )
                if depths[b][n] != depths[b][parent] + 1:
                    raise ValueError(f"depth of node {n}, row {b}, is not its parent's plus one.")
                expected.append(expected[parent] | 1 << n)
            for n in range(count):
                if bits[b][n] != words_of(expected[n], words):
                    raise ValueError(f"ancestors of node {n}, row {b}, do not match its parents.")

"""Drafted trees for sampled acceptance, and what their acceptance is held to."""

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from selfspec_kernels import philox
from selfspec_kernels.tree_accept import reference, tree_accept_sampled
from torch import Tensor

from .acceptance_oracle import Pair, chances, decide
from .trees import Forest, chain

RULES = ["traversal", "multiround"]
# Levels are computed in float32: a coin as near as this to one may fall on either side.
NEAR = 1e-4


@dataclass(frozen=True)
class Batch:
    """Arguments of the op, by row: trees, and the scores of target and draft."""

    forest: Forest
    counts: list[int]
    tokens: Tensor
    scores: Tensor
    log_q: Tensor
    logsumexp: Tensor
    seed: Tensor
    position: Tensor

    @classmethod
    def of(cls, rows: list[tuple[list[int], list[int]]], scores: Tensor, log_q: Tensor) -> "Batch":
        """Rows of (tokens, parents), padded to the longest with nodes that would be accepted."""
        size = max(len(tokens) for tokens, _ in rows)
        batch = len(rows)
        rng = random.Random(size)
        return cls(
            Forest([p + [0] * (size - len(p)) for _, p in rows], [0] * batch),
            [len(tokens) for tokens, _ in rows],
            torch.tensor([t + [1] * (size - len(t)) for t, _ in rows]),
            scores,
            log_q,
            scores.float().logsumexp(-1),
            torch.tensor([rng.randrange(-(2**63), 2**63) for _ in rows]),
            torch.tensor([rng.randrange(2**31 - 200) for _ in rows], dtype=torch.int32),
        )

    @property
    def parents(self) -> Tensor:
        return torch.tensor(self.forest.parents, dtype=torch.int32)

    def arguments(self) -> dict[str, Any]:
        layout = self.forest.layout()
        children = [
            parents.count(n) for parents in self.forest.parents for n in range(len(parents))
        ]
        return {
            "tokens": self.tokens,
            "parents": self.parents,
            "ancestors": layout.ancestors,
            "depth": layout.depth,
            "num_nodes": torch.tensor(self.counts, dtype=torch.int32),
            "scores": self.scores,
            "logsumexp": self.logsumexp,
            "log_q": self.log_q,
            "seed": self.seed,
            "position": self.position,
            "max_depth": int(layout.depth.max()),
            "max_children": max(1, *children),
        }

    def coins(self) -> Tensor:
        """[B, N]: what the op tosses, by the definition of its random numbers."""
        nodes = torch.arange(self.tokens.shape[1])
        return philox.uniform(self.seed[:, None], nodes, self.position[:, None], philox.ACCEPT)


def run(batch: Batch, backend: str, rule: str, **changes: Any) -> tuple[Tensor, Tensor, Tensor]:
    arguments = batch.arguments() | changes
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    path, num_accepted, next_token = tree_accept_sampled(**arguments, rule=rule, backend=backend)
    for name, tensor in before.items():
        now, then = (x.contiguous().view(torch.uint8) for x in (arguments[name], tensor))
        assert torch.equal(now, then), f"{name} was changed"
    size, depth = len(batch.counts), arguments["max_depth"]
    assert (path.dtype, num_accepted.dtype, next_token.dtype) == (
        torch.int32,
        torch.int32,
        torch.int64,
    )
    assert (path.shape, num_accepted.shape, next_token.shape) == (
        (size, depth + 1),
        (size,),
        (size,),
    )
    assert ((path >= 0).sum(1) == num_accepted + 1).all()
    assert ((next_token >= 0) & (next_token < batch.scores.shape[2])).all()
    return path, num_accepted, next_token


def drawn(shape: tuple[int, ...], seeds: range, vocabulary: int = 3) -> tuple[Batch, list[Pair]]:
    """Trees of a shape drawn from random pairs."""
    rows, p, q, pairs = [], [], [], []
    for seed in seeds:
        pair = Pair(seed % 60, vocabulary)
        rows.append(pair.draft(shape, random.Random(seed)))
        pairs.append(pair)
        p.append([[float(a) for a in pair.p(prefix)] for prefix in pair.prefixes])
        q.append([[float(a) for a in pair.q(prefix)] for prefix in pair.prefixes])
    size = max(map(len, p))
    blank = [1 / vocabulary] * vocabulary
    p, q = ([row + [blank] * (size - len(row)) for row in x] for x in (p, q))
    return Batch.of(rows, torch.tensor(p).log(), torch.tensor(q).log()), pairs


def spelt_out(batch: Batch, rule: str, max_depth: int = 99) -> list[tuple[list[int], Any, Any]]:
    """`decide` on every row, in float64."""
    p, q = (x.double().softmax(-1).tolist() for x in (batch.scores, batch.log_q))
    coins = batch.coins().tolist()
    return [
        decide(
            batch.tokens[b, :count].tolist(),
            batch.forest.parents[b][:count],
            p[b],
            q[b],
            coins[b],
            rule,
            max_depth,
        )
        for b, count in enumerate(batch.counts)
    ]


def assert_chances(batch: Batch, backend: str, rule: str, max_depth: int = 99) -> None:
    """Hold level and residual of every node that matters to float64; more strict than coins are."""
    arguments = batch.arguments()
    p = (batch.scores.float() - batch.logsumexp[..., None]).exp()
    q = batch.log_q.exp()
    bounds = arguments["max_children"], rule
    inside = torch.arange(batch.tokens.shape[1]) < arguments["num_nodes"][:, None]
    inside &= arguments["depth"] <= max_depth
    if backend == "reference":
        drafted = inside & (batch.parents >= 0)
        level, _ = reference._chances(batch.tokens, batch.parents, drafted, p, q, *bounds)
    else:
        from selfspec_kernels.tree_accept import kernel_levels, kernel_sampled

        names = ("tokens", "parents", "depth", "num_nodes", "scores", "logsumexp", "log_q")
        tensors = [arguments[name] for name in names]
        state = kernel_sampled._chances(*tensors, max_depth, *bounds)
        level = state[:, kernel_levels.LEVEL.value]
        t, mass = (state[:, row.value, :, None] for row in (kernel_levels.T, kernel_levels.MASS))
        p = (p - t * q).clamp(min=0) / mass
    for b in range(len(batch.counts)):
        exact_level, exact_p = chances(
            batch.tokens[b].tolist(),
            torch.where(inside[b], batch.parents[b], -1).tolist(),
            batch.scores[b].double().softmax(-1).tolist(),
            batch.log_q[b].double().softmax(-1).tolist(),
            rule,
        )
        for n, value in exact_level.items():
            assert abs(max(level[b, n].item(), 0) - value) < NEAR, (b, n)
        for n, values in exact_p.items():
            assert (p[b, n].double() - torch.tensor(values, dtype=torch.float64)).abs().max() < NEAR
        assert not (level[b, ~inside[b]] > 0).any(), b


def assert_decisions(batch: Batch, got: tuple[Tensor, Tensor, Tensor], expected: list) -> None:
    clear = 0
    for path, token, (nodes, residual, margin) in zip(
        got[0].tolist(), got[2].tolist(), expected, strict=True
    ):
        if margin < NEAR:
            continue
        clear += 1
        assert [n for n in path if n >= 0] == nodes
        assert residual[token] > 0
    assert clear > 0.9 * len(expected)


def noisy(
    forest: Forest,
    counts: list[int],
    vocab: int,
    seed: int,
    *,
    distance: float = 0.7,
    repeats: bool = False,
) -> Batch:
    """Trees whose tokens are drawn from q, without replacement unless they may repeat.

    The target's scores are those of q and as much noise as `distance` says.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, size = len(counts), forest.num_nodes
    log_q = torch.randn(batch, size, vocab, generator=generator).mul(2).log_softmax(-1)
    scores = log_q + distance * torch.randn(batch, size, vocab, generator=generator)
    rows = []
    for b, count in enumerate(counts):
        tokens, weights = [0], log_q[b].exp()
        for n in range(1, count):
            weight = weights[forest.parents[b][n]]
            tokens.append(int(torch.multinomial(weight, 1, generator=generator)))
            if not repeats:
                weight[tokens[-1]] = 0
        rows.append((tokens, forest.parents[b][:count]))
    return replace(Batch.of(rows, scores, log_q), forest=forest)


def assert_a_coin_at_its_level_fails(backend: str, rule: str) -> None:
    """And one that is less passes; q is certain of token 1, so that p of it is node 1's level."""
    batch = noisy(Forest([[-1, 0]], [0]), [2], 3, seed=0)
    log_q = torch.full((1, 2, 3), float("-inf"))
    log_q[..., 1] = 0.0
    batch = replace(batch, log_q=log_q, logsumexp=torch.zeros(1, 2), tokens=torch.tensor([[0, 1]]))
    for seed in range(1000):
        batch = replace(batch, seed=torch.tensor([seed]))
        coin = batch.coins()[0, 1]
        # Of such a score both torch and numpy, which is what the interpreter has, make the coin.
        near = coin.log().view(torch.int32) + torch.arange(-40, 40, dtype=torch.int32)
        near = near.view(torch.float32)
        levels = torch.stack([near.exp(), torch.from_numpy(np.exp(near.numpy()))])
        equal, more = (levels == coin).all(0), (levels > coin).all(0)
        if equal.any() and more.any():
            break
    for score, accepted in ((near[equal][0], 0), (near[more].max(), 1)):
        scores = torch.full((1, 2, 3), -5.0)
        scores[..., 1] = score
        assert run(replace(batch, scores=scores), backend, rule)[1].tolist() == [accepted]


def chi_square(rule: str, nodes: int = 7, rows: int = 20_000) -> float:
    """Of the first two tokens of many rows against the target's law, with 63 degrees of freedom.

    The draft is two children of the root and two of each of them, or the first `nodes` of these.
    """
    vocab, generator = 8, torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 1 + vocab, vocab, generator=generator).pow(2).add(0.02).log().unbind()
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    # Two children of the root, two of each of them, without replacement: the best two of a race.
    noise = -torch.rand(rows, 3, vocab, generator=generator).log()
    first = (q[0].exp() / noise[:, 0]).topk(2).indices
    below = [(q[1 + first[:, i]].exp() / noise[:, 1 + i]).topk(2).indices for i in range(2)]
    tokens = torch.cat([torch.zeros(rows, 1, dtype=torch.long), first, *below], 1)
    # Row 0 of p and q is for the first token, row 1 + x for the token that follows x.
    table = torch.cat([tokens.new_zeros(rows, 1), 1 + first, 1 + tokens[:, 3:]], 1)
    forest = Forest([[-1, 0, 0, 1, 1, 2, 2][:nodes]], [0])
    layout = forest.layout()
    path, num_accepted, next_token = tree_accept_sampled(
        tokens[:, :nodes],
        torch.tensor(forest.parents, dtype=torch.int32).expand(rows, -1),
        layout.ancestors.expand(rows, -1, -1),
        layout.depth.expand(rows, -1),
        torch.full((rows,), nodes, dtype=torch.int32),
        p[table[:, :nodes]],
        torch.zeros(rows, nodes),
        q[table[:, :nodes]],
        seed=torch.arange(rows) * 2**33,
        position=torch.zeros(rows, dtype=torch.int32),
        max_depth=forest.depth(0, nodes - 1),
        max_children=2,
        rule=rule,
    )
    text = tokens.gather(1, path.long().clamp(min=0))[:, 1:]
    text = torch.cat([text, text[:, :1]], 1).scatter(
        1, num_accepted[:, None].long(), next_token[:, None]
    )
    alone = torch.multinomial(p[1 + text[:, 0]].exp(), 1, generator=generator)[:, 0]
    second = torch.where(num_accepted > 0, text[:, 1], alone)
    counts = torch.bincount(text[:, 0] * vocab + second, minlength=vocab**2)
    expected = rows * (p[0].exp()[:, None] * p[1:].exp()).flatten()
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_of_one(rows: int = 20_000) -> float:
    """Of the first token, with 3 degrees of freedom, where shared random numbers would show.

    Node 1's coin and token 1's noise have the same index: were they one number, a rejected draft
    would speak against token 1, which has half of what is left then.
    """
    p = torch.tensor([0.05, 0.45, 0.45, 0.05])
    drafts = torch.randint(4, (rows, 1), generator=torch.Generator().manual_seed(0))
    layout = chain(2, [0]).layout()
    _, num_accepted, next_token = tree_accept_sampled(
        torch.cat([drafts * 0, drafts], 1),
        torch.tensor([[-1, 0]], dtype=torch.int32).expand(rows, -1),
        layout.ancestors.expand(rows, -1, -1),
        layout.depth.expand(rows, -1),
        torch.full((rows,), 2, dtype=torch.int32),
        p.log().expand(rows, 2, 4),
        torch.zeros(rows, 2),
        torch.full((rows, 2, 4), 0.25).log(),
        seed=torch.arange(rows) * 2**33,
        position=torch.zeros(rows, dtype=torch.int32),
        max_depth=1,
        max_children=1,
    )
    first = torch.where(num_accepted > 0, drafts[:, 0], next_token)
    counts, expected = torch.bincount(first, minlength=4), rows * p
    return float(((counts - expected) ** 2 / expected).sum())


# Mean 3, standard deviation 2.4.
MOST_OF_ONE = 3 + 5 * 2.4
# 63 degrees of freedom: mean 63, standard deviation 11.2. Broken rules give hundreds.
MOST = 63 + 5 * 11.2

"""Sampled acceptance: the law in exact fractions, and the op against it, coin by coin."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from selfspec_kernels.tree_accept import tree_accept_sampled
from torch import Tensor

from .acceptance_cases import (
    MOST,
    MOST_OF_ONE,
    RULES,
    assert_a_coin_at_its_level_fails,
    assert_chances,
    assert_decisions,
    chi_square,
    chi_square_of_one,
    drawn,
    noisy,
    run,
    spelt_out,
)
from .acceptance_oracle import Pair, accepted, continued, law
from .trees import BACKENDS, Forest, chain, random_forest

# What the interpreter computes in lanes that a mask discards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SHAPES = [(1,), (1, 1), (1, 1, 1), (3,), (2, 2), (2, 2, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_law_is_the_targets(shape):
    lead = 0
    for seed in range(60):
        pair = Pair(seed)
        length = len(shape) + 1
        target = continued({(): Fraction(1)}, pair.p, length)
        outputs = {rule: law(pair.p, pair.q, shape, rule) for rule in RULES}
        for rule in RULES:
            assert continued(outputs[rule], pair.p, length) == target, (seed, rule)
        by_token = law(pair.p, pair.q, (1,) * len(shape), "multiround")
        means = [accepted(outputs[rule]) for rule in RULES] + [accepted(by_token)]
        assert means == sorted(means, reverse=True)
        lead += means[0] > means[1]
    assert lead == 0 if len(shape) == 1 else lead > 10


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_decision_is_the_exact_one(backend, shape, rule):
    if backend == "triton":  # all kinds of pairs are among the first few
        batch, _ = drawn(shape, range(0, 60, 7) if shape == (2, 2) else range(3))
    else:
        batch, _ = drawn(shape, range(600))
    got = run(batch, backend, rule)
    assert_decisions(batch, got, spelt_out(batch, rule))
    if backend == "reference":
        assert len(set(got[1].tolist())) == len(shape) + 1


CASES = {
    "root": (chain(1, [0] * 2), [1, 1], 31),
    "chain": (chain(6, [0] * 4), [6, 1, 4, 6], 1000),
    "long chain": (chain(66, [0] * 2), [66, 40], 31),
    "blocks": (random_forest(4, [0] * 2, seed=5), [4, 4], 4097),
    "tree": (random_forest(33, [0] * 2, seed=1), [33, 20], 31),
    "star": (Forest([[-1] + [0] * 15], [0]), [16], 31),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_the_recursion(backend, case, rule):
    forest, counts, vocab = CASES[case]
    batch = noisy(forest, counts, vocab, seed=len(case))
    assert_chances(batch, backend, rule)
    got = run(batch, backend, rule)
    expected = spelt_out(batch, rule)
    assert_decisions(batch, got, expected)
    if backend == "triton":
        assert all(map(torch.equal, got, run(batch, "reference", rule)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_repeated_token_counts_once(backend, rule):
    forest = random_forest(9, [0] * (200 if backend == "reference" else 4), seed=3)
    batch = noisy(forest, [9] * len(forest.parents), 3, seed=1, repeats=True)
    assert_chances(batch, backend, rule)
    assert_decisions(batch, run(batch, backend, rule), spelt_out(batch, rule))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bounds_cut_the_tree(backend, rule):
    forest = random_forest(9, [0] * (100 if backend == "reference" else 3), seed=3)
    batch = noisy(forest, [9] * len(forest.parents), 5, seed=1)
    got = run(batch, backend, rule, max_depth=2)
    assert_decisions(batch, got, spelt_out(batch, rule, max_depth=2))
    assert got[1].max() == 2
    got = run(batch, backend, rule, max_depth=40)
    assert_decisions(batch, got, spelt_out(batch, rule))
    path, num_accepted, _ = run(batch, backend, rule, max_depth=0)
    assert not path.any()
    assert not num_accepted.any()
    # Only first children are left: the tree without the others.
    got = run(batch, backend, rule, max_children=1)
    for b, parents in enumerate(forest.parents):
        assert all(parents.index(parents[n]) == n for n in got[0][b, 1:].tolist() if n > 0)
    if backend == "triton":
        assert all(map(torch.equal, got, run(batch, "reference", rule, max_children=1)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_what_is_around_it(backend, rule):
    batch = noisy(random_forest(7, [0] * 3, seed=8), [7, 5, 7], 31, seed=4)
    arguments = batch.arguments()
    whole = run(batch, backend, rule)
    # The last row alone, in a tree padded to another number of words, its leaves' log_q unknown.
    nodes = 70
    alone: dict[str, Any] = {}
    for name, value in arguments.items():
        alone[name] = value[2:] if isinstance(value, Tensor) else value
        if isinstance(value, Tensor) and value.dim() > 1:
            padded = torch.full((1, nodes, *value.shape[2:]), 3, dtype=value.dtype)
            padded[:, :7] = value[2:]
            alone[name] = padded
    alone["ancestors"] = torch.nn.functional.pad(alone["ancestors"], (0, 1), value=-1)
    inner = set(batch.forest.parents[2])
    alone["log_q"][:, [n for n in range(nodes) if n not in inner]] = float("nan")
    got = tree_accept_sampled(**alone, rule=rule, backend=backend)
    assert all(torch.equal(a[2:], b) for a, b in zip(whole, got, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes_and_strided_inputs(backend, dtype):
    batch = noisy(chain(4, [0] * 2), [4, 3], 40, seed=2)
    batch = replace(batch, scores=batch.scores.to(dtype))
    batch = replace(batch, logsumexp=batch.scores.float().logsumexp(-1))
    expected = run(batch, "reference", "traversal")
    names = ("tokens", "parents", "ancestors", "depth", "logsumexp", "log_q", "scores")
    arguments = batch.arguments()
    strided = {name: arguments[name].mT.contiguous().mT for name in names}
    strided["scores"] = torch.stack([batch.scores] * 2, 1).movedim(1, 0)[1]  # rows further apart
    strided["seed"] = torch.stack([batch.seed] * 2, 1)[:, 0]
    strided["position"] = torch.stack([batch.position] * 2, 1)[:, 0]
    assert all(map(torch.equal, run(batch, backend, "traversal", **strided), expected))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_draft_equal_to_target_is_accepted(backend, rule):
    forest = Forest([[-1, 0, 0, 1, 1, 3]] * 2, [0] * 2)
    batch = noisy(forest, [6, 6], 31, seed=9)
    batch = replace(batch, scores=batch.log_q, logsumexp=torch.zeros(2, 6))
    path, _, _ = run(batch, backend, rule)
    assert path.tolist() == [[0, 1, 3, 5]] * 2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_disjoint_supports_never_accept(backend, rule):
    batch = noisy(Forest([[-1, 0, 0, 1]] * 3, [0] * 3), [4] * 3, 6, seed=9)
    scores, log_q = batch.scores.clone(), batch.log_q.clone()
    scores[..., :4], log_q[..., 4:] = float("-inf"), float("-inf")
    tokens = torch.tensor([[0, 1, 2, 3]] * 3)
    logsumexp = scores.logsumexp(-1)
    batch = replace(batch, scores=scores, log_q=log_q, tokens=tokens, logsumexp=logsumexp)
    path, _, next_token = run(batch, backend, rule)
    assert path[:, 1:].max() == -1
    assert next_token.min() >= 4
    # Tokens that q cannot have drawn are not kept either, though the target may emit them.
    path, _, _ = run(replace(batch, tokens=torch.tensor([[0, 4, 5, 5]] * 3)), backend, rule)
    assert path[:, 1:].max() == -1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_odd_leaves_the_bounds(backend, rule):
    inf, nan = float("inf"), float("nan")
    forest = Forest([[-1, 0, 0, 1, 1]] * 9, [0] * 9)
    batch = noisy(forest, [5] * 9, 7, seed=9)
    scores, log_q = batch.scores, batch.log_q
    scores[0] = nan
    scores[1] = -inf
    scores[2, :, 3] = inf
    scores[3, :, ::2] = nan  # some NaN: as if those tokens could not be emitted
    log_q[4] = nan
    log_q[5] = -inf
    log_q[6] = 0.0  # not normalised
    tokens = batch.tokens.clone()
    tokens[7, 1], tokens[7, 3] = 7, -1  # no tokens of the vocabulary
    logsumexp = scores.nan_to_num(-inf, inf, -inf).logsumexp(-1)
    parents = batch.parents
    parents[8] = torch.tensor([0, 3, 2, 1, 9])  # no tree
    batch = replace(batch, scores=scores, log_q=log_q, tokens=tokens, logsumexp=logsumexp)
    path, num_accepted, next_token = run(batch, backend, rule, parents=parents)
    assert num_accepted[:2].tolist() == [0, 0]
    assert int(next_token[3]) % 2 == 1
    assert 1 not in path[7].tolist()
    assert num_accepted[8] == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_coin_equal_to_the_level_fails(backend, rule):
    assert_a_coin_at_its_level_fails(backend, rule)


@pytest.mark.parametrize("nodes", [2, 3, 7])
@pytest.mark.parametrize("rule", RULES)
def test_emitted_tokens_follow_the_target(rule, nodes):
    assert chi_square(rule, nodes) < MOST


def test_coins_and_residuals_share_no_number():
    assert chi_square_of_one() < MOST_OF_ONE


def good() -> dict[str, Any]:
    batch = noisy(chain(3, [0] * 2), [3, 3], 5, seed=0)
    return batch.arguments()


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"tokens": lambda x: x.int()}, TypeError, "tokens must be torch.int64"),
        ({"parents": lambda x: x.long()}, TypeError, "parents must be torch.int32"),
        ({"ancestors": lambda x: x.int()}, TypeError, "ancestors must be torch.int64"),
        ({"depth": lambda x: x.long()}, TypeError, "depth must be torch.int32"),
        ({"num_nodes": lambda x: x.long()}, TypeError, "num_nodes must be torch.int32"),
        ({"scores": lambda x: x.long()}, TypeError, "scores must be floating point, got torch.int"),
        ({"logsumexp": lambda x: x.double()}, TypeError, "logsumexp must be torch.float32"),
        ({"log_q": lambda x: x.half()}, TypeError, "log_q must be torch.float32"),
        ({"seed": lambda x: x.int()}, TypeError, "seed must be torch.int64"),
        ({"position": lambda x: x.long()}, TypeError, "position must be torch.int32"),
        ({"tokens": lambda x: x[0]}, ValueError, r"tokens has shape \(3,\), expected \[B, N\]"),
        ({"tokens": lambda x: x[:, :0]}, ValueError, "tokens has no nodes"),
        ({"parents": lambda x: x[:, :2]}, ValueError, r"parents has shape \(2, 2\)"),
        (
            {"ancestors": lambda x: x.expand(2, 3, 2)},
            ValueError,
            r"ancestors has shape \(2, 3, 2\), expected \(2, 3, 1\)",
        ),
        ({"depth": lambda x: x[:1]}, ValueError, r"depth has shape \(1, 3\)"),
        ({"num_nodes": lambda x: x[:1]}, ValueError, r"num_nodes has shape \(1,\)"),
        (
            {"scores": lambda x: x[0]},
            ValueError,
            r"scores has shape \(3, 5\), expected \[B, N, V\]",
        ),
        ({"scores": lambda x: x[..., :0]}, ValueError, r"scores has shape \(2, 3, 0\)"),
        ({"scores": lambda x: x[:, :2]}, ValueError, r"scores has shape \(2, 2, 5\)"),
        ({"logsumexp": lambda x: x[:1]}, ValueError, r"logsumexp has shape \(1, 3\)"),
        ({"log_q": lambda x: x[..., :4]}, ValueError, r"log_q has shape \(2, 3, 4\)"),
        ({"seed": lambda x: x[:1]}, ValueError, r"seed has shape \(1,\)"),
        ({"position": lambda x: x[:1]}, ValueError, r"position has shape \(1,\)"),
        ({"log_q": lambda x: x.to("meta")}, ValueError, "log_q is on meta, tokens on cpu"),
        ({"max_depth": lambda x: -1}, ValueError, "max_depth=-1"),
        ({"max_children": lambda x: 0}, ValueError, "max_children=0"),
        ({"rule": lambda x: "block"}, ValueError, "rule='block'"),
        ({"backend": lambda x: "cpu"}, ValueError, "backend='cpu'"),
        ({"backend": lambda x: "triton"}, ValueError, 'backend="triton" needs CUDA'),
    ],
)
def test_refuses_what_does_not_fit(changes, error, match):
    arguments = {**good(), "rule": "traversal", "backend": "auto"}
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    with pytest.raises(error, match=f"tree_accept_sampled: {match}"):
        tree_accept_sampled(**arguments)


@pytest.mark.parametrize("wrong", [float("-inf"), float("nan")])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_q_cannot_have_drawn_counts_as_not_drafted(backend, rule, wrong):
    batch = noisy(random_forest(7, [0] * 4, seed=3), [7] * 4, 31, seed=5, distance=0.1)
    batch.log_q[:, 0, batch.tokens[:, 1]] = wrong  # in all rows, for more than node 1 perhaps
    got = run(batch, backend, rule)
    live = [b for b in range(4) if not batch.log_q[b, 0].isnan().all()]
    for b in live:
        path = got[0][b].tolist()
        assert path[1] < 1 or batch.log_q[b, 0, batch.tokens[b, path[1]]] > float("-inf")
    if backend == "triton":
        assert all(map(torch.equal, got, run(batch, "reference", rule)))

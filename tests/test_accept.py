"""Acceptance: stories for the walk, exact frequencies for the rules that draw."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from selfspec_kernels import row_stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec import TokenTree
from selfspec.accept import accept
from selfspec.sampling import Sampler

V = 6


def state(batch: int = 1, frozen: tuple[int, ...] = ()) -> Any:
    """As much of a DecodeState as acceptance reads."""
    return SimpleNamespace(
        batch=batch,
        frozen=[b in frozen for b in range(batch)],
        prompt_length=3,
        positions=lambda: [0] * batch,
        prefix=lambda b: torch.tensor([1, 2, 3]),
    )


def preferring(*choices: int) -> torch.Tensor:
    """Logits [1, N, V] whose maxima are `choices`."""
    return torch.nn.functional.one_hot(torch.tensor([choices]), V).float() * 5


class PrefixDependent:
    """Makes the sampler walk; changes nothing."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


GREEDY = [
    Sampler(LogitsProcessorList(), False),
    Sampler(LogitsProcessorList([PrefixDependent()]), False),
]


@pytest.mark.parametrize("sampler", GREEDY, ids=["at once", "walk"])
@pytest.mark.parametrize(
    ("parents", "tokens", "choices", "path", "next_token"),
    [
        ([-1, 0, 1], [5, 1, 2], (1, 2, 3), [0, 1, 2], 3),  # all accepted, bonus
        ([-1, 0, 1], [5, 1, 2], (1, 4, 3), [0, 1, -1], 4),  # second rejected, recovered
        ([-1, 0, 1], [5, 1, 2], (0, 2, 3), [0, -1, -1], 0),  # accepts after a reject do not count
        ([-1], [5], (2,), [0], 2),  # nothing drafted
        ([-1, 0, 0, 2], [5, 1, 2, 3], (2, 0, 3, 4), [0, 2, 3], 4),  # second branch
        ([-1, 0, 0, 1], [5, 1, 2, 3], (2, 3, 0, 4), [0, 2, -1], 0),  # not the other branch's child
    ],
)
def test_greedy_stories(
    sampler: Sampler,
    parents: list[int],
    tokens: list[int],
    choices: tuple[int, ...],
    path: list[int],
    next_token: int,
) -> None:
    tree = TokenTree.from_topology(torch.tensor([tokens]), parents)
    out = accept(tree, preferring(*choices), sampler, state())
    assert out.path.tolist() == [path]
    assert out.num_accepted.tolist() == [sum(n > 0 for n in path)]
    assert out.next_token.tolist() == [next_token]


@pytest.mark.parametrize("sampler", GREEDY, ids=["at once", "walk"])
def test_ties_take_the_first_and_nan_stays_in_the_vocabulary(sampler: Sampler) -> None:
    tree = TokenTree.root_only(torch.tensor([5]))
    assert accept(tree, torch.ones(1, 1, V), sampler, state()).next_token.tolist() == [0]
    nan = torch.full((1, 1, V), float("nan"))
    assert 0 <= int(accept(tree, nan, sampler, state()).next_token) < V


def test_disagreeing_shapes() -> None:
    tree = TokenTree.chain(5, [1])
    with pytest.raises(ValueError, match=r"logits are \(1, 3, 6\)"):
        accept(tree, preferring(1, 2, 3), GREEDY[0], state())


# --------------------------------------------------------------- rules that draw

RUNS = 6000
P = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.1, 0.0], [0.1, 0.6, 0.3, 0.0, 0.0, 0.0]])
Q = torch.tensor([[0.1, 0.5, 0.2, 0.0, 0.1, 0.1], [0.3, 0.1, 0.4, 0.2, 0.0, 0.0]])


def sampled_chains(q: torch.Tensor, generator: torch.Generator) -> TokenTree:
    """RUNS chains of two tokens, drawn from `q` [2, V] (the second whatever the first was)."""
    tokens = torch.stack(
        [torch.multinomial(row, RUNS, replacement=True, generator=generator) for row in q], 1
    )
    log_q = torch.cat([q, torch.full((1, V), 1 / V)]).log()
    root = torch.full((RUNS,), 5)
    return TokenTree.chain(root, tokens, log_q=log_q.expand(RUNS, 3, V))


def target_logits() -> torch.Tensor:
    return torch.cat([P, P[:1]]).log().expand(RUNS, 3, V)


def first_two(tree: TokenTree, out: Any) -> torch.Tensor:
    """Joint counts of the first two emitted tokens; unknown second ones are drawn from P."""
    accepted = out.num_accepted
    first = torch.where(accepted > 0, tree.tokens[:, 1], out.next_token)
    plain = torch.multinomial(P[1], RUNS, replacement=True)
    second = torch.where(
        accepted == 0, plain, torch.where(accepted == 1, out.next_token, tree.tokens[:, 2])
    )
    return torch.bincount(first * V + second, minlength=V * V).view(V, V).float()


def distance(counts: torch.Tensor) -> float:
    return float((counts / RUNS - P[0][:, None] * P[1]).abs().sum() / 2)


RATE_NOISE = 0.026  # four standard deviations of a frequency around a half
NOISE = 0.045  # total variation of 36 cells over 6,000 draws stays below this (mean 0.021)


def sampling(rule: Any = "traversal", *processors: Any) -> Sampler:
    return Sampler(LogitsProcessorList(processors), True, rule=rule)


@pytest.mark.parametrize("rule", ["traversal", "multiround"])
def test_drawn_chains_have_the_target_law(rule: str) -> None:
    torch.manual_seed(100)  # not the drafts' generator: the two would draw the same numbers
    tree = sampled_chains(Q, torch.Generator().manual_seed(0))
    out = accept(tree, target_logits(), sampling(rule), state(RUNS))
    assert distance(first_two(tree, out)) < NOISE
    rate = float((out.num_accepted > 0).float().mean())
    token_wise = float(torch.minimum(P[0], Q[0]).sum())
    if rule == "multiround":
        assert abs(rate - token_wise) < RATE_NOISE
    else:
        assert rate > token_wise - RATE_NOISE


def test_the_check_can_fail() -> None:
    """A drafter that misreports q must be caught."""
    torch.manual_seed(100)
    tree = sampled_chains(Q, torch.Generator().manual_seed(0))
    wrong = torch.full_like(tree.log_q, 1 / V).log()
    lying = TokenTree.chain(tree.tokens[:, 0], tree.tokens[:, 1:], log_q=wrong)
    out = accept(lying, target_logits(), sampling(), state(RUNS))
    assert distance(first_two(tree, out)) > 2 * NOISE


@pytest.mark.parametrize("kind", ["p equals q", "disjoint", "tiny q"])
def test_edges_of_rejection(kind: str) -> None:
    torch.manual_seed(0)
    q = {
        "p equals q": P,
        "disjoint": torch.tensor([[0.0, 0, 0, 0, 0, 1.0], [0, 0, 0, 1.0, 0, 0]]),
        "tiny q": torch.tensor([[1e-9, 0.5, 0.5, 0, 0, 0], [1e-9, 0.5, 0.5, 0, 0, 0]]),
    }[kind]
    tree = sampled_chains(q, torch.Generator().manual_seed(0))
    out = accept(tree, target_logits(), sampling(), state(RUNS))
    assert distance(first_two(tree, out)) < NOISE
    if kind == "p equals q":
        assert out.num_accepted.eq(2).all()
    if kind == "disjoint":
        assert out.num_accepted.eq(0).all()


@pytest.mark.parametrize("rule", ["traversal", "multiround"])
def test_drawn_siblings_have_the_target_law(rule: str) -> None:
    torch.manual_seed(0)
    first, second = torch.multinomial(Q[0], 2 * RUNS, True).view(2, RUNS)
    while (same := second == first).any():  # without replacement: draw again
        second[same] = torch.multinomial(Q[0], int(same.sum()), True)
    tokens = torch.stack([torch.full((RUNS,), 5), first, second], 1)
    log_q = Q[:1].log().expand(RUNS, 3, V)
    tree = TokenTree.from_topology(tokens, [-1, 0, 0], log_q=log_q)
    logits = P[:1].log().expand(RUNS, 3, V)
    out = accept(tree, logits, sampling(rule), state(RUNS))
    node = out.path[:, 1:2].clamp(min=0).long()
    emitted = torch.where(out.num_accepted > 0, tokens.gather(1, node)[:, 0], out.next_token)
    law = torch.bincount(emitted, minlength=V) / RUNS
    assert float((law - P[0]).abs().sum() / 2) < 0.03
    assert float((out.num_accepted > 0).float().mean()) > float(torch.minimum(P[0], Q[0]).sum())


def test_a_request_has_one_key_a_row() -> None:
    """Rows and positions draw apart; the generator decides on the keys alone."""
    tree = sampled_chains(Q, torch.Generator().manual_seed(0))
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(accept(tree, target_logits(), sampling(), state(RUNS)).next_token)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    sampler = sampling()
    assert torch.equal(sampler.seeds(RUNS), sampler.seeds(RUNS))
    assert len(set(sampler.seeds(RUNS).tolist())) == RUNS


def test_processors_see_every_nodes_own_prefix() -> None:
    """A repetition penalty under rejection: p at a node is that of its path."""
    penalty = RepetitionPenaltyLogitsProcessor(1.5)
    tree = TokenTree.from_topology(
        torch.tensor([[3, 1, 2, 4]]), [-1, 0, 0, 2], log_q=torch.full((1, 4, V), 1 / V).log()
    )
    logits = torch.randn(1, 4, V, generator=torch.Generator().manual_seed(0))
    sampler = sampling("traversal", penalty)
    sampler.keep_scores = True
    out = accept(tree, logits, sampler, state())
    for node, path in enumerate(([], [1], [2], [2, 4])):
        expected = penalty(torch.tensor([[1, 2, 3, *path]]), logits[:, node].clone())
        assert torch.equal(out.scores[:, node], expected)


def test_a_processor_that_remembers_is_shown_no_path_not_taken() -> None:
    seen = []

    class Remembering:
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(ids.tolist()[0])
            return scores

    tree = TokenTree.from_topology(
        torch.tensor([[3, 1, 2]]), [-1, 0, 0], log_q=torch.full((1, 3, V), 1 / V).log()
    )
    logits = preferring(2, 0, 4) * 100
    out = accept(tree, logits, sampling("traversal", Remembering()), state())
    assert out.path.tolist() == [[0, 2]]
    assert seen == [[1, 2, 3], [1, 2, 3, 2]]


def test_log_q_over_another_vocabulary() -> None:
    tree = TokenTree.chain(torch.tensor([5]), torch.tensor([[1]]), log_q=torch.zeros(1, 2, V + 1))
    with pytest.raises(ValueError, match="log_q is over 7 tokens, the model's logits over 6"):
        accept(tree, preferring(1, 2), sampling(), state())


@pytest.mark.parametrize(
    "processors",
    [
        [TemperatureLogitsWarper(0.6)],
        [TopKLogitsWarper(3)],
        [TemperatureLogitsWarper(1.4), TopKLogitsWarper(20), TopPLogitsWarper(0.8)],
        [TopPLogitsWarper(0.5), MinPLogitsWarper(0.2)],
    ],
    ids=lambda processors: "-".join(
        type(p).__name__.removesuffix("LogitsWarper") for p in processors
    ),
)
def test_filters_of_the_kernel_are_those_of_transformers(
    processors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(2, 5, 300, generator=torch.Generator().manual_seed(0))
    sampler = sampling("traversal", *processors)
    expected = sampler.scores(logits)
    monkeypatch.setattr("selfspec.sampling.on_kernels", lambda logits: True)
    calls = []
    monkeypatch.setattr(
        "selfspec.sampling.row_stats", lambda *a, **k: calls.append(k) or row_stats(*a, **k)
    )
    assert torch.equal(sampler.scores(logits), expected)
    assert len(calls[0]) == len(processors)


@pytest.mark.parametrize(
    "processors",
    [
        [TopKLogitsWarper(3), TemperatureLogitsWarper(0.6)],
        [TopKLogitsWarper(3), TopKLogitsWarper(2)],
        [TopKLogitsWarper(3, filter_value=-1e4)],
        [TopPLogitsWarper(0.5, min_tokens_to_keep=2)],
        [TopKLogitsWarper(3), RepetitionPenaltyLogitsProcessor(1.5)],
    ],
)
def test_other_orders_and_options_stay_with_transformers(
    processors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfspec.sampling.on_kernels", lambda logits: True)
    monkeypatch.setattr("selfspec.sampling.row_stats", None)
    sampler = sampling("traversal", *processors)
    if sampler.prefix_free:
        sampler.scores(torch.randn(1, 2, 300))
    assert sampler._fused is None


def test_greedy_ignores_how_a_draft_was_drawn() -> None:
    tree = TokenTree.chain(torch.tensor([5]), torch.tensor([[1]]), log_q=torch.zeros(1, 2, V))
    out = accept(tree, preferring(1, 2), GREEDY[0], state())
    assert out.num_accepted.tolist() == [1]


def test_deterministic_trees_under_sampling_have_the_target_law() -> None:
    """Siblings that cover the support, some or none of it: the first token follows P."""
    for siblings in ([0], [0, 1], [0, 1, 2, 3, 4, 5], [5]):
        torch.manual_seed(0)
        root = torch.full((RUNS,), 5)
        tree = TokenTree.from_paths(root, [[[s] for s in siblings]] * RUNS)
        logits = P[:1].log().expand(RUNS, len(siblings) + 1, V)
        out = accept(tree, logits, Sampler(LogitsProcessorList(), True), state(RUNS))
        first = torch.where(
            out.num_accepted > 0,
            tree.tokens.gather(1, out.path[:, 1:2].clamp(min=0).long())[:, 0],
            out.next_token,
        )
        law = torch.bincount(first, minlength=V) / RUNS
        assert float((law - P[0]).abs().sum() / 2) < 0.03


# --------------------------------------------------------------- lossy, on request


def typical_path(tree: TokenTree, p: torch.Tensor) -> list[int]:
    """By the definition, a node at a time."""
    best: tuple[int, float, list[int]] = (0, 0.0, [0])
    for leaf in range(1, int(tree.num_nodes)):
        path = [leaf]
        while path[0]:
            path.insert(0, int(tree.parents[0, path[0]]))
        likelihood = 0.0
        for parent, node in itertools.pairwise(path):
            law = p[parent]
            entropy = -sum(float(x) * math.log(float(x)) for x in law if x > 0)
            chance = float(law[tree.tokens[0, node]])
            if not chance > min(0.09, 0.3 * math.exp(-entropy)):
                break
            likelihood += math.log(chance)
        else:
            if (len(path), likelihood) > (len(best[2]), best[1]):
                best = (len(path), likelihood, path)
    return best[2]


@pytest.mark.parametrize("seed", range(40))
def test_b18_typical_acceptance_keeps_what_is_likely_enough(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parents = [-1, 0, 0, 1, 1, 2, 3, 5]
    tokens = torch.randint(V, (1, 8), generator=generator)
    tree = TokenTree.from_topology(tokens, parents[: 8 - seed % 3])
    logits = torch.randn(1, 8, V, generator=generator) * (0.5 + seed % 4)
    p = logits[0].softmax(-1)
    out = accept(tree, logits, sampling("lossy-typical"), state())
    expected = typical_path(tree, p)
    assert out.path[0, : len(expected)].tolist() == expected
    assert (out.path[0, len(expected) :] == -1).all()
    assert out.num_accepted.tolist() == [len(expected) - 1]
    assert 0 <= int(out.next_token) < V


def test_b18_typical_acceptance_is_for_sampling_alone() -> None:
    tree = TokenTree.chain(torch.tensor([5]), torch.tensor([[1]]))
    greedy = Sampler(LogitsProcessorList(), False, rule="lossy-typical")
    almost = torch.tensor([[[0.0, 3.0, 3.1, 0, 0, 0], [0.0, 0, 0, 0, 0, 1]]])
    assert accept(tree, almost, greedy, state()).num_accepted.tolist() == [0]
    assert accept(tree, almost, sampling("lossy-typical"), state()).num_accepted.tolist() == [1]


def test_the_token_after_a_typical_path_follows_the_target() -> None:
    torch.manual_seed(100)
    tree = TokenTree.chain(torch.full((RUNS,), 5), torch.zeros(RUNS, 1, dtype=torch.int64))
    logits = torch.stack([P[0], P[1]]).log().expand(RUNS, 2, V)
    out = accept(tree, logits, sampling("lossy-typical"), state(RUNS))
    assert out.num_accepted.eq(1).all()
    law = torch.bincount(out.next_token, minlength=V) / RUNS
    assert float((law - P[1]).abs().sum() / 2) < 0.03

"""Drafts drawn by the model's own layers: lossless, reproducible, accepted as they should be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selfspec
from selfspec.drafters import draw as drawing
from tests.families import tiny
from tests.generate.test_drawn_drafts import CRITICAL, HOT, largest_gaps

SETTINGS = {"do_sample": True, "temperature": HOT, "top_k": 0}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama")


DRAFTERS = {
    "exit": lambda: selfspec.EarlyExitDrafter(2, 3, 0.0, do_sample=True),
    "exit with leaves": lambda: selfspec.EarlyExitDrafter(2, 3, 0.0, branches=3, do_sample=True),
    "skip": lambda: selfspec.LayerSkipDrafter([1], 3, 0.0, do_sample=True),
    "skip, unsure": lambda: selfspec.LayerSkipDrafter([1], 3, 0.05, branches=2, do_sample=True),
}


@pytest.mark.parametrize("rule", ["traversal", "multiround"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_text_follows_the_targets_law(model: Any, name: str, rule: str) -> None:
    gaps, stats = largest_gaps(model, DRAFTERS[name](), rule, rows=1500)
    assert max(gaps) < CRITICAL
    assert stats.accepted > 300


def test_the_whole_model_draws_what_it_accepts(model: Any) -> None:
    """q is p, after the same processors: nothing is ever rejected."""
    prompt = tiny.prompts(3)
    for settings in (
        SETTINGS,
        {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8},
        {"do_sample": True, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    ):
        drafter = selfspec.EarlyExitDrafter(4, 3, 0.0, do_sample=True)
        spec = selfspec.wrap(model, drafter)
        torch.manual_seed(0)
        spec.generate(**prompt, max_new_tokens=24, **settings)
        assert spec.stats.acceptance_rate > 0.97  # rounding of blocks may reject one in a while
        assert spec.stats.mean_accepted_length > 3


def test_acceptance_is_the_overlap_of_p_and_q(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token: accepted at depth d, if tried, with probability sum(min(p, q))."""
    seen: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    accept = selfspec.accept.accept

    def recording(tree: Any, logits: Any, sampler: Any, state: Any) -> Any:
        acceptance = accept(tree, logits, sampler, state)
        if tree.log_q is not None:
            seen.append((tree, sampler.scores(logits).softmax(-1), acceptance.num_accepted))
        return acceptance

    monkeypatch.setattr("selfspec.loop.accept", recording)
    drafter = selfspec.EarlyExitDrafter(3, 3, 0.0, do_sample=True)
    spec = selfspec.wrap(model, drafter, acceptance="multiround")
    torch.manual_seed(0)
    prompt = tiny.prompts(1)["input_ids"].expand(600, -1)
    spec.generate(prompt, max_new_tokens=9, eos_token_id=None, pad_token_id=0, **SETTINGS)
    for depth in range(3):
        tried, hits, expected, variance = 0, 0.0, 0.0, 0.0
        for tree, p, accepted in (item for item in seen if item[0].max_depth > depth):
            here = (tree.num_nodes > depth + 1) & (accepted >= depth)
            overlap = torch.minimum(p[:, depth], tree.log_q[:, depth].exp()).sum(-1)[here]
            tried += int(here.sum())
            hits += float((accepted[here] > depth).sum())
            expected += float(overlap.sum())
            variance += float((overlap * (1 - overlap)).sum())
        assert tried > 200
        assert abs(hits - expected) < 3 * variance**0.5


def test_seeds_repeat_and_rows_are_alone(model: Any) -> None:
    prompt = tiny.prompts(3)
    spec = selfspec.wrap(model, selfspec.EarlyExitDrafter(3, 3, 0.0, do_sample=True))

    def text(rows: list[int]) -> torch.Tensor:
        part = {name: value[rows] for name, value in prompt.items()}
        generators = [torch.Generator().manual_seed(b) for b in rows]
        return spec.generate(**part, max_new_tokens=16, **SETTINGS, generator=generators)

    whole = text([0, 1, 2])
    assert torch.equal(text([0, 1, 2]), whole)
    assert torch.equal(text([2, 0]), whole[[2, 0]])


def test_where_nothing_can_be_drawn_tokens_are_the_likeliest(model: Any) -> None:
    class Remembering:
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=12)
    spec = selfspec.wrap(model, selfspec.EarlyExitDrafter(3, 3, 0.0, do_sample=True))
    assert spec.generate(**prompt, max_new_tokens=12).equal(plain)
    arguments = {"max_new_tokens": 12, **SETTINGS, "logits_processor": [Remembering()]}
    torch.manual_seed(0)
    plain = model.generate(**prompt, **arguments)
    torch.manual_seed(0)
    assert spec.generate(**prompt, **arguments).equal(plain)


def test_fewer_tokens_than_siblings(model: Any) -> None:
    """top_k=1 leaves q one token: the others are repeats of it, which count as not drafted."""
    spec = selfspec.wrap(model, selfspec.EarlyExitDrafter(3, 3, 0.0, branches=3, do_sample=True))
    prompt = tiny.prompts(2)
    greedy = model.generate(**prompt, max_new_tokens=12)
    torch.manual_seed(0)
    assert spec.generate(**prompt, max_new_tokens=12, do_sample=True, top_k=1).equal(greedy)


def test_siblings_are_drawn_without_replacement() -> None:
    """The first two of a race: q(x) q(y) / (1 - q(x))."""
    from types import SimpleNamespace

    from selfspec.sampling import Sampler

    rows, q = 20_000, torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampler = Sampler([], True)  # type: ignore[arg-type]
    torch.manual_seed(0)
    state: Any = SimpleNamespace(
        sampler=sampler, batch=rows, positions=lambda: [3] * rows, frozen=[False] * rows
    )
    assert drawing.draws(state)
    nothing = torch.empty(rows, 0, dtype=torch.int64)
    ids, log_q = drawing.draw(state, q.log().expand(rows, 4), nothing, 2)
    torch.testing.assert_close(log_q, q.log().expand(rows, 4))
    counts = torch.bincount(ids[:, 0] * 4 + ids[:, 1], minlength=16).view(4, 4)
    expected = rows * q[:, None] * q / (1 - q[:, None])
    expected.fill_diagonal_(0)
    apart = ~torch.eye(4, dtype=torch.bool)
    assert counts.diagonal().sum() == 0
    chi_square = ((counts - expected) ** 2 / expected)[apart].sum()
    assert float(chi_square) < 11 + 5 * 22**0.5  # 11 degrees of freedom


def test_refusals() -> None:
    with pytest.raises(TypeError, match="do_sample=1 must be True or False"):
        selfspec.LayerSkipDrafter(do_sample=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"EarlyExitDrafter\(do_sample=True\) cannot be part"):
        selfspec.CombinedDrafter([selfspec.EarlyExitDrafter(do_sample=True)])

"""Heads whose drafts are drawn: the target's law, seeds, processors, and draws of several nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import selfspec
from selfspec import HeadsDrafter
from selfspec.drafters.draw import draw_children
from selfspec.sampling import Sampler
from tests.families import tiny
from tests.generate.test_drawn_drafts import CRITICAL, HOT, largest_gaps
from tests.test_heads import GREEDY, KINDS, SAMPLED, SOME, Watching, heads, trained


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("conditioned", "traversal"),
        ("medusa", "multiround"),
        ("draft vocabulary", "traversal"),
    ],
)
def test_drawn_drafts_follow_the_targets_law(model: Any, name: str, rule: str) -> None:
    tree = [[0], [1], [0, 0], [1, 0], [0, 1]]
    network = trained(name) if name != "draft vocabulary" else heads(**KINDS[name])
    gaps, stats = largest_gaps(model, HeadsDrafter(network, tree, True), rule, rows=500)
    assert max(gaps) < CRITICAL
    assert stats.accepted > 20


def test_seeds_repeat_and_rows_are_alone(model: Any) -> None:
    prompt = tiny.prompts(3)
    spec = selfspec.wrap(
        model, HeadsDrafter(trained("conditioned"), do_sample=True), max_draft_tokens=9
    )

    def text(rows: list[int]) -> torch.Tensor:
        part = {name: value[rows] for name, value in prompt.items()}
        generators = [torch.Generator().manual_seed(b) for b in rows]
        return spec.generate(**part, **{**SAMPLED, "temperature": HOT}, generator=generators)

    whole = text([0, 1, 2])
    assert text([0, 1, 2]).equal(whole)
    assert text([2, 0]).equal(whole[[2, 0]])


def _few(b: int, ids: torch.Tensor) -> list[int]:
    return [3, 5, 6]


_few.stateless = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"suppress_tokens": SOME.tolist()},
        {"bad_words_ids": SOME[:, None].tolist()},
        {"prefix_allowed_tokens_fn": _few},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_processors_of_drawn_drafts(model: Any, settings: Any) -> None:
    """Some leave nothing that the heads could draft, which is no reason for a NaN."""
    seen = Watching(heads(draft_vocab_size=len(SOME)), do_sample=True)
    spec = selfspec.wrap(model, seen, max_draft_tokens=6)
    text = spec.generate(**tiny.prompts(2), **{**SAMPLED, "top_k": 50, **settings})
    assert seen.trees
    for tree in (tree for tree in seen.trees if tree.log_q is not None):
        assert not tree.log_q.isnan().any()
        torch.testing.assert_close(tree.log_q[:, 0].exp().sum(-1), torch.ones(2))
    if "top_k" in settings:
        assert text.equal(model.generate(**tiny.prompts(2), **GREEDY))
    else:
        new = set(text[:, 17:].flatten().tolist())
        barred = settings.get("suppress_tokens", [t for (t,) in settings.get("bad_words_ids", [])])
        assert not new & set(barred)


def _state(rows: int) -> Any:
    torch.manual_seed(0)
    sampler = Sampler([], True)  # type: ignore[arg-type]
    return SimpleNamespace(
        sampler=sampler, batch=rows, positions=lambda: [3] * rows, frozen=[False] * rows
    )


def test_nodes_draw_independently_and_cut_trees_alike() -> None:
    rows = 20_000
    state = _state(rows)
    q = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits = q.log().expand(rows, 3, 4)
    nodes, paths = torch.tensor([1, 2, 5]), torch.zeros(rows, 3, 1, dtype=torch.int64)
    ids, log_q = draw_children(state, logits, paths, nodes, 2)
    torch.testing.assert_close(log_q, logits)
    for one, two in ((0, 1), (0, 2), (1, 2)):
        pairs = torch.bincount(ids[:, one, 0] * 4 + ids[:, two, 0], minlength=16).view(4, 4)
        expected = rows * q[:, None] * q
        chi_square = float(((pairs - expected) ** 2 / expected).sum())
        assert chi_square < 15 + 5 * 30**0.5  # 15 degrees of freedom
    alone, _ = draw_children(state, logits[:, :1], paths[:, :1], nodes[1:2], 1)
    assert alone[:, 0, 0].equal(ids[:, 1, 0])


def test_among_some_tokens_is_a_draw_from_their_law() -> None:
    rows, among = 20_000, torch.tensor([1, 4, 5])
    state = _state(rows)
    q = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.3, 0.2])
    logits = (q.log() + 3.0).expand(rows, 1, 6)
    paths = torch.zeros(rows, 1, 0, dtype=torch.int64)
    ids, log_q = draw_children(state, logits, paths, torch.tensor([0]), 2, among)
    torch.testing.assert_close(log_q[:, 0].exp(), q.expand(rows, 6))
    counts = torch.bincount(ids[:, 0, 0], minlength=6)
    assert counts[[0, 2, 3]].sum() == 0
    expected = rows * q[among]
    assert float(((counts[among] - expected) ** 2 / expected).sum()) < 2 + 5 * 4**0.5
    assert (ids[:, 0, 0] != ids[:, 0, 1]).all()

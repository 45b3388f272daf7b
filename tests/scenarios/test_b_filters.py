"""Area B, filters: temperature, top-k, top-p and min-p mean what they mean in plain `generate`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import selfspec
from selfspec import TokenTree
from tests.families import tiny
from tests.oracle import RandomTreeDrafter
from tests.scenarios.tables import TableDrafter, V, speaking, spoken, tables, worst

TARGET, DRAFT = tables()
RULES = ("traversal", "multiround")
rules = pytest.mark.parametrize("rule", RULES)
NEW = 8


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def kept(logits: torch.Tensor, *warpers: Any) -> torch.Tensor:
    """Scores of rows of logits after transformers' warpers."""
    return LogitsProcessorList(warpers)(torch.empty(len(logits), 0).long(), logits.float())


@pytest.mark.parametrize(
    "drafter",
    [
        TableDrafter(DRAFT, (2, 1)),  # of a q that knows nothing of the filters
        TableDrafter(DRAFT, (2, 2), says=None),
        selfspec.EarlyExitDrafter(1, 3, 0.0, branches=3, do_sample=True),
    ],
    ids=["raw q", "chosen", "exit"],
)
@rules
def test_b4_nothing_outside_the_nucleus_is_accepted(rule: str, drafter: Any) -> None:
    spec = speaking(TARGET, drafter, DRAFT, acceptance=rule)
    text = spoken(spec, 1500, 7, temperature=0.3, top_p=0.5)
    p = kept(TARGET, TemperatureLogitsWarper(0.3), TopPLogitsWarper(0.5)).softmax(-1)
    assert (p > 0).sum() < V * 3
    assert spec.stats.accepted > 1000
    assert max(worst(text, p, length) for length in (1, 2, 3)) < 1  # infinite outside of it


FILTERS: dict[str, dict[str, Any]] = {
    "top_p": {"top_k": 0, "temperature": 0.1, "top_p": 0.9},
    "top_k": {"top_k": 3},
    "min_p": {"top_k": 0, "min_p": 0.1},
    "all": {"temperature": 3.0, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
}
WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}
DRAFTERS = {
    "drawn chain": lambda: selfspec.EarlyExitDrafter(3, 3, 0.0, do_sample=True),
    "drawn tree": lambda: selfspec.EarlyExitDrafter(3, 3, 0.0, branches=3, do_sample=True),
    "ngram": lambda: selfspec.NGramDrafter(1, min_prob=0.0),
    "tree": RandomTreeDrafter,
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", DRAFTERS)
def test_b13_masks_are_those_of_transformers_row_by_row(name: str, batch: int) -> None:
    """And the scores that are returned are finite where they were drawn from."""
    spec = selfspec.wrap(tiny.build("llama"), DRAFTERS[name]())
    for filters in FILTERS.values():
        out = spec.generate(
            **tiny.prompts(batch),
            max_new_tokens=NEW,
            do_sample=True,
            **filters,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
        warpers = [WARPERS[k](v) for k, v in filters.items() if v]
        assert len(out.scores) == len(out.logits) == NEW
        for t, (scores, logits) in enumerate(zip(out.scores, out.logits, strict=True)):
            for b in range(batch):
                assert torch.equal(scores[b], kept(logits[b, None], *warpers)[0])
                assert scores[b, out.sequences[b, 17 + t]] > -torch.inf
    assert spec.stats.fallbacks == 0
    assert spec.stats.drafted > 0


@pytest.fixture(scope="module")
def sharp() -> Any:
    """With logits so far apart that a temperature of 0.01 is cold."""
    model: Any = copy.deepcopy(tiny.build("llama"))
    with torch.no_grad():
        model.lm_head.weight.mul_(100)
    return model


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        *((rule, "drawn tree") for rule in RULES),
        ("lossy-typical", "drawn chain"),
        ("traversal", "ngram"),
        ("traversal", "tree"),
    ],
)
def test_b15_cold_text_is_greedy_text(sharp: Any, rule: str, name: str) -> None:
    """With rows that end one after the other."""
    prompt = tiny.prompts(3)
    plain = sharp.generate(**prompt, max_new_tokens=NEW)
    eos = int(plain[1, -NEW + 5])
    plain = sharp.generate(**prompt, max_new_tokens=NEW, eos_token_id=eos)
    spec = selfspec.wrap(sharp, DRAFTERS[name](), acceptance=rule)
    for settings in (
        *({"temperature": t} for t in (1e-7, 1e-5, 1e-2)),
        {"top_k": 1},
        {"top_p": 1e-9},
    ):
        out = spec.generate(
            **prompt,
            max_new_tokens=NEW,
            do_sample=True,
            eos_token_id=eos,
            **settings,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert out.sequences.equal(plain), settings
        assert not any(scores.isnan().any() or scores.eq(torch.inf).any() for scores in out.scores)
    assert spec.stats.fallbacks == 0


@rules
def test_b15_top_k_alone_is_honoured(rule: str) -> None:
    """No temperature is asked for, only sampling from the best two."""
    drafter = selfspec.EarlyExitDrafter(1, 2, 0.0, do_sample=True)
    spec = speaking(TARGET, drafter, DRAFT, acceptance=rule)
    text = spoken(spec, 1500, 6, top_k=2, temperature=None, top_p=None)
    p = kept(TARGET, TopKLogitsWarper(2)).softmax(-1)
    assert ((p > 0).sum(-1) == 2).all()
    assert worst(text, p, 2) < 1
    assert spec.stats.accepted > 1000


WEIGHTS = torch.tensor([0.5, 0.3, 0.15, 0.05])


@pytest.mark.parametrize("on_kernels", [False, True], ids=["warpers", "fused"])
@pytest.mark.parametrize(
    ("weights", "settings", "expected"),
    [
        (WEIGHTS, {"top_p": 0.6}, {0, 1}),  # the token that crosses the threshold stays
        (torch.ones(4), {"top_p": 0.5}, {2, 3}),  # of tied ones those with the highest ids
        (torch.ones(4), {"top_k": 2}, {0, 1, 2, 3}),  # a tie at the border stays whole
        (WEIGHTS, {"top_k": 2}, {0, 1}),
        (WEIGHTS, {"top_k": 50}, {0, 1, 2, 3}),
        (WEIGHTS, {"top_p": 0.01}, {0}),
        (WEIGHTS, {"min_p": 0.3}, {0, 1, 2}),
    ],
)
def test_b16_what_is_kept_at_the_border(
    weights: torch.Tensor,
    settings: dict[str, float],
    expected: set[int],
    on_kernels: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = weights.log().expand(4, 4)
    drafter = selfspec.EarlyExitDrafter(1, 2, 0.0, do_sample=True)
    spec = speaking(logits, drafter, 0.5 * logits)
    plain = spec.model.generate(
        torch.full((200, 1), 3), do_sample=True, max_new_tokens=6, **{"top_k": 0, **settings}
    )
    assert set(plain[:, 1:].flatten().tolist()) == expected
    if on_kernels:
        monkeypatch.setattr("selfspec.sampling.on_kernels", lambda logits: True)
    text = spoken(spec, 200, 6, **settings)
    assert set(text.flatten().tolist()) == expected
    p = torch.where(torch.isin(torch.arange(4), torch.tensor([*expected])), weights, 0)
    assert worst(text, (p / p.sum()).expand(4, 4), 1) < 1
    assert spec.stats.accepted > 0


# ------------------------------------------------------------------- B22: small vocabularies


class Watching:
    """Lets another drafter draft, and keeps its trees."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.trees: list[TokenTree] = []
        self.hidden_taps = drafter.hidden_taps

    def draft(self, state: Any, budget: int) -> TokenTree:
        self.trees.append(self.drafter.draft(state, budget))
        return self.trees[-1]

    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        self.drafter.observe(state, output, acceptance)

    def reset(self) -> None:
        self.drafter.reset()

    def repeated_siblings(self) -> int:
        """How many nodes are there twice."""
        found = 0
        for tree in self.trees:
            for tokens, parents, count in zip(
                tree.tokens.tolist(), tree.parents.tolist(), tree.num_nodes.tolist(), strict=True
            ):
                nodes = list(zip(parents, tokens, strict=True))[1:count]
                found += len(nodes) - len(set(nodes))
        return found


@pytest.mark.parametrize("settings", [{"top_k": 50}, {"top_k": V}], ids=str)
@pytest.mark.parametrize("do_sample", [True, False], ids=["drawn", "chosen"])
@rules
def test_b22_more_branches_and_candidates_than_tokens(
    rule: str, do_sample: bool, settings: dict[str, int]
) -> None:
    """Both are clamped to the vocabulary: a whole row of siblings, each once."""
    drafter = Watching(selfspec.EarlyExitDrafter(1, 2, 0.0, branches=16, do_sample=do_sample))
    spec = speaking(TARGET, drafter, DRAFT, acceptance=rule)
    text = spoken(spec, 60, 20, **settings)
    assert worst(text, TARGET.softmax(-1), 1) < 1
    assert drafter.repeated_siblings() == 0
    assert max(tree.width for tree in drafter.trees) == 2 * V + 1
    assert spec.stats.accepted > 0.8 * spec.stats.verifies  # none can miss but for lack of room
    assert spec.stats.fallbacks == 0


@rules
def test_b22_fewer_candidates_than_branches_when_drawing(rule: str) -> None:
    """Two tokens have a chance and four are asked for: what is drawn twice counts once."""
    drafter = Watching(selfspec.EarlyExitDrafter(1, 2, 0.0, branches=4, do_sample=True))
    spec = speaking(TARGET, drafter, DRAFT, acceptance=rule)
    text = spoken(spec, 1500, 6, top_k=2)
    p = kept(TARGET, TopKLogitsWarper(2)).softmax(-1)
    assert worst(text, p, 2) < 1
    assert drafter.repeated_siblings() > 0


@pytest.mark.parametrize("do_sample", [True, False])
def test_b22_a_draft_over_a_larger_vocabulary_is_refused_by_name(do_sample: bool) -> None:
    class Larger(TableDrafter):
        def draft(self, state: Any, budget: int) -> TokenTree:
            return TokenTree.from_paths(state.root, [[[V]]] * state.batch)

    settings = {"do_sample": do_sample, "pad_token_id": 0, "max_new_tokens": 4}
    spec = speaking(TARGET, Larger(DRAFT))
    with pytest.raises(ValueError, match=rf"token {V} of node 1, row 0, is outside the vocabulary"):
        spec.generate(torch.tensor([[3]]), **settings)
    wide = torch.nn.functional.pad(DRAFT.log_softmax(-1), (0, 3), value=-torch.inf)
    spec = speaking(TARGET, TableDrafter(DRAFT, says=wide))
    if do_sample:
        with pytest.raises(ValueError, match=rf"log_q is over {V + 3} tokens, the model's .* {V}"):
            spec.generate(torch.tensor([[3]]), **settings)
    else:  # which has no use for q
        assert spec.generate(torch.tensor([[3]]), **settings).shape == (1, 5)

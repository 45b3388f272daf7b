"""Area E: rows of a batch that differ in length, padding, drafts and end."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import selfspec
from tests.families import tiny
from tests.generate.common import NEW, raised, same
from tests.oracle import OracleDrafter, RandomTreeDrafter


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama")


def solo(model: Any, prompt: dict[str, torch.Tensor], b: int, **kwargs: Any) -> list[int]:
    """What row b gives alone and without its padding."""
    ids = prompt["input_ids"][b][prompt["attention_mask"][b].bool()]
    out: list[int] = model.generate(ids[None], **kwargs)[0, len(ids) :].tolist()
    return out


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Left-padded prompts."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


# Rows with something to copy, and rows of tokens that occur once.
REPEATING = ([5, 9, 33, 5, 9], [7, 7, 7], [50, 51, 52, 53, 50, 51])
SINGLE = ([1, 2, 3, 4, 6, 8, 10], [60], [40, 41])


@pytest.mark.parametrize("graphs", [False, True])
def test_e1_rows_with_and_without_a_match(model: Any, graphs: bool) -> None:
    rows = [list(row) for pair in zip(REPEATING, SINGLE, strict=True) for row in pair]
    prompt = padded(rows)
    truth = [solo(model, prompt, b, max_new_tokens=NEW) for b in range(6)]
    spec = selfspec.wrap(model, drafter=selfspec.NGramDrafter(1, min_prob=0.0), cuda_graphs=graphs)
    steps = list(spec.stream(**prompt, max_new_tokens=NEW))
    assert [[t for s in steps for t in s.tokens[b]] for b in range(6)] == truth
    mixed = [s for s in steps if 0 in s.num_drafted and any(s.num_drafted)]
    assert len(mixed) > 3
    assert spec.stats.accepted > 0


class Copying(OracleDrafter):
    """Drafts for some rows alone."""

    rows: tuple[int, ...] = ()

    def draft(self, state: Any, budget: int) -> selfspec.TokenTree:
        paths: list[list[list[int]]] = [
            [self.answers[b][state.length[b] :][: min(4, budget, max(state.room(b) - 1, 0))]]
            if b in self.rows
            else []
            for b in range(state.batch)
        ]
        return selfspec.TokenTree.from_paths(state.root, paths, budget)


@pytest.mark.parametrize("graphs", [False, True])
def test_e7_no_row_or_one_row_has_a_draft(model: Any, graphs: bool) -> None:
    prompt = tiny.prompts(4)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    for rows in ((), (2,), (0, 3)):
        drafter = Copying(plain)
        drafter.rows = rows
        spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs)
        steps = list(spec.stream(**prompt, max_new_tokens=NEW))
        for b in range(4):
            assert [t for s in steps for t in s.tokens[b]] == plain[b, 17:].tolist()
            assert (sum(s.num_drafted[b] for s in steps) > 0) == (b in rows)
        assert spec.stats.forwards == NEW - 1
    # What the n-gram drafter finds: nothing in rows of tokens that occur once.
    prompt = padded([list(row) for row in SINGLE])
    plain = model.generate(**prompt, max_new_tokens=3)
    spec = selfspec.wrap(model, drafter=selfspec.NGramDrafter(8, min_prob=0.0), cuda_graphs=graphs)
    assert spec.generate(**prompt, max_new_tokens=3).equal(plain)
    assert spec.stats.drafted == 0


@pytest.mark.parametrize(
    ("name", "explicit"),
    [(name, True) for name in ("llama", "gpt2", "gemma3", "bloom")] + [("gpt2", False)],
)
def test_e3_padded_rows_are_those_without_padding(name: str, explicit: bool) -> None:
    """Pads of 0, 3 and 11; with the mask passed, and with transformers guessing it."""
    model = tiny.build(name)
    prompt = padded([[*range(20, 34)], [*range(40, 51)], [9, 33, 9]])
    if not explicit:  # transformers takes the padding token for padding
        prompt = {"input_ids": prompt["input_ids"], "attention_mask": None}  # type: ignore[dict-item]
    batch = model.generate(**prompt, max_new_tokens=12)
    mask = padded([[1] * 14, [1] * 11, [1] * 3])["attention_mask"]
    full = {"input_ids": prompt["input_ids"], "attention_mask": mask}
    truth = [solo(model, full, b, max_new_tokens=12) for b in range(3)]
    for drafter in (OracleDrafter(batch, 5, wrong_at=(0, 2)), selfspec.EarlyExitDrafter(4, 3, 0.0)):
        spec = selfspec.wrap(model, drafter=drafter)
        assert spec.generate(**prompt, max_new_tokens=12)[:, 14:].tolist() == truth
        assert spec.stats.fallbacks == 0
        assert spec.stats.accepted > 0


class Uneven(OracleDrafter):
    """Row 0 is right throughout, row 1 wrong at once, row 2 after two tokens."""

    def draft(self, state: Any, budget: int) -> selfspec.TokenTree:
        self.wrong_at, self.steps = (0, 1, 3), 0
        return super().draft(state, budget)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_e4_every_row_keeps_what_it_accepted(model: Any, ragged: bool, graphs: bool) -> None:
    prompt = tiny.prompts(3, ragged=ragged)
    plain = model.generate(**prompt, max_new_tokens=25)
    spec = selfspec.wrap(model, drafter=Uneven(plain, 5), cuda_graphs=graphs)
    steps = list(spec.stream(**prompt, max_new_tokens=25))
    counts = [[len(s.tokens[b]) for s in steps] for b in range(3)]
    # One token of the prompt, then as far as each row's drafts are right, whatever the others do.
    assert counts[0] == [1, 6, 6, 6, 6, *[0] * 20]
    assert counts[1] == [1] * 25
    assert counts[2][:8] == [1, *[3] * 7]
    for b in range(3):
        assert [t for s in steps for t in s.tokens[b]] == plain[b, 17:].tolist()


def large_batch(model: Any, batch: int, device: str, graphs: bool) -> None:
    prompt = {k: v.to(device) for k, v in tiny.prompts(batch).items()}
    plain = model.generate(**prompt, max_new_tokens=16)
    for drafter in (
        OracleDrafter(plain.cpu(), 5, wrong_at=(0, 3, 1), branches=1),
        selfspec.NGramDrafter(1, min_prob=0.0),
        selfspec.EarlyExitDrafter(4, 4, 0.0),
    ):
        spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs)
        assert spec.generate(**prompt, max_new_tokens=16).equal(plain)
        assert spec.stats.accepted > 0


@pytest.mark.parametrize(("batch", "graphs"), [(8, True), (32, False)])
def test_e6_large_batches(model: Any, batch: int, graphs: bool) -> None:
    large_batch(model, batch, "cpu", graphs)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("batch", [8, 32])
def test_e6_large_batches_on_a_gpu(batch: int, graphs: bool) -> None:
    # float64: with other shapes a GPU rounds float32 otherwise, and near ties may turn.
    model: Any = copy.deepcopy(tiny.build("llama", dtype=torch.float64))
    large_batch(model.cuda(), batch, "cuda", graphs)


@pytest.mark.parametrize("batch", [1, 3])
def test_e9_several_sequences_a_prompt(model: Any, batch: int) -> None:
    prompt = tiny.prompts(batch)
    spec = selfspec.wrap(model, drafter=RandomTreeDrafter())
    greedy = {"num_return_sequences": 2, "max_new_tokens": NEW, "do_sample": False}
    assert raised(lambda: spec.generate(**prompt, **greedy)) == raised(
        lambda: model.generate(**prompt, **greedy)
    )
    sampled = {"num_return_sequences": 2, "max_new_tokens": NEW, "do_sample": True}
    stats = same(model, prompt, **sampled)
    assert stats.accepted > 0
    torch.manual_seed(1)
    out = spec.generate(**prompt, **sampled)
    assert out.shape[0] == 2 * batch
    assert len({tuple(row) for row in out[:, 17:].tolist()}) == 2 * batch


class Contains(StoppingCriteria):
    """Stops every row at a token of its own."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        new = input_ids[:, 17:]
        return (new == self.tokens[: len(new), None]).any(-1)


@pytest.mark.parametrize("eos", [False, True])
def test_e10_rows_end_by_themselves(model: Any, eos: bool) -> None:
    """By ids at different places of accepted blocks, and by a criterion that knows its rows."""
    prompt = tiny.prompts(3)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    at = (3, 8, 14)
    tokens = [int(plain[b, 17 + at[b]]) for b in range(3)]
    kwargs: dict[str, Any] = {"max_new_tokens": NEW}
    if eos:
        kwargs |= {"eos_token_id": tokens, "pad_token_id": 0}
    else:
        kwargs["stopping_criteria"] = StoppingCriteriaList([Contains(tokens)])
    stats = same(model, prompt, falls_back=not eos, **kwargs)
    assert (stats.accepted > 0) == eos
    ends = [
        min(i for i, t in enumerate(row[17:].tolist()) if t in (tokens if eos else [tokens[b]]))
        for b, row in enumerate(plain)
    ]
    assert len(set(ends)) > 1  # or else looking at row 0 would have done
    out = selfspec.wrap(model, drafter=OracleDrafter(plain, 6)).generate(**prompt, **kwargs)
    assert out.shape[1] == 17 + max(ends) + 1
    if eos:
        for row, end in zip(out, ends, strict=True):
            assert not row[17 + end + 1 :].any()

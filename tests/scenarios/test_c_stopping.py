"""Where a text ends: end-of-sequence ids, lengths, strings, times and users' criteria."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers.generation import stopping_criteria as hf

import selfspec
from tests.families import tiny
from tests.generate.common import NEW, Columns, raised, same, snapshot
from tests.oracle import OracleDrafter, RandomTreeDrafter
from tests.scenarios import text

PROMPT = 17


def exact(
    model: Any,
    prompt: dict[str, Any],
    drafter: Any,
    *,
    graphs: bool = False,
    falls_back: bool = False,
    **kwargs: Any,
) -> tuple[Any, selfspec.SpecStats]:
    """Text and stream of plain `generate`, from a wrapper, or from one around `drafter`."""
    plain, ours = Columns(), Columns()
    spec = drafter
    if not isinstance(spec, selfspec.SpeculativeModel):
        spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs)
    spec.stats.reset()
    torch.manual_seed(3)
    expected = model.generate(**prompt, streamer=plain, **kwargs)
    torch.manual_seed(3)
    got = spec.generate(**prompt, streamer=ours, **kwargs)
    assert got.tolist() == expected.tolist()
    assert (ours.columns, ours.ends) == (plain.columns, 1)
    assert spec.stats.fallbacks == falls_back
    return got, spec.stats


@pytest.mark.parametrize(
    ("index", "graphs"), [(0, False), (3, False), (7, False), (8, False), (3, True), (8, True)]
)
def test_c1_text_ends_at_an_eos_inside_a_block(model: Any, index: int, graphs: bool) -> None:
    """The prefill gives one token; the first block drafts the next eight; index 8 is the bonus."""
    prompt = tiny.prompts(1, seed=3)
    answers = model.generate(**prompt, max_new_tokens=12)
    new = answers[0, PROMPT:].tolist()
    eos = new[1 + index]
    assert eos not in new[: 1 + index]
    out, stats = exact(
        model, prompt, OracleDrafter(answers, 8), max_new_tokens=12, eos_token_id=eos, graphs=graphs
    )
    assert out[0, PROMPT:].tolist() == new[: index + 2]
    # Of an accepted block only the part up to the end counts.
    assert (stats.forwards, stats.accepted) == (1, min(index + 1, 8))


@pytest.mark.parametrize(("at", "do_sample"), [(0, False), (1, True), (6, False), (11, True)])
def test_c1_rows_end_at_different_tokens(model: Any, at: int, do_sample: bool) -> None:
    prompt = tiny.prompts(3)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": 0.7} if do_sample else {}
    answers = model.generate(**prompt, max_new_tokens=NEW)
    eos = [int(answers[2, PROMPT + at]), int(answers[1, PROMPT + 2 * at]), 62]
    stats = same(model, prompt, max_new_tokens=NEW, eos_token_id=eos, **sampling)
    assert stats.accepted > 0


@pytest.mark.parametrize("batch", [1, 3])
def test_c10_an_eos_that_was_drafted_and_rejected_ends_nothing(model: Any, batch: int) -> None:
    prompt = tiny.prompts(batch)
    answers = model.generate(**prompt, max_new_tokens=NEW)
    eos = next(t for t in range(1, 64) if not (answers[:, PROMPT:] == t).any())

    class DraftsEos(OracleDrafter):
        def draft(self, state: Any, budget: int) -> selfspec.TokenTree:
            """The right continuation up to some depth, then the end; the end first of all."""
            depth = self.steps % 5
            self.steps += 1
            rows = []
            for b in range(state.batch):
                room = max(state.room(b) - 1, 0)
                right = self.answers[b][state.length[b] :][: min(depth, room)]
                rows.append([[eos], [*right, eos, eos]])
            return selfspec.TokenTree.from_paths(state.root, rows, budget)

    out, stats = exact(model, prompt, DraftsEos(answers), max_new_tokens=NEW, eos_token_id=[eos, 0])
    assert out.equal(answers)
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("graphs", [False, True])
def test_c3_a_stop_before_the_cap_wins_and_one_beyond_it_is_not_emitted(
    model: Any, graphs: bool
) -> None:
    prompt = tiny.prompts(1, seed=3)
    answers = model.generate(**prompt, max_new_tokens=10)
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 8), cuda_graphs=graphs)
    new = answers[0, PROMPT:].tolist()
    assert len(set(new[:8])) == 8
    for stop, length in ((3, 3), (5, 5), (6, 5), (8, 5)):
        out, _ = exact(model, prompt, spec, max_new_tokens=5, eos_token_id=new[stop - 1])
        assert out[0, PROMPT:].tolist() == new[:length]


@pytest.mark.parametrize(
    ("stop", "graphs"),
    [(s, False) for s in ("in", "\n", "€st", "é", "op,", "😀s", "中", "r ")] + [("p,", True)],
)
def test_c4_a_stop_string_inside_a_long_block(stop: str, graphs: bool) -> None:
    """Wherever it ends in a block of 16, and within a character as well."""
    model, tokenizer = text.writer(), text.tokenizer()
    ids = torch.tensor([[text.USER_ID, text.script()[-1]]])
    answers = model.generate(ids, max_new_tokens=40)
    kwargs = {"max_new_tokens": 40, "stop_strings": [stop, "xyz"], "tokenizer": tokenizer}
    out, stats = exact(
        model, {"input_ids": ids}, OracleDrafter(answers, 16), graphs=graphs, **kwargs
    )
    assert stats.accepted > 0
    assert stats.forwards <= 3
    new = tokenizer.decode(out[0, 2:])
    assert stop in new or "�" in new  # transformers may know single bytes of a character only


@pytest.mark.parametrize("eos", [None, 40])
def test_c4_stop_strings_in_rows_that_part(model: Any, eos: int | None) -> None:
    """Strings that cross blocks, one for each row; without an end token rows go on side by side."""
    tokenizer = text.tokenizer()
    prompt = tiny.prompts(3)
    answers = model.generate(**prompt, max_new_tokens=NEW)
    stops = []
    for row, at in zip(answers[:, PROMPT:].tolist(), (2, 9, 15), strict=True):
        pieces = [tokenizer.convert_ids_to_tokens(t) for t in row[at : at + 2]]
        stops.append(tokenizer.convert_tokens_to_string(pieces))
    for width in (4, 16):
        _, stats = exact(
            model,
            prompt,
            OracleDrafter(answers, width, wrong_at=(0, 2)),
            max_new_tokens=NEW,
            stop_strings=[s for s in stops if s.isprintable()],
            tokenizer=tokenizer,
            eos_token_id=eos,
        )
        assert stats.accepted > 0


def test_c4_stop_strings_are_searched_for_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One search, which costs as much as a small model, serves all rows and prefixes."""
    model, tokenizer, prompt = text.writer(), text.tokenizer(), tiny.prompts(3)
    answers = model.generate(**prompt, max_new_tokens=NEW)
    calls = []
    search = hf.StopStringCriteria.__call__

    def counted(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(tuple(input_ids.shape))
        return search(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(hf.StopStringCriteria, "__call__", counted)
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 5))
    spec.generate(**prompt, max_new_tokens=NEW, stop_strings=["never said"], tokenizer=tokenizer)
    assert len(calls) == spec.stats.forwards + 1
    assert sum(rows for rows, _ in calls) == 3 * NEW
    assert {width for _, width in calls} == {len("never said")}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("graphs", [False, True])
def test_c6_never_more_than_max_new_tokens(model: Any, graphs: bool, batch: int) -> None:
    prompt = tiny.prompts(batch)
    answers = model.generate(**prompt, max_new_tokens=9)
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 5), cuda_graphs=graphs)
    for new in (1, 2, 3, 7):
        for limit in ({"max_new_tokens": new}, {"max_length": PROMPT + new}):
            out, stats = exact(model, prompt, spec, **limit)
            assert out.equal(answers[:, : PROMPT + new])
            assert stats.emitted == batch * new


def test_c6_a_prompt_as_long_as_max_length(model: Any) -> None:
    prompt = tiny.prompts(1)
    spec = selfspec.wrap(model, drafter="ngram")
    for limit in ({"max_length": n} for n in (PROMPT, PROMPT - 3, 0)):
        assert raised(lambda: spec.generate(**prompt, **limit)) == raised(  # noqa: B023
            lambda: model.generate(**prompt, **limit)  # noqa: B023
        )
    assert raised(lambda: spec.generate(**prompt, max_new_tokens=0)) == raised(
        lambda: model.generate(**prompt, max_new_tokens=0)
    )


@pytest.mark.parametrize("batch", [1, 2])
def test_c7_neither_eos_nor_padding_is_configured(batch: int) -> None:
    model: Any = copy.deepcopy(tiny.build("llama"))
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = None
    ids = torch.tensor([[7, 8, 9] * 5 + [7, 8]] * batch)
    before = snapshot(model)
    out, stats = exact(
        model,
        {"input_ids": ids},
        selfspec.NGramDrafter(1, min_prob=0.0),
        max_new_tokens=NEW,
        do_sample=False,
    )
    assert out.shape == (batch, PROMPT + NEW)
    assert stats.drafted > 0
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("field", "batch", "graphs"),
    [("min_new_tokens", 1, True), ("min_new_tokens", 3, False), ("min_length", 3, True)],
)
def test_c9_the_least_length_counts_positions_not_blocks(
    field: str, batch: int, graphs: bool
) -> None:
    """A model that would end at every token: the eighth is the first that may."""
    model: Any = copy.deepcopy(text.writer())
    model.lm_head.weight.data[text.EOS_ID] = 2.0
    prompt = tiny.prompts(batch)
    least = {field: 7 if field == "min_new_tokens" else PROMPT + 7}
    answers = model.generate(**prompt, max_new_tokens=NEW, eos_token_id=text.EOS_ID, **least)
    assert answers[:, PROMPT:].eq(text.EOS_ID).int().argmax(1).tolist() == [7] * batch
    # Drafts of the end come too early, at every depth.
    for wrong_at in ((0,), (1, 4, 3)):
        drafter = OracleDrafter(answers, 4, wrong_at=wrong_at)
        out, stats = exact(
            model,
            prompt,
            drafter,
            graphs=graphs,
            max_new_tokens=NEW,
            eos_token_id=text.EOS_ID,
            **least,
        )
        assert out.equal(answers)
        assert stats.accepted > 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("eos", [None, 40])
def test_c15_no_time_is_one_token(model: Any, batch: int, eos: int | None) -> None:
    for drafter in (RandomTreeDrafter(), "none"):
        out, stats = exact(
            model, tiny.prompts(batch), drafter, max_new_tokens=NEW, max_time=0.0, eos_token_id=eos
        )
        assert out.shape[1] == PROMPT + 1
        assert stats.forwards == 0


def test_c15_time_that_runs_out_inside_a_block(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by one at every look: one look a step."""
    prompt = tiny.prompts(3)
    answers = model.generate(**prompt, max_new_tokens=NEW)
    looks = iter(range(100))
    monkeypatch.setattr(hf.time, "time", lambda: float(next(looks)))
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 4))
    out = spec.generate(**prompt, max_new_tokens=NEW, max_time=2.5)
    assert out.equal(answers[:, : out.shape[1]])
    assert out.shape[1] == PROMPT + 1 + 5 + 1  # prefill, a block, the first token of the next


def test_c6_a_text_that_outgrows_the_model_is_warned_of(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = copy.deepcopy(model)
    twin.config.max_position_embeddings = PROMPT + 4
    prompt = tiny.prompts(1)
    answers = twin.generate(**prompt, max_new_tokens=NEW)
    said: list[str] = []
    monkeypatch.setattr(hf.logger, "warning_once", said.append)
    spec = selfspec.wrap(twin, drafter=OracleDrafter(answers, 16))
    for new, warnings in ((4, 0), (5, 0), (6, 1), (NEW, 1)):
        for generate in (twin.generate, spec.generate):
            said.clear()
            generate(**prompt, max_new_tokens=new)
            assert len(set(said)) == warnings, (new, generate)


@pytest.mark.parametrize("seed", range(12))
def test_c1_c3_c4_c6_c9_c13_all_together(model: Any, seed: int) -> None:
    """Rows, ends, strings, lengths and streams, thrown together."""
    random_ = random.Random(seed)
    batch = random_.choice([1, 2, 3])
    prompt = tiny.prompts(batch, seed)
    tokenizer = text.tokenizer()
    answers = model.generate(**prompt, max_new_tokens=32)
    new = answers[:, PROMPT:].tolist()
    kwargs: dict[str, Any] = {"max_new_tokens": random_.randint(1, 32)}
    if random_.random() < 0.6:
        kwargs["eos_token_id"] = [random_.choice(random_.choice(new)) for _ in range(2)]
    if random_.random() < 0.6:
        row = tokenizer.convert_tokens_to_string(
            tokenizer.convert_ids_to_tokens(random_.choice(new))
        )
        found = [row[i : i + random_.randint(1, 4)] for i in range(len(row))]
        found = [s for s in found if "�" not in s]
        kwargs |= {"stop_strings": random_.sample(found, 2), "tokenizer": tokenizer}
    if random_.random() < 0.4:
        kwargs["min_new_tokens"] = random_.randint(1, 9)
    if random_.random() < 0.4:
        kwargs |= {"do_sample": True, "temperature": random_.choice([0.3, 1.0]), "top_k": 20}
    drafters = [
        OracleDrafter(answers, random_.randint(1, 16), wrong_at=(0, random_.randint(1, 6))),
        selfspec.NGramDrafter(1, min_prob=0.0),
        selfspec.EarlyExitDrafter(2, 5, 0.0),
    ]
    exact(model, prompt, random_.choice(drafters), graphs=random_.random() < 0.3, **kwargs)

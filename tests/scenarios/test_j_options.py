"""Every option of `generate` is what the table of `selfspec.generation_options` says."""

from __future__ import annotations

import copy
import inspect
import logging
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMixin
from transformers.generation import configuration_utils as hf_config
from transformers.generation import utils as hf_utils

import selfspec
from selfspec import generation_options as table
from tests.families import tiny
from tests.generate.common import Columns, snapshot
from tests.oracle import OracleDrafter, RandomTreeDrafter
from tests.parts import by_name
from tests.scenarios import options as cases
from tests.scenarios.options import NEW, Counting, Fresh, answered, small

README = (Path(__file__).parents[2] / "README.md").read_text()
FIELDS = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
ARGUMENTS = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
POPPED = {"tokenizer", "assistant_tokenizer", "trust_remote_code"}  # by `generate`, off its kwargs
REMOVED = {"use_model_defaults"}
INSTALLED = FIELDS | ARGUMENTS | POPPED | REMOVED
GROUPS = (
    (table.EXACT, cases.EXACT),
    (table.IDLE, cases.IDLE),
    (table.STOCK, cases.STOCK),
    (table.ERROR, cases.ERROR),
)


def of(group: cases.Cases) -> list[Any]:
    """Cases of the options that the installed transformers has, with readable ids."""
    return [
        pytest.param(name, values, id=f"{name}-{i}" if i else name)
        for name, several in group.items()
        if name in INSTALLED
        for i, values in enumerate(several)
    ]


def run(generate: Any, values: dict[str, Any], batch: int) -> tuple[Any, Any]:
    """What a request gives, an exception as text, and what its objects have seen."""
    made = {k: v.make(batch) if isinstance(v, Fresh) else v for k, v in values.items()}
    torch.manual_seed(5)
    try:
        out = generate(**{**tiny.prompts(batch), "max_new_tokens": NEW, **made})
    except Exception as error:
        return f"{type(error).__name__}: {error}", None
    seen: list[Any] = [torch.get_rng_state().tolist()[:64]]
    for value in made.values():
        if isinstance(value, Columns):
            seen += [value.columns, value.ends]
        if isinstance(value, list):
            seen += [p.calls for p in value if isinstance(p, Counting) and batch == 1]
    return out, seen


def text(out: Any) -> Any:
    out = getattr(out, "sequences", out)
    return out.tolist() if isinstance(out, torch.Tensor) else out


def same(ours: Any, plain: Any) -> None:
    assert type(ours) is type(plain)
    assert text(ours) == text(plain)
    if isinstance(plain, (str, torch.Tensor)):
        return
    assert ours.keys() == plain.keys()
    for name in ("scores", "logits"):
        if getattr(plain, name) is None:
            assert getattr(ours, name) is None
            continue
        for a, b in zip(getattr(ours, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@cache
def without(batch: int, do_sample: bool) -> Any:
    return text(run(small().generate, {"do_sample": do_sample}, batch)[0])


@cache
def _wrapped() -> tuple[Any, OracleDrafter]:
    drafter = OracleDrafter(torch.zeros(1, 1), 4, wrong_at=(0, 3))
    return selfspec.wrap(small(), drafter=drafter), drafter


def drafted(plain: Any) -> Any:
    """A wrapper that drafts what plain gave; one for all, since wrapping takes its time."""
    spec, drafter = _wrapped()
    drafter.answers = text(plain)
    spec.stats.reset()
    return spec


def one_sequence(name: str, values: dict[str, Any]) -> bool:
    stateful = (cases.SYNTH_ID, cases.allowed)
    needs = {"guidance_scale", "logits_processor", "stopping_criteria"}
    return bool(needs & {name, *values}) or any(v is s for v in values.values() for s in stateful)


# ------------------------------------------------------------------------ the table is complete


def test_j7_every_option_has_a_place_and_a_case() -> None:
    """What a newer transformers adds turns this red until somebody has looked at it."""
    assert INSTALLED <= table.KNOWN, "options that the table lacks"
    for entries, group in GROUPS:
        assert set(group) == set(entries)
    assert not set(table.IDLE) & (set(table.EXACT) | set(table.STOCK))


def test_j7_every_way_to_decode_is_known() -> None:
    own = {m for m in hf_utils.GENERATION_MODES_MAPPING.values() if "/" not in m}
    assert own == {"_sample", "_beam_search", "_assisted_decoding"}


def test_j7_the_readme_has_the_table() -> None:
    found = re.search(r"<!-- options -->\n(.*)\n<!-- /options -->", README, flags=re.S)
    assert found, "README.md has no table between <!-- options --> and <!-- /options -->"
    assert found[1].strip() == table.table(), "write generation_options.table() there"


# ------------------------------------------------------------------------ and right


@pytest.mark.parametrize(("name", "values"), of(cases.EXACT))
def test_j7_exact(name: str, values: dict[str, Any]) -> None:
    """Plain's result and generator state: in a ragged batch, and alone under a seed."""
    changed = False
    alone = one_sequence(name, values)
    for batch, do_sample in ((1 if alone else 3, name in cases.DRAWN), (1, True)):
        wanted = {"do_sample": do_sample, **values}
        plain, seen = run(small().generate, wanted, batch)
        assert not isinstance(plain, str), plain
        changed |= text(plain) != without(batch, do_sample)
        changed |= type(plain) is not torch.Tensor
        spec = drafted(plain)
        ours, mine = run(spec.generate, wanted, batch)
        same(ours, plain)
        assert mine == seen
        assert spec.stats.fallbacks == 0
        if spec.stats.emitted > 3 * len(text(plain)):
            assert spec.stats.accepted > 0
    assert changed != (name in cases.NO_CHANGE)


@pytest.mark.parametrize(("name", "values"), of(cases.IDLE))
def test_j7_without_effect(name: str, values: dict[str, Any]) -> None:
    do_sample = name == "penalty_alpha" and values["top_k"] == 0
    plain, _ = run(small().generate, {**values, "do_sample": do_sample}, 3)
    assert do_sample or text(plain) == without(3, False)
    spec = drafted(plain)
    same(run(spec.generate, {**values, "do_sample": do_sample}, 3)[0], plain)
    assert spec.stats.fallbacks == 0
    assert spec.stats.accepted > 0


@pytest.mark.parametrize(("name", "values"), of(cases.STOCK))
def test_j7_left_to_transformers(
    name: str, values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Same result or same error; one line that names the option; counted."""
    batch = 3 if "several" in table.STOCK[name] and "output_scores" not in values else 1
    model = copy.deepcopy(small())
    plain, seen = run(model.generate, values, batch)
    spec = selfspec.wrap(model, drafter="ngram")
    for calls in (1, 2):
        ours, mine = run(spec.generate, values, batch)
        same(ours, plain)
        assert mine == seen
        assert spec.stats.fallbacks == calls
        assert spec.stats.requests == 0
    (line,) = [r.getMessage() for r in caplog.records if r.name == "selfspec"]
    assert "left to transformers' own loop" in line
    assert name in line
    assert "left to transformers" in repr(spec.stats)


@pytest.mark.parametrize(("name", "values"), of(cases.ERROR))
def test_j7_refused(name: str, values: dict[str, Any]) -> None:
    plain, _ = run(small().generate, values, 2)
    spec = drafted([[]])
    assert run(spec.generate, values, 2)[0] == plain
    assert plain.startswith("ValueError")
    assert spec.stats.requests == spec.stats.fallbacks == 0


@pytest.mark.parametrize("values", cases.WRONG, ids=lambda d: "-".join(d))
def test_j7_j16_wrong_values_and_names_are_transformers_own_errors(values: dict[str, Any]) -> None:
    plain, _ = run(small().generate, values, 1)
    assert isinstance(plain, str)
    assert run(drafted([[]]).generate, values, 1)[0] == plain


@pytest.mark.parametrize("kind", hf_config.ALL_CACHE_IMPLEMENTATIONS)
def test_j7_every_kind_of_cache(kind: str) -> None:
    """Offloading wants a GPU and quantisation a package: without them, both raise alike."""
    model, twin = copy.deepcopy(small()), copy.deepcopy(small())  # static ones stay on a model
    plain, _ = run(model.generate, {"cache_implementation": kind}, 3)
    spec = selfspec.wrap(twin, drafter="ngram")
    same(run(spec.generate, {"cache_implementation": kind}, 3)[0], plain)
    if not isinstance(plain, str):
        assert spec.stats.fallbacks == (kind not in ("dynamic", "hybrid"))


def test_j7_continuous_batching(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Done:
        prompt_ids, generated_tokens = [1], [2]

    monkeypatch.setattr(type(small()), "generate_batch", lambda *a, **kw: {"req_0": Done()})
    spec = selfspec.wrap(small())
    assert spec.generate(**tiny.prompts(1), cache_implementation="paged").tolist() == [[[1, 2]]]
    assert spec.stats.fallbacks == 1
    assert "cache_implementation is 'paged'" in caplog.text


# ------------------------------------------------------------------------ what nobody has listed


def test_j7_a_field_of_a_later_transformers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    defaults = {**table._defaults(), "sharper": None, "calmer": 3}
    monkeypatch.setattr(table, "_defaults", lambda: defaults)
    spec = selfspec.wrap(small(), drafter="ngram")
    for value, fallbacks in ((None, 0), (2.0, 1)):
        config = GenerationConfig(max_new_tokens=NEW, sharper=value, calmer=3)
        out = spec.generate(**tiny.prompts(1), generation_config=config)
        assert out.tolist() == without(1, False)
        assert spec.stats.fallbacks == fallbacks
    assert "sharper is set, which this version of selfspec does not know" in caplog.text
    assert "calmer" not in caplog.text


def test_j7_entries_of_published_configs_that_are_no_fields() -> None:
    config = GenerationConfig(max_new_tokens=NEW, chat_format="chatml", max_window_size=6144)
    spec = selfspec.wrap(small(), drafter="ngram")
    out = spec.generate(**tiny.prompts(1), generation_config=config)
    assert out.tolist() == without(1, False)
    assert spec.stats.fallbacks == 0


def test_j7_what_leads_to_another_loop_in_the_models_own_config(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = copy.deepcopy(small())
    model.generation_config.num_beams = 2
    plain = model.generate(**tiny.prompts(2), max_new_tokens=NEW)
    spec = selfspec.wrap(model)
    assert spec.generate(**tiny.prompts(2), max_new_tokens=NEW).equal(plain)
    assert spec.stats.fallbacks == 1
    assert "num_beams is 2" in caplog.text


def test_j7_a12_an_early_exit_of_transformers_does_not_draft_with_ours() -> None:
    """Its inner `generate` runs on the same, shortened model; afterwards that is whole."""
    model = copy.deepcopy(small())
    before = snapshot(model)
    spec = selfspec.wrap(model, drafter=by_name("early-exit"))
    for _ in range(2):
        out = spec.generate(**tiny.prompts(1), max_new_tokens=NEW, assistant_early_exit=1)
        assert out.tolist() == without(1, False)
    assert spec.stats.fallbacks == 2
    assert spec.stats.requests == 0
    assert snapshot(model) == before
    assert model.config.num_hidden_layers == 2
    assert spec.generate(**tiny.prompts(1), max_new_tokens=NEW).tolist() == without(1, False)


def test_j7_a_loop_of_the_users_is_given_the_model() -> None:
    given: list[Any] = []

    def twice(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        given.append(model)
        return model._sample(input_ids, **kwargs).repeat(2, 1)

    plain = small().generate(**tiny.prompts(1), max_new_tokens=NEW, custom_generate=twice)
    spec = selfspec.wrap(small(), drafter=OracleDrafter(plain, 4))
    ours = spec.generate(**tiny.prompts(1), max_new_tokens=NEW, custom_generate=twice)
    assert ours.equal(plain)
    assert given[-1] is spec.model
    assert (spec.stats.requests, spec.stats.fallbacks) == (0, 1)


def test_j7_token_healing_is_not_a_request_of_its_own() -> None:
    """It calls `generate` for every row before the loop begins; streams must not show that."""
    healed = run(small().generate, {"do_sample": False, **cases.HEALED}, 3)[0]
    spec = selfspec.wrap(small(), drafter="ngram")
    made = {**cases.HEALED, "inputs": cases.unhealed(3), "max_new_tokens": NEW}
    rows: list[list[int]] = [[], [], []]
    for step in spec.stream(**made):
        for row, new in zip(rows, step.tokens, strict=True):
            row.extend(new)
    assert rows == healed[:, -NEW:].tolist()
    assert spec.stats.requests == 1


# ------------------------------------------------------------------------ what is counted


def test_j7_the_counters_say_when_nothing_is_drafted() -> None:
    prompt = tiny.prompts(1)
    spec = selfspec.wrap(small(), drafter="none")
    spec.generate(**prompt, max_new_tokens=NEW)
    assert (spec.stats.requests, spec.stats.verifies, spec.stats.drafted) == (1, 0, 0)
    assert "nothing drafted" in repr(spec.stats)
    for options in ({"num_beams": 2}, {"use_cache": False}):
        spec.generate(**prompt, max_new_tokens=2, **options)
    spec.enabled = False
    assert spec.generate(**prompt, max_new_tokens=NEW).tolist() == without(1, False)
    assert spec.stats.fallbacks == 3
    assert "3 requests left to transformers' own loop" in repr(spec.stats)
    spec.enabled = True
    spec.generate(**prompt, max_new_tokens=2)
    assert (spec.stats.requests, spec.stats.fallbacks) == (2, 3)


@pytest.mark.parametrize(
    ("value", "left"), [("1", 1), ("true", 1), ("on", 1), ("0", 0), ("False", 0), ("", 0)]
)
def test_j7_the_environment_switches_all_wrappers_off_and_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str, left: int
) -> None:
    prompt = tiny.prompts(1)
    wrappers = [selfspec.wrap(small()), selfspec.wrap(small(), drafter="none")]
    monkeypatch.setenv("SELFSPEC_DISABLE", value)
    for spec in wrappers:
        assert spec.generate(**prompt, max_new_tokens=NEW).tolist() == without(1, False)
        assert (spec.stats.fallbacks, spec.stats.requests) == (left, 1 - left)
        assert ("NOT ENABLED" in repr(spec)) is bool(left)
        assert spec.enabled
    assert (f"SELFSPEC_DISABLE={value} is set" in caplog.text) is bool(left)
    monkeypatch.delenv("SELFSPEC_DISABLE")
    wrappers[0].generate(**prompt, max_new_tokens=2)
    assert wrappers[0].stats.requests == 2 - left


# ------------------------------------------------------------------------ all together

STOPS = {"stop_strings": ["a", "e", "th"], "tokenizer": cases.tokenizer(), "max_time": 60.0}
PARTS: dict[str, list[dict[str, Any]]] = {
    "length": [{}, {"max_new_tokens": 5}, {"max_length": 26, "max_new_tokens": None}],
    "end": [{}, {"eos_token_id": 9}, {"eos_token_id": cases.END, "min_new_tokens": 4}, STOPS],
    "penalty": [{}, {"repetition_penalty": 1.4}, {"encoder_repetition_penalty": 1.3}],
    "ban": [{}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[5], [7, 9]]}, {"top_h": 0.5}],
    "bias": [{}, {"sequence_bias": {(11,): 3.0, (3, 4): 9.0}}, {"suppress_tokens": [3, 4, 5]}],
    "force": [{}, {"forced_eos_token_id": 2}, {"begin_suppress_tokens": list(range(30))}],
    "user": [
        {},
        {"prefix_allowed_tokens_fn": cases.marked},
        {"prefix_allowed_tokens_fn": cases.allowed},
        {"logits_processor": Fresh(cases._processors)},
        {"watermarking_config": cases.WatermarkingConfig(bias=5.0)},
        {"watermarking_config": cases.SYNTH_ID},
        {"guidance_scale": 1.4},
    ],
    "choice": [
        {},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0},
        {"do_sample": True, "top_k": 7, "min_p": 0.05, "num_return_sequences": 2},
        {"do_sample": True, "typical_p": 0.8, "epsilon_cutoff": 0.002, "eta_cutoff": 0.002},
    ],
    "output": [
        {},
        {"output_scores": True},
        cases.RETURNED,
        {**cases.RETURNED, "output_scores": True, "renormalize_logits": True},
        {**cases.RETURNED, "output_logits": True},
    ],
    "prompt": [{}, {"prefill_chunk_size": 4}, {"remove_invalid_values": True}],
    "stream": [{}, {"streamer": Fresh(lambda batch: Columns())}],
}


@pytest.mark.parametrize("seed", range(20))
def test_j7_options_together(seed: int) -> None:
    """Drawn combinations of options, batches, drafters and steps of fixed shape."""
    draw = random.Random(seed)
    values = {k: v for several in PARTS.values() for k, v in draw.choice(several).items()}
    batch = draw.choice((1, 3))
    plain, seen = run(small().generate, values, batch)
    oracle = "ngram" if isinstance(plain, str) else answered(plain)
    parts = [by_name("early-exit"), by_name("layer-skip")]
    drafter = draw.choice([oracle, RandomTreeDrafter(seed), "ngram", *parts])
    spec = selfspec.wrap(small(), drafter=drafter, cuda_graphs=draw.random() < 0.4)
    ours, mine = run(spec.generate, values, batch)
    if "eos_token_id" in values and not isinstance(plain, str):  # scores of rows that have ended
        plain, ours = (getattr(out, "sequences", out) for out in (plain, ours))
    same(ours, plain)
    assert mine == seen
    if not isinstance(plain, str):
        assert spec.stats.fallbacks == (one_sequence("", values) and len(text(plain)) > 1)


def test_j7_log_lines_are_at_level_warning(caplog: pytest.LogCaptureFixture) -> None:
    spec = selfspec.wrap(small())
    spec.generate(**tiny.prompts(1), max_new_tokens=2, use_cache=False)
    assert [r.levelno for r in caplog.records if r.name == "selfspec"] == [logging.WARNING]

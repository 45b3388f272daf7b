"""What people pass to `generate`: the same text, the same returns, the same errors."""

from __future__ import annotations

import copy
import itertools
import threading
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    RobertaConfig,
    RobertaForCausalLM,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import selfspec
from tests.families import tiny
from tests.oracle import OracleDrafter, RandomTreeDrafter

NEW = 24


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama")


def oracle(model: Any, prompt: dict[str, Any], width: int = 6, **kwargs: Any) -> Any:
    """A wrapper whose drafts are right for a while, so that events fall inside accepted blocks."""
    state = torch.get_rng_state()
    answers = model.generate(**prompt, **kwargs)
    torch.set_rng_state(state)
    drafter = OracleDrafter(answers, width, wrong_at=(0, 0, 3))
    return selfspec.wrap(model, drafter=drafter)


def same(
    model: Any, prompt: dict[str, Any], falls_back: bool = False, **kwargs: Any
) -> selfspec.SpecStats:
    spec = oracle(model, prompt, **kwargs)
    torch.manual_seed(5)
    plain = model.generate(**prompt, **kwargs)
    after_plain = torch.get_rng_state()
    torch.manual_seed(5)
    ours = spec.generate(**prompt, **kwargs)
    assert ours.tolist() == plain.tolist()
    assert torch.equal(torch.get_rng_state(), after_plain), "the generator was left elsewhere"
    assert spec.stats.fallbacks == falls_back
    return spec.stats


# ------------------------------------------------------------------- sampling, processors

PROCESSORS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [7, 9]]},
    {"suppress_tokens": [3, 4, 5]},
    {"min_new_tokens": 9, "eos_token_id": list(range(20, 40))},
    {"prefix_allowed_tokens_fn": lambda b, ids: list(range(int(ids[-1]) % 3, 64, 3 - b))},
    {"exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 9},
    {"sequence_bias": {(11,): 2.0, (3, 4): -5.0}},
    {"renormalize_logits": True, "forced_eos_token_id": 2},
]
WARPERS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    {"do_sample": True, "top_k": 7, "min_p": 0.05},
    {"do_sample": True, "typical_p": 0.8, "epsilon_cutoff": 0.002, "eta_cutoff": 0.002},
]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("warpers", WARPERS, ids=lambda d: "-".join(d))
@pytest.mark.parametrize("processors", PROCESSORS, ids=lambda d: next(iter(d), "none"))
def test_processors(
    model: Any, processors: dict[str, Any], warpers: dict[str, Any], batch: int
) -> None:
    """Sampled text, too: drafts do not even change which token a seed gives."""
    # A user's function may know the texts of its own row only.
    falls_back = "prefix_allowed_tokens_fn" in processors and batch > 1
    options = {"max_new_tokens": NEW, **processors, **warpers}
    stats = same(model, tiny.prompts(batch), falls_back, **options)
    if not warpers["do_sample"] and not falls_back:
        assert stats.accepted > 0


@pytest.mark.parametrize("batch", [1, 3])
def test_generation_config_of_the_model_is_honoured(batch: int) -> None:
    model = tiny.build("qwen2")
    model.generation_config.repetition_penalty = 1.4
    try:
        same(model, tiny.prompts(batch), max_new_tokens=NEW)
    finally:
        model.generation_config.repetition_penalty = 1.0


class Counting(LogitsProcessor):
    """A stateful processor: it bans what it has seen at every third call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(input_ids[0].tolist())
        if len(self.calls) % 3 == 0:
            scores[:, input_ids[0, -1]] = -float("inf")
            scores[:, scores.argmax(-1)] = -float("inf")
        return scores


def test_a_stateful_processor_sees_the_calls_it_expects(model: Any) -> None:
    prompt, plain, ours = tiny.prompts(1), Counting(), Counting()
    answers = model.generate(
        **prompt, max_new_tokens=NEW, logits_processor=LogitsProcessorList([plain])
    )
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 5))
    text = spec.generate(**prompt, max_new_tokens=NEW, logits_processor=LogitsProcessorList([ours]))
    assert text.tolist() == answers.tolist()
    assert ours.calls == plain.calls
    assert spec.stats.accepted > 0


def test_a_stateful_processor_with_a_batch_goes_to_the_stock_loop(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, plain, ours = tiny.prompts(3), Counting(), Counting()
    answers = model.generate(
        **prompt, max_new_tokens=NEW, logits_processor=LogitsProcessorList([plain])
    )
    spec = selfspec.wrap(model)
    for _ in range(2):
        ours.calls.clear()
        text = spec.generate(
            **prompt, max_new_tokens=NEW, logits_processor=LogitsProcessorList([ours])
        )
        assert text.tolist() == answers.tolist()
    assert spec.stats.fallbacks == 2
    assert caplog.text.count("Counting may keep a state") == 1  # one line a reason


@pytest.mark.parametrize("temperature", [1e-7, 1e-5, 1e-2])
def test_tiny_temperatures(model: Any, temperature: float) -> None:
    prompt = tiny.prompts(2)
    same(model, prompt, max_new_tokens=NEW, do_sample=True, temperature=temperature)


def test_sampling_with_more_candidates_than_vocabulary(model: Any) -> None:
    same(model, tiny.prompts(1), max_new_tokens=NEW, do_sample=True, top_k=500)


# ------------------------------------------------------------------- stopping


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("at", [0, 1, 2, 6, 7, 13])
def test_end_of_sequence_inside_a_block(model: Any, at: int, batch: int) -> None:
    """One of the tokens that plain greedy emits is declared to end a sequence."""
    prompt = tiny.prompts(batch)
    answers = model.generate(**prompt, max_new_tokens=NEW)
    eos = int(answers[batch - 1, prompt["input_ids"].shape[1] + at])
    same(model, prompt, max_new_tokens=NEW, eos_token_id=[eos, 62])


@pytest.mark.parametrize("new", [1, 2, 3])
def test_few_new_tokens(model: Any, new: int) -> None:
    for batch in (1, 3):
        prompt = tiny.prompts(batch)
        answers = model.generate(**prompt, max_new_tokens=NEW)
        spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 8))
        assert spec.generate(**prompt, max_new_tokens=new).shape[1] == answers.shape[1] - NEW + new


class Every(StoppingCriteria):
    """Stops a row at its first token divisible by 7 after a few."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1] % 7 == 0) & (input_ids.shape[1] > 20)


@pytest.mark.parametrize("eos", [None, 63])
@pytest.mark.parametrize("batch", [1, 3])
def test_stopping_criteria_of_the_user(model: Any, batch: int, eos: int | None) -> None:
    """In a batch one may look across the rows: those are left to transformers."""
    same(
        model,
        tiny.prompts(batch),
        batch > 1,
        max_new_tokens=NEW,
        stopping_criteria=StoppingCriteriaList([Every()]),
        eos_token_id=eos,
    )


class Counted(StoppingCriteria):
    """Stops everything at its ninth call, or when the first row says so."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        stop = self.calls == 9 or int(input_ids[0, -1]) == 63
        return torch.full((input_ids.shape[0],), stop)


@pytest.mark.parametrize("batch", [1, 3])
def test_stopping_criteria_that_count_or_compare(model: Any, batch: int) -> None:
    prompt = tiny.prompts(batch)
    full = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=OracleDrafter(full, 5))
    plain, ours = Columns(), Columns()
    texts = [
        generate(
            **prompt,
            max_new_tokens=NEW,
            stopping_criteria=StoppingCriteriaList([Counted()]),
            streamer=streamer,
        )
        for generate, streamer in ((model.generate, plain), (spec.generate, ours))
    ]
    assert texts[0].equal(texts[1])
    assert texts[0].shape[1] == 17 + 9
    assert ours.columns == plain.columns  # not one token more than the answer has
    if batch == 1:
        assert spec.stats.emitted == 9


def test_max_time_stops_like_plain(model: Any) -> None:
    prompt = tiny.prompts(1)
    spec = selfspec.wrap(model, drafter=RandomTreeDrafter())
    assert spec.generate(**prompt, max_new_tokens=NEW, max_time=0.0).shape[1] == 18


# ------------------------------------------------------------------- streaming


class Columns(BaseStreamer):
    def __init__(self, fail_at: int = -1) -> None:
        self.columns: list[list[int]] = []
        self.ends = 0
        self.fail_at = fail_at

    def put(self, value: torch.Tensor) -> None:
        if len(self.columns) == self.fail_at:
            raise RuntimeError("the streamer fails")
        self.columns.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("batch", [1, 3])
def test_streamer_gets_what_plain_would_give_it(model: Any, batch: int) -> None:
    prompt = tiny.prompts(batch)
    plain, ours = Columns(), Columns()
    answers = model.generate(**prompt, max_new_tokens=NEW, eos_token_id=7, streamer=plain)
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 6, wrong_at=(0, 2)))
    spec.generate(**prompt, max_new_tokens=NEW, eos_token_id=7, streamer=ours)
    assert ours.columns == plain.columns
    assert ours.ends == 1


def test_after_an_exception_in_a_streamer_all_is_as_before(model: Any) -> None:
    prompt = tiny.prompts(1)
    answers = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 6))
    before = snapshot(model)
    broken = Columns(fail_at=9)
    with pytest.raises(RuntimeError, match="the streamer fails"):
        spec.generate(**prompt, max_new_tokens=NEW, streamer=broken)
    assert broken.ends == 1  # a consumer in another thread must not wait for ever
    assert snapshot(model) == before
    assert model.generate(**prompt, max_new_tokens=NEW).tolist() == answers.tolist()
    assert spec.generate(**prompt, max_new_tokens=NEW).tolist() == answers.tolist()


def test_stream_yields_steps(model: Any) -> None:
    prompt = tiny.prompts(3)
    answers = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 4))
    rows: list[list[int]] = [[], [], []]
    for step in spec.stream(**prompt, max_new_tokens=NEW):
        for row, new in zip(rows, step.tokens, strict=True):
            row.extend(new)
    assert rows == answers[:, -NEW:].tolist()


def test_closing_a_stream_ends_the_generation(model: Any) -> None:
    before = snapshot(model)
    spec = selfspec.wrap(model)
    steps = spec.stream(**tiny.prompts(1), max_new_tokens=200)
    next(steps)
    steps.close()
    assert snapshot(model) == before
    assert threading.active_count() == 1 or not any(
        t.name == "selfspec-stream" for t in threading.enumerate()
    )


def test_stream_raises_what_generate_raises(model: Any) -> None:
    spec = selfspec.wrap(model)
    with pytest.raises(ValueError, match="not_an_option"):
        list(spec.stream(**tiny.prompts(1), max_new_tokens=4, not_an_option=1))
    with pytest.raises(ValueError, match="cannot be decoded in steps: use_cache is False"):
        list(spec.stream(**tiny.prompts(1), max_new_tokens=4, use_cache=False))
    with pytest.raises(ValueError, match="only greedy and sampled decoding has steps"):
        list(spec.stream(**tiny.prompts(1), max_new_tokens=4, num_beams=2))


# ------------------------------------------------------------------- returns


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_returned_scores_logits_and_cache(model: Any, batch: int, do_sample: bool) -> None:
    prompt = tiny.prompts(batch)
    kwargs: dict[str, Any] = {
        "max_new_tokens": NEW,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "do_sample": do_sample,
        "temperature": 0.8 if do_sample else None,
    }
    torch.manual_seed(0)
    plain = model.generate(**prompt, **kwargs)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain.sequences, 4, wrong_at=(0, 2)))
    torch.manual_seed(0)
    ours = spec.generate(**prompt, **kwargs)
    assert type(ours) is type(plain)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        assert len(getattr(ours, name)) == NEW
        for a, b in zip(getattr(ours, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    cache, reference = (getattr(out, "cache", None) or out.past_key_values for out in (ours, plain))
    assert cache.get_seq_length() == ours.sequences.shape[1] - 1
    real = prompt["attention_mask"].bool() if batch > 1 else torch.ones(1, 17, dtype=torch.bool)
    mask = torch.cat([real, torch.ones(batch, NEW - 1, dtype=torch.bool)], 1)[:, None, :, None]
    for mine, theirs in zip(cache.layers, reference.layers, strict=True):
        torch.testing.assert_close(mine.keys * mask, theirs.keys * mask, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.values * mask, theirs.values * mask, atol=1e-4, rtol=1e-4)


def test_finished_rows_score_their_padding(model: Any) -> None:
    prompt = tiny.prompts(3)
    answers = model.generate(**prompt, max_new_tokens=NEW)
    eos = int(answers[1, -NEW + 2])
    out = selfspec.wrap(model).generate(
        **prompt,
        max_new_tokens=NEW,
        eos_token_id=eos,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert len(out.scores) == out.sequences.shape[1] - 17
    assert out.scores[5][1].softmax(-1)[tiny.PAD] == 1


@pytest.mark.parametrize("num", [1, 3])
def test_num_return_sequences(model: Any, num: int) -> None:
    kwargs = {"do_sample": True} if num > 1 else {}
    same(model, tiny.prompts(2), max_new_tokens=NEW, num_return_sequences=num, **kwargs)


# ------------------------------------------------------------------- caches and inputs


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mistral"])
def test_continuing_from_a_returned_cache(name: str) -> None:
    model = tiny.build(name)
    prompt = tiny.prompts(1)
    spec = selfspec.wrap(model, drafter=RandomTreeDrafter())
    whole = model.generate(**prompt, max_new_tokens=NEW)
    first = spec.generate(**prompt, max_new_tokens=9, return_dict_in_generate=True)
    cache = getattr(first, "cache", None) or first.past_key_values
    again = spec.generate(input_ids=first.sequences, past_key_values=cache, max_new_tokens=NEW - 9)
    assert again.tolist() == whole.tolist()
    # ... and by the model itself
    first = spec.generate(**prompt, max_new_tokens=9, return_dict_in_generate=True)
    cache = getattr(first, "cache", None) or first.past_key_values
    again = model.generate(input_ids=first.sequences, past_key_values=cache, max_new_tokens=NEW - 9)
    assert again.tolist() == whole.tolist()


@pytest.mark.parametrize("batch", [1, 3])
def test_the_users_cache_is_continued_in_place(model: Any, batch: int) -> None:
    prompt = tiny.prompts(batch)
    ids = prompt["input_ids"]
    caches = []
    for generate in (model.generate, selfspec.wrap(model, drafter=RandomTreeDrafter()).generate):
        cache = DynamicCache()
        model(
            input_ids=ids[:, :-5],
            attention_mask=prompt["attention_mask"][:, :-5] if batch > 1 else None,
            past_key_values=cache,
        )
        out = generate(**prompt, past_key_values=cache, max_new_tokens=NEW)
        caches.append((cache, out))
    (theirs, plain), (mine, ours) = caches
    assert ours.tolist() == plain.tolist()
    assert mine.get_seq_length() == theirs.get_seq_length() == plain.shape[1] - 1


def test_other_caches_go_to_the_stock_loop(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model)
    for kwargs in (
        {"cache_implementation": "static"},
        {"past_key_values": StaticCache(model.config, max_cache_len=64)},
        {"use_cache": False},
    ):
        text = spec.generate(**prompt, max_new_tokens=NEW, **kwargs)
        assert text.tolist() == plain.tolist()
    assert spec.stats.fallbacks == 3
    assert "StaticCache" in caplog.text
    assert "use_cache is False" in caplog.text


@pytest.mark.parametrize("batch", [1, 3])
def test_passing_only_the_tokens_that_a_cache_lacks(model: Any, batch: int) -> None:
    prompt = tiny.prompts(batch)
    outs = []
    for generate in (model.generate, selfspec.wrap(model, drafter="ngram").generate):
        cache = DynamicCache()
        mask = prompt.get("attention_mask", torch.ones_like(prompt["input_ids"]))
        model(
            input_ids=prompt["input_ids"][:, :-5],
            attention_mask=mask[:, :-5],
            past_key_values=cache,
        )
        outs.append(
            generate(
                input_ids=prompt["input_ids"][:, -5:],
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=NEW,
            )
        )
    assert outs[0].equal(outs[1])
    assert outs[0].shape[1] == 5 + NEW


def test_chunked_prefill(model: Any) -> None:
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=NEW, prefill_chunk_size=5)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 4))
    assert spec.generate(**prompt, max_new_tokens=NEW, prefill_chunk_size=5).equal(plain)
    assert spec.stats.fallbacks == 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_inputs_embeds(name: str) -> None:
    model = tiny.build(name)
    ids = tiny.prompts(1)["input_ids"]
    embeds = model.get_input_embeddings()(ids).detach()
    plain = model.generate(inputs_embeds=embeds, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=selfspec.NGramDrafter(min_match=1))
    ours = spec.generate(inputs_embeds=embeds, max_new_tokens=NEW)
    assert ours.tolist() == plain.tolist()
    assert spec.stats.fallbacks == 0


def test_masks_that_are_not_left_padding_go_to_the_stock_loop(model: Any) -> None:
    prompt = dict(tiny.prompts(1))
    mask = torch.ones_like(prompt["input_ids"])
    mask[0, 4:6] = 0
    prompt["attention_mask"] = mask
    spec = selfspec.wrap(model)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    assert spec.generate(**prompt, max_new_tokens=NEW).tolist() == plain.tolist()
    assert spec.stats.fallbacks == 1


def test_one_token_prompt_and_repetition(model: Any) -> None:
    for ids in ([[5]], [[7] * 48], [[3, 9]]):
        prompt = {"input_ids": torch.tensor(ids)}
        plain = model.generate(**prompt, max_new_tokens=NEW)
        for drafter in (selfspec.NGramDrafter(1), selfspec.EarlyExitDrafter(1)):
            spec = selfspec.wrap(model, drafter=drafter)
            assert spec.generate(**prompt, max_new_tokens=NEW).tolist() == plain.tolist()


def test_up_to_the_last_learned_position() -> None:
    model = tiny.build("gpt2")
    prompt = tiny.prompts(1)
    limit = model.config.n_positions
    plain = model.generate(**prompt, max_length=limit)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 8))
    assert spec.generate(**prompt, max_length=limit).tolist() == plain.tolist()
    assert plain.shape[1] == limit


@pytest.mark.parametrize(("length", "new"), [(200, 60), (500, 30)])
def test_longer_than_a_window_and_growing(length: int, new: int) -> None:
    model = tiny.build("gemma3")
    ids = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(0))
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(**prompt, max_new_tokens=new)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 6, wrong_at=(0, 4)))
    assert spec.generate(**prompt, max_new_tokens=new).tolist() == plain.tolist()


# ------------------------------------------------------------------- other modes, bad input


def test_other_modes_are_transformers_own(model: Any) -> None:
    prompt = tiny.prompts(1)
    spec = selfspec.wrap(model)
    for kwargs in ({"num_beams": 3}, {"num_beams": 2, "do_sample": False, "length_penalty": 0.5}):
        plain = model.generate(**prompt, max_new_tokens=NEW, **kwargs)
        assert spec.generate(**prompt, max_new_tokens=NEW, **kwargs).tolist() == plain.tolist()
    lookup = {"prompt_lookup_num_tokens": 3, "eos_token_id": 63}
    plain = model.generate(**prompt, max_new_tokens=NEW, **lookup)
    assert spec.generate(**prompt, max_new_tokens=NEW, **lookup).tolist() == plain.tolist()


def raised(call: Any) -> str:
    with pytest.raises((ValueError, RuntimeError, TypeError, IndexError)) as info:
        call()
    return f"{type(info.value).__name__}: {info.value}"


def test_errors_are_transformers_own(model: Any) -> None:
    spec = selfspec.wrap(model)
    prompt = tiny.prompts(1)
    for kwargs in (
        {**prompt, "not_an_option": 1},
        {**prompt, "max_length": 3},
        {**prompt, "max_new_tokens": 0},
        {**prompt, "temperature": -1.0, "do_sample": True},
        {**prompt, "stop_strings": ["x"]},
        {"input_ids": torch.empty(1, 0, dtype=torch.int64), "max_new_tokens": 4},
    ):
        assert raised(lambda kw=kwargs: spec.generate(**kw)) == raised(
            lambda kw=kwargs: model.generate(**kw)
        )


def test_switched_off(model: Any) -> None:
    prompt = tiny.prompts(1)
    spec = selfspec.wrap(model, drafter=RandomTreeDrafter())
    spec.enabled = False
    plain = model.generate(**prompt, max_new_tokens=NEW)
    assert spec.generate(**prompt, max_new_tokens=NEW).tolist() == plain.tolist()
    assert (spec.stats.requests, spec.stats.fallbacks) == (0, 1)
    spec.enabled = True
    spec.generate(**prompt, max_new_tokens=NEW)
    assert spec.stats.requests == 1


# ------------------------------------------------------------------- nothing is left behind


def snapshot(model: Any) -> Any:
    """All that a patch could have touched."""
    return (
        type(model),
        sorted(model.__dict__),
        [sorted(m.__dict__) for m in model.modules()],
        model.config._attn_implementation,
        model.generation_config.to_dict(),
        list(model.state_dict()),
    )


def test_the_model_is_left_as_it_was(model: Any) -> None:
    before = snapshot(model)
    for drafter in ("auto", "ngram", "early-exit", "layer-skip", "none"):
        spec = selfspec.wrap(model, drafter=drafter)
        assert snapshot(model) == before
        spec.generate(**tiny.prompts(2), max_new_tokens=NEW)
        assert snapshot(model) == before
        assert spec.unwrap() is spec.model is model


class Failing:
    """Fails in one of its methods, at its third step."""

    hidden_taps = ()

    def __init__(self, method: str, error: type[BaseException]) -> None:
        self.method, self.error, self.calls = method, error, 0

    def _maybe(self, method: str) -> None:
        if method == self.method:
            self.calls += 1
            if self.calls == 3:
                raise self.error("scripted")

    def draft(self, state: Any, budget: int) -> selfspec.TokenTree:
        self._maybe("draft")
        return selfspec.TokenTree.root_only(state.root)

    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        self._maybe("observe")

    def reset(self) -> None:
        pass


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["draft", "observe"])
def test_after_an_exception_in_a_drafter(model: Any, method: str, error: Any) -> None:
    before = snapshot(model)
    prompt = tiny.prompts(2)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=Failing(method, error))
    with pytest.raises(error, match="scripted"):
        spec.generate(**prompt, max_new_tokens=NEW)
    assert snapshot(model) == before
    assert spec.generate(**prompt, max_new_tokens=NEW).tolist() == plain.tolist()
    assert model.generate(**prompt, max_new_tokens=NEW).tolist() == plain.tolist()


def test_a_hook_on_a_layer_survives(model: Any) -> None:
    """accelerate sets an instance `forward`; it must be called, and be there afterwards."""
    layer = model.model.layers[1]
    original, calls = layer.forward, itertools.count()

    def hooked(*args: Any, **kwargs: Any) -> Any:
        next(calls)
        return original(*args, **kwargs)

    layer.forward = hooked
    try:
        prompt = tiny.prompts(1)
        plain = model.generate(**prompt, max_new_tokens=8)
        before = next(calls)
        spec = selfspec.wrap(model, drafter="early-exit")
        assert spec.generate(**prompt, max_new_tokens=8).tolist() == plain.tolist()
        assert next(calls) > before + 3
        assert layer.__dict__["forward"] is hooked
    finally:
        del layer.forward


def test_threads(model: Any) -> None:
    """One wrapper and the plain model in eight threads: each gets what it gets alone."""
    prompts = [
        {"input_ids": torch.randint(1, 64, (1, 8 + i), generator=torch.Generator().manual_seed(i))}
        for i in range(8)
    ]
    answers = [model.generate(**p, max_new_tokens=NEW).tolist() for p in prompts]
    before = snapshot(model)
    wrappers = [selfspec.wrap(model, drafter=d) for d in ("early-exit", "layer-skip", "ngram")]
    results: dict[int, list[Any]] = {i: [] for i in range(8)}

    def work(i: int) -> None:
        for k in range(3):
            generate = model.generate if i == 7 else wrappers[(i + k) % 3].generate
            results[i].append(generate(**prompts[i], max_new_tokens=NEW).tolist())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [answers[i]] * 3 for i in range(8)}
    assert snapshot(model) == before


def test_inference_mode_inside_and_outside(model: Any) -> None:
    prompt = tiny.prompts(2)
    plain = model.generate(**prompt, max_new_tokens=NEW).tolist()
    for drafter in (RandomTreeDrafter(), "early-exit"):
        spec = selfspec.wrap(model, drafter=drafter)
        with torch.inference_mode():
            assert spec.generate(**prompt, max_new_tokens=NEW).tolist() == plain
        assert spec.generate(**prompt, max_new_tokens=NEW).tolist() == plain


# ------------------------------------------------------------------- found by breaking it


def test_batch_of_uneven_rows_up_to_the_last_learned_position() -> None:
    """A short row's padding nodes and overlong chains must not run off the table."""
    config = GPT2Config(
        n_positions=64,
        n_embd=64,
        n_layer=4,
        n_head=4,
        vocab_size=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    prompt = tiny.prompts(3, ragged=False)
    plain = model.generate(**prompt, max_length=64, do_sample=False)
    drafters = (
        selfspec.EarlyExitDrafter(3, 8, 0.0),
        OracleDrafter(plain, 8, wrong_at=(0, 2, 7)),
        selfspec.LayerSkipDrafter([2], 6, 0.0),
    )
    for drafter in drafters:
        spec = selfspec.wrap(model, drafter=drafter)
        assert spec.generate(**prompt, max_length=64, do_sample=False).equal(plain)


def test_small_position_tables_are_no_reason_against_trees() -> None:
    config = GPT2Config(n_positions=24, n_embd=32, n_layer=2, n_head=2, vocab_size=64)
    assert "token trees" in repr(selfspec.wrap(GPT2LMHeadModel(config).eval()))


@pytest.mark.parametrize("pads", [0, 12])
def test_longrope_around_its_limit(pads: int) -> None:
    """Frequencies change for a whole call at position 24: by positions, not by slots."""
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 24,
    }
    config = LlamaConfig(
        **{**tiny._GQA, "max_position_embeddings": 96},
        initializer_range=0.3,
        rope_parameters=rope,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.cat([torch.zeros(1, pads, dtype=torch.int64), tiny.prompts(1)["input_ids"]], 1)
    kwargs = {"attention_mask": (ids > 0).long(), "max_new_tokens": 30, "do_sample": False}
    plain = model.generate(ids, **kwargs)
    for drafter in (selfspec.NGramDrafter(1), selfspec.EarlyExitDrafter(2, confidence=0.0)):
        spec = selfspec.wrap(model, drafter=drafter)
        assert spec.generate(ids, **kwargs).equal(plain)


def test_other_dtypes_of_inputs(model: Any) -> None:
    prompt = tiny.prompts(3)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter="ngram")
    ours = spec.generate(
        prompt["input_ids"].int(),
        attention_mask=prompt["attention_mask"].float(),
        max_new_tokens=NEW,
    )
    assert ours.equal(plain)
    assert spec.stats.fallbacks == 0


class Doubling(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.double() * 0.7


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_processor_that_changes_the_dtype(model: Any, do_sample: bool) -> None:
    processors = LogitsProcessorList([Doubling()])
    same(
        model,
        tiny.prompts(1),
        max_new_tokens=NEW,
        logits_processor=processors,
        do_sample=do_sample,
    )


def test_classifier_free_guidance() -> None:
    for dtype in (torch.float32, torch.float64):
        same(
            tiny.build("llama", dtype=dtype), tiny.prompts(1), max_new_tokens=9, guidance_scale=1.5
        )


class OwnLoop(LlamaForCausalLM):
    def _sample(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return super()._sample(input_ids, **kwargs)


def test_a_class_with_a_loop_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="it overrides _sample"):
        selfspec.wrap(OwnLoop(LlamaConfig(**tiny._GQA)).eval())


def test_models_whose_positions_come_from_cache_slots_are_refused() -> None:
    """Aligning the rows of a batch would move them; ALiBi does not mind, a position table does."""
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=64,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        is_decoder=True,
        init_std=0.3,
    )
    with pytest.raises(ValueError, match="cannot be wrapped"):
        selfspec.wrap(BartForCausalLM(config).eval())


@pytest.mark.parametrize("batch", [1, 3])
def test_encoder_style_decoders_with_shifted_position_tables(batch: int) -> None:
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=128,
        pad_token_id=1,
        bos_token_id=None,
        eos_token_id=None,
        is_decoder=True,
        initializer_range=0.3,
    )
    model = RobertaForCausalLM(config).eval()
    ids = torch.randint(2, 64, (batch, 12), generator=torch.Generator().manual_seed(0))
    plain = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    for drafter in ("none", selfspec.NGramDrafter(1), OracleDrafter(plain, 4, (0, 3))):
        spec = selfspec.wrap(model, drafter=drafter)
        assert spec.generate(ids, max_new_tokens=NEW, do_sample=False).equal(plain)


def test_a_model_in_training_mode_is_left_to_transformers() -> None:
    model = copy.deepcopy(tiny.build("gpt2"))
    spec = selfspec.wrap(model, drafter="ngram")
    model.train()
    torch.manual_seed(0)
    plain = model.generate(**tiny.prompts(1), max_new_tokens=NEW)
    torch.manual_seed(0)
    assert spec.generate(**tiny.prompts(1), max_new_tokens=NEW).equal(plain)
    assert spec.stats.fallbacks == 1


def test_a_model_copied_while_a_request_runs_is_an_ordinary_one(model: Any) -> None:
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    steps = selfspec.wrap(model, drafter="early-exit").stream(**prompt, max_new_tokens=NEW)
    next(steps)
    next(steps)
    twin = copy.deepcopy(model)
    again = selfspec.wrap(model, drafter="ngram")
    steps.close()
    assert not any("selfspec" in type(m.__dict__.get("forward")).__module__ for m in twin.modules())
    for generate in (twin.generate, again.generate, selfspec.wrap(twin).generate):
        assert generate(**prompt, max_new_tokens=NEW).equal(plain)


def test_nan_logits_raise_under_sampling_as_plain_does() -> None:
    model = copy.deepcopy(tiny.build("llama"))
    spec = selfspec.wrap(model, drafter=RandomTreeDrafter())
    model.lm_head.weight.data[3] = float("nan")
    prompt = tiny.prompts(1)
    assert raised(lambda: spec.generate(**prompt, max_new_tokens=4, do_sample=True)) == raised(
        lambda: model.generate(**prompt, max_new_tokens=4, do_sample=True)
    )
    plain = model.generate(**prompt, max_new_tokens=4)
    assert spec.generate(**prompt, max_new_tokens=4).equal(plain)


def test_autocast_reaches_the_thread_of_a_stream(model: Any) -> None:
    prompt = tiny.prompts(1)
    spec = selfspec.wrap(model, drafter="none")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = spec.generate(**prompt, max_new_tokens=NEW)[0, 17:].tolist()
        steps = list(spec.stream(**prompt, max_new_tokens=NEW))
    assert [t for step in steps for t in step.tokens[0]] == whole

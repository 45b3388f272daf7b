"""Conversations: a cache that goes from turn to turn, and the text-generation pipeline."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import TextStreamer, pipeline

import selfspec
from tests.families import tiny
from tests.generate.common import NEW, snapshot
from tests.oracle import OracleDrafter, RandomTreeDrafter
from tests.scenarios import text


def turn(generate: Any, ids: torch.Tensor, cache: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """One answer: the text so far, and the cache that the next turn continues."""
    given = {} if cache is None else {"past_key_values": cache}
    out = generate(input_ids=ids, return_dict_in_generate=True, **given, **kwargs)
    returned = getattr(out, "cache", None) or out.past_key_values
    assert cache is None or returned is cache  # continued in place, as transformers does
    return out.sequences, returned


@pytest.mark.parametrize("speakers", ["sss", "psp", "sps"])
@pytest.mark.parametrize(("name", "graphs"), [("llama", False), ("gpt2", False), ("llama", True)])
def test_c12_turns_that_continue_a_cache(name: str, speakers: str, graphs: bool) -> None:
    """Plain and speculative turns in any order; each answer is that of a run without a cache."""
    model = tiny.build(name)
    ids, cache = tiny.prompts(1)["input_ids"], None
    drafter = OracleDrafter(ids, 4, wrong_at=(0, 2))
    spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs)
    for n, speaker in enumerate(speakers):
        generate = spec.generate if speaker == "s" else model.generate
        plain = model.generate(ids, max_new_tokens=8)
        drafter.answers = plain.tolist()
        end = int(plain[0, ids.shape[1] + 3 + n])  # inside a block, wherever it comes first
        fresh = model.generate(ids, max_new_tokens=8, eos_token_id=end)
        text_so_far, cache = turn(generate, ids, cache, max_new_tokens=8, eos_token_id=end)
        assert text_so_far.equal(fresh)
        assert cache.get_seq_length() == fresh.shape[1] - 1  # the last token is not in it
        said = torch.tensor([[5 + n, 9, 23]])
        ids = torch.cat([text_so_far, said], 1)
    assert spec.stats.accepted > 0
    assert spec.stats.fallbacks == 0


def test_c12_a_cache_with_windows_is_continued_by_transformers() -> None:
    model = tiny.build("gemma3")
    spec = selfspec.wrap(model, drafter=RandomTreeDrafter())
    ids, cache = tiny.prompts(1)["input_ids"], None
    for falls_back in (0, 1):
        fresh = model.generate(ids, max_new_tokens=8)
        text_so_far, cache = turn(spec.generate, ids, cache, max_new_tokens=8)
        assert text_so_far.equal(fresh)
        assert cache.get_seq_length() == fresh.shape[1] - 1
        assert spec.stats.fallbacks == falls_back
        ids = torch.cat([text_so_far, torch.tensor([[5, 9, 23]])], 1)


@pytest.mark.parametrize(
    ("name", "hides_padding", "graphs"),
    [
        ("llama", False, False),
        ("llama", False, True),
        ("llama", True, False),
        ("gpt2", False, False),
        ("bloom", False, False),
    ],
)
def test_c12_rows_that_ended_are_continued(name: str, hides_padding: bool, graphs: bool) -> None:
    """Transformers caches their padding, too, and shows it to the next turn if no mask hides it."""
    model = tiny.build(name)
    prompt = tiny.prompts(3)
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    answers = model.generate(**prompt, max_new_tokens=NEW)
    ends = [int(answers[0, 17 + 2]), int(answers[2, 17 + 5])]
    spec = selfspec.wrap(model, "ngram", cuda_graphs=graphs, max_draft_tokens=5)
    texts, caches = [], []
    for generate in (model.generate, spec.generate):
        first, cache = turn(
            generate, ids, None, attention_mask=mask, max_new_tokens=NEW, eos_token_id=ends
        )
        new = torch.ones_like(first[:, 17:])
        if hides_padding:
            new = (first[:, 17:] != tiny.PAD).long()
        said = torch.tensor([[5, 9, 23]] * 3)
        caches.append(copy.deepcopy(cache))
        second, _ = turn(
            generate,
            torch.cat([first, said], 1),
            cache,
            attention_mask=torch.cat([mask, new, torch.ones_like(said)], 1),
            max_new_tokens=8,
        )
        texts.append(second.tolist())
        assert (first[:, 17:] == tiny.PAD).any()
    assert texts[1] == texts[0]
    assert spec.stats.fallbacks == hides_padding  # holes in a mask are for the stock loop
    shown = torch.cat([mask, torch.ones_like(first[:, 18:])], 1).bool()[:, None, :, None]
    for theirs, mine in zip(caches[0].layers, caches[1].layers, strict=True):
        for a, b in ((theirs.keys, mine.keys), (theirs.values, mine.values)):
            torch.testing.assert_close(a * shown, b * shown, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def spec() -> Any:
    return selfspec.wrap(text.writer(), drafter=selfspec.NGramDrafter(1, min_prob=0.0))


CHAT = [{"role": "user", "content": "hello, stop."}]
CHATS = [CHAT, [*CHAT, {"role": "assistant", "content": "the end"}]]


@pytest.mark.parametrize(
    ("inputs", "kwargs"),
    [
        ("a th", {}),
        ("a th", {"return_full_text": False, "max_new_tokens": 40}),
        (["hi st", "what is the", "é"], {"batch_size": 3, "return_full_text": False}),
        (["hi st", "what is the"], {"batch_size": 2, "stop_sequence": ","}),
        (CHAT, {}),
        (CHATS, {"batch_size": 2}),
        (CHAT, {"return_full_text": False, "skip_special_tokens": False}),
        ("th", {"do_sample": True, "temperature": 2.0, "num_return_sequences": 3}),
        ("th", {"return_tensors": True, "eos_token_id": 12}),
    ],
)
def test_c13_pipeline_says_what_the_models_pipeline_says(
    spec: Any, inputs: Any, kwargs: dict[str, Any]
) -> None:
    answers = []
    options = {"max_new_tokens": 60, "do_sample": False, **kwargs}
    before = snapshot(spec.model)
    for model in (spec.model, spec):
        pipe = pipeline("text-generation", model=model, tokenizer=text.tokenizer())
        torch.manual_seed(0)
        answers.append(pipe(inputs, **options))
    assert answers[1] == answers[0]
    assert snapshot(spec.model) == before
    assert spec.stats.fallbacks == 0
    if not kwargs:
        assert spec.stats.accepted > 0  # the text comes round again


def test_c13_pipeline_without_options_samples_as_the_models_does(spec: Any) -> None:
    """Defaults of the pipeline's own (it samples), whichever way transformers sets them."""
    answers = []
    for model in (spec.model, spec):
        pipe = pipeline("text-generation", model=model, tokenizer=text.tokenizer())
        torch.manual_seed(0)
        answers.append(pipe("abc", eos_token_id=text.script()[0]))
    assert answers[0] == answers[1]


def test_c13_pipeline_streams_and_takes_options_when_it_is_made(
    spec: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, answers = [], []
    for model in (spec.model, spec):
        pipe = pipeline(
            "text-generation",
            model=model,
            tokenizer=text.tokenizer(),
            max_new_tokens=30,
            do_sample=False,
            device="cpu",
            dtype=torch.float64,  # for models that it loads; this one stays as it is
        )
        answers.append(pipe("a st", streamer=TextStreamer(text.tokenizer(), skip_prompt=True)))
        printed.append(capsys.readouterr().out)
        assert (pipe.device, pipe.dtype) == (torch.device("cpu"), torch.float32)
    assert answers[0] == answers[1]
    assert printed[0] == printed[1] == answers[0][0]["generated_text"][4:] + "\n"


def test_c13_pipelines_take_it_for_its_model(
    spec: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No error in the log that the class is not supported; device map and all as of the model."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    pipes = [
        pipeline("text-generation", model=model, tokenizer=text.tokenizer(), device=-1)
        for model in (spec.model, spec)
    ]
    assert "not supported" not in caplog.text
    assert repr(pipes[0]) == repr(pipes[1])
    assert not hasattr(spec, "hf_device_map")
    twin: Any = copy.deepcopy(text.writer())
    twin.hf_device_map = {"": "cpu"}
    mapped = selfspec.wrap(twin, drafter="ngram")
    assert pipeline("text-generation", model=mapped, tokenizer=text.tokenizer()).device == (
        torch.device("cpu")
    )
    with pytest.raises(ValueError, match="accelerate"):
        pipeline("text-generation", model=mapped, tokenizer=text.tokenizer(), device="cpu")
    assert isinstance(spec, selfspec.SpeculativeModel)
    assert "SpeculativeModel[LlamaForCausalLM]" in repr(type(spec))

"""Streams: every token once, none that the answer lacks, and an end whatever happens."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from transformers import (
    AsyncTextIteratorStreamer,
    GenerationConfig,
    TextIteratorStreamer,
    TextStreamer,
)

import selfspec
from tests.families import tiny
from tests.generate.common import NEW, Columns, snapshot
from tests.oracle import OracleDrafter
from tests.scenarios import text


@pytest.fixture(scope="module")
def prompt() -> dict[str, Any]:
    return {"input_ids": torch.tensor([text.tokenizer().encode("a é th")])}


@pytest.fixture(scope="module")
def spec(prompt: dict[str, Any]) -> Any:
    """Writes a text with characters of several tokens; drafts are wrong now and then."""
    model = text.writer()
    answers = model.generate(**prompt, max_new_tokens=60)
    return selfspec.wrap(model, drafter=OracleDrafter(answers, 5, wrong_at=(0, 3, 1)))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_c13_a_streamer_gets_what_plain_would_give_it(model: Any, batch: int, graphs: bool) -> None:
    """The prompt once, a column a token, rejected drafts never; the end once."""
    prompt = tiny.prompts(batch)
    plain, ours = Columns(), Columns()
    answers = model.generate(**prompt, max_new_tokens=NEW, eos_token_id=7, streamer=plain)
    drafter = OracleDrafter(answers, 6, wrong_at=(0, 2))
    spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs)
    spec.generate(**prompt, max_new_tokens=NEW, eos_token_id=7, streamer=ours)
    assert ours.columns == plain.columns
    assert ours.columns[0] == prompt["input_ids"].tolist()
    assert ours.ends == 1
    assert 0 < spec.stats.accepted < spec.stats.drafted


@pytest.mark.parametrize("skip_prompt", [False, True])
@pytest.mark.parametrize("new", [60, 59, 7])
def test_c13_printed_text_is_the_decoded_text(
    spec: Any,
    prompt: dict[str, Any],
    new: int,
    skip_prompt: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where the text ends within a character."""
    tokenizer = text.tokenizer()
    printed = []
    for generate in (spec.model.generate, spec.generate):
        streamer = TextStreamer(tokenizer, skip_prompt=skip_prompt)
        ids = generate(**prompt, max_new_tokens=new, streamer=streamer)[0]
        printed.append(capsys.readouterr().out)
    start = prompt["input_ids"].shape[1] if skip_prompt else 0
    assert printed[0] == printed[1] == tokenizer.decode(ids[start:]) + "\n"


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_c13_an_iterator_in_another_thread(
    spec: Any, prompt: dict[str, Any], skip_prompt: bool
) -> None:
    tokenizer = text.tokenizer()
    pieces = []
    for generate in (spec.model.generate, spec.generate):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=skip_prompt, timeout=60)
        kwargs = {**prompt, "max_new_tokens": 60, "streamer": streamer}
        thread = threading.Thread(target=generate, kwargs=kwargs)
        thread.start()
        pieces.append(list(streamer))
        thread.join()
    assert pieces[0] == pieces[1]
    start = prompt["input_ids"].shape[1] if skip_prompt else 0
    ids = spec.model.generate(**prompt, max_new_tokens=60)[0, start:]
    assert "".join(pieces[1]) == tokenizer.decode(ids)
    assert len([piece for piece in pieces[1] if piece]) > 4


def test_c13_an_asynchronous_iterator(spec: Any, prompt: dict[str, Any]) -> None:
    async def collect(generate: Any) -> list[str]:
        streamer = AsyncTextIteratorStreamer(text.tokenizer(), skip_prompt=True)
        kwargs = {**prompt, "max_new_tokens": 40, "streamer": streamer}
        thread = threading.Thread(target=generate, kwargs=kwargs)
        thread.start()
        pieces = [piece async for piece in streamer]
        thread.join()
        return pieces

    ours = asyncio.run(collect(spec.generate))
    assert ours == asyncio.run(collect(spec.model.generate))
    assert "😀" in "".join(ours)


def test_c13_text_streamers_refuse_batches_as_with_plain(model: Any) -> None:
    spec = selfspec.wrap(model, drafter="ngram")
    with pytest.raises(ValueError, match="only supports batch size 1"):
        spec.generate(**tiny.prompts(3), streamer=TextStreamer(text.tokenizer()))


@pytest.mark.parametrize("fail_at", [1, 9])
def test_c13_a_streamer_that_raises(model: Any, fail_at: int) -> None:
    """The caller gets the exception, whoever reads the stream its end, and the model nothing."""
    prompt = tiny.prompts(1)
    answers = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 6))
    before = snapshot(model)
    broken = Columns(fail_at=fail_at)
    with pytest.raises(RuntimeError, match="the streamer fails"):
        spec.generate(**prompt, max_new_tokens=NEW, streamer=broken)
    assert broken.ends == 1
    assert snapshot(model) == before
    assert model.generate(**prompt, max_new_tokens=NEW).equal(answers)
    assert spec.generate(**prompt, max_new_tokens=NEW).equal(answers)


class Worse(Columns):
    def end(self) -> None:
        super().end()
        raise OSError("the end fails")


def test_c13_an_end_that_raises(model: Any) -> None:
    """It does not hide what went wrong before, and is not called twice."""
    spec, prompt = selfspec.wrap(model, drafter="ngram"), tiny.prompts(1)
    worse = Worse(fail_at=3)
    with pytest.raises(RuntimeError, match="the streamer fails"):
        spec.generate(**prompt, max_new_tokens=NEW, streamer=worse)
    assert worse.ends == 1
    worse = Worse()
    with pytest.raises(OSError, match="the end fails"):
        spec.generate(**prompt, max_new_tokens=4, streamer=worse)
    assert worse.ends == 1


class Nested(Columns):
    """Generates with the same wrapper while it is given tokens."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec, self.is_inside = spec, False

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if not self.is_inside:
            self.is_inside = True
            self.spec.generate(**tiny.prompts(1), max_new_tokens=2)
            self.is_inside = False


def test_c13_a_streamer_that_generates(model: Any) -> None:
    """Its request is its own: generator and steps of the one around it stay there."""
    spec, prompt = selfspec.wrap(model, drafter="ngram"), tiny.prompts(1)
    sampled = {**prompt, "max_new_tokens": 8, "do_sample": True}
    plain = spec.generate(**sampled, generator=torch.Generator().manual_seed(3))
    nested = Nested(spec)
    generator = torch.Generator().manual_seed(3)
    assert spec.generate(**sampled, generator=generator, streamer=nested).equal(plain)
    assert len(nested.columns) == 9
    steps = list(spec.stream(**prompt, max_new_tokens=8, do_sample=False, streamer=Nested(spec)))
    assert sum(len(step.tokens[0]) for step in steps) == 8


class Duck:
    """The methods of a streamer, and nothing else of one."""

    def __init__(self) -> None:
        self.ends = 0

    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"do_sample": True, "temperature": -1.0},
        {"foo": 1},
        {"stop_strings": ["x"]},
        {"generator": 5},
        {"num_beams": 2},
    ],
)
def test_c13_a_stream_ends_where_a_call_is_refused(model: Any, wrong: dict[str, Any]) -> None:
    """Before a token is made; whoever reads it from another thread must not wait for ever."""
    spec, prompt = selfspec.wrap(model, drafter="ngram"), tiny.prompts(1)
    for streamer in (Columns(), Duck()):
        with pytest.raises((TypeError, ValueError)):
            spec.generate(**prompt, streamer=streamer, **wrong)
        assert streamer.ends == 1
        spec.generate(**prompt, streamer=streamer, max_new_tokens=3)
        assert streamer.ends == 2
    streamer = Columns()
    ids, config = prompt["input_ids"], GenerationConfig(max_new_tokens=3)
    with pytest.raises((TypeError, ValueError)):
        spec.generate(ids, config, None, None, None, None, None, streamer, **wrong)
    assert streamer.ends == 1


class Interrupts:
    """A drafter that is interrupted at its second draft."""

    hidden_taps = ()

    def draft(self, state: Any, budget: int) -> selfspec.TokenTree:
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return selfspec.TokenTree.root_only(state.root)

    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        """Nothing."""

    def reset(self) -> None:
        self.calls = 0


@pytest.mark.parametrize("where", ["prefill", "drafter", "stock loop"])
def test_c13_a_stream_ends_wherever_decoding_breaks(
    model: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = selfspec.wrap(model, drafter=Interrupts())
    streamer = Columns()
    kwargs: dict[str, Any] = {"max_new_tokens": NEW, "streamer": streamer}
    if where == "stock loop":
        kwargs["use_cache"] = False
    if where != "drafter":

        def fails(*args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(model.lm_head, "forward", fails)
    with pytest.raises(KeyboardInterrupt):
        spec.generate(**tiny.prompts(1), **kwargs)
    assert streamer.ends == 1

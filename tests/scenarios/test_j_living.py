"""Living with others: threads, two wrappers of one model, interruptions, unwrap."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

import selfspec
from tests.families import tiny
from tests.follow import only_watched
from tests.generate.common import snapshot
from tests.scenarios.test_j_metrics import consistent

NEW = 16


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results of all calls, each in a thread of its own, started at the same moment."""
    results: list[Any] = [None] * len(calls)
    gate = threading.Barrier(len(calls))

    def work(i: int) -> None:
        gate.wait()
        try:
            results[i] = calls[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def prompts(count: int) -> list[dict[str, Any]]:
    return [
        {"input_ids": torch.randint(1, 64, (1, 6 + i), generator=torch.Generator().manual_seed(i))}
        for i in range(count)
    ]


DRAFTERS: dict[str, Callable[[], Any]] = {
    "ngram": lambda: selfspec.NGramDrafter(1, max_candidates=2, min_prob=0.0),
    "early-exit": lambda: selfspec.EarlyExitDrafter(2, 3, 0.0, branches=2),
    "layer-skip": lambda: selfspec.LayerSkipDrafter([1, 2], 3, 0.2),
}


@pytest.mark.parametrize(
    ("name", "graphs"),
    [("ngram", False), ("early-exit", False), ("early-exit", True), ("layer-skip", True)],
)
def test_j1_eight_threads_on_one_wrapper(model: Any, name: str, graphs: bool) -> None:
    """Greedy, sampled by a generator each, streamed: every one gets what it gets alone."""
    before = snapshot(model)
    spec = selfspec.wrap(model, drafter=DRAFTERS[name](), cuda_graphs=graphs)

    def call(i: int, prompt: dict[str, Any]) -> Callable[[], list[int]]:
        def greedy() -> list[int]:
            return spec.generate(**prompt, max_new_tokens=NEW)[0].tolist()

        def sampled() -> list[int]:
            generator = torch.Generator().manual_seed(i)
            settings = {"do_sample": True, "generator": generator}
            return spec.generate(**prompt, max_new_tokens=NEW, **settings)[0].tolist()

        def streamed() -> list[int]:
            steps = spec.stream(**prompt, max_new_tokens=NEW)
            return [token for step in steps for token in step.tokens[0]]

        return (greedy, sampled, streamed, greedy)[i % 4]

    calls = [call(i, prompt) for i, prompt in enumerate(prompts(8))]
    alone = [call() for call in calls]
    for i, prompt in enumerate(prompts(8)):
        if i % 4 in (0, 3):
            assert alone[i] == model.generate(**prompt, max_new_tokens=NEW)[0].tolist()
    spec.stats.reset()
    assert together(calls) == alone
    assert snapshot(model) == before
    assert spec.stats.requests == 8
    assert spec.stats.emitted == 8 * NEW
    consistent(spec.stats, 8)


def test_j1_two_wrappers_and_the_model_itself(model: Any) -> None:
    before = snapshot(model)
    one = selfspec.wrap(model, drafter="early-exit")
    other = selfspec.wrap(model, drafter=selfspec.LayerSkipDrafter([1]), cuda_graphs=True)
    switched_off = selfspec.wrap(model)
    switched_off.enabled = False
    ids = prompts(6)
    plain = [model.generate(**p, max_new_tokens=NEW).tolist() for p in ids]
    users = (one, other, model, switched_off, one, other)

    def call(user: Any, prompt: dict[str, Any]) -> Callable[[], Any]:
        return lambda: user.generate(**prompt, max_new_tokens=NEW).tolist()

    for _ in range(2):
        results = together([call(user, p) for user, p in zip(users, ids, strict=True)])
        assert results == plain
    assert snapshot(model) == before
    assert (one.stats.requests, other.stats.requests, switched_off.stats.fallbacks) == (4, 4, 2)


def test_j1_one_threads_error_is_its_own(model: Any) -> None:
    """A request that fails, and one that is refused, beside six that go on."""
    before = snapshot(model)
    spec = selfspec.wrap(model, drafter="early-exit")
    ids = prompts(8)
    plain = [model.generate(**p, max_new_tokens=NEW).tolist() for p in ids]

    def fail(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] > 12:
            raise KeyboardInterrupt("scripted")
        return scores

    def call(i: int) -> Callable[[], Any]:
        extra = {3: {"logits_processor": [fail]}, 5: {"no_such_argument": 1}}.get(i, {})
        return lambda: spec.generate(**ids[i], max_new_tokens=NEW, **extra).tolist()

    results = together([call(i) for i in range(8)])
    assert isinstance(results[3], KeyboardInterrupt)
    assert isinstance(results[5], ValueError)
    assert "no_such_argument" in str(results[5])
    assert [r for i, r in enumerate(results) if i not in (3, 5)] == [
        r for i, r in enumerate(plain) if i not in (3, 5)
    ]
    assert snapshot(model) == before


# ------------------------------------------------------------------------ interrupted


class Interrupt:
    """Raises KeyboardInterrupt at a call."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt("scripted")

    def process(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self()
        return scores


class InterruptedStreamer(BaseStreamer):
    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt = interrupt

    def put(self, value: Any) -> None:
        self.interrupt()

    def end(self) -> None: ...


def _criterion(interrupt: Interrupt) -> Callable[[Any, Any], Any]:
    def ask(ids: Any, scores: Any, **kwargs: Any) -> Any:
        interrupt()
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    return ask


@pytest.mark.parametrize(
    ("name", "graphs"), [("early-exit", False), ("layer-skip", True), ("ngram", True)]
)
@pytest.mark.parametrize(
    "where", ["layer", "prefill", "draft", "observe", "streamer", "criterion", "processor"]
)
def test_j1_interrupted(
    model: Any, where: str, name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle: model and counters sound, the next request right."""
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=NEW).tolist()
    drafter = DRAFTERS[name]()
    spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs)
    before = snapshot(model)
    interrupt, settings, handle = Interrupt(4), {}, None
    if where in ("layer", "prefill"):
        interrupt = Interrupt(4 if where == "layer" else 1)
        handle = model.model.layers[1].mlp.register_forward_hook(interrupt)
        only_watched(spec)
    elif where in ("draft", "observe"):
        original = getattr(drafter, method := where)

        def interrupted(*args: Any) -> Any:
            interrupt()
            return original(*args)

        monkeypatch.setattr(drafter, method, interrupted)
    elif where == "streamer":
        settings = {"streamer": InterruptedStreamer(interrupt)}
    elif where == "criterion":
        settings = {"stopping_criteria": [_criterion(interrupt)]}
    else:
        settings = {"logits_processor": [interrupt.process]}
    try:
        with pytest.raises(KeyboardInterrupt, match="scripted"):
            spec.generate(**prompt, max_new_tokens=NEW, **settings)
    finally:
        monkeypatch.undo()
        if handle is not None:
            handle.remove()
    assert snapshot(model) == before
    assert spec.unwrap() is spec.model is model
    consistent(spec.stats, 0 if where == "prefill" else min(1, spec.stats.emitted))
    assert spec.stats.emitted < NEW
    assert spec.stats.requests == 1
    spec.stats.reset()
    assert spec.generate(**prompt, max_new_tokens=NEW).tolist() == plain
    assert model.generate(**prompt, max_new_tokens=NEW).tolist() == plain
    consistent(spec.stats, 1)


def test_j1_unwrap_undoes_nothing_because_there_is_nothing_to_undo(model: Any) -> None:
    before = snapshot(model)
    spec = selfspec.wrap(model, drafter="early-exit")
    plain = model.generate(**tiny.prompts(2), max_new_tokens=NEW)
    spec.generate(**tiny.prompts(2), max_new_tokens=NEW)
    stream = spec.stream(**tiny.prompts(1), max_new_tokens=200)
    next(stream)
    assert spec.unwrap() is model
    stream.close()
    assert snapshot(model) == before
    assert model.generate(**tiny.prompts(2), max_new_tokens=NEW).equal(plain)
    again = selfspec.wrap(spec.unwrap(), drafter="ngram")
    assert again.generate(**tiny.prompts(2), max_new_tokens=NEW).equal(plain)

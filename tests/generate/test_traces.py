"""Nothing is left on the model, after exceptions and between threads, too."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch

import selfspec
from tests.families import tiny
from tests.generate.common import NEW, snapshot
from tests.oracle import RandomTreeDrafter
from tests.parts import by_name


def test_the_model_is_left_as_it_was(model: Any) -> None:
    before = snapshot(model)
    for drafter in ("auto", "ngram", "early-exit", "layer-skip", "none"):
        spec = selfspec.wrap(model, drafter=by_name(drafter))
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
        spec = selfspec.wrap(model, drafter=by_name("early-exit"))
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
    names = ("early-exit", "layer-skip", "ngram")
    wrappers = [selfspec.wrap(model, drafter=by_name(name)) for name in names]
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

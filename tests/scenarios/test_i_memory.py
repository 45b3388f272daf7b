"""Area I but prefill: memory and work that do not grow."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import selfspec
from selfspec import NGramDrafter
from tests.families import tiny
from tests.follow import only_watched
from tests.oracle import RandomTreeDrafter
from tests.parts import by_name


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """What is not freed by counting references stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def census() -> tuple[int, int]:
    """Live tensors, and all objects that the collector knows."""
    everything = gc.get_objects()
    return sum(issubclass(type(o), torch.Tensor) for o in everything), len(everything)


def growth(call: Callable[[int], Any], count: int) -> tuple[int, int]:
    """What `count` calls leave behind, after some to warm up."""
    for i in range(12):
        call(i)
    tensors, objects = census()
    for i in range(count):
        call(i)
    after = census()
    return after[0] - tensors, after[1] - objects


@pytest.mark.usefixtures("_no_collector")
def test_i1_nothing_is_left_by_300_requests(model: Any) -> None:
    """Drafting, drafting nothing, switched off, streamed, left to the stock loop."""
    prompt = tiny.prompts(2)
    wrappers = [
        selfspec.wrap(model, drafter=NGramDrafter(1, min_prob=0.0)),
        selfspec.wrap(model, drafter=by_name("early-exit"), cuda_graphs=True),
        selfspec.wrap(model, drafter="none"),
        selfspec.wrap(model),
    ]
    wrappers[3].enabled = False

    def call(i: int) -> None:
        spec = wrappers[i % 4]
        if i % 3 == 0 and spec.enabled:
            list(spec.stream(**prompt, max_new_tokens=3))
        else:
            spec.generate(**prompt, max_new_tokens=3, use_cache=i % 5 > 0)

    def plain(i: int) -> None:
        model.generate(**prompt, max_new_tokens=3)

    # Some versions of transformers leave cycles of their own behind.
    stock = min(growth(plain, 20)[1] for _ in range(2)) // 20
    tensors, objects = growth(call, 300)
    assert tensors <= 0
    assert objects - 300 * max(stock, 0) < 150  # anything that every request left would be 300


@pytest.mark.usefixtures("_no_collector")
def test_i1_failing_requests_leave_what_plain_ones_leave(model: Any) -> None:
    prompt = tiny.prompts(1)

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("scripted")

    def failing(generate: Any) -> Callable[[int], None]:
        def call(i: int) -> None:
            try:  # not pytest.raises: what it gives holds the frame that holds it
                generate(**prompt, max_new_tokens=3, logits_processor=[fail])
            except RuntimeError:
                return
            raise AssertionError

        return call

    # Transformers keeps cycles of its own, some objects a request, no tensors.
    stock = growth(failing(model.generate), 60)[1]
    for drafter in ("ngram", "early-exit"):
        spec = selfspec.wrap(model, drafter=by_name(drafter))
        tensors, objects = growth(failing(spec.generate), 60)
        assert tensors <= 0
        assert objects < stock + 30


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("drafter", ["early-exit", "layer-skip"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_i1_an_exception_frees_keys_and_values(model: Any, drafter: str, error: Any) -> None:
    spec = selfspec.wrap(model, drafter=by_name(drafter))

    def fail(ids: Any, scores: Any) -> Any:
        if ids.shape[1] > 20:
            raise error
        return scores

    def call() -> None:
        try:
            spec.generate(**tiny.prompts(1), max_new_tokens=9, logits_processor=[fail])
        except error:
            return
        raise AssertionError

    call()
    before = census()[0]
    call()
    assert census()[0] <= before


@pytest.mark.gpu
def test_i1_memory_of_the_device_is_flat() -> None:
    model = copy.deepcopy(tiny.build("llama")).cuda()
    prompt = {name: value.cuda() for name, value in tiny.prompts(3).items()}
    for drafter in ("ngram", "early-exit", "layer-skip"):
        spec = selfspec.wrap(model, drafter=by_name(drafter))
        used = []
        for _ in range(60):
            spec.generate(**prompt, max_new_tokens=20)
            used.append(torch.cuda.memory_allocated())
        assert used[-1] <= used[9], drafter


def test_i4_nothing_is_copied_deeply_in_a_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    deepcopy = copy.deepcopy

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return deepcopy(*args, **kwargs)

    prompt = tiny.prompts(2)
    specs = [
        selfspec.wrap(model, drafter=d)
        for d in ("none", NGramDrafter(1, min_prob=0.0), by_name("early-exit"), RandomTreeDrafter())
    ]
    monkeypatch.setattr(copy, "deepcopy", counting)
    for generate in (model.generate, *(spec.generate for spec in specs)):
        for new in (2, 20):
            counts.append(0)
            generate(**prompt, max_new_tokens=new)
    # As many for 20 tokens as for 2, and as many as in plain generate.
    assert set(counts) == {counts[0]}


@pytest.mark.parametrize("drafter", ["ngram", "early-exit"])
def test_i6_a_cached_prefix_is_not_computed_again(model: Any, drafter: str) -> None:
    prompt = tiny.prompts(1)["input_ids"]
    spec = selfspec.wrap(model, drafter=by_name(drafter))
    settings = {"max_new_tokens": 8, "return_dict_in_generate": True}
    first = spec.generate(prompt, **settings)
    longer = torch.cat([first.sequences, torch.tensor([[3, 5, 7]])], 1)
    expected = model.generate(longer, max_new_tokens=8)
    widths: list[int] = []

    def seen(module: Any, args: Any, kwargs: Any) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(seen, with_kwargs=True)
    only_watched(spec)
    try:
        text = spec.generate(longer, past_key_values=first.past_key_values, **settings).sequences
    finally:
        handle.remove()
    assert text.tolist() == expected.tolist()
    assert widths[0] == 4  # three new tokens, and the last of the text, which is never cached
    assert max(widths[1:]) < prompt.shape[1]

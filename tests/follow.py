"""Whether a wrapper gives the text of its model, for tests of models of many kinds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

import selfspec
from selfspec.architectures import describe
from tests.families import tiny
from tests.generate.common import snapshot

NEW = {"max_new_tokens": 12}

DRAFTERS: dict[str, Callable[[], Any]] = {
    "none": lambda: "none",
    "ngram": lambda: selfspec.NGramDrafter(min_match=1, min_prob=0.0),
    "early-exit": lambda: selfspec.EarlyExitDrafter(3, 3, 0.0),
    "layer-skip": lambda: selfspec.LayerSkipDrafter([1], 3, 0.0),
}

Text = list[list[int]]


def fresh(name: str = "llama", **options: Any) -> Any:
    """A model that may be changed; arguments as for `tiny.build`."""
    model = copy.deepcopy(tiny.build(name, **options))
    # Hooks that transformers leaves on a model that was asked for hidden states, by whichever test
    # came before, cannot be pickled.
    for module in model.modules():
        module._forward_hooks.clear()
        module.__dict__.pop("_output_capturing_hooks_installed", None)
    return model


def only_watched(spec: Any) -> None:
    """Hooks put on the model just now change nothing: do not measure it anew, and through them."""
    target = spec._target
    target._measurement = replace(target._measurement, described=describe(target.model))


def text(one: Any, prompt: dict[str, torch.Tensor], do_sample: bool = False) -> Text:
    """What a model or a wrapper generates."""
    torch.manual_seed(3)
    return one.generate(**prompt, **NEW, do_sample=do_sample).tolist()


def follows(
    spec: Any,
    model: Any,
    batch: int = 3,
    do_sample: bool = False,
    prompt: dict[str, torch.Tensor] | None = None,
) -> Text:
    """The text of `model.generate`, which `spec` gives, too."""
    prompt = prompt or tiny.prompts(batch)
    plain = text(model, prompt, do_sample)
    assert text(spec, prompt, do_sample) == plain
    return plain


def everywhere(model: Any, names: Iterable[str] = DRAFTERS, **options: Any) -> None:
    """Drafters by name; greedy and sampled; one row and three of different length."""
    cases = [(tiny.prompts(1), False), (tiny.prompts(3), False), (tiny.prompts(3), True)]
    plain = [text(model, *case) for case in cases]
    before = snapshot(model)
    for name in names:
        spec = selfspec.wrap(model, drafter=DRAFTERS[name](), **options)
        assert [text(spec, *case) for case in cases] == plain
        assert spec.stats.fallbacks == 0
        assert (spec.stats.drafted > 0) == (name != "none")
        assert spec.stats.accepted > 0 or name in ("none", "ngram")
    assert snapshot(model) == before

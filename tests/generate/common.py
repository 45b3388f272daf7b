"""What the tests of `generate` share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

import selfspec
from tests.oracle import OracleDrafter

NEW = 24


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


def raised(call: Any) -> str:
    with pytest.raises((ValueError, RuntimeError, TypeError, IndexError)) as info:
        call()
    return f"{type(info.value).__name__}: {info.value}"

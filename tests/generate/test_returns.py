"""Scores, logits and caches that `generate` returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selfspec
from tests.families import tiny
from tests.generate.common import NEW, same
from tests.oracle import OracleDrafter


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

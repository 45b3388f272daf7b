"""What is returned beside the text: scores, logits, the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selfspec
from tests.families import tiny
from tests.scenarios import options as cases
from tests.scenarios.options import answered, small


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_j9_scores_logits_and_cache(batch: int, do_sample: bool, graphs: bool) -> None:
    """One a new token, plain's, and the transition scores that follow from them."""
    prompt, end = tiny.prompts(batch), cases.END if batch == 3 else None
    kwargs: dict[str, Any] = {
        **cases.RETURNED,
        "output_scores": True,
        "output_logits": True,
        "max_new_tokens": 12,
        "do_sample": do_sample,
        "temperature": 0.8 if do_sample else None,
        "eos_token_id": end,
    }
    model = small()
    torch.manual_seed(0)
    plain = model.generate(**prompt, **kwargs)
    spec = selfspec.wrap(model, drafter=answered(plain), cuda_graphs=graphs)
    torch.manual_seed(0)
    ours = spec.generate(**prompt, **kwargs)
    assert spec.stats.accepted > 0
    new = plain.sequences.shape[1] - 17
    live = [[True] * batch]  # what a row that has ended scores is nobody's choice
    for t in range(new):
        column = plain.sequences[:, 17 + t].tolist()
        live.append([a and c not in (end or ()) for a, c in zip(live[-1], column, strict=True)])
    assert type(ours) is type(plain)
    assert ours.sequences.equal(plain.sequences)
    transitions = []
    for out in (ours, plain):
        of_out = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        transitions.append(of_out.T[torch.tensor(live[:-1])])
    torch.testing.assert_close(*transitions, atol=1e-4, rtol=1e-4)
    for name in ("scores", "logits"):
        assert len(getattr(ours, name)) == new
        for t, (a, b) in enumerate(zip(getattr(ours, name), getattr(plain, name), strict=True)):
            torch.testing.assert_close(a[live[t]], b[live[t]], atol=1e-4, rtol=1e-4)
    cache, reference = (getattr(out, "cache", None) or out.past_key_values for out in (ours, plain))
    assert cache.get_seq_length() == ours.sequences.shape[1] - 1
    real = torch.cat([prompt["attention_mask"].bool(), torch.tensor(live[1:-1]).T], 1)
    mask = real[:, None, :, None]
    for mine, theirs in zip(cache.layers, reference.layers, strict=True):
        torch.testing.assert_close(mine.keys * mask, theirs.keys * mask, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.values * mask, theirs.values * mask, atol=1e-4, rtol=1e-4)


def test_j9_a_row_that_has_ended_is_certain_of_its_padding() -> None:
    kwargs = {**cases.RETURNED, "output_scores": True, "eos_token_id": cases.END}
    plain = small().generate(**tiny.prompts(3), max_new_tokens=12, **kwargs)
    out = selfspec.wrap(small(), drafter=answered(plain)).generate(
        **tiny.prompts(3), max_new_tokens=12, **kwargs
    )
    padding = (out.sequences[:, 17:] == tiny.PAD).nonzero().tolist()
    assert padding
    for row, t in padding:
        assert out.scores[t][row].softmax(-1)[tiny.PAD] == 1

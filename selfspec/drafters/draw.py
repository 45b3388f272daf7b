"""Drawing draft tokens instead of taking the most probable ones.

A draft that is drawn from q is accepted with probability sum(min(p, q)) at least; one that is
always the likeliest token, with the p of that token. Siblings are drawn without replacement, in the
order in which they are tried (a race of exponential clocks; Efraimidis and Spirakis 2006,
https://doi.org/10.1016/j.ipl.2005.11.003), under q after the processors that the target's own
scores go through. How many there are is fixed before they are drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from selfspec_kernels.philox import DRAFT, exponential
from torch import Tensor

if TYPE_CHECKING:
    from selfspec.state import DecodeState


def draws(state: DecodeState) -> bool:
    """Whether drafts can be drawn in this request.

    It has to sample by a rule that weighs p against q, with processors that may be shown a path
    that is not taken.
    """
    sampler = state.sampler
    return sampler is not None and sampler.do_sample and not sampler.stateful


def draw(state: DecodeState, logits: Tensor, drafted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw the next tokens of every row's draft.

    Args:
        state: Its sampler `draws`.
        logits: [B, V] of the draft after `drafted`.
        drafted: int64 [B, d], the draft so far, without the root.
        count: Siblings, fewer than V.

    Returns:
        int64 [B, count] in the order of the draws, and float32 [B, V], the logarithm of q. Where q
        has fewer tokens than are asked for, the first is repeated: that counts as not drafted.
    """
    sampler, device = state.sampler, logits.device
    assert sampler is not None
    if sampler.prefix_free:
        scores = sampler.scores(logits)
    else:
        prefixes = [
            torch.cat([state.prefix(b), path.to(state.device)]) for b, path in enumerate(drafted)
        ]
        live = [b for b in range(state.batch) if not state.frozen[b]]
        scores = sampler.scores_after(logits, prefixes, live)
    log_q = scores.float().log_softmax(-1)
    # Keyed by the root's position, which no later step has, and the depth of what is drawn.
    noise = exponential(
        sampler.seeds(state.batch).to(device),
        logits.shape[-1],
        torch.tensor(state.positions(), device=device),
        DRAFT,
        node=drafted.shape[1] + 1,
    )
    race = (log_q - noise.log()).topk(count)
    ids = torch.where(race.values > float("-inf"), race.indices, race.indices[:, :1])
    return ids, log_q

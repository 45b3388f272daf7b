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
    from selfspec.sampling import Sampler
    from selfspec.state import DecodeState


def draws(state: DecodeState) -> bool:
    """Whether drafts can be drawn in this request.

    It has to sample by a rule that weighs p against q, with processors that may be shown a path
    that is not taken.
    """
    sampler = state.sampler
    return sampler is not None and sampler.do_sample and not sampler.stateful


def draw(
    state: DecodeState, logits: Tensor, drafted: Tensor, count: int, among: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw the next tokens of every row's draft, a chain.

    Args:
        state: Its sampler `draws`.
        logits: [B, V] of the draft after `drafted`.
        drafted: int64 [B, d], the draft so far, without the root.
        count: Siblings, fewer than V.
        among: See `draw_children`.

    Returns:
        int64 [B, count] in the order of the draws, and float32 [B, V], the logarithm of q. Where q
        has fewer tokens than are asked for, the first is repeated: that counts as not drafted.
    """
    last = torch.tensor([drafted.shape[1]], device=logits.device)
    ids, log_q = draw_children(state, logits[:, None], drafted[:, None], last, count, among)
    return ids[:, 0], log_q[:, 0]


def draw_children(
    state: DecodeState,
    logits: Tensor,
    drafted: Tensor,
    nodes: Tensor,
    count: int,
    among: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw children of several nodes of every row's tree at once, independently of each other.

    What a node draws depends on its number, not on how many nodes there are; and more siblings
    are drawn behind fewer. So a tree that is cut short has what the whole one has there.

    Args:
        state: Its sampler `draws`.
        logits: [B, M, V] of the draft after every node; -inf for tokens that it does not know.
        drafted: int64 [B, M, d], the draft up to and with every node, without the root.
        nodes: int64 [M], or [B, M], their numbers in the tree.
        count: Siblings, fewer than there are tokens to draw.
        among: int64 [Vd], the tokens with finite logits, if not all are; saves noise for the rest.

    Returns:
        int64 [B, M, count] in the order of the draws, and float32 [B, M, V], the logarithm of q. As
        for `draw` the first is repeated. Where processors leave no token that the draft knows, q is
        that of the logits as they are, of which the target then takes none.
    """
    sampler, device = state.sampler, logits.device
    assert sampler is not None
    if sampler.prefix_free:
        scores = sampler.scores(logits)
    else:
        scores = torch.stack(
            [
                _scores_after(state, sampler, logits[:, m], drafted[:, m])
                for m in range(logits.shape[1])
            ],
            dim=1,
        )
    if among is not None:
        knows_none = scores.amax(-1, keepdim=True) == float("-inf")
        scores = torch.where(knows_none, logits.float(), scores)
    log_q = scores.float().log_softmax(-1)
    law = log_q if among is None else log_q[..., among]
    # Keyed by the root's position, which no later step has, and the node that is gone on from.
    noise = exponential(
        sampler.seeds(state.batch).to(device)[:, None],
        law.shape[-1],
        torch.tensor(state.positions(), device=device)[:, None],
        DRAFT,
        node=nodes + 1,
    )
    race = (law - noise.log()).topk(count)
    ids = race.indices if among is None else among[race.indices]
    return torch.where(race.values > float("-inf"), ids, ids[..., :1]), log_q


def _scores_after(state: DecodeState, sampler: Sampler, logits: Tensor, drafted: Tensor) -> Tensor:
    """Processed scores [B, V] of logits [B, V] after `drafted` [B, d]."""
    prefixes = [
        torch.cat([state.prefix(b), path.to(state.device)]) for b, path in enumerate(drafted)
    ]
    live = [b for b in range(state.batch) if not state.frozen[b]]
    return sampler.scores_after(logits, prefixes, live)

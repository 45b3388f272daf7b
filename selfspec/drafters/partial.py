"""Chains drafted by a part of the target's own layers.

What early exit and layer skip have in common: the draft runs in the *same* cache as the target, at
the slots that its tokens will have. Layers that run complete from the embedding on are the target's
own work; verification takes over from there, so that no layer runs twice for a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from selfspec.patch import LayerPlan
from selfspec.tree import Resume, TokenTree

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec.state import DecodeState


def draft_chain(
    state: DecodeState,
    plan: LayerPlan,
    shared: int,
    num_tokens: int,
    confidence: float,
) -> TokenTree:
    """Draft one chain a row, greedily, with the layers that `plan` runs.

    Args:
        state: Where decoding stands.
        plan: Layers to run; `taps` and `captured` are used here.
        shared: The first `shared` layers run complete: their keys, values and the states they end
            in are kept for verification.
        num_tokens: Longest chain.
        confidence: A row stops after a token whose draft probability was below this. (After, not
            before: the decision may depend on tokens that are kept, never on one thrown away.)

    Returns:
        The chains, with the shared work attached.
    """
    target, cache = state.target, state.cache
    plan.taps = frozenset({shared} if shared else ())
    device = state.root.device
    rooms = [max(1, state.room(b)) for b in range(state.batch)]  # most nodes, the root included
    num_nodes = torch.ones(state.batch, dtype=torch.int32, device=device)
    growing = torch.ones(state.batch, dtype=torch.bool, device=device)
    tree = TokenTree.root_only(state.root)
    states: list[Tensor] = []
    for depth in range(1, min(num_tokens, max(rooms) - 1) + 1):
        logits = target.run(tree, 1, cache, plan)[:, -1]
        if shared:
            states.append(plan.captured.pop(shared))
        tokens = torch.cat([tree.tokens[:, 1:], logits.argmax(-1, keepdim=True)], dim=1)
        tree = TokenTree.chain(state.root, tokens)
        growing = growing & torch.tensor([room > depth for room in rooms], device=device)
        num_nodes = num_nodes + growing
        if confidence > 0:
            growing = growing & (logits.float().softmax(-1).amax(-1) >= confidence)
            # The one host read while drafting: going on for nobody costs more than asking.
            if not bool(growing.any()):
                break
    resume = None
    if shared:
        # The last token still needs the shared layers; what comes after them is verification.
        rest = LayerPlan(last=shared, taps=frozenset({shared}))
        target.run(tree, 1, cache, rest, with_logits=False)
        states.append(rest.captured.pop(shared))
        resume = Resume(shared, torch.cat(states, dim=1))
    return TokenTree.chain(state.root, tree.tokens[:, 1:], num_nodes=num_nodes, resume=resume)

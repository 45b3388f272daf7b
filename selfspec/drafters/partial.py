"""Drafts by a part of the target's own layers: a chain, with leaves beside it if they are wanted.

What early exit and layer skip have in common: the draft runs in the *same* cache as the target, at
the slots that its tokens will have. Layers that run complete from the embedding on are the target's
own work; verification takes over from there, so that no layer runs twice for a token.

Tokens are read off the last hidden state by the architecture's `readout`, or else off the logits of
the model's own head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from selfspec.drafters.candidates import Candidates, best_after, best_of
from selfspec.drafters.draw import draw, draws
from selfspec.patch import LayerPlan
from selfspec.tree import Resume, TokenTree

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec.architectures import Architecture
    from selfspec.drafters.exit_readout import ExitReadout
    from selfspec.drafters.growth import Growth
    from selfspec.readout import Readout
    from selfspec.state import DecodeState


def check_layers(architecture: Architecture) -> None:
    """Refuse a model that does not run without some of its layers.

    Raises:
        ValueError: With the reason.
    """
    if architecture.layers_fault:
        raise ValueError(
            f"layers cannot be left out of this model ({architecture.layers_fault}); draft with "
            "something else, such as NGramDrafter()."
        )


def draft_chain(
    state: DecodeState,
    plan: LayerPlan,
    shared: int,
    num_tokens: int,
    growth: Growth,
    branches: int = 1,
    budget: int = 0,
    do_sample: bool = False,
    exit_readout: ExitReadout | None = None,
) -> TokenTree:
    """Draft one chain a row with the layers that `plan` runs.

    The nodes of a row are the chain, in the cache slots where it was drafted, then the leaves. So a
    row cannot end early and have leaves: with leaves, the rows of a batch stop together, when the
    last one would, and a row without room for the whole chain has the part that fits and no leaves.

    Args:
        state: Where decoding stands.
        plan: Layers to run; `taps` and `captured` are used here.
        shared: The first `shared` layers run complete: their keys, values and the states they end
            in are kept for verification.
        num_tokens: Longest chain.
        growth: Decides which rows go on after every token. (The token after which one stops is
            kept: the decision may not depend on one thrown away.)
        branches: Draft tokens at every position: the one that goes on and, as its leaf siblings,
            those of the next best ones that pay, the first positions first. Models that verify
            chains only get no leaves.
        budget: Most draft tokens a row, leaves included; only leaves need it.
        do_sample: Draw tokens, if the request does, rather than take the likeliest.
        exit_readout: Trained for the state after the last layer that runs; None reads tokens as
            the model does after its last layer.

    Returns:
        The drafts, with the shared work attached.
    """
    target, cache = state.target, state.cache
    architecture, device = target.architecture, state.root.device
    if not architecture.resumable:
        shared = 0
    most = min(branches, budget) if architecture.support == "tree" else 1
    last = architecture.num_layers
    drawn = do_sample and draws(state)
    readout: Readout | ExitReadout | None = exit_readout
    if exit_readout is None and not drawn:  # drawing needs q whole
        own = architecture.readout
        readout = own if own is not None and own.usable else None
    plan.taps = frozenset(({shared} if shared else set()) | ({last} if readout else set()))
    rooms = [max(1, state.room(b)) for b in range(state.batch)]  # most nodes, the root included
    room = torch.tensor(rooms, dtype=torch.int32, device=device)
    num_nodes = torch.ones(state.batch, dtype=torch.int32, device=device)
    growing = room > 1  # rows that get the next node
    tree = TokenTree.root_only(state.root)
    states: list[Tensor] = []
    siblings: list[Tensor] = []
    log_q: list[Tensor] = []
    for depth in range(1, min(num_tokens, max(rooms) - 1) + 1):
        logits = target.run(tree, 1, cache, plan, with_logits=readout is None)
        if logits.shape[-1] > target.vocab_size:  # a head padded beyond what can be embedded
            logits = torch.nn.functional.pad(
                logits[..., : target.vocab_size],
                (0, logits.shape[-1] - target.vocab_size),
                value=-torch.inf,
            )
        if shared:
            states.append(plan.captured[shared])
        if drawn:
            among = None
            if exit_readout is not None:
                logits = exit_readout.logits(plan.captured[last], logits.shape[-1])
                among = exit_readout.known
            count = min(most, logits.shape[-1] if among is None else len(among))
            ids, q = draw(state, logits[:, -1], tree.tokens[:, 1:], count, among)
            log_q.append(q)
            best = Candidates(ids, q.gather(1, ids).exp() if growth.asks else None)
        elif readout is None:
            best = best_of(logits[:, -1], most, growth.asks)
        else:
            best = best_after(plan.captured[last][:, -1], readout, most, growth.asks)
        best = best.to(device)
        ids = best.ids
        siblings.append(ids[:, 1:])
        tree = TokenTree.chain(state.root, torch.cat([tree.tokens[:, 1:], ids[:, :1]], dim=1))
        num_nodes = num_nodes + growing
        growing = growing & (room > depth + 1)
        if best.probable is not None:
            growing = growth.after(best, growing)
            if not growth.goes_on(growing):
                break
    length = tree.width
    # Drawn siblings stay, whatever they are.
    counts = growth.leaves() if not drawn else None
    tree = _with_leaves(tree, siblings, budget, counts)
    if tree.width > length:
        num_nodes = torch.where(room >= length, tree.width, room)
    resume = None
    if shared:
        # Last token and leaves still need the shared layers; the rest of them is verification.
        rest = LayerPlan(last=shared, taps=frozenset({shared}))
        target.run(tree, 1 + tree.width - length, cache, rest, with_logits=False)
        states.append(rest.captured[shared])
        resume = Resume(shared, torch.cat(states, dim=1))
    known = None
    if log_q:  # of the last token and the leaves nothing was drawn
        known = torch.stack(log_q, dim=1)
        known = torch.nn.functional.pad(known, (0, 0, 0, tree.width - known.shape[1]))
    expected = None if drawn else growth.expected(counts)
    if expected is not None:  # leaves may be cut to the budget
        expected = expected[:, : tree.width].to(device)
    return replace(tree, num_nodes=num_nodes, resume=resume, log_q=known, expected=expected)


def _with_leaves(
    chain: TokenTree, siblings: list[Tensor], budget: int, counts: list[int] | None = None
) -> TokenTree:
    """`chain` with `siblings` of its nodes 1, 2, ... ([B, any] each) as leaves behind it.

    `counts` says how many of every node, the best first; None all of them.
    """
    if counts is not None:
        siblings = [ids[:, :count] for ids, count in zip(siblings, counts, strict=True)]
    parents = [node for node, ids in enumerate(siblings) for _ in range(ids.shape[1])]
    parents = parents[: max(0, budget + 1 - chain.width)]
    if not parents:
        return chain
    leaves = torch.cat(siblings, dim=1)[:, : len(parents)]
    one = _topology(chain.width, tuple(parents), leaves.device)
    batch, width = chain.batch, chain.width + len(parents)
    return replace(
        chain,
        tokens=torch.cat([chain.tokens, leaves], dim=1),
        parents=one.parents.expand(batch, -1),
        depth=one.depth.expand(batch, -1),
        ancestors=one.ancestors.expand(batch, -1, -1),
        num_nodes=one.num_nodes.expand(batch),
        max_nodes=width,
        max_children=one.max_children,
    )


@lru_cache(maxsize=512)
def _topology(length: int, parents: tuple[int, ...], device: torch.device) -> TokenTree:
    """A chain of `length` nodes with leaves under `parents`, for one row; its tokens mean nothing.

    Made outside inference mode, as `chain_topology`.
    """
    rows = [-1, *range(length - 1), *parents]
    with torch.inference_mode(False):
        return TokenTree.from_topology(
            torch.zeros(1, len(rows), dtype=torch.int64, device=device), rows
        )

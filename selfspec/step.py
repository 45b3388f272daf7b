"""What one step emits: from an acceptance on the device to tokens on the host, cut at a stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from selfspec.sampling import Sampler
    from selfspec.state import Acceptance, DecodeState, TargetOutput
    from selfspec.stopping import StopRules
    from selfspec.tree import TokenTree


@dataclass(frozen=True, eq=False)
class Step:
    """One step of the loop, row by row.

    Attributes:
        tokens: New tokens; empty for a row that had ended.
        num_drafted: Draft tokens, the root not counted.
        num_accepted: Draft tokens among `tokens`.
        draft_depth: Length of the longest path that was drafted.
        num_nodes: Nodes that the target ran a row; 1 is a plain step.
        moved: Whether accepted nodes have to move up in the cache (never on a chain).
        is_prefill: Whether this was the prompt.
        drafter: Who drafted.
        seconds: Time by station.
        scores: Processed float32 scores [V] of every new token, if they are to be returned.
        logits: The target's float32 logits [V] of every new token, likewise.
        num_given: LOSSY: tokens that were kept unseen; empty if the request is exact.
        given_layers: Sum of the layers that each of those was drafted after, likewise.
        num_differing: Those of them of which the target says something else.
    """

    tokens: list[list[int]]
    num_drafted: list[int]
    num_accepted: list[int]
    draft_depth: list[int]
    num_nodes: int
    moved: bool
    is_prefill: bool
    drafter: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    scores: list[list[Tensor]] | None = None
    logits: list[list[Tensor]] | None = None
    num_given: list[int] = field(default_factory=list)
    given_layers: list[int] = field(default_factory=list)
    num_differing: list[int] = field(default_factory=list)


def emit(
    tree: TokenTree,
    output: TargetOutput,
    acceptance: Acceptance,
    state: DecodeState,
    stops: StopRules,
    sampler: Sampler,
    is_prefill: bool,
) -> Step:
    """Read the accepted tokens (the step's one host copy) and cut every row where it stops."""
    width = acceptance.path.shape[1]
    tokens, drafted, accepted, depths, moved = [], [], [], [], False
    scores: list[list[Tensor]] | None = [] if sampler.keep_scores else None
    logits: list[list[Tensor]] | None = [] if sampler.keep_logits else None
    rows = _rows(tree, acceptance)
    proposed = [
        [] if frozen else [*rest[width + 1 : width + 1 + count], next_token]
        for (count, next_token, _, _, *rest), frozen in zip(rows, state.frozen, strict=True)
    ]
    kept_tokens = stops.cut(state, proposed)
    for b, (count, _, num_nodes, depth, *rest) in enumerate(rows):
        walked, new = rest[:width], kept_tokens[b]
        kept = min(count, max(len(new) - 1, 0)) if not is_prefill else 0
        if not acceptance.in_place:
            moved = moved or walked[1 : kept + 1] != list(range(1, kept + 1))
        tokens.append(new)
        drafted.append(num_nodes - 1)
        accepted.append(min(count, len(new)))
        depths.append(depth)
        at = walked[: len(new)]
        if scores is not None and acceptance.scores is not None:
            scores.append(list(acceptance.scores[b, at].unbind(0)))
        if logits is not None:
            logits.append(list(output.logits[b, at].float().unbind(0)))
    given, layers, differing = _unseen(acceptance, tokens)
    return Step(
        tokens,
        drafted,
        accepted,
        depths,
        tree.width,
        moved,
        is_prefill,
        scores=scores,
        logits=logits,
        num_given=given,
        given_layers=layers,
        num_differing=differing,
    )


def _unseen(
    acceptance: Acceptance, tokens: list[list[int]]
) -> tuple[list[int], list[int], list[int]]:
    """Of the new tokens, how many were kept unseen, the layers of those, and how many differ."""
    if acceptance.given is None or acceptance.differs is None:
        return [], [], []
    counts = list(map(len, tokens))
    layers = [row[:n] for row, n in zip(acceptance.given.tolist(), counts, strict=True)]
    differs = [row[:n] for row, n in zip(acceptance.differs.tolist(), counts, strict=True)]
    given = [sum(layer > 0 for layer in row) for row in layers]
    return given, list(map(sum, layers)), list(map(sum, differs))


def _rows(tree: TokenTree, acceptance: Acceptance) -> list[list[int]]:
    if acceptance.table is not None:
        rows: list[list[int]] = acceptance.table.tolist()
        return rows
    if tree.width == 1:
        return [[0, token, 1, 0, 0, -1] for token in acceptance.next_token.tolist()]
    return step_table(tree, acceptance).tolist()


def step_table(tree: TokenTree, acceptance: Acceptance) -> Tensor:
    """What the host reads of a step, in one tensor.

    Returns:
        int64 [B, 4 + 2 P] with P columns of `path`: num_accepted, next_token, nodes, draft depth,
        the path, and the tokens along it.
    """
    path, device = acceptance.path, acceptance.path.device
    nodes = torch.arange(tree.width, device=device) < tree.num_nodes.to(device)[:, None]
    columns = [
        acceptance.num_accepted[:, None],
        acceptance.next_token[:, None],
        tree.num_nodes.to(device)[:, None],
        (tree.depth.to(device) * nodes).amax(1, keepdim=True),
        path,
        tree.tokens.to(device).gather(1, path.clamp(min=0).long()),
    ]
    return torch.cat(columns, dim=1)

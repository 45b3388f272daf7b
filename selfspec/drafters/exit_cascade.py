"""One draft through several exits: a token goes on to the next one until it is believed.

Schuster et al. 2022 (CALM), https://arxiv.org/abs/2207.07061, look after every layer. Layers
between two exits run for all tokens at once that left before them: keys and values of those have to
be there for the token that goes on. No layer runs twice for a token, verification included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from selfspec.drafters.candidates import Candidates, best_after, best_of
from selfspec.patch import LayerPlan
from selfspec.tree import Resume, TokenTree

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec.drafters.exit_readout import ExitReadout
    from selfspec.readout import Readout
    from selfspec.state import DecodeState


class Judge(Protocol):
    """Says which tokens of an exit are believed."""

    def __call__(self, exit_layer: int, found: Candidates) -> Tensor:
        """For every row, bool [B] on the host.

        Args:
            exit_layer: A count of layers.
            found: What the exit says, with probabilities.
        """
        ...


def draft_cascade(
    state: DecodeState,
    exits: Sequence[int],
    num_tokens: int,
    judge: Judge,
    exit_readout: ExitReadout | None = None,
) -> TokenTree:
    """Draft one chain a row, and give (`TokenTree.given`) what is believed of it.

    A row's chain ends with the first token that no exit is believed on: the deepest one's. So in a
    batch it gets the chain that it would get alone.

    Args:
        state: Where decoding stands.
        exits: Counts of layers, rising. More than one asks for a model whose layers can be resumed.
        num_tokens: Longest chain.
        judge: Whom to believe.
        exit_readout: Trained for the state after the exit, where there is one exit only; None
            reads tokens as the model does after its last layer.
    """
    climb = _Climb(state, exits, exit_readout)
    rooms = [max(1, state.room(b)) for b in range(state.batch)]  # most nodes, the root included
    growing = torch.tensor(rooms) > 1
    sure = torch.ones(state.batch, dtype=torch.bool)
    num_nodes = torch.ones(state.batch, dtype=torch.int32)
    after = [torch.zeros(state.batch, dtype=torch.int32)]  # layers before every node; 0: not given
    for depth in range(1, min(num_tokens, max(rooms) - 1) + 1):
        believed = torch.zeros(state.batch, dtype=torch.int32)
        ids = None
        for exit_layer in exits:
            found = climb.to(exit_layer)
            open_ = believed == 0
            ids = found.ids if ids is None else torch.where(_like(open_, ids), found.ids, ids)
            believed = torch.where(open_ & judge(exit_layer, found), exit_layer, believed)
            if bool((believed > 0)[growing].all()):
                break
        assert ids is not None
        climb.append(ids)
        num_nodes = num_nodes + growing
        sure = sure & (believed > 0)
        after.append(torch.where(sure, believed, 0))
        growing = growing & sure & (torch.tensor(rooms) > depth + 1)
        if not bool(growing.any()):
            break
    tree, resume = climb.end()
    device = state.root.device
    given = torch.stack(after, dim=1).to(device)
    return replace(tree, num_nodes=num_nodes.to(device), resume=resume, given=given)


def _like(rows: Tensor, ids: Tensor) -> Tensor:
    """Rows [B] beside ids [B, 1]."""
    return rows.to(ids.device)[:, None]


class _Climb:
    """The nodes of a draft, and how far up the layers each has come."""

    def __init__(
        self, state: DecodeState, exits: Sequence[int], exit_readout: ExitReadout | None
    ) -> None:
        self._state, self._exits = state, list(exits)
        architecture = state.target.architecture
        self._resumable = architecture.resumable
        own = architecture.readout
        usable = own if own is not None and own.usable else None
        self._readout: Readout | ExitReadout | None = exit_readout or usable
        self._last = architecture.num_layers
        self._tree = TokenTree.root_only(state.root)
        self._states: list[list[Tensor]] = [[] for _ in exits]  # after every exit, of nodes 0, 1..
        self._passed = [0] * len(exits)  # nodes

    def to(self, exit_layer: int) -> Candidates:
        """What the exit says after the last node; the exits before it have been asked."""
        captured, logits = self._run(self._exits.index(exit_layer), with_logits=True)
        if captured is not None and self._readout is not None:
            found = best_after(captured[:, -1], self._readout, 1, measured=True)
        else:
            found = best_of(logits[:, -1, : self._state.target.vocab_size], 1, measured=True)
        return found.to(self._state.root.device)

    def append(self, ids: Tensor) -> None:
        """Go on with the tokens [B, 1]."""
        tokens = torch.cat([self._tree.tokens[:, 1:], ids], dim=1)
        self._tree = TokenTree.chain(self._state.root, tokens)

    def end(self) -> tuple[TokenTree, Resume | None]:
        """All nodes behind the last exit; the rest of the layers is verification."""
        if not self._resumable:
            return self._tree, None
        for level in range(len(self._exits)):
            self._run(level, with_logits=False)
        return self._tree, Resume(self._exits[-1], torch.cat(self._states[-1], dim=1))

    def _run(self, level: int, with_logits: bool) -> tuple[Tensor | None, Tensor]:
        """Bring the nodes that are not there yet to an exit; the state after it, and logits."""
        state, tree = self._state, self._tree
        count = tree.width - self._passed[level]
        exit_layer = self._exits[level]
        plan = LayerPlan(last=exit_layer)
        if level:
            before = torch.cat(self._states[level - 1], dim=1)
            plan.first, plan.resume = self._exits[level - 1], before[:, -count:]
        taps = {exit_layer} if self._resumable else set()
        with_logits = with_logits and self._readout is None
        if self._readout is not None:
            taps.add(self._last)
        plan.taps = frozenset(taps)
        logits = state.target.run(tree, count, state.cache, plan, with_logits=with_logits)
        self._passed[level] = tree.width
        if self._resumable:
            self._states[level].append(plan.captured[exit_layer])
        return plan.captured.get(self._last), logits

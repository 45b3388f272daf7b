"""What travels between the stations of a step, apart from the tree itself."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from selfspec.costs import StepCosts

if TYPE_CHECKING:
    from selfspec.cache import TreeCache
    from selfspec.sampling import Sampler
    from selfspec.target import Target


@dataclass(frozen=True, eq=False)
class TargetOutput:
    """What one target forward gives.

    Attributes:
        logits: [B, N, V] next-token logits after every node (N = 1 after the prefill).
        hidden: {layer: [B, N, C]} input of every tapped layer; layer L is the last layer's output.
            After the prefill N is the padded prompt length.
        acceptance: What was accepted, where acceptance was part of the forward; else None.

    `logits` may be overwritten by the next forward; whoever wants to keep them copies.
    """

    logits: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)
    acceptance: Acceptance | None = None


@dataclass(frozen=True, eq=False)
class Acceptance:
    """What the target keeps of a tree.

    Attributes:
        path: int32 [B, depth + 1] accepted nodes, the root first, -1 padded.
        num_accepted: int32 [B], accepted draft tokens; `next_token` is not counted.
        next_token: int64 [B], the recovered or bonus token.
        scores: Processed float32 scores [B, N, V] the choice was made from, if they were asked for.
        table: What the host reads of a step, if it is made already; see `step_table`.
        in_place: Whether the cache has the accepted nodes where they belong.
        differs: LOSSY: bool [B, N - 1], which of the nodes 1.. were kept though the target says
            something else. None where nothing is kept unseen.
        given: int32 [B, N - 1], after how many layers each of them was kept unseen, 0 if it was
            not; None likewise.
    """

    path: Tensor
    num_accepted: Tensor
    next_token: Tensor
    scores: Tensor | None = None
    table: Tensor | None = None
    in_place: bool = False
    differs: Tensor | None = None
    given: Tensor | None = None


class DecodeState:
    """The sequences being decoded. Only `commit` and `freeze` change it; drafters read.

    Attributes:
        target: The model, for drafters that run parts of it.
        cache: Keys and values of all committed tokens but the root.
        root: int64 [B], last committed token of every row, on the model's device.
        start: Left padding of every row.
        length: Tokens of every row so far, padding included.
        prompt_length: Length of the prompt, padding included (the same for all rows).
        limit: Length at which a row must end.
        sampler: How the target's tokens are chosen; drafts that are drawn follow it.
        costs: What steps take, for drafters that weigh what they draft.
        frozen: Rows that take no more tokens.
    """

    def __init__(
        self,
        target: Target,
        cache: TreeCache,
        input_ids: Tensor,
        start: list[int],
        limit: int,
        sampler: Sampler | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        self.target = target
        self.costs = StepCosts() if costs is None else costs
        self.sampler = sampler
        self.cache = cache
        self.start = start
        self.limit = limit
        self.prompt_length = input_ids.shape[1]
        self.length = [self.prompt_length] * input_ids.shape[0]
        self.frozen = [False] * input_ids.shape[0]
        self.device = input_ids.device
        self._ids = input_ids.cpu().long().numpy().copy()
        last = input_ids[:, -1] if self.prompt_length else input_ids.new_zeros(input_ids.shape[0])
        self.root = last.to(target.device, torch.int64)

    def of_a_pool(self) -> DecodeState:
        """The same to read, for a drafter beside others; see `StepCosts.of_a_pool`."""
        view = copy.copy(self)
        view.costs = self.costs.of_a_pool()
        return view

    @property
    def batch(self) -> int:
        """B."""
        return len(self.length)

    @property
    def done(self) -> bool:
        """Whether every row has ended."""
        return all(self.frozen)

    def freeze(self, frozen: list[bool]) -> None:
        """Say which rows take no more tokens."""
        self.frozen = frozen
        self.cache.mark_ended(frozen)

    def tokens(self, b: int) -> np.ndarray:
        """Row b without its padding, int64 [T]; a view, do not keep it across steps."""
        return self._ids[b, self.start[b] : self.length[b]]

    def prefix(self, b: int, new: list[int] | None = None) -> Tensor:
        """Row b with its padding and perhaps some more tokens, int64 [T] where the prompt was."""
        ids = np.concatenate([self._ids[b, : self.length[b]], np.array(new or [], np.int64)])
        return torch.from_numpy(ids).to(self.device)

    def ending(self, b: int, count: int) -> list[int]:
        """The last `count` tokens of row b, or all there are, padding included."""
        ids: list[int] = self._ids[b, max(self.length[b] - count, 0) : self.length[b]].tolist()
        return ids

    def generated(self, b: int) -> int:
        """Tokens that row b has gained since the prompt."""
        return self.length[b] - self.prompt_length

    def positions(self) -> list[int]:
        """`generated` of every row; frozen rows, which draw nothing, keep up with the others."""
        moving = [self.generated(b) for b in range(self.batch) if not self.frozen[b]]
        front = max(moving, default=0)
        return [front if self.frozen[b] else self.generated(b) for b in range(self.batch)]

    def room(self, b: int) -> int:
        """Tokens that row b can still take."""
        return 0 if self.frozen[b] else self.limit - self.length[b]

    @property
    def max_draft_tokens(self) -> int:
        """Deepest draft that some row could use: the target adds a token of its own.

        None goes past the last position of the model, in any row: where plain decoding ends at that
        position or before it, so does this; where it fails there, this fails there.
        """
        longest = max(self.room(b) for b in range(self.batch)) - 1
        rows = zip(self.cache.lengths, self.frozen, strict=True)
        roots = [length for length, frozen in rows if not frozen]
        return max(0, min(longest, self.cache.positions - 1 - max(roots, default=0)))

    def sequences(self, length: int, pad: int = 0) -> Tensor:
        """int64 [B, length]; rows are cut, or padded with `pad`, to `length`."""
        out = np.full((self.batch, length), pad, dtype=np.int64)
        for b, own in enumerate(self.length):
            out[b, : min(own, length)] = self._ids[b, : min(own, length)]
        return torch.from_numpy(out).to(self.device)

    def commit(
        self,
        emitted: list[list[int]],
        acceptance: Acceptance | None,
        *,
        moved: bool = True,
    ) -> None:
        """Append tokens and keep the keys and values that belong to them.

        Args:
            emitted: New tokens of every row: accepted drafts, then the next token; possibly cut
                short by a stopping rule, empty for a frozen row.
            acceptance: Where the accepted nodes are; None after the prefill, when the cache holds
                exactly the prompt.
            moved: False if all accepted nodes are in place already (chains).
        """
        longest = max(length + len(new) for length, new in zip(self.length, emitted, strict=True))
        if longest > self._ids.shape[1]:
            grown = np.zeros((self.batch, min(max(longest, 2 * longest), self.limit)), np.int64)
            grown[:, : self._ids.shape[1]] = self._ids
            self._ids = grown
        for b, new in enumerate(emitted):
            end = self.length[b] + len(new)
            self._ids[b, self.length[b] : end] = new
            self.length[b] = end
        if acceptance is not None:
            counts = [len(new) for new in emitted]
            self.cache.commit(acceptance.path, counts, moved)
        last = [int(self._ids[b, length - 1]) for b, length in enumerate(self.length)]
        self.root = torch.tensor(last, device=self.root.device)

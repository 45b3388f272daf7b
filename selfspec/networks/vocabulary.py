"""The head of a draft network, over all tokens or over those that are worth drafting.

A head over the whole vocabulary would cost more than the rest of a small network. Tokens outside
the draft vocabulary are never drafted; the target may still choose them, so the text is the same.
Zhao et al. 2025 (FR-Spec), https://arxiv.org/abs/2502.14856.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class DraftHead(nn.Module):
    """From states to logits of the draft vocabulary.

    Args:
        size: C of the states.
        vocab_size: V of the target.
        draft_vocab_size: Tokens that can be drafted, Vd; None: all of them.
        own: Whether the head is trained. Else its rows are those of the target's head, which
            `attach` takes.
        ids: int64 [Vd], ascending: which tokens; set later by `choose` if it is not known yet.
    """

    ids: Tensor | None
    rows: Tensor | None

    def __init__(
        self, size: int, vocab_size: int, draft_vocab_size: int | None, *, own: bool
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.size = draft_vocab_size or vocab_size
        if self.size > vocab_size:
            raise ValueError(
                f"draft_vocab_size={draft_vocab_size} is more than vocab_size={vocab_size}."
            )
        self.weight = nn.Parameter(torch.zeros(self.size, size)) if own else None
        ids = torch.arange(self.size) if draft_vocab_size is not None else None
        self.register_buffer("ids", ids)
        self.register_buffer("rows", None, persistent=False)

    @property
    def matrix(self) -> Tensor:
        """[Vd, C].

        Raises:
            RuntimeError: If it is the target's and `attach` was not called.
        """
        if self.weight is not None:
            return self.weight
        if self.rows is None:
            raise RuntimeError("the head uses the target's rows: call attach(weight) first.")
        return self.rows

    def choose(self, ids: Tensor) -> None:
        """Set the draft vocabulary.

        Args:
            ids: int64 [Vd], ascending and without duplicates.

        Raises:
            ValueError: If they do not fit.
        """
        if self.ids is None or ids.shape != self.ids.shape:
            raise ValueError(f"ids must be {self.size} tokens, got {tuple(ids.shape)}.")
        rising = bool((ids[1:] > ids[:-1]).all())
        if not rising or int(ids[0]) < 0 or int(ids[-1]) >= self.vocab_size:
            raise ValueError(f"ids must be ascending and within 0..{self.vocab_size - 1}.")
        self.ids.copy_(ids)

    def attach(self, weight: Tensor) -> None:
        """Take the rows of the target's LM head [V, C] that it needs, if it needs any.

        The whole head is shared with the target, a reduced one is a copy.
        """
        if self.weight is None:
            rows = weight.detach()[: self.vocab_size]
            self.rows = rows if self.ids is None else rows[self.ids.to(rows.device)]

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [..., Vd] of states [..., C]."""
        return functional.linear(hidden, self.matrix)

    def spread(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits [..., Vd] as [..., vocab_size]; -inf for tokens that are never drafted."""
        if self.ids is None:
            return functional.pad(logits, (0, vocab_size - logits.shape[-1]), value=float("-inf"))
        out = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
        return out.index_copy_(-1, self.ids, logits)

    def tokens(self, indices: Tensor) -> Tensor:
        """Ids of the vocabulary for indices into the draft vocabulary."""
        return indices if self.ids is None else self.ids[indices]

    def indices(self, device: torch.device | None = None) -> Tensor:
        """int64 [V]: index into the draft vocabulary of every token, -1 outside."""
        ids = torch.arange(self.size) if self.ids is None else self.ids.cpu()
        out = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        out[ids] = torch.arange(self.size)
        return out.to(device)

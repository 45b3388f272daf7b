"""Heads that draft from the target's last hidden state.

Head k = 1, 2, ... predicts the k-th token after the root from the state whose logits gave the root.
Medusa heads know nothing but that state, so that all of them are computed at once (Cai et al. 2024,
https://arxiv.org/abs/2401.10774); conditioned heads see the tokens drafted before theirs as well
(Ankner et al. 2024, Hydra, https://arxiv.org/abs/2402.05109).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from selfspec.networks.blocks import ResidualBlock
from selfspec.networks.sizes import check_counts
from selfspec.networks.vocabulary import DraftHead

_ROUNDING = 1e-3  # of sums of measured shares


@dataclass(frozen=True)
class HeadsConfig:
    """Sizes and kind of a `HeadsNetwork`, and how good it was found to be.

    Attributes:
        hidden_size: C of the target.
        vocab_size: V of the target.
        num_heads: How many tokens are drafted.
        num_layers: Residual blocks of a head.
        conditioned: Whether a head sees the root and the tokens drafted before its own.
        own_head: Whether every head has an LM head of its own, or all use rows of the target's.
        draft_vocab_size: Tokens that can be drafted; None: all of the vocabulary.
        accuracies: [num_heads, any number of ranks]: how often the target's token is the best, the
            second-best, ... of a head, where all tokens drafted before it are right. Trees are
            fitted to them; None: not measured.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    conditioned: bool = True
    own_head: bool = False
    draft_vocab_size: int | None = None
    accuracies: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what makes no network; take accuracies of any sequences.

        Raises:
            ValueError: If a size is too small, or `accuracies` is no table of probabilities.
        """
        sizes = {"hidden_size": 1, "vocab_size": 1, "num_heads": 1, "num_layers": 0}
        check_counts(self, ("draft_vocab_size",), draft_vocab_size=1, **sizes)
        if self.accuracies is not None:
            object.__setattr__(self, "accuracies", self._checked(self.accuracies))

    def _checked(self, rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
        table = tuple(tuple(float(share) for share in row) for row in rows)
        if len(table) != self.num_heads or not all(table):
            raise ValueError(
                f"accuracies has {len(table)} rows; it takes one of a rank or more for each of "
                f"num_heads={self.num_heads}."
            )
        for row in table:
            if not (all(0 <= share <= 1 for share in row) and sum(row) <= 1 + _ROUNDING):
                raise ValueError(
                    f"accuracies has the row {list(row)}; it must be shares, each in 0..1, that "
                    "sum up to 1 at most."
                )
        return table


class HeadsNetwork(nn.Module):
    """`num_heads` heads over the target's final state (after its last norm).

    New heads say what the target's head says of that state: fusion and blocks add nothing yet, and
    LM heads of their own are zero.

    Args:
        config: Sizes.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        c, size = config, config.hidden_size
        # Head k reads the state, and the embeddings of the root and of k - 1 drafted tokens.
        self.fuse = nn.ModuleList(
            nn.Linear((k + 2) * size, size) for k in range(c.num_heads if c.conditioned else 0)
        )
        for parameter in self.fuse.parameters():
            nn.init.zeros_(parameter)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(size) for _ in range(c.num_layers)))
            for _ in range(c.num_heads)
        )
        self.heads = nn.ModuleList(
            DraftHead(size, c.vocab_size, c.draft_vocab_size, own=c.own_head)
            for _ in range(c.num_heads if c.own_head else 1)
        )

    @property
    def accuracies(self) -> tuple[tuple[float, ...], ...] | None:
        """See `HeadsConfig.accuracies`, where they are kept; assign a tensor or a table.

        Raises:
            ValueError: If what is assigned is no table of probabilities.
        """
        return self.config.accuracies

    @accuracies.setter
    def accuracies(self, table: Tensor | Sequence[Sequence[float]] | None) -> None:
        if isinstance(table, Tensor):
            table = table.tolist()
        self.config = replace(self.config, accuracies=table)  # type: ignore[arg-type]

    def head(self, k: int) -> DraftHead:
        """The LM head that head `k` (0-based) reads tokens with."""
        head = self.heads[k if self.config.own_head else 0]
        assert isinstance(head, DraftHead)
        return head

    def choose(self, ids: Tensor) -> None:
        """Set the draft vocabulary of all heads; see `DraftHead.choose`."""
        for k in range(len(self.heads)):
            self.head(k).choose(ids)

    def attach(self, weight: Tensor) -> None:
        """Give heads without an LM head of their own the target's, [V, C]."""
        for k in range(len(self.heads)):
            self.head(k).attach(weight)

    def forward(self, k: int, hidden: Tensor, path: Tensor | None = None) -> Tensor:
        """What the LM head of head `k` reads.

        Args:
            k: 0-based; head k drafts the token k + 1 after the root.
            hidden: [..., C] target's final state before the root.
            path: [..., k + 1, C] embeddings of the root and the k tokens after it; unused by heads
                that are not conditioned.

        Returns:
            [..., C]

        Raises:
            ValueError: If the heads are conditioned and there is no path.
        """
        x = hidden
        if self.config.conditioned:
            if path is None:
                raise ValueError("path=None: conditioned heads need the tokens before theirs.")
            inputs = torch.cat([hidden, path[..., : k + 1, :].flatten(-2)], dim=-1)
            x = x + silu(self.fuse[k](inputs))
        out: Tensor = self.blocks[k](x)
        return out

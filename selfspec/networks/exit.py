"""A trained exit: reads tokens off the state after the first layers.

What the remaining layers would do to the state is approximated by one layer, then comes the head.
Without attention it is like the tuned lens (Belrose et al. 2023, https://arxiv.org/abs/2303.08112),
whose translator is linear; with attention over the states of earlier tokens like Kangaroo's adapter
(Liu et al. 2024, https://arxiv.org/abs/2404.18911).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from selfspec.networks.attention import Angles, Attend, AttentionLayer
from selfspec.networks.blocks import GatedMLP, RMSNorm
from selfspec.networks.sizes import check_attention, check_counts
from selfspec.networks.vocabulary import DraftHead


@dataclass(frozen=True)
class ExitConfig:
    """Sizes of an `ExitNetwork`.

    Attributes:
        hidden_size: C of the target.
        vocab_size: V of the target.
        exit_layer: How many layers have run, a count.
        intermediate_size: Of the MLP.
        draft_vocab_size: Tokens that can be drafted; None: all of the vocabulary.
        own_head: Whether the exit has an LM head of its own, or uses rows of the target's.
        rms_norm_eps: Of the norms.
        num_heads: H of its attention; 0: it has none, and reads one state at a time.
        num_key_value_heads: K.
        head_dim: D.
        max_positions: Positions that its attention was made for.
        rope: Rotary parameters, as in a transformers config.
    """

    hidden_size: int
    vocab_size: int
    exit_layer: int
    intermediate_size: int
    draft_vocab_size: int | None = None
    own_head: bool = False
    rms_norm_eps: float = 1e-5
    num_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_positions: int = 2048
    rope: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )

    def __post_init__(self) -> None:
        """Check that the sizes fit together.

        Raises:
            ValueError: If they do not.
        """
        sizes = ("hidden_size", "vocab_size", "exit_layer", "intermediate_size")
        check_counts(self, ("draft_vocab_size",), draft_vocab_size=1, **dict.fromkeys(sizes, 1))
        if self.num_heads:
            check_attention(self)


class ExitNetwork(AttentionLayer):
    """From the state after `exit_layer` layers to draft tokens.

    Args:
        config: Sizes.
    """

    def __init__(self, config: ExitConfig) -> None:
        super().__init__()
        self.config = config
        c, size = config, config.hidden_size
        if c.num_heads:
            self.attention_layernorm = RMSNorm(size, c.rms_norm_eps)
            self.make_attention(size, size, c)
        self.input_layernorm = RMSNorm(size, c.rms_norm_eps)
        self.mlp = GatedMLP(size, c.intermediate_size)
        self.norm = RMSNorm(size, c.rms_norm_eps)
        self.head = DraftHead(size, c.vocab_size, c.draft_vocab_size, own=c.own_head)

    def pack(self) -> None:
        """Join products of one input, see `Packed`; not for a network that is trained or saved."""
        if self.config.num_heads:
            self.pack_attention()
        self.mlp.pack()

    def forward(
        self, hidden: Tensor, angles: Angles | None = None, attend: Attend | None = None
    ) -> Tensor:
        """What the head reads of states.

        Args:
            hidden: [B, T, C]; any [..., C] without attention.
            angles: Of their positions, by `rotary`; with attention alone.
            attend: Attention over whatever the caller keeps; with attention alone.

        Returns:
            The shape of `hidden`.
        """
        if self.config.num_heads:
            assert angles is not None
            assert attend is not None
            hidden = hidden + self.attended(self.attention_layernorm(hidden), angles, attend)
        out: Tensor = self.norm(hidden + self.mlp(self.input_layernorm(hidden)))
        return out

    def entries(self, hidden: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, T, D] of states [B, T, C]; for an exit with attention."""
        return self.keys_and_values(self.attention_layernorm(hidden), angles)

"""A trained exit: reads tokens off the state after the first layers.

What the remaining layers would do to the state is approximated by one gated block, then comes the
head. Like the tuned lens (Belrose et al. 2023, https://arxiv.org/abs/2303.08112), whose translator
is linear; Kangaroo (Liu et al. 2024, https://arxiv.org/abs/2404.18911) has attention there.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from selfspec.networks.blocks import GatedMLP, RMSNorm
from selfspec.networks.vocabulary import DraftHead


@dataclass(frozen=True)
class ExitConfig:
    """Sizes of an `ExitNetwork`.

    Attributes:
        hidden_size: C of the target.
        vocab_size: V of the target.
        exit_layer: How many layers have run, a count.
        intermediate_size: Of the block.
        draft_vocab_size: Tokens that can be drafted; None: all of the vocabulary.
        own_head: Whether the exit has an LM head of its own, or uses rows of the target's.
        rms_norm_eps: Of the norms.
    """

    hidden_size: int
    vocab_size: int
    exit_layer: int
    intermediate_size: int
    draft_vocab_size: int | None = None
    own_head: bool = False
    rms_norm_eps: float = 1e-5


class ExitNetwork(nn.Module):
    """From the state after `exit_layer` layers to draft tokens.

    Args:
        config: Sizes.
    """

    def __init__(self, config: ExitConfig) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = DraftHead(
            config.hidden_size, config.vocab_size, config.draft_vocab_size, own=config.own_head
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """What the head reads, [..., C], of states [..., C]."""
        out: Tensor = self.norm(hidden + self.mlp(self.input_layernorm(hidden)))
        return out

"""The network of a feature drafter: one decoder layer that runs on the target's hidden states.

At position t it reads two things side by side: the embedding of token t + 1, and what the target
knew at t. For accepted tokens that is the target's own hidden states, several layers fused into
one; for drafted tokens, which the target has not seen, it is the output of this layer one position
before.

Li et al. 2025 (EAGLE-3), https://arxiv.org/abs/2503.01840, and 2024 (EAGLE),
https://arxiv.org/abs/2401.15077, whose layer has no norms in front.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selfspec.networks.attention import Angles, Attend, AttentionLayer
from selfspec.networks.blocks import GatedMLP, RMSNorm
from selfspec.networks.sizes import check_attention, check_counts, check_layers
from selfspec.networks.vocabulary import DraftHead


@dataclass(frozen=True)
class FeatureConfig:
    """Sizes and conventions of a `FeatureNetwork`.

    Attributes:
        target_hidden_size: C of the target.
        vocab_size: V of the target.
        taps: Layers of the target whose input is read; L is the last layer's output, before the
            final norm.
        hidden_size: C of the layer.
        intermediate_size: Of its MLP.
        num_heads: H.
        num_key_value_heads: K.
        head_dim: D.
        draft_vocab_size: Tokens that can be drafted; None: all of the vocabulary.
        own_head: Whether the network has an LM head of its own, or uses rows of the target's.
        layout: "eagle3": norms before the layer, a norm before the head, and taps fused alone.
            "eagle": one tap, read after the target's final norm and fused with the embedding; no
            norms but the one before the MLP.
        norm_before_residual: Whether the residual stream starts after the norm of the feature
            ("eagle3" only).
        bias: Whether queries, keys and values have biases.
        fusion_bias: Whether `fc` has one.
        rms_norm_eps: Of all norms.
        max_positions: Positions that it was made for.
        rope: Rotary parameters, as in a transformers config (`rope_type`, `rope_theta`, ...).
    """

    target_hidden_size: int
    vocab_size: int
    taps: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    draft_vocab_size: int | None = None
    own_head: bool = True
    layout: Literal["eagle3", "eagle"] = "eagle3"
    norm_before_residual: bool = False
    bias: bool = False
    fusion_bias: bool = False
    rms_norm_eps: float = 1e-5
    max_positions: int = 2048
    rope: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )

    def __post_init__(self) -> None:
        """Check that the sizes fit together.

        Raises:
            ValueError: If they do not.
        """
        object.__setattr__(self, "taps", tuple(self.taps))
        sizes = ("target_hidden_size", "vocab_size", "hidden_size", "intermediate_size")
        check_counts(self, ("draft_vocab_size",), draft_vocab_size=1, **dict.fromkeys(sizes, 1))
        check_attention(self)
        check_layers("taps", self.taps)
        if not self.own_head and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"own_head=False needs hidden_size={self.hidden_size} to be the target's, "
                f"{self.target_hidden_size}."
            )
        if self.layout not in ("eagle3", "eagle"):
            raise ValueError(f"layout={self.layout!r} must be 'eagle3' or 'eagle'.")
        if not self.taps or (self.layout == "eagle" and len(self.taps) != 1):
            raise ValueError(f"taps={self.taps} do not fit layout={self.layout!r}.")


class FeatureNetwork(AttentionLayer):
    """One decoder layer over (embedding of the next token, feature of this position).

    The target's embeddings are not part of it: whoever calls passes embedded tokens.

    Args:
        config: Sizes.
    """

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.config = config
        c, size = config, config.hidden_size
        eagle3 = c.layout == "eagle3"
        fused = len(c.taps) * c.target_hidden_size + (0 if eagle3 else c.target_hidden_size)
        self.fc = nn.Linear(fused, size, bias=c.fusion_bias)
        if eagle3:
            self.input_layernorm = RMSNorm(c.target_hidden_size, c.rms_norm_eps)
            self.hidden_norm = RMSNorm(size, c.rms_norm_eps)
            self.norm = RMSNorm(size, c.rms_norm_eps)
        width = size + (c.target_hidden_size if eagle3 else 0)
        self.make_attention(width, size, c, c.bias)
        self.post_attention_layernorm = RMSNorm(size, c.rms_norm_eps)
        self.mlp = GatedMLP(size, c.intermediate_size)
        self.head = DraftHead(size, c.vocab_size, c.draft_vocab_size, own=c.own_head)

    def pack(self) -> None:
        """Join products of one input, see `Packed`; not for a network that is trained or saved."""
        self.pack_attention()
        self.mlp.pack()

    def fuse(self, taps: Tensor) -> Tensor:
        """From the target's states [..., n C], in the order of `config.taps`, to features."""
        fused: Tensor = self.fc(taps) if self.config.layout == "eagle3" else taps
        return fused

    def forward(self, embedded: Tensor, feature: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """One draft step.

        Args:
            embedded: [B, T, C] embeddings of the tokens one position on.
            feature: [B, T, C] fused features, or outputs of the step before.
            angles: Of the positions, by `rotary`.
            attend: Attention over whatever the caller keeps.

        Returns:
            [B, T, C]: features of the next positions; `head(self.readout(...))` has the logits.
        """
        return self.layer(*self.inputs(embedded, feature), angles, attend)

    def inputs(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """What attention projects, and where the residual stream starts.

        Args:
            embedded: As for `forward`.
            feature: Likewise.

        Returns:
            [B, T, inputs of `q_proj`] and [B, T, C].
        """
        if self.config.layout == "eagle3":
            normed = self.hidden_norm(feature)
            x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
            return x, normed if self.config.norm_before_residual else feature
        fused = self.fc(torch.cat([embedded, feature], dim=-1))
        return fused, fused

    def layer(self, x: Tensor, residual: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """`forward` from what `inputs` gives, of all its positions or of some; [B, T, C]."""
        residual = residual + self.attended(x, angles, attend)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out

    def readout(self, hidden: Tensor) -> Tensor:
        """What the head reads of an output [..., C]."""
        normed: Tensor = self.norm(hidden) if self.config.layout == "eagle3" else hidden
        return normed

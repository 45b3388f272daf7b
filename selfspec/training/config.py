"""How a draft is trained: one object, printed at the start and saved with the weights."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Real
from typing import Literal, get_args

from selfspec.config import Options
from selfspec.networks.sizes import check_counts
from selfspec.training.losses import Loss

Kind = Literal["feature", "heads", "exit"]
Optimizer = Literal["adamw", "muon"]
Precision = Literal["bfloat16", "float32"]
Start = Literal["head", "layer", "random"]


@dataclass(frozen=True)
class TrainConfig(Options):
    """What is trained, on how much, and how. Sizes that are None are the target's.

    Attributes:
        kind: "feature": one layer over fused hidden states; "heads": heads over the last state;
            "exit": a readout of an early state.
        taps: Layers whose input a feature network reads (L: the last layer's output); None: 2,
            L // 2 and L - 3.
        intermediate_size: Inner size of the MLP of a feature network or an exit.
        draft_vocab_size: Tokens that can be drafted: the most frequent ones in answers, and those
            that end a text; None: all.
        own_head: Whether the LM head is trained, or is made of rows of the target's.
        num_draft_heads: Heads of a heads network.
        num_layers: Residual blocks of a head.
        conditioned: Whether heads see the tokens drafted before theirs.
        exit_layer: How many layers run before the exit; None: a third.
        exit_attention: Whether an exit looks at earlier tokens, too.
        steps: Draft steps that a feature network is unrolled for; of an exit, the length of the
            chain that tau is estimated for. Heads have one step each.
        loss: See `selfspec.training.losses`.
        step_decay: Factor of the loss from one step or head to the next.
        prompt_weight: Weight of positions in prompts, next to 1 for answers.
        optimizer: "adamw", or "muon": Muon for matrices other than LM heads, AdamW for the rest.
        learning_rate: Of AdamW.
        muon_learning_rate: Of Muon.
        weight_decay: Of both.
        clip: Largest norm of the gradient.
        warmup_steps: Over which the learning rate rises, or over a tenth of the tokens if that is
            less; it then falls linearly to `final_learning_rate` of itself.
        final_learning_rate: A share.
        tokens_per_batch: Most positions of a batch, padding included; a longer sequence has a batch
            of its own.
        total_tokens: Tokens in all, prompts included, padding not; more than there are means
            several passes.
        held_out: Share of the prompts that is kept for the estimate, about.
        max_held_out: About how many sequences are kept for it at most.
        evaluate_every: Steps between estimates.
        log_every: Steps between lines of the log.
        checkpoint_seconds: Longest time between two checkpoints.
        ranks: R, how many ranks of the draft's tokens the estimate counts.
        start: "layer": heads, final norm and a feature network's layer are the target's at first,
            its last one, and an exit's block has inner weights of that; what does not fit is
            random. "head": heads and final norm alone. "random": nothing.
        dtype: Of the network while it trains; the optimizer works in float32.
        seed: Of everything random.
    """

    kind: Kind = "feature"
    taps: tuple[int, ...] | None = None
    intermediate_size: int | None = None
    draft_vocab_size: int | None = 8192
    own_head: bool = True
    num_draft_heads: int = 4
    num_layers: int = 1
    conditioned: bool = True
    exit_layer: int | None = None
    exit_attention: bool = True
    steps: int = 3
    loss: Loss = "kl"
    step_decay: float = 0.8
    prompt_weight: float = 0.0
    optimizer: Optimizer = "adamw"
    learning_rate: float = 2e-3
    muon_learning_rate: float = 0.02
    weight_decay: float = 0.01
    clip: float = 0.5
    warmup_steps: int = 50
    final_learning_rate: float = 0.03
    tokens_per_batch: int = 2048
    total_tokens: int = 10_000_000
    held_out: float = 0.05
    max_held_out: int = 120
    evaluate_every: int = 500
    log_every: int = 50
    checkpoint_seconds: float = 60.0
    ranks: int = 10
    start: Start = "layer"
    dtype: Precision = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check values.

        Raises:
            ValueError: If one is unknown or out of range.
        """
        if self.taps is not None:
            object.__setattr__(self, "taps", tuple(self.taps))
        choices = {
            "kind": Kind,
            "loss": Loss,
            "optimizer": Optimizer,
            "dtype": Precision,
            "start": Start,
        }
        for name, known in choices.items():
            if (value := getattr(self, name)) not in get_args(known):
                listed = ", ".join(f'"{choice}"' for choice in get_args(known))
                raise ValueError(f"{name}={value!r} must be one of {listed}.")
        least = {
            "num_draft_heads": 1,
            "num_layers": 0,
            "steps": 1,
            "warmup_steps": 0,
            "tokens_per_batch": 1,
            "total_tokens": 1,
            "max_held_out": 1,
            "evaluate_every": 1,
            "log_every": 1,
            "ranks": 1,
        }
        optional = ("intermediate_size", "draft_vocab_size", "exit_layer")
        check_counts(self, optional, **least, **dict.fromkeys(optional, 1))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "float" and (isinstance(value, bool) or not isinstance(value, Real)):
                raise ValueError(f"{field.name}={value!r} must be a number.")
            if field.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{field.name}={value!r} must be True or False.")
        for name in ("learning_rate", "muon_learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be more than 0.")
        for name in ("prompt_weight", "weight_decay", "checkpoint_seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 0.")
        for name in ("step_decay", "final_learning_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be in 0..1.")
        if not 0 < self.held_out < 1:
            raise ValueError(
                f"held_out={self.held_out!r} must be a share between 0 and 1: the best weights are "
                "chosen by sequences that were not trained on."
            )

    @property
    def depths(self) -> int:
        """How many draft tokens the estimate of tau is for."""
        return self.num_draft_heads if self.kind == "heads" else self.steps

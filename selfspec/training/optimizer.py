"""Steps in float32 for a network that computes in two bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from selfspec.training.config import TrainConfig

_BETAS = (0.9, 0.95)
_MOMENTUM = 0.95
_WARM = 0.1  # share of the tokens after which the learning rate has risen at the latest


class Optimizer:
    """AdamW, or Muon and AdamW, over float32 copies of the parameters.

    bf16 has 8 bits: added to directly, most steps would be rounded away. A network in float32 has
    no copies.

    Args:
        network: To be trained, in its dtype and on its device.
        config: Of the training.

    Raises:
        ValueError: If this torch has no Muon.
    """

    def __init__(self, network: nn.Module, config: TrainConfig) -> None:
        self.config = config
        named = [(n, p) for n, p in network.named_parameters() if p.requires_grad]
        self.working = [p for _, p in named]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.working]
        pairs = [(name, m) for (name, _), m in zip(named, self.masters, strict=True)]
        by_muon = [m for n, m in pairs if config.optimizer == "muon" and _is_matrix(n, m)]
        others = [m for m in self.masters if not any(m is other for other in by_muon)]
        self.optimizers: list[torch.optim.Optimizer] = []
        if by_muon:
            muon: Any = getattr(torch.optim, "Muon", None)
            if muon is None:
                raise ValueError(
                    f'optimizer="muon" needs torch >= 2.9, this is {torch.__version__}: upgrade, '
                    'or choose "adamw".'
                )
            options = {"momentum": _MOMENTUM, "weight_decay": config.weight_decay}
            self.optimizers.append(muon(by_muon, lr=config.muon_learning_rate, **options))
        if others:
            self.optimizers.append(
                torch.optim.AdamW(
                    others,
                    lr=config.learning_rate,
                    betas=_BETAS,
                    weight_decay=config.weight_decay,
                    fused=True,
                )
            )
        self._rates = [group["lr"] for o in self.optimizers for group in o.param_groups]

    def factor(self, step: int, progress: float) -> float:
        """Share of the learning rates at a step (from 0), after `progress` (0..1) of the tokens."""
        low = self.config.final_learning_rate
        # A run of a few steps has to learn something, too.
        warm = min(1.0, max((step + 1) / max(1, self.config.warmup_steps), progress / _WARM))
        return warm * (low + (1 - low) * (1 - min(1.0, progress)))

    def step(self, step: int, progress: float) -> bool:
        """Use the gradients of the network and drop them.

        Returns:
            False if they were not finite: nothing has changed then.
        """
        for working, master in zip(self.working, self.masters, strict=True):
            if working is master:
                continue
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            if working.grad is None:
                master.grad.zero_()
            else:
                master.grad.copy_(working.grad)
        norm = float(nn.utils.clip_grad_norm_(self.masters, self.config.clip, foreach=True))
        finite = math.isfinite(norm)
        if finite:
            factor = self.factor(step, progress)
            groups = [group for o in self.optimizers for group in o.param_groups]
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate * factor
            for optimizer in self.optimizers:
                optimizer.step()
            self._publish()
        self.drop()
        return finite

    def drop(self) -> None:
        """Forget the gradients of the network."""
        for parameter in self.working:
            parameter.grad = None

    @torch.no_grad()
    def _publish(self) -> None:
        for working, master in zip(self.working, self.masters, strict=True):
            if working is not master:
                working.copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a later run needs to go on, by names of our own."""
        found = {f"master.{i}": m.detach() for i, m in enumerate(self.masters)}
        for i, optimizer in enumerate(self.optimizers):
            for j, values in optimizer.state_dict()["state"].items():
                found |= {f"state.{i}.{j}.{key}": value for key, value in values.items()}
        return found

    def load(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        with torch.no_grad():
            for i, master in enumerate(self.masters):
                master.copy_(tensors[f"master.{i}"])
        self._publish()
        for i, optimizer in enumerate(self.optimizers):
            state: dict[int, dict[str, Tensor]] = {}
            for name, value in tensors.items():
                if name.startswith(f"state.{i}."):
                    _, _, j, key = name.split(".")
                    state.setdefault(int(j), {})[key] = value
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon is for it: an LM head's rows are tokens, each on its own."""
    return parameter.ndim == 2 and not name.startswith("head")

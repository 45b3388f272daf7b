"""Which sublayers a draft leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from selfspec.patch import LayerPlan


@dataclass(frozen=True)
class SkipSet:
    """Sublayers that a draft leaves out, 0-based.

    Attributes:
        attention: Layers without attention.
        mlp: Layers without MLP.
    """

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Take any iterable of layers.

        Raises:
            TypeError: If one is no int.
            ValueError: If one is negative.
        """
        for name in ("attention", "mlp"):
            layers = frozenset(getattr(self, name))
            for layer in layers:
                if not isinstance(layer, int) or isinstance(layer, bool):
                    raise TypeError(f"skip_set.{name} layer={layer!r} must be an int.")
                if layer < 0:
                    raise ValueError(f"skip_set.{name} layer={layer} must be at least 0.")
            object.__setattr__(self, name, layers)

    @classmethod
    def layers(cls, indices: Iterable[int]) -> SkipSet:
        """Whole layers."""
        whole = frozenset(indices)
        return cls(whole, whole)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SkipSet:
        """The inverse of `to_dict`."""
        return cls(frozenset(values["attention"]), frozenset(values["mlp"]))

    def to_dict(self) -> dict[str, list[int]]:
        """Two lists of layers, ascending."""
        return {"attention": sorted(self.attention), "mlp": sorted(self.mlp)}

    @property
    def first(self) -> int | None:
        """First layer that is not complete, or None if nothing is skipped."""
        return min(self.attention | self.mlp, default=None)

    @property
    def plan(self) -> LayerPlan:
        """A plan that runs the rest."""
        return LayerPlan(skip_attention=self.attention, skip_mlp=self.mlp)

    def __len__(self) -> int:
        """How many sublayers."""
        return len(self.attention) + len(self.mlp)

    def __str__(self) -> str:
        """In one line."""
        whole, halves = self.attention & self.mlp, self.attention ^ self.mlp
        parts = [f"layers {_ranges(whole)}"] if whole else []
        for name, some in (("attention", self.attention & halves), ("MLP", self.mlp & halves)):
            if some:
                parts.append(f"{name} of {_ranges(some)}")
        return ", ".join(parts) or "nothing"


def _ranges(layers: Iterable[int]) -> str:
    """3, 5-7, 9."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)

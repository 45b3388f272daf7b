"""Random numbers: which generator they come from, and the noise that belongs to a position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Generators = torch.Generator | Sequence[torch.Generator] | None


def check_generator(generator: object) -> None:
    """Refuse what is no generator and no list of them.

    Raises:
        TypeError: If it is something else.
        ValueError: If one generator stands for several rows, which could not be independent.
    """
    if generator is None or isinstance(generator, torch.Generator):
        return
    if isinstance(generator, Sequence) and all(isinstance(g, torch.Generator) for g in generator):
        if len({id(g) for g in generator}) < len(generator):
            raise ValueError("generator: every sequence of a list needs a generator of its own.")
        return
    raise TypeError(f"generator={generator!r} must be a torch.Generator or a list of them.")


class Source:
    """Where the random numbers of a request come from.

    Args:
        generator: None for torch's own generator of the device; one generator for the batch; or one
            a row, so that what a row draws does not depend on the rows beside it.
    """

    def __init__(self, generator: Generators = None) -> None:
        self.one: torch.Generator | None = None
        self.rows: list[torch.Generator] | None = None
        if isinstance(generator, torch.Generator):
            self.one = generator
        elif generator is not None:
            self.rows = list(generator)

    def check(self, batch: int) -> None:
        """Raises ValueError unless there are generators for `batch` rows."""
        if self.rows is not None and len(self.rows) != batch:
            raise ValueError(
                f"generator has {len(self.rows)} generators, one a sequence would be {batch}."
            )

    def exponential(self, batch: int, vocab: int, like: Tensor) -> Tensor:
        """Standard exponential noise [B, V], drawn as `torch.multinomial` draws it."""
        empty = torch.empty((batch, vocab), device=like.device, dtype=like.dtype)
        if self.rows is None:
            return empty.exponential_(generator=self.one)
        for row, generator in zip(empty, self.rows, strict=True):
            row.exponential_(generator=generator)
        return empty

    def keys(self, batch: int) -> Tensor:
        """Fresh random keys, int64 [B] on the CPU."""
        if self.rows is not None:
            return torch.cat([_keys(1, generator) for generator in self.rows])
        return _keys(batch, self.one)

    def state(self, device: torch.device) -> list[Tensor]:
        """Where the generators stand."""
        if self.rows is not None:
            return [generator.get_state() for generator in self.rows]
        if self.one is not None:
            return [self.one.get_state()]
        if device.type == "cuda":
            return [torch.cuda.get_rng_state(device)]
        return [torch.get_rng_state()]

    def restore(self, states: list[Tensor], device: torch.device) -> None:
        """Put the generators back to where `state` found them."""
        if self.rows is not None:
            for generator, state in zip(self.rows, states, strict=True):
                generator.set_state(state)
        elif self.one is not None:
            self.one.set_state(states[0])
        elif device.type == "cuda":
            torch.cuda.set_rng_state(states[0], device)
        else:
            torch.set_rng_state(states[0])


def _keys(count: int, generator: torch.Generator | None) -> Tensor:
    device = None if generator is None else generator.device
    return torch.randint(1 << 62, (count,), generator=generator, device=device).cpu()


class Noise:
    """Exponential noise by position: block t is the t-th that plain `generate` would draw.

    Args:
        source: Where it is drawn.
        batch: B.
        vocab: V.
        like: Gives device and dtype.
    """

    def __init__(self, source: Source, batch: int, vocab: int, like: Tensor) -> None:
        self.source = source
        self.shape = (batch, vocab)
        self.like = like.new_empty(0)
        self.blocks: dict[int, Tensor] = {}
        self.after: dict[int, list[Tensor]] = {}  # generator state when t blocks have been drawn
        self.drawn = 0
        self._remember()

    def _remember(self) -> None:
        self.after[self.drawn] = self.source.state(self.like.device)

    def at(self, t: int) -> Tensor:
        """Noise [B, V] of position t, drawn when first asked for."""
        while self.drawn <= t:
            self.blocks[self.drawn] = self.source.exponential(*self.shape, self.like)
            self.drawn += 1
            self._remember()
        return self.blocks[t]

    def forget(self, t: int) -> None:
        """Drop blocks before position t."""
        for old in [key for key in self.blocks if key < t]:
            del self.blocks[old]
        for old in [key for key in self.after if key < t]:
            del self.after[old]

    def rewind(self, t: int) -> None:
        """Put the generator back to where t blocks had been drawn."""
        if t in self.after and t < self.drawn:
            self.source.restore(self.after[t], self.like.device)

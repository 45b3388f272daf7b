"""Batches of whole sequences of similar length, in an order that a number tells."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Batch:
    """B sequences, padded at the end to T tokens.

    Attributes:
        ids: int64 [B, T] prompt and answer.
        prompt_lengths: int64 [B].
        lengths: int64 [B], of prompt and answer together.
        taps: [B, T, n C] hidden states, one layer beside the other; 0 in padding.
        top: int64 [B, T, K]: at t the target's most probable tokens t + 1, best first.
        probs: float32 [B, T, K], their probabilities.
    """

    ids: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    taps: Tensor
    top: Tensor
    probs: Tensor

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return int(self.lengths.sum())

    def weights(self, prompt_weight: float = 0.0) -> Tensor:
        """float32 [B, T]: at t how much the prediction of token t + 1 counts.

        1 if that is a token of the answer, `prompt_weight` if it is one of the prompt, 0 if there
        is none.
        """
        after = torch.arange(1, self.ids.shape[1] + 1, device=self.ids.device)
        answers = after >= self.prompt_lengths[:, None]
        weights = torch.where(answers, 1.0, prompt_weight)
        return torch.where(after < self.lengths[:, None], weights, 0.0)

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """On `device`, states in `dtype`."""
        ids, prompts, lengths, top, probs = (
            t.to(device)
            for t in (self.ids, self.prompt_lengths, self.lengths, self.top, self.probs)
        )
        return Batch(ids, prompts, lengths, self.taps.to(device, dtype), top, probs)


def split(keys: Sequence[str], share: float, most: int, seed: int) -> tuple[list[int], list[int]]:
    """Sequences to train on, and sequences held out (at least one, at most about half).

    A number that seed and prompt tell decides: answers to one prompt stay together, and what was
    trained on is not held out when there are more answers, of which a run goes on.

    Args:
        keys: Of every sequence, that of its prompt.
        share: Of the prompts that is held out, about.
        most: Sequences held out, but for the last prompt's.
        seed: Any int.

    Raises:
        ValueError: If there are not two prompts.
    """
    rows: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    if len(rows) < 2:
        raise ValueError(
            f"{len(rows)} different prompts are too few: one is held out, others are trained on."
        )
    numbers = {key: _number(seed, key) for key in rows}
    cap = min(most, len(keys) // 2)
    held: list[int] = []
    for key in sorted(rows, key=numbers.__getitem__)[:-1]:
        if held and (numbers[key] >= share or len(held) >= cap):
            break
        held += rows[key]
    chosen = set(held)
    return [row for row in range(len(keys)) if row not in chosen], sorted(held)


def _number(seed: int, key: str) -> float:
    """In 0..1, evenly."""
    digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
    return float(int.from_bytes(digest[:8], "big")) / 2.0**64


def plan(
    rows: Sequence[int], lengths: Sequence[int], tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """Batches of one pass over `rows`: the same for the same seed and epoch.

    Args:
        rows: Indices of sequences.
        lengths: Of all sequences.
        tokens: Most positions of a batch, padding included; a longer sequence is alone.
        seed: Any int.
        epoch: Number of the pass: who is with whom, and in which order, differs between passes.
    """
    rng = np.random.default_rng([seed, epoch])
    # Sequences whose lengths differ by less than a few percent change places.
    jitter = rng.uniform(1.0, 1.05, len(rows))
    order = sorted(range(len(rows)), key=lambda i: lengths[rows[i]] * jitter[i])
    batches: list[list[int]] = [[]]
    longest = 0
    for row in (rows[i] for i in order):
        longest = max(longest, lengths[row])
        if batches[-1] and (len(batches[-1]) + 1) * longest > tokens:
            batches.append([])
            longest = lengths[row]
        batches[-1].append(row)
    return [batches[i] for i in rng.permutation(len(batches))]


def ahead(read: Callable[[T], Batch], items: Iterable[T]) -> Iterator[Batch]:
    """`read` of every item, the next one in a thread while the caller works on this one."""
    with ThreadPoolExecutor(1) as pool:
        waiting = None
        for item in items:
            ready, waiting = waiting, pool.submit(read, item)
            if ready is not None:
                yield ready.result()
        if waiting is not None:
            yield waiting.result()

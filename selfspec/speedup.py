"""What a chain of draft tokens is expected to gain, by how often it is right and what it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Times = Sequence[float] | np.ndarray


def expected_speedup(
    acceptance: float, draft_tokens: int, draft_step: float, verify: float = 1.0
) -> float:
    """Speed of chains of a fixed length over plain decoding, by the textbook's formula.

    `(1 - a^(d + 1)) / ((1 - a) (d c + v))`: Leviathan et al. 2023, theorem 3.8, there with v = 1.
    It takes it that every draft token is right with the same probability, whatever came before it
    and however far ahead it is; that every step drafts d tokens; and that a step takes nothing but
    drafting and verifying. Acceptance that is mixed (some text is copied, some is not) has more
    tokens a step than the same mean would give.

    Args:
        acceptance: a, probability that a draft token is right if those before it are, in 0..1.
        draft_tokens: d, at least 0.
        draft_step: c, time of drafting one over that of a plain step.
        verify: v, time of verifying d + 1 nodes, likewise.

    Raises:
        ValueError: If an argument is out of range.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance={acceptance!r} must be a probability.")
    if draft_tokens < 0 or draft_step < 0 or verify <= 0:
        raise ValueError(
            f"draft_tokens={draft_tokens!r} and draft_step={draft_step!r} must not be negative, "
            f"and verify={verify!r} must be positive."
        )
    tokens = sum(float(acceptance) ** depth for depth in range(draft_tokens + 1))
    return tokens / (draft_tokens * draft_step + verify)


def chain_speedup(
    acceptance: float, draft_step: float, verify: Times, shared: float = 0.0
) -> tuple[float, int]:
    """Speed of the best chain over plain decoding.

    A chain of d tokens gives `1 + a + a^2 + ... + a^d` tokens (Leviathan et al. 2023,
    https://arxiv.org/abs/2211.17192) and takes d draft steps and a verification of d + 1 nodes.

    Args:
        acceptance: a, probability that a draft token is right if those before it are.
        draft_step: Time of one, over that of a plain step.
        verify: Time of verifying 1, 2, ... nodes, over that of a plain step.
        shared: Part of a plain step whose layers run complete in drafts, so that verification does
            not run them again, but for the last token.

    Returns:
        Speed over plain, which may be less than 1, and the length d, at least 1.

    Raises:
        ValueError: If no block of two nodes was timed.
    """
    if len(verify) < 2:
        raise ValueError(f"verify={verify!r} must have the times of one node, two nodes, and on.")
    lengths = np.arange(1, len(verify))
    tokens = np.cumsum(float(acceptance) ** np.arange(len(verify)))[1:]
    verifying = np.asarray(verify, float)[1:] * (1 - shared) + shared
    speed = tokens / np.maximum(lengths * draft_step + verifying, 1e-9)
    best = int(np.argmax(speed))
    return float(speed[best]), int(lengths[best])


def speed_by_counts(
    right: float, of: float, chain: tuple[float, Times, float], deviations: float = 0.0
) -> float:
    """What `chain_speedup` says of an acceptance that was counted.

    Args:
        right: Draft tokens that were right.
        of: Draft tokens that were counted; one right and one wrong are added, since nothing is
            certain.
        chain: The other arguments of `chain_speedup`.
        deviations: Standard deviations by which the acceptance may be better than it was counted.
    """
    mean = (right + 1) / (of + 2)
    bound = mean + deviations * math.sqrt(mean * (1 - mean) / (of + 3))
    return chain_speedup(min(bound, 1.0), *chain)[0]


def acceptance_needed(
    draft_step: float, verify: Times, shared: float = 0.0, speed: float = 1.0
) -> float | None:
    """The least acceptance at which some chain is faster than `speed` times plain decoding.

    Arguments are those of `chain_speedup`.

    Returns:
        A probability, to a thousandth; None if even drafts that are always right are not.
    """
    low, high = 0.0, 1.0
    if chain_speedup(high, draft_step, verify, shared)[0] <= speed:
        return None
    while high - low > 5e-4:
        middle = (low + high) / 2
        pays = chain_speedup(middle, draft_step, verify, shared)[0] > speed
        low, high = (low, middle) if pays else (middle, high)
    return round(high, 3)

"""The texts of earlier requests, for drafters that copy from them."""

from __future__ import annotations

import numpy as np

_NONE = -1  # no token: between two texts


class History:
    """Of one wrapper, and of no other: what one user said is not to come up for another.

    Args:
        max_tokens: Most tokens that are kept; the oldest are dropped, a quarter at a time.
    """

    def __init__(self, max_tokens: int = 200_000) -> None:
        self.max_tokens = max_tokens
        # Never written to: other requests read it while one adds to it.
        self.tokens = np.empty(0, np.int64)

    def add(self, text: np.ndarray) -> None:
        """Keep a text.

        Args:
            text: int64 [T].
        """
        if not len(text) or not self.max_tokens:
            return
        known = self.tokens
        if len(known) + len(text) + 1 > self.max_tokens:
            known = known[len(known) - max(self.max_tokens * 3 // 4 - len(text), 0) :]
        self.tokens = np.concatenate([known, text[-self.max_tokens + 1 :], [_NONE]])

    def __len__(self) -> int:
        """Tokens that are kept, marks between texts included."""
        return len(self.tokens)

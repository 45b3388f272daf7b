"""How often the token after a match is right, by the length of the match.

A copy that was right so far is a longer match: the d-th token after a match of m tokens holds like
the first one after m + d - 1. So one table of conditional rates serves every match and depth. Rates
start from a guess, learn over all requests, and lean towards what the present request shows.
"""

from __future__ import annotations

import numpy as np

_EDGES = np.array([1, 2, 3, 4, 5, 6, 8, 12, 16, 24])  # first match length of every bucket
_GUESS = np.array([0.3, 0.45, 0.58, 0.66, 0.72, 0.76, 0.82, 0.88, 0.92, 0.95])
_OTHER = 0.1  # of the first token of a match that is not the first choice


class MatchSurvival:
    """Counts of right and wrong tokens after matches.

    Args:
        memory: Tokens of all requests after which one counts for less than half.
    """

    guess_weight = 4.0  # tokens that the guess counts for
    request_weight = 6.0  # tokens that everything else counts for within a request

    def __init__(self, memory: int = 1500) -> None:
        self._decay = 0.5 ** (1 / memory)
        # Right tokens and all tokens; the last row is of other choices' first tokens.
        guess = np.append(_GUESS, _OTHER)
        self._all = self.guess_weight * np.stack([guess, np.ones_like(guess)], axis=1)
        self._own = np.zeros_like(self._all)  # of a request

    def for_request(self) -> MatchSurvival:
        """One for a request, which shares what all requests show."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._own = np.zeros_like(self._all)
        return new

    def path(self, match: int, length: int, is_first: bool = True) -> np.ndarray:
        """Probabilities [length] that verification gets to each of the tokens after a match.

        Args:
            match: Tokens that matched.
            length: Tokens that followed them.
            is_first: Whether this match is the one that is tried first.
        """
        usual = self._all[:, 0] / self._all[:, 1]
        weight = self.request_weight
        rates = (self._own[:, 0] + weight * usual) / (self._own[:, 1] + weight)
        each = rates[_buckets(match, length)]
        if not is_first and length:
            each[0] = rates[-1]
        return np.cumprod(each)

    def observe(self, match: int, copied: list[int], new: list[int], is_first: bool = True) -> None:
        """See what the text went on with.

        Args:
            match: As for `path`.
            copied: Tokens that followed the match.
            new: Tokens that the text has gained, however they were drafted.
            is_first: As for `path`.
        """
        buckets = _buckets(match, len(copied))
        for depth, (copy, token) in enumerate(zip(copied, new, strict=False)):
            at = len(_EDGES) if depth == 0 and not is_first else int(buckets[depth])
            right = copy == token
            self._own[at] += right, 1
            self._all[at] *= self._decay
            self._all[at] += right, 1
            if not right:
                return


def _buckets(match: int, length: int) -> np.ndarray:
    """Of the matches that the tokens after one are first after, [length]."""
    return np.searchsorted(_EDGES, np.arange(match, match + length), side="right") - 1

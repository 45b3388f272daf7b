"""Trees that grow where the draft is sure of itself.

Every level the most probable nodes so far are expanded, and in the end the most probable of all
candidates are verified: a node is worth the probability that the target comes by it, which is
estimated by the product of the draft's probabilities along its path. Li et al. 2024 (EAGLE-2),
https://arxiv.org/abs/2406.16858. Only for drafts that are not drawn: which candidates survive
depends on their own probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from selfspec.topology import ancestors_of
from selfspec.tree import TokenTree

Size = Callable[[Sequence[float]], int]

# A child is less probable than its parent, if only by this: where the draft is certain the two
# would tie, and the better of a tie need not be the parent.
_CERTAIN = -1e-4


class DynamicTree:
    """The candidates of one step, B rows.

    Args:
        root: int64 [B].
        width: Most nodes that are expanded at a level.
        rooms: Deepest level of every row, >= 0; on the host.
        price: Least probability of a node that is verified.
    """

    def __init__(self, root: Tensor, width: int, rooms: list[int], price: float = 0.0) -> None:
        self.root = root
        self.width = width
        self.price = price
        self._least = math.log(price) if price > 0 else -math.inf
        self.levels = 0
        self._rooms = rooms
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []  # candidates, -1 for the root
        self._sizes: list[int] = []
        self._total = 0
        batch = root.shape[0]
        self._open = torch.full((batch, 1), -1, dtype=torch.int64, device=root.device)
        self._open_scores = torch.zeros(batch, 1, dtype=torch.float32, device=root.device)

    def grow(self, tokens: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Add a level of candidates and choose which of them are expanded next.

        Args:
            tokens: int64 [B, W, k] best tokens after each of the W nodes that were expanded (W = 1
                at first: the root).
            log_probs: float32 [B, W, k] of them.

        Returns:
            int64 [B, w] which of the W nodes the chosen ones are children of, and their tokens.
        """
        batch, _, best = tokens.shape
        self.levels += 1
        above = self._open_scores[:, :, None]
        scores = above + log_probs.clamp(max=_CERTAIN)
        # So improbable that the difference is lost in rounding: still less than the parent.
        scores = torch.minimum(scores, torch.nextafter(above, above.new_tensor(-math.inf)))
        if self.levels > min(self._rooms):
            closed = torch.tensor([room < self.levels for room in self._rooms])
            scores = scores.masked_fill(closed.to(scores.device)[:, None, None], float("-inf"))
        flat_scores, flat_tokens = scores.reshape(batch, -1), tokens.reshape(batch, -1)
        self._scores.append(flat_scores)
        self._tokens.append(flat_tokens)
        self._parents.append(self._open.repeat_interleave(best, dim=1))
        self._sizes.append(flat_scores.shape[1])
        top = flat_scores.topk(min(self.width, flat_scores.shape[1]))
        open_scores, chosen = top.values, top.indices
        if self.root.is_cpu:  # where a read is free, nothing is expanded that has no worthy child
            worthy = int((open_scores >= self._least).sum(1).max())
            open_scores, chosen = open_scores[:, : max(worthy, 1)], chosen[:, : max(worthy, 1)]
        self._open, self._open_scores = chosen + self._total, open_scores
        self._total += flat_scores.shape[1]
        return chosen // best, flat_tokens.gather(1, chosen)

    def outlook(self) -> Tensor:
        """float32 [2], sums over rows: worth of the level just made, mass of the one to come.

        The worth is what its candidates are expected to give beyond their price; the mass how many
        of the nodes to be expanded are expected to be right. Both if the draft is right.
        """
        worth = (self._scores[-1].exp() - self.price).clamp(min=0).sum()
        return torch.stack([worth, self._open_scores.exp().sum()])

    def finish(self, budget: int, size: Size | None = None) -> TokenTree:
        """The tree of the most probable candidates.

        Args:
            budget: Most of them in a row.
            size: Says how many of them to verify, from what each rank is expected to give, summed
                over rows. None: all that are worth their price.
        """
        device, batch = self.root.device, self.root.shape[0]
        scores = torch.cat(self._scores, dim=1)
        count = min(budget, self._total)
        best = scores.topk(count)
        taken = best.values.isfinite()
        if size is None:
            taken = taken & (best.values >= self._least)
        else:
            count = size(best.values.exp().sum(0).tolist())
            taken[:, count:] = False
        kept = taken.sum(1)
        if device.type == "cpu":  # where a read is free, nothing is verified in vain
            count = int(kept.max())
        # Candidates were made parents first, so order of making is an order for nodes.
        order = torch.where(taken, best.indices, self._total)[:, :count].sort(1).values
        live = order < self._total
        at = order.clamp(max=self._total - 1)
        node = torch.arange(1, count + 1, device=device).expand(batch, -1)
        place = torch.zeros(batch, self._total + 2, dtype=torch.int64, device=device)
        place.scatter_(1, torch.where(live, order, self._total) + 1, node)
        place[:, 0] = 0  # the root, which is candidate -1
        parents = place.gather(1, torch.cat(self._parents, dim=1).gather(1, at) + 1)
        depth = self._depth_of(device)[at]
        tokens = torch.cat(self._tokens, dim=1).gather(1, at)
        expected = scores.gather(1, at).exp().where(live, 0)
        first = torch.full((batch, 1), -1, dtype=torch.int64, device=device)
        parents = torch.cat([first, parents.where(live, -1)], dim=1)
        zero = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        return TokenTree(
            tokens=torch.cat([self.root[:, None], tokens.where(live, self.root[:, None])], dim=1),
            parents=parents.int(),
            depth=torch.cat([zero, depth.where(live, 0)], dim=1).int(),
            ancestors=ancestors_of(parents, self.levels),
            num_nodes=(kept + 1).int(),
            expected=torch.nn.functional.pad(expected, (1, 0), value=1.0),
            max_depth=-1 if device.type == "cpu" else self.levels,
            max_nodes=count + 1,
        )

    def _depth_of(self, device: torch.device) -> Tensor:
        """int64 [M], the level of every candidate."""
        levels = torch.arange(1, self.levels + 1, device=device)
        return levels.repeat_interleave(torch.tensor(self._sizes, device=device))

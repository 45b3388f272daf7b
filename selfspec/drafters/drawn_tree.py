"""Trees of drawn tokens, for rules that weigh p against q.

Every token that is drawn is kept. Which of them get children depends on the probabilities of tokens
that are kept, how many children is fixed before they are drawn: so nothing is thrown away for what
it is, and the text follows the target's distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.topology import ancestors_of
from selfspec.tree import TokenTree


class DrawnTree:
    """The nodes of one step, B rows.

    Args:
        root: int64 [B].
        width: Most nodes that get children at a level.
        rooms: Deepest level of every row, >= 0; on the host.
    """

    def __init__(self, root: Tensor, width: int, rooms: list[int]) -> None:
        batch, device = root.shape[0], root.device
        self.width = width
        self.levels = 0
        self._rooms = rooms
        self._tokens = root[:, None]
        self._parents = torch.full((batch, 1), -1, dtype=torch.int64, device=device)
        self._sizes: list[int] = []
        self._log_q: list[tuple[Tensor, Tensor]] = []  # nodes [B, W], of their children [B, W, V]
        self.open = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # nodes, numbered
        self.paths = root.new_zeros(batch, 1, 0)  # [B, W, d] tokens up to and with open nodes
        self._scores = torch.zeros(batch, 1, dtype=torch.float32, device=device)

    def cost(self, branches: int) -> int:
        """Nodes that the next level adds."""
        return self.open.shape[1] * branches

    def grow(self, tokens: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Add the children of the open nodes, and open the most probable of them.

        Args:
            tokens: int64 [B, W, m], drawn without replacement.
            log_q: float32 [B, W, V], what they were drawn from.

        Returns:
            int64 [B, w] which of the W nodes the newly open ones are children of, and their tokens.
        """
        batch, _, branches = tokens.shape
        self.levels += 1
        first = self._tokens.shape[1]
        self._log_q.append((self.open, log_q))
        flat = tokens.reshape(batch, -1)
        self._tokens = torch.cat([self._tokens, flat], dim=1)
        self._parents = torch.cat(
            [self._parents, self.open.repeat_interleave(branches, dim=1)], dim=1
        )
        self._sizes.append(flat.shape[1])
        scores = (self._scores[:, :, None] + log_q.gather(2, tokens)).reshape(batch, -1)
        # A token that was repeated because there were no others is one node, not two.
        again = tokens == tokens[:, :, :1]
        again[:, :, 0] = False
        scores = scores.masked_fill(again.reshape(batch, -1), float("-inf"))
        top = scores.topk(min(self.width, scores.shape[1]))
        self.open, self._scores = first + top.indices, top.values
        parent = top.indices // branches
        chosen = flat.gather(1, top.indices)
        above = self.paths.gather(1, parent[:, :, None].expand(-1, -1, self.paths.shape[2]))
        self.paths = torch.cat([above, chosen[:, :, None]], dim=2)
        return parent, chosen

    def expected(self) -> Tensor:
        """[B] how many of the open nodes are right, if the draft is."""
        return self._scores.exp().sum(1)

    def finish(self) -> TokenTree:
        """The tree of all nodes."""
        batch, nodes = self._tokens.shape
        device = self._tokens.device
        depths = [0, *(d + 1 for d, size in enumerate(self._sizes) for _ in range(size))]
        within = [sum(depth <= room for depth in depths) for room in self._rooms]
        node_depth = torch.tensor(depths, dtype=torch.int32, device=device)
        vocab_size = self._log_q[0][1].shape[-1]
        log_q = torch.zeros(batch, nodes, vocab_size, dtype=torch.float32, device=device)
        rows = torch.arange(batch, device=device)[:, None]
        for at, known in self._log_q:
            log_q[rows, at] = known
        return TokenTree(
            tokens=self._tokens,
            parents=self._parents.int(),
            depth=node_depth.expand(batch, -1),
            ancestors=ancestors_of(self._parents, self.levels),
            num_nodes=torch.tensor(within, dtype=torch.int32, device=device),
            log_q=log_q,
            max_depth=self.levels,
            max_nodes=max(within),
        )

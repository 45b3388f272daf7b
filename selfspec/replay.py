"""Running a text that is known again by a part of the model: what it would have drafted.

All tokens of a window run at once, each after the true tokens before it: what comes out is what a
chain drafted by that part would have said at every depth, had it been right so far. So one forward
tells of a whole window how often a part of the model is right, and no draft has to be made for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.patch import LayerPlan
from selfspec.topology import chain_topology
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from selfspec.cache import TreeCache
    from selfspec.state import DecodeState
    from selfspec.target import Target

MOST = 32  # tokens of a window: its nodes and as many hidden ones are the bits of one word
_COLUMNS = 256  # tokens of a row that are cached at a time


@dataclass(frozen=True, eq=False)
class Replay:
    """W known tokens of every row, behind a cached prefix of the whole model.

    Attributes:
        target: The model; `ready()` while it runs.
        cache: Keys and values of the prefix, made by all layers. Nothing committed is written to.
        tree: The window, as the last W nodes.
        tokens: int64 [B, W], W.
        following: int64 [B, W], the token that came after each, on the model's device.
        hidden: How many committed tokens at the end are not to be seen: the window's own.
    """

    target: Target
    cache: TreeCache
    tree: TokenTree
    following: Tensor
    hidden: int = 0

    @property
    def window(self) -> int:
        """W."""
        return self.following.shape[1]

    def run(self, plan: LayerPlan | None, *, with_logits: bool = True) -> Tensor:
        """Logits [B, W, V] after every token, by the layers that `plan` runs."""
        place = self.cache.rewound(self.hidden) if self.hidden else nullcontext()
        with place:
            return self.target.run(
                self.tree, self.window, self.cache, plan, with_logits=with_logits
            )

    def hits(self, plan: LayerPlan | None) -> Tensor:
        """Whether the likeliest token by `plan` is the one that followed, bool [B, W]."""
        chosen = self.run(plan).argmax(-1)
        return chosen == self.following.to(chosen.device)

    def exit_hits(self, exits: Sequence[int]) -> Tensor:
        """The same of the model's norm and head after so many layers each, bool [E, B, W]."""
        readout = self.target.architecture.readout
        if readout is None or not readout.usable:
            found = [self.hits(LayerPlan(last=exit_layer)) for exit_layer in exits]
        else:
            plan = LayerPlan(last=max(exits), taps=frozenset(exits))
            self.run(plan, with_logits=False)
            chosen = [readout.top(plan.captured[e], 1)[0][..., 0] for e in exits]
            found = [ids == self.following.to(ids.device) for ids in chosen]
        return torch.stack([hits.to(found[0].device) for hits in found])


def replay_request(state: DecodeState, window: int) -> Replay | None:
    """The last `window` tokens of a request, in its own cache.

    Args:
        state: Where decoding stands.
        window: W, at most 32.

    Returns:
        The window; None where rows have not gained as many tokens yet, or the model verifies chains
        only, whose cache cannot hide tokens.
    """
    cache = state.cache
    if state.target.architecture.support != "tree" or not 0 < window <= MOST:
        return None
    if min(state.generated(b) for b in range(state.batch)) <= window:
        return None
    device = state.root.device
    rows = [torch.from_numpy(state.tokens(b)[-window - 1 :].copy()) for b in range(state.batch)]
    text = torch.stack(rows).to(device)
    return Replay(state.target, cache, _behind(text[:, :-1]), text[:, 1:], hidden=window)


def _behind(tokens: Tensor) -> TokenTree:
    """A chain of `tokens` [B, W] in the slots behind W others, which it does not see.

    The others are the same tokens where they have been committed: their slots are those of nodes
    that are nobody's ancestors.
    """
    batch, window = tokens.shape
    parents, depth, ancestors = chain_topology(window, tokens.device)
    before = torch.full_like(parents, -1)
    own = torch.where(parents < 0, -1, parents + window)
    return TokenTree(
        tokens=torch.cat([tokens, tokens], dim=1),
        parents=torch.cat([before, own], dim=-1).expand(batch, -1).contiguous(),
        depth=torch.cat([torch.zeros_like(depth), depth], dim=-1).expand(batch, -1).contiguous(),
        ancestors=torch.cat([torch.zeros_like(ancestors), ancestors << window], dim=-2).expand(
            batch, -1, -1
        ),
        num_nodes=torch.full((batch,), 2 * window, dtype=torch.int32, device=tokens.device),
        max_depth=window - 1,
        max_nodes=2 * window,
    )


@torch.no_grad()
def replay_texts(target: Target, texts: Sequence[Sequence[int]], window: int) -> Replay:
    """The last `window` tokens of every text, behind all tokens before.

    What should follow is the model's own choice, whatever the texts are.

    Args:
        target: The model, in evaluation mode.
        texts: Token ids; each longer than `window`.
        window: W, at least 1.

    Raises:
        ValueError: If a text is too short.
    """
    if short := [len(text) for text in texts if len(text) <= window]:
        raise ValueError(f"a text of {short[0]} tokens has none before a window of {window}.")
    prefixes = [list(text[:-window]) for text in texts]
    longest = max(map(len, prefixes))
    cache = target.architecture.new_cache(
        len(texts), reserve=longest + window, longest=longest + window, extra=_COLUMNS
    )
    cache.settle([0] * len(texts))  # nothing is in it so far
    device = target.device
    rows = torch.tensor([list(text[-window:]) for text in texts], device=device)
    with target.ready():
        for at in range(0, longest, _COLUMNS):
            parts = [prefix[at : at + _COLUMNS] for prefix in prefixes]
            counts = [len(part) for part in parts]
            width = max(counts)
            ids = torch.tensor([[*part, *[0] * (width - len(part))] for part in parts])
            chain = TokenTree.chain(ids[:, 0].to(device), ids[:, 1:].to(device))
            target.run(chain, width, cache, None, with_logits=False)
            path = torch.arange(width, dtype=torch.int32).expand(len(texts), -1)
            cache.commit(path, counts, moved=False)
        tree = TokenTree.chain(rows[:, 0], rows[:, 1:])
        found = Replay(target, cache, tree, rows)
        return replace(found, following=found.run(None).argmax(-1))


@contextmanager
def ready(replays: Iterable[Replay]) -> Iterator[None]:
    """Patches on, for replays of one model outside of a request."""
    first = next(iter(replays))
    with torch.no_grad(), first.target.ready():
        yield

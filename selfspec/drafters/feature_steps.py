"""A feature network in one request: over states of the target, then over its own guesses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from selfspec_kernels import TreeLayout, tree_attention
from selfspec_kernels.draft_topk import draft_topk
from torch import Tensor
from torch.nn import functional

from selfspec.drafters.features_seen import FeaturesSeen
from selfspec.topology import chain_topology, packed_bits

if TYPE_CHECKING:
    from selfspec.networks.feature import FeatureNetwork
    from selfspec.state import DecodeState, TargetOutput

_AT_ONCE = 256  # entries of a catch-up; a prompt is one piece, whatever its length


class FeatureSteps:
    """The network, its cache, and the states that are not in it yet.

    Args:
        network: As it runs on the model.
        state: After the prompt.
        output: Of the prompt.
    """

    def __init__(self, network: FeatureNetwork, state: DecodeState, output: TargetOutput) -> None:
        self.network = network
        self.seen = FeaturesSeen(network.config.taps, state, output)
        self.vocab_size = output.logits.shape[-1]
        architecture = state.target.architecture
        self._embed = architecture.embeddings
        self._norm = None
        if network.config.layout == "eagle":
            assert architecture.readout is not None
            self._norm = architecture.readout.norm
        self._last: Tensor | None = None
        self._table: tuple[Tensor, Tensor] | None = None

    def best(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B, W, k] after outputs [B, W, C], best first, and log-probabilities.

        `k` is `count`, or all of a smaller vocabulary.
        """
        network, head = self.network, self.network.head
        count = min(count, head.size)
        if not hidden.is_cuda:  # the fused operation is defined, not made, for other devices
            log_probs = head(network.readout(hidden)).float().log_softmax(-1)
            top = log_probs.topk(count)
            return head.tokens(top.indices), top.values
        norm: dict[str, Any] = {}
        if network.config.layout == "eagle3":
            norm = {"norm_weight": network.norm.weight, "norm_eps": network.norm.eps}
        indices, best = draft_topk(hidden, head.matrix, count, **norm)
        return head.tokens(indices), best

    def catch_up(self, state: DecodeState) -> Tensor:
        """Cache entries for all states that wait; the output after the last one, [B, 1, C].

        A row without any, which has ended, keeps the output that it had.
        """
        seen = self.seen
        device = state.root.device
        while any(seen.counts):
            is_prompt = not any(seen.cache.lengths)
            states, tokens, counts = seen.take(state, max(seen.counts) if is_prompt else _AT_ONCE)
            out = self._extend(states.to(device), tokens.to(device), counts)
            at = torch.tensor(counts, device=device).clamp(min=1) - 1
            last = out[torch.arange(state.batch, device=device), at]
            if self._last is not None and not all(counts):
                ended = torch.tensor([count == 0 for count in counts], device=device)
                last = torch.where(ended[:, None], self._last, last)
            self._last = last
        assert self._last is not None
        return self._last[:, None]

    def _extend(self, states: Tensor, tokens: Tensor, counts: list[int]) -> Tensor:
        """Entries for [B, P] pairs behind those that are there; outputs [B, P, C]."""
        cache, length = self.seen.cache, tokens.shape[1]
        if self._norm is not None:
            states = self._norm(states)
        prefix, _ = cache.placement(tokens.device)
        positions = prefix[:, None].long() + torch.arange(length, device=tokens.device)
        cache.open(0, length)
        layout = None
        if any(cache.lengths):
            _, _, bits = chain_topology(length, tokens.device)
            depth = torch.zeros(cache.batch, length, dtype=torch.int32, device=tokens.device)
            layout = TreeLayout(bits.expand(cache.batch, -1, -1), depth, prefix, cache.width)
        feature = self.network.fuse(states.to(self.network.o_proj.weight.dtype))
        out = self.run(feature, tokens, positions, layout)
        cache.lengths = [have + new for have, new in zip(cache.lengths, counts, strict=True)]
        return out

    def run(
        self, feature: Tensor, tokens: Tensor, positions: Tensor, layout: TreeLayout | None
    ) -> Tensor:
        """One forward; keys and values go to the slots that the cache was opened at.

        Args:
            feature: [B, P, C] at `positions`.
            tokens: int64 [B, P], one position on.
            positions: int64 [B, P].
            layout: Who sees whom; None: a prompt, causally.

        Returns:
            [B, P, C]
        """
        network = self.network

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            kept_keys, kept_values = self.seen.cache.layers[0].update(keys, values)
            if layout is None:
                return functional.scaled_dot_product_attention(
                    queries, keys, values, is_causal=True, enable_gqa=True
                )
            return tree_attention(queries, kept_keys, kept_values, layout)

        embedded = self._embed()(tokens).to(feature.dtype)
        out: Tensor = network(embedded, feature, self._angles(positions, feature.dtype), attend)
        return out

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`FeatureNetwork.angles`, out of a table that grows with the text."""
        slots = self.seen.cache.capacity + 1
        if self._table is None or self._table[0].shape[0] < slots:
            every = torch.arange(2 * slots, device=positions.device)[None]
            cos, sin = self.network.angles(every, dtype)
            self._table = cos[0, 0], sin[0, 0]
        cos, sin = (rows[positions][:, None] for rows in self._table)
        return cos, sin


class Expansion:
    """The nodes of one draft, level by level, behind the entries of the cache.

    Args:
        steps: Caught up.
    """

    def __init__(self, steps: FeatureSteps, device: torch.device) -> None:
        self._steps = steps
        self._prefix, _ = steps.seen.cache.placement(device)
        self._nodes = 0
        self._level = 0
        self._visible: Tensor | None = None  # bool [B, W, nodes so far], of the last level

    def run(self, hidden: Tensor, parent: Tensor, tokens: Tensor) -> Tensor:
        """Run a level.

        Args:
            hidden: [B, W, C] outputs of the level before.
            parent: int64 [B, w], of which of them the new nodes are children.
            tokens: int64 [B, w] of the new nodes.

        Returns:
            [B, w, C]
        """
        batch, width = tokens.shape
        device, cache = hidden.device, self._steps.seen.cache
        feature = hidden.gather(1, parent[:, :, None].expand(-1, -1, hidden.shape[2]))
        own = torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)
        if self._visible is not None:
            above = parent[:, :, None].expand(-1, -1, self._visible.shape[2])
            own = torch.cat([self._visible.gather(1, above), own], dim=2)
        self._visible = own
        cache.open(self._nodes, width)
        self._nodes += width
        depth = torch.zeros(batch, self._nodes, dtype=torch.int32, device=device)
        layout = TreeLayout(packed_bits(own), depth, self._prefix, cache.width)
        positions = (self._prefix[:, None].long() + self._level).expand(-1, width)
        self._level += 1
        return self._steps.run(feature, tokens, positions, layout)

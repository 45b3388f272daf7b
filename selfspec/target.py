"""The model as target: verify a tree in one forward, run some of its layers, tap hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from selfspec_kernels import TreeLayout
from torch import Tensor, nn

from selfspec.architectures import Architecture, agree, describe
from selfspec.attention import TreeContext, tree_context
from selfspec.cache import AlignedCache, TreeCache
from selfspec.fingerprint import fingerprint
from selfspec.patch import LayerPlan, layer_plan, patched, renew_patch
from selfspec.probes import measure
from selfspec.state import TargetOutput
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class _Measurement:
    """What was found of a model, and what the model looked like."""

    described: Architecture
    measured: Architecture
    looks: tuple[Any, ...]


# Of models that some target has, by id; what is found refers to the model, which keeps its id.
_MEASURED: WeakValueDictionary[int, _Measurement] = WeakValueDictionary()


class Target:
    """Runs the user's model, always through its own forward.

    Args:
        model: A transformers decoder. It is probed by a few forwards over a handful of tokens,
            unless another target has found out about it as it is.
        deterministic: See `SpecConfig`.
    """

    def __init__(self, model: PreTrainedModel, deterministic: bool = False) -> None:
        self.model = model
        self.deterministic = deterministic
        self.attention_calls = 0
        self._measurement = self._measure()
        self.architecture = self._measurement.measured

    def _measure(self) -> _Measurement:
        looks = _looks(self.model, self.deterministic)
        known = _MEASURED.get(id(self.model))
        if known is not None and known.looks == looks:
            return known
        self.architecture = described = describe(self.model)
        with torch.no_grad(), _evaluating(self.model):
            with _without_autocast(self.device.type):
                measured = measure(self)
            if measured.support == "none" and _autocasts(self.device.type):
                measured = measure(self)  # parts of different dtype, which run in no other way
        found = _Measurement(described, measured, looks)
        _MEASURED[id(self.model)] = found
        return found

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        embeddings = self.model.get_input_embeddings()
        device: torch.device = embeddings.weight.device
        if device.type == "meta":  # offloaded: accelerate brings weights where it computes
            for module in (embeddings, *self.model.modules()):
                execution = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
                if execution is not None:
                    return torch.device(execution)
        return device

    @property
    def is_training(self) -> bool:
        """Whether a forward may be random: dropout, or a layer that passes its flag to one.

        The model's own flag does not tell: adapters are added in training mode, and parts of a
        model can be trained alone.
        """
        found = self.architecture
        parts = [self.model, *found.layers, *(m for pair in found.sublayers for m, _ in pair)]
        return any(part.training for part in parts) or any(
            module.training and module.p > 0
            for module in self.model.modules()
            if isinstance(module, nn.modules.dropout._DropoutNd)
        )

    @property
    def vocab_size(self) -> int:
        """Ids that can be embedded; read anew, since embeddings may be resized after wrapping."""
        return len(self.architecture.vocabulary)

    @property
    def is_current(self) -> bool:
        """Whether the model still looks as it did: layers may be replaced, windows changed."""
        readout = self.architecture.readout
        if readout is not None and not readout.in_place:
            return False
        return agree(self._measurement.described, describe(self.model))

    @contextmanager
    def using(self, architecture: Architecture) -> Iterator[None]:
        """Patch the model for the block, as `architecture` says; for probing."""
        previous, self.architecture = self.architecture, architecture
        try:
            with patched(self.model, architecture):
                yield
        finally:
            self.architecture = previous

    def ready(self) -> Any:
        """A context in which this target may be run (the patch is on)."""
        return patched(self.model, self.architecture)

    # ------------------------------------------------------------------ forwards

    def plain(self, ids: Tensor, at: int = -1) -> Tensor:
        """The model as it is: next-token logits [V] (float32) after token `at` of `ids` [1, T].

        Under an empty plan, so that what its modules return is known from here on; but under its
        own attention's name, since some models ask for that name outside the interface, too.
        """
        return self.read(ids).logits[0, at].float()

    def read(
        self, ids: Tensor, plan: LayerPlan | None = None, *, with_logits: bool = True
    ) -> TargetOutput:
        """Whole texts through the model as it is, without a cache.

        Args:
            ids: int64 [B, T], rows padded at the end with any token.
            plan: Layers that run, and those whose input is returned as `hidden`.
            with_logits: False leaves the LM head out, where the model lets us.

        Returns:
            Logits [B, T, V] after every token, and hidden states [B, T, C].
        """
        unnamed, plan = replace(self.architecture, attention_names=[]), plan or LayerPlan()
        arguments: dict[str, Any] = self._positions(ids)
        if not with_logits and self.architecture.takes_logits_to_keep:
            arguments["logits_to_keep"] = torch.empty(0, dtype=torch.int64, device=ids.device)
        with patched(self.model, unnamed), layer_plan(plan):
            logits = self.model(input_ids=ids, use_cache=False, **arguments).logits
        return TargetOutput(logits, plan.captured)

    def after_last(self, hidden: Tensor) -> Tensor:
        """Logits [B, M, V] that the model reads off states [B, M, C] of its last layer's output."""
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
        return self.read(ids, LayerPlan(first=self.architecture.num_layers, resume=hidden)).logits

    def _positions(self, ids: Tensor) -> dict[str, Tensor]:
        """What `generate` tells a model about the positions of a prompt without padding."""
        if not (self.architecture.takes_position_ids and self.architecture.told_positions):
            return {}
        return {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None]}

    def fill(self, ids: Tensor, cache: TreeCache) -> None:
        """Prefill `cache` with `ids` [B, T] of rows without padding."""
        arguments = {self.architecture.cache_argument: cache, **self._positions(ids)}
        self.model(input_ids=ids, use_cache=True, **arguments)
        cache.settle([0] * ids.shape[0])

    def prefill(
        self, forward: Callable[[], Any], cache: TreeCache, pads: list[int], taps: frozenset[int]
    ) -> TargetOutput:
        """Run transformers' own prefill into `cache`.

        Args:
            forward: Calls the model and returns its output.
            cache: Where it will write.
            pads: Left padding of every row.
            taps: Layers whose input is returned as `hidden`.
        """
        plan = LayerPlan(taps=taps) if taps else None
        with layer_plan(plan), tree_context(None):
            logits = forward().logits
            if logits.shape[1] > 1:  # a view would keep those of the whole prompt
                logits = logits[:, -1:].clone()
        cache.settle(pads)
        return TargetOutput(logits, plan.captured if plan else {})

    def verify(
        self,
        tree: TokenTree,
        cache: TreeCache,
        taps: frozenset[int] = frozenset(),
        position_shift: int = 0,
    ) -> TargetOutput:
        """Run every node of `tree` through the layers that drafting has not run yet.

        Args:
            tree: Its keys and values are written behind the committed ones.
            cache: Committed tokens of every row.
            taps: Layers whose input is returned as `hidden`.
            position_shift: Added to every position; only probing wants this.
        """
        resume = tree.resume
        plan = None
        if resume is not None:
            plan = LayerPlan(first=resume.layer, resume=resume.hidden, taps=taps)
        elif taps:
            plan = LayerPlan(taps=taps)
        logits = self.run(tree, tree.width, cache, plan, position_shift=position_shift)
        return TargetOutput(logits, plan.captured if plan else {})

    def run(
        self,
        tree: TokenTree,
        count: int,
        cache: TreeCache,
        plan: LayerPlan | None,
        *,
        with_logits: bool = True,
        position_shift: int = 0,
    ) -> Tensor:
        """Run the last `count` nodes of `tree`; the nodes before them have been run.

        Args:
            tree: N nodes; node n of a row is written to the n-th slot behind its committed ones.
            count: M, how many nodes to run.
            cache: Committed tokens, and the nodes before.
            plan: Which layers run.
            with_logits: False leaves the LM head out, where the model lets us.
            position_shift: Added to every position.

        Returns:
            Logits [B, M, V], or [B, 0, V] without them.
        """
        architecture, device = self.architecture, self.device
        renew_patch()
        cache.open(tree.width - count, count)
        context = None
        arguments: dict[str, Any] = {architecture.cache_argument: cache}
        if architecture.takes_position_ids:
            depth = tree.depth.to(device)
            prefix_len, last = cache.placement(device)
            positions = prefix_len[:, None] + depth[:, -count:] + position_shift
            arguments["position_ids"] = torch.minimum(positions, last[:, None]).long()
        if architecture.support == "tree":
            if tree.width == 1 and cache.is_even and not architecture.slides_past(cache.width):
                # A step of plain decoding: bit for bit what `generate` would compute.
                arguments["attention_mask"] = None
            else:
                ancestors = tree.ancestors[:, -count:].to(device)
                layout = TreeLayout(ancestors, depth, prefix_len, cache.width)
                if architecture.attention_names:
                    context = TreeContext(layout, architecture.windows, self.deterministic)
                    arguments["attention_mask"] = context.mask_argument()
                else:
                    arguments["attention_mask"] = self._masks(layout, cache)
        else:
            assert isinstance(cache, AlignedCache)
            arguments["attention_mask"] = cache.mask(tree.width, device)
        if architecture.takes_logits_to_keep:
            none = torch.empty(0, dtype=torch.int64, device=device)
            arguments["logits_to_keep"] = 0 if with_logits else none
        tokens = tree.tokens[:, -count:].to(device)
        with layer_plan(plan), tree_context(context):
            logits = self.model(input_ids=tokens, use_cache=True, **arguments).logits
        if context is not None:
            self.attention_calls += context.calls
        return logits.to(device)

    def _masks(self, layout: TreeLayout, cache: TreeCache) -> Tensor | dict[str, Tensor]:
        """Explicit 4-D masks, for models that do not consult the attention interface."""
        assert cache.window is not None
        masks = {
            kind: layout.mask(cache.window[1], window)[:, None]
            for kind, window in self.architecture.windows.items()
        }
        dtype = self.architecture.mask_dtype
        if dtype != torch.bool:  # eager attention adds its mask
            lowest = torch.finfo(dtype).min
            masks = {
                kind: torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, lowest)
                for kind, mask in masks.items()
            }
        return next(iter(masks.values())) if len(masks) == 1 else masks


def _looks(model: PreTrainedModel, deterministic: bool) -> tuple[Any, ...]:
    """All that probes could depend on; weights by how often they were written to."""
    weights = [*model.parameters(), *model.buffers()]
    versions = tuple(None if w.is_inference() else w._version for w in weights)
    return deterministic, fingerprint(model), versions


def _autocasts(device_type: str) -> bool:
    available = torch.amp.is_autocast_available(device_type)
    return available and torch.is_autocast_enabled(device_type)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """What is found under autocast, by its rounding, would be kept for requests without it."""
    if not _autocasts(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Probe without dropout, and leave every module's training flag as it was."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True

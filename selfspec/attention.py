"""The attention implementation that reads token trees, registered with transformers.

While a wrapper generates, the model's config names this implementation. It does nothing of its own
unless the calling context carries a tree: everybody else (the prefill, another thread's plain
`model.generate`) gets the implementation that the model had before. Tree metadata travels in a
`ContextVar`, not in keyword arguments, because not every model passes those on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from selfspec_kernels import TreeLayout, tree_attention
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PREFIX = "selfspec_tree_over_"


class MaskChangedError(RuntimeError):
    """The model makes something else of its mask: adds a bias to it, or selects keys by it."""


class TreeContext:
    """The tree of the forward in progress, and one mask tag for every kind of layer.

    Models hand each attention layer the mask that belongs to its layer type. Passing them
    distinguishable stand-ins tells us the type, hence the window, without trusting every modeling
    file to pass `sliding_window` on. The type is in the *shape* of the stand-in, which survives a
    move to the device of another layer.

    Args:
        layout: Where the nodes are and who sees whom.
        windows: Sliding window by layer type; 0 is full attention.
        deterministic: Whether sums may not depend on the rest of the batch.
    """

    def __init__(
        self, layout: TreeLayout, windows: dict[str, int], deterministic: bool = False
    ) -> None:
        self.layout = layout
        self.windows = windows
        self.deterministic = deterministic
        self.calls = 0

    def mask_argument(self) -> Tensor | dict[str, Tensor]:
        """What to pass as `attention_mask`."""
        device = self.layout.prefix_len.device
        tags = {
            kind: torch.ones(1, 1, 1, i + 1, dtype=torch.bool, device=device)
            for i, kind in enumerate(self.windows)
        }
        return next(iter(tags.values())) if len(tags) == 1 else tags

    def window(self, tag: Tensor | None) -> int:
        """The window of the layer that was given `tag`."""
        if tag is not None and tag.shape[:-1] != (1, 1, 1):
            raise MaskChangedError
        windows = list(self.windows.values())
        if len(windows) == 1:
            return windows[0]
        if tag is None or tag.numel() > len(windows):
            raise RuntimeError("an attention layer did not receive the mask of its layer type")
        return windows[tag.numel() - 1]


_CONTEXT: ContextVar[TreeContext | None] = ContextVar("selfspec_tree_context", default=None)


@contextmanager
def tree_context(context: TreeContext | None) -> Iterator[None]:
    """Make `context` the tree that attention sees in this thread (None: no tree)."""
    token = _CONTEXT.set(context)
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def register_over(original: str) -> str | None:
    """Register our implementation on top of `original`; returns its name.

    Returns None if transformers builds no masks for `original`: without a mask function of its own
    an implementation is given no mask at all, and plain calls from other threads would go wrong.
    """
    name = PREFIX + original
    if name in ALL_ATTENTION_FUNCTIONS:
        return name
    if original not in ALL_MASK_ATTENTION_FUNCTIONS or "flash" in original:
        return None
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
    AttentionInterface.register(name, _over(original))
    return name


def _over(original: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    # Older versions drop soft cap and sinks under sdpa (5.10 runs gemma2 so) and newer ones refuse.
    # The text to reproduce is that of the model as it is, so under sdpa we drop them, too.
    honours_extras = original != "sdpa"

    def selfspec_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        context = _CONTEXT.get()
        if context is None:
            return _plain(original, module)(module, query, key, value, attention_mask, **kwargs)
        context.calls += 1
        if not query.dtype == key.dtype == value.dtype:  # autocast: the rotation is left in float32
            query, key, value = _one_dtype(query, key, value)
        if kwargs.get("position_bias") is not None:
            raise RuntimeError("position_bias is not supported in a tree")
        out = tree_attention(
            query,
            key,
            value,
            context.layout,
            scale=kwargs.get("scaling"),
            softcap=kwargs.get("softcap") or 0.0 if honours_extras else 0.0,
            window=context.window(attention_mask),
            sinks=kwargs.get("s_aux") if honours_extras else None,
            deterministic=context.deterministic,
        )
        return out.transpose(1, 2).contiguous(), None

    return selfspec_attention


def _one_dtype(*tensors: Tensor) -> list[Tensor]:
    """Cast as autocast would before `scaled_dot_product_attention`."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = torch.promote_types(tensors[0].dtype, tensors[1].dtype)
    return [tensor.to(dtype) for tensor in tensors]


def _plain(original: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if original == "eager":  # not in the registry: every modeling file has its own
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[original]

"""From the last layer's output to draft tokens, without the logits of the whole vocabulary.

A draft token needs a few numbers of its logits: the best ids and how probable they are. The model's
final norm and LM head give them in one fused operation, once it is known how this model goes from a
hidden state to logits. That is measured, not looked up: candidates (which norm, how it uses its
weight, which of the config's scales apply) are compared with logits of the model itself.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from selfspec_kernels.draft_topk import draft_topk
from selfspec_kernels.exit_confidence import ExitConfidence, exit_confidence
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Backend = Literal["auto", "reference"]

logger = logging.getLogger("selfspec")

# Largest difference of log-probabilities, in units of the largest logit: float32 sums in another
# order (TF32 perhaps), and roundings of norm and logits where the dtype is coarser than that.
TOLERANCE = 1e-3
TOLERANCE_ROUNDINGS = 4  # times the machine epsilon of the model's dtype
_COMPARED = 16  # best ids of every probed position


@dataclass(frozen=True, eq=False)
class Readout:
    """How a model goes from its last layer's output to logits.

    It holds modules, and reads their weights when called: the user may move the model, train it or
    resize its embeddings.

    Attributes:
        model: Asked for its LM head at every call.
        owner: The module that has the final norm.
        name: Of the norm in it.
        norm: The norm.
        offset: What an RMS norm adds to its weight (0 or 1); None: the norm runs as the module that
            it is, before the fused part.
        eps: Of an RMS norm.
        scale: Factor of the logits.
        softcap: Logits are bent to stay below this; 0: they are not.
    """

    model: PreTrainedModel
    owner: nn.Module
    name: str
    norm: nn.Module
    offset: float | None
    eps: float
    scale: float
    softcap: float

    @property
    def usable(self) -> bool:
        """Whether head and norm are (still) plain modules whose weights may be read directly."""
        plain = self.offset is None or is_plain(self.norm)
        return self.in_place and self.head is not None and plain

    @property
    def in_place(self) -> bool:
        """Whether the norm is still the model's."""
        return getattr(self.owner, self.name, None) is self.norm

    @property
    def head(self) -> nn.Linear | None:
        """The LM head, if it is an ordinary linear layer over tokens that can be embedded."""
        head = self.model.get_output_embeddings()
        if type(head) is not nn.Linear or not is_plain(head):
            return None
        embeddings: Any = self.model.get_input_embeddings()
        return head if head.weight.shape[0] <= embeddings.weight.shape[0] else None

    @property
    def size(self) -> int:
        """V of the head."""
        head = self.head
        assert head is not None
        return int(head.weight.shape[0])

    def best(self, hidden: Tensor) -> ExitConfidence:
        """The most probable token after each of `hidden` [..., C], and how sure it is."""
        states, weight, options = self._terms(hidden)
        return on_device(exit_confidence(states, weight, **options), hidden.device)

    def top(self, hidden: Tensor, k: int, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
        """The `k` most probable tokens after each of `hidden` [..., C], best first.

        Returns:
            int64 ids and float32 log-probabilities, [..., k], or all V of a smaller vocabulary.
        """
        states, weight, options = self._terms(hidden)
        k = min(k, weight.shape[0])
        ids, log_probs = draft_topk(states, weight, k, **options, backend=backend)
        return ids.to(hidden.device), log_probs.to(hidden.device)

    def _terms(self, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """What the operations take: states, head, and what is done before and after."""
        head = self.head
        assert head is not None
        weight = head.weight
        options = {"head_bias": head.bias, "logit_scale": self.scale, "softcap": self.softcap}
        if self.offset is None:
            hidden = self.norm(hidden)
        else:
            norm_weight = self.norm.weight.to(weight.device)
            options |= {
                "norm_weight": norm_weight,
                "norm_eps": self.eps,
                "norm_offset": self.offset,
            }
        return hidden.to(weight.device, weight.dtype), weight, options


def on_device(found: ExitConfidence, device: torch.device) -> ExitConfidence:
    """The same where it is wanted."""
    parts = (found.token, found.top1, found.top2, found.entropy)
    return ExitConfidence(*(part.to(device) for part in parts))


def find_readout(
    model: PreTrainedModel, layers: list[nn.Module], hidden: Tensor, logits: Tensor
) -> Readout | None:
    """The readout that gives the model's own log-probabilities, if there is one.

    Args:
        model: Its final norm is looked for beside `layers`.
        layers: The decoder layers.
        hidden: [T, C] output of the last layer for some tokens.
        logits: [T, V] of the model after the same tokens.

    Returns:
        The first candidate that agrees, or None: drafts are then read from the model's own logits.
    """
    log_probs = logits.float().log_softmax(-1)
    best = log_probs.topk(min(_COMPARED, logits.shape[-1])).values
    tolerance = _tolerance(logits)
    why = "no norm beside the layers fits the head"
    for readout in _candidates(model, layers, hidden):
        if not readout.usable:
            why = "the LM head is no plain linear layer"
            break
        ids, found = readout.top(hidden, best.shape[-1], backend="reference")
        own = log_probs.gather(-1, ids)
        differences = torch.stack([found - best, found - own])
        error = float(differences[torch.stack([found, found]) > -torch.inf].abs().amax())
        if error <= tolerance:
            return readout
        why = f"log-probabilities differ by {error:.2g}"
    logger.debug("drafts are read from the model's own logits: %s.", why)
    return None


def _tolerance(truth: Tensor) -> float:
    unit = max(TOLERANCE, TOLERANCE_ROUNDINGS * torch.finfo(truth.dtype).eps)
    return unit * float(truth[truth.isfinite()].float().abs().amax())


def _candidates(
    model: PreTrainedModel, layers: list[nn.Module], hidden: Tensor
) -> Iterator[Readout]:
    size = hidden.shape[-1]
    if getattr(model.get_output_embeddings(), "in_features", size) != size:
        return
    config = model.config.get_text_config(decoder=True)
    scales = _numbers(config, "logit_scale")
    scales += [1 / scale for scale in _numbers(config, "logits_scaling")]
    softcaps = _numbers(config, "final_logit_softcapping")
    for owner, name, norm in _norms(model, layers, size):
        offset, eps = _as_rms(norm, hidden)
        for scale, softcap in itertools.product([*scales, 1.0], [*softcaps, 0.0]):
            yield Readout(model, owner, name, norm, offset, eps, scale, softcap)


def _as_rms(norm: nn.Module, hidden: Tensor) -> tuple[float | None, float]:
    """`offset` and `eps` of a norm, see `Readout`.

    Compared on shifted states: where the mean is zero a LayerNorm without bias is an RMS norm.
    """
    eps = _numbers(norm, "variance_epsilon") + _numbers(norm, "eps")
    if not eps or len(list(norm.parameters())) > 1 or not is_plain(norm):
        return None, 0.0
    states = hidden + hidden.std()
    truth, weight = norm(states), norm.weight
    assert isinstance(weight, Tensor)
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps[0])
    for offset in (0.0, 1.0):
        error = (wide * (offset + weight) - truth).abs().amax()
        if float(error) <= _tolerance(truth):
            return offset, eps[0]
    return None, 0.0


def _norms(
    model: nn.Module, layers: list[nn.Module], size: int
) -> list[tuple[nn.Module, str, nn.Module]]:
    """(owner, name, module) beside the layers with a vector of a weight; the last one first."""
    for owner in model.modules():
        children = list(owner.named_children())
        if any(isinstance(c, nn.ModuleList) and list(c) == layers for _, c in children):
            weights = [getattr(child, "weight", None) for _, child in children]
            return [
                (owner, *child)
                for child, weight in zip(children, weights, strict=True)
                if isinstance(weight, Tensor) and weight.shape == (size,)
            ][::-1]
    return []


def _numbers(holder: Any, name: str) -> list[float]:
    value = getattr(holder, name, None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return [float(value)] if is_number and value else []


def is_plain(module: nn.Module) -> bool:
    """Whether its weight is what it computes with: not quantised, sharded, offloaded or hooked."""
    weight = module.weight
    return "forward" not in module.__dict__ and type(weight) is nn.Parameter and not weight.is_meta

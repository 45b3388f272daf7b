"""Statistics of rows of logits, with the thresholds of temperature, top-k, top-p and min-p."""

import math

import torch
from torch import Tensor

from .._dispatch import Backend, use_triton
from .reference import RowStats, kept, row_stats_reference, scaled_logits

__all__ = ["RowStats", "keep_mask", "row_stats"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def row_stats(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    backend: Backend = "auto",
) -> RowStats:
    """Reduce every row of logits to what a sampler needs, without storing probabilities.

    A logit is scaled by float32 division, and is -inf where it is NaN. Then transformers' warpers
    apply in transformers' order, each on what the ones before it left:

    - top-k keeps all that are not below the k-th largest;
    - top-p keeps a token iff those above it have less than `top_p` of the probability; among equal
      ones the later index is above. The first always stays;
    - min-p keeps those with at least `min_p` times the largest probability.

    Probabilities are those of real numbers, reached to 1e-6: where a border falls closer than that
    to a token, either side is right. In a row that has +inf, those entries share the probability.

    Bytes moved: the logits once without filters; with top-k or top-p three times, the second and
    third out of the cache where they fit, and 4 bytes for every candidate a few times; their
    scratch has 4 bytes a logit.

    Args:
        logits: [..., V] of any float dtype; the last dimension is contiguous.
        temperature: Positive.
        top_k: 0, or V and more, keep all.
        top_p: In [0, 1]; 1 keeps all.
        min_p: In [0, 1]; 0 keeps all.
        backend: "auto" takes the Triton kernel for CUDA tensors; "triton" and "reference" insist.

    Returns:
        Fields of shape [...]. A row without a number above -inf has argmax 0, and -inf elsewhere.

    Raises:
        TypeError: If `logits` is not a float tensor, or `top_k` not an int.
        ValueError: If a number is out of its range, V is 0, or the last dimension is strided.

    Example:
        >>> stats = row_stats(torch.tensor([[1.0, 3.0, 2.0, 3.0]]), top_k=2)
        >>> stats.argmax, stats.threshold
        (tensor([1]), tensor([3.]))
    """
    if logits.dtype not in _DTYPES:
        raise TypeError(f"row_stats: logits must be a float tensor, got {logits.dtype}")
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"row_stats: logits has shape {tuple(logits.shape)}, expected [..., V]")
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        raise ValueError(
            f"row_stats: logits has stride {logits.stride(-1)} in its last dimension; it must be 1"
        )
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        raise TypeError(f"row_stats: top_k must be an int, got {top_k!r}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"row_stats: temperature={temperature!r} is not positive and finite")
    if top_k < 0:
        raise ValueError(f"row_stats: top_k={top_k} is negative; 0 keeps all")
    for name, share in (("top_p", top_p), ("min_p", min_p)):
        if not 0 <= share <= 1:
            raise ValueError(f"row_stats: {name}={share!r} is not in [0, 1]")
    if use_triton("row_stats", backend, logits):
        from .kernel import row_stats_triton

        return row_stats_triton(logits, temperature, top_k, top_p, min_p)
    return row_stats_reference(logits, temperature, top_k, top_p, min_p)


def keep_mask(logits: Tensor, stats: RowStats, temperature: float = 1.0) -> Tensor:
    """Which logits the filters of `stats` keep.

    Args:
        logits: [..., V], as given to `row_stats`.
        stats: What it returned for them.
        temperature: As given to `row_stats`.

    Returns:
        bool [..., V].
    """
    return kept(scaled_logits(logits, temperature), stats.threshold, stats.ties)

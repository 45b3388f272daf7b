"""From logits to the target's choice, exactly as transformers would make it.

Plain `generate` draws each token as `argmax(p / e)` with fresh exponential noise `e` (that is what
`torch.multinomial` does for one sample). We draw the same noise, in the same order, from the same
generator, one [B, V] block per *position*; a draft only decides how many positions are settled per
step. So with deterministic drafts even sampled text is that of plain `generate` under the same
seed, whatever was drafted, and the generator is left where plain `generate` would have left it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from selfspec_kernels import keep_mask, row_stats
from torch import Tensor
from transformers.generation import logits_process as hf

from selfspec.noise import Noise, Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from selfspec.config import Rule
    from selfspec.state import DecodeState

# Processors whose result for a row depends on that row of scores alone: nodes can be processed
# together, whatever their prefixes.
_PREFIX_FREE = tuple(
    getattr(hf, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
    if hasattr(hf, name)
)

# Processors that depend on (row, prefix, scores) and remember nothing between calls: rows of
# different length can be processed in separate calls.
_STATELESS = (
    *_PREFIX_FREE,
    *(
        getattr(hf, name)
        for name in (
            "MinLengthLogitsProcessor",
            "MinNewTokensLengthLogitsProcessor",
            "RepetitionPenaltyLogitsProcessor",
            "EncoderRepetitionPenaltyLogitsProcessor",
            "NoRepeatNGramLogitsProcessor",
            "EncoderNoRepeatNGramLogitsProcessor",
            "SequenceBiasLogitsProcessor",
            "NoBadWordsLogitsProcessor",
            "ForcedBOSTokenLogitsProcessor",
            "ForcedEOSTokenLogitsProcessor",
            "ExponentialDecayLengthPenalty",
            "SuppressTokensAtBeginLogitsProcessor",
            "WatermarkLogitsProcessor",
        )
        if hasattr(hf, name)
    ),
)

# Warpers that `row_stats` stands for, with the name of its argument and of their attribute.
_FILTERS = {
    hf.TemperatureLogitsWarper: "temperature",
    hf.TopKLogitsWarper: "top_k",
    hf.TopPLogitsWarper: "top_p",
    hf.MinPLogitsWarper: "min_p",
}


# Options that make the processors which are not.
_OPTION_OF = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
}


def stateful_processor(processors: hf.LogitsProcessorList) -> str | None:
    """The first processor that may remember earlier calls, by option and class, or None.

    A user's own counts as one unless it, or the `prefix_allowed_tokens_fn`, has an attribute
    `stateless` that is True: a promise that its result for a row depends on the ids and scores of
    that row alone, whatever rows it is called with.
    """
    for processor in processors:
        function = getattr(processor, "_prefix_allowed_tokens_fn", processor)
        if type(processor) in _STATELESS or getattr(function, "stateless", False) is True:
            continue
        name = type(processor).__name__
        return f"{name} ({_OPTION_OF.get(name, 'logits_processor')})"
    return None


class Sampler:
    """Chooses tokens from the target's logits.

    Args:
        processors: Processors and warpers, as transformers prepared them.
        do_sample: Draw, or take the maximum.
        keep_scores: Whether the scores that choices are made from will be returned.
        keep_logits: Whether the logits under them will be.
        rule: How drafts are taken when tokens are drawn; see `SpecConfig.acceptance`.
        source: Where random numbers come from; torch's own generator by default.
        ends: Whether the last of some new tokens of a row ends it; see `StopRules.ends`.
    """

    def __init__(
        self,
        processors: hf.LogitsProcessorList,
        do_sample: bool,
        *,
        keep_scores: bool = False,
        keep_logits: bool = False,
        rule: Rule = "traversal",
        source: Source | None = None,
        ends: Callable[[DecodeState, int, list[int]], bool] = lambda state, b, new: False,
    ) -> None:
        self.rule: Rule = rule
        self.ends = ends
        self.stateful = stateful_processor(processors) is not None
        self.processors = processors
        self.do_sample = do_sample
        self.keep_scores = keep_scores
        self.keep_logits = keep_logits
        self.prefix_free = all(type(p) in _PREFIX_FREE for p in processors)
        self._fused = _fused_filters(processors)
        self._source = source or Source()
        self._noise: Noise | None = None
        self._seeds: Tensor | None = None

    @property
    def is_argmax(self) -> bool:
        """Whether a choice is nothing but the largest logit, and no scores are kept."""
        return not (self.do_sample or self.processors or self.keep_scores)

    def scores(self, logits: Tensor) -> Tensor:
        """Processed float32 scores for rows of any prefix; `prefix_free` samplers only.

        Args:
            logits: [..., V].
        """
        if self._fused is not None and on_kernels(logits):
            filters, temperature = self._fused, self._fused.get("temperature", 1.0)
            kept = keep_mask(logits, row_stats(logits, **filters), temperature)
            return (logits.float() / temperature).masked_fill_(~kept, float("-inf"))
        rows = logits.float().reshape(-1, logits.shape[-1])
        if self.processors:
            no_ids = torch.empty(rows.shape[0], 0, dtype=torch.int64, device=rows.device)
            rows = self.processors(no_ids, rows)
        return rows.view(*logits.shape[:-1], -1)

    def scores_after(self, logits: Tensor, prefixes: list[Tensor], active: list[int]) -> Tensor:
        """Processed float32 scores [B, V], each row after its own prefix.

        Processors get the whole batch, because some of them hold one entry a row. Rows whose prefix
        has another length are cut, or stood in for by a row that has it: always text that exists,
        since a user's `prefix_allowed_tokens_fn` may know no other. Their result is dropped.

        Args:
            logits: [B, V].
            prefixes: int64 [T_b] token ids of every row so far, padding included.
            active: Rows whose result is wanted.
        """
        logits = logits.float()
        result = None
        for length in sorted({len(prefixes[b]) for b in active}):
            rows = [b for b in active if len(prefixes[b]) == length]
            stand_in = prefixes[rows[0]]
            ids = torch.stack([p[:length] if len(p) >= length else stand_in for p in prefixes])
            processed = self.processors(ids, logits.clone())
            if result is None:  # in the processors' dtype and width, which they may change
                result = processed.new_zeros(processed.shape)
            result[rows] = processed[rows]
        assert result is not None
        return result

    def choose(self, scores: Tensor, position: Tensor, span: range) -> Tensor:
        """The target's choice for rows of scores.

        Args:
            scores: [B, N, V] processed scores.
            position: int64 [B, N], how many tokens a node comes after the prompt.
            span: Holds all of them; known on the host.

        Returns:
            int64 [B, N], inside the vocabulary even if scores are NaN.
        """
        if not self.do_sample:
            return argmax(scores)
        batch, _, vocab = scores.shape
        if self._noise is None:
            self._noise = Noise(self._source, batch, vocab, scores)
        noise = self._noise
        probabilities = scores.softmax(-1)
        blocks = torch.stack([noise.at(t) for t in span])
        rows = torch.arange(batch, device=scores.device)[:, None]
        return argmax(probabilities / blocks[position - span.start, rows])

    @property
    def has_seeds(self) -> bool:
        """Whether `seeds` has been asked for."""
        return self._seeds is not None

    def check(self, scores: Tensor, path: Tensor) -> None:
        """Raise as plain `generate` does on a CPU if it cannot draw where a path goes.

        Off the path scores may be anything: plain `generate` never sees them.

        Args:
            scores: [B, N, V] processed scores.
            path: [B, P] nodes that something was drawn after; negative ones stand for the root.

        Raises:
            RuntimeError: With the words of `torch.multinomial`.
        """
        # Subclasses (fake tensors, for one) have no values to read.
        if not (self.do_sample and scores.is_cpu and type(scores) is Tensor):
            return
        visited = scores[torch.arange(len(path))[:, None], path.clamp(min=0).long()]
        if not bool(visited.logsumexp(-1).isfinite().all()):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    def seeds(self, batch: int) -> Tensor:
        """int64 [B], the random keys of a request's rows, on the CPU; drawn when first asked for.

        A rule with random numbers of its own cannot leave the generator where plain `generate`
        would.
        """
        if self._seeds is None:
            self._seeds = self._source.keys(batch)
        return self._seeds

    def release(self, state: DecodeState) -> None:
        """Forget noise of positions that every row has passed."""
        if self._noise is not None:
            self._noise.forget(min(state.positions()))

    def finish(self, generated: int) -> None:
        """Leave the generator where plain `generate` would after `generated` tokens."""
        if self._noise is not None and self._seeds is None:
            self._noise.rewind(generated)


def argmax(scores: Tensor) -> Tensor:
    """First maximum over the last dimension, always inside the vocabulary."""
    if on_kernels(scores):
        return row_stats(scores).argmax
    return scores.max(dim=-1).indices  # on a CPU several times as fast as argmax


def first_choice(logits: Tensor) -> Tensor:
    """The greedy choice where nothing processes the logits.

    Transformers makes it in float32, where logits can be tied that are not in float64.
    """
    return argmax(logits.float() if logits.dtype is torch.float64 else logits)


def on_kernels(logits: Tensor) -> bool:
    """Whether rows are reduced by a kernel; on a CPU transformers' own warpers are as good."""
    return logits.is_cuda


def _fused_filters(processors: hf.LogitsProcessorList) -> dict[str, Any] | None:
    """Arguments of `row_stats` that stand for all of `processors`, or None.

    Only for what `generate` itself makes of `temperature`, `top_k`, `top_p` and `min_p`, in its
    order.
    """
    filters: dict[str, Any] = {}
    left = list(_FILTERS)
    for processor in processors:
        kind = type(processor)
        if kind not in left:
            return None
        del left[: left.index(kind) + 1]  # each once, and none after a later one
        if getattr(processor, "filter_value", -math.inf) != -math.inf:
            return None
        if getattr(processor, "min_tokens_to_keep", 1) != 1:
            return None
        filters[_FILTERS[kind]] = getattr(processor, _FILTERS[kind])
    return filters or None

"""wrap(): a model whose `generate` speculates, beside the model as it was."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.generation import GenerationMixin

from selfspec.config import SpecConfig
from selfspec.controller import Controller, FixedBudget, OffSwitch, StepCosts
from selfspec.decode import Decoder
from selfspec.drafters import CombinedDrafter, Drafter
from selfspec.drafters.named import label, resolve
from selfspec.metrics import SpecStats
from selfspec.noise import Generators, Source, check_generator
from selfspec.propose import check_taps
from selfspec.request import Request
from selfspec.step import Step
from selfspec.stream import stream_steps
from selfspec.target import Target

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        LogitsProcessorList,
        PreTrainedModel,
        StoppingCriteriaList,
    )
    from transformers.generation.streamers import BaseStreamer

logger = logging.getLogger("selfspec")


def wrap(
    model: PreTrainedModel,
    drafter: str | Drafter | Sequence[Drafter] = "auto",
    **config: Any,
) -> SpeculativeModel:
    """Give `model` a `generate` that speculates. The model itself is not changed.

    Args:
        model: A transformers decoder.
        drafter: "auto" (n-gram drafts with the off switch), "ngram", "layer-skip", "early-exit",
            "none", a drafter, or a list of drafters whose drafts are merged.
        **config: See `SpecConfig`.

    Returns:
        The wrapper. Its `generate` has the signature, the return types and the text of
        `model.generate`.

    Raises:
        TypeError: If `model` is no transformers model that generates, or `drafter` is no drafter.
        ValueError: If the model cannot be verified in blocks (recurrent state, encoder-decoder), or
            an option is unknown or out of range.

    Example:
        >>> spec = selfspec.wrap(model)
        >>> out = spec.generate(**inputs, max_new_tokens=256)
        >>> print(spec.stats)
    """
    return SpeculativeModel(model, drafter, SpecConfig.from_dict(config))


class SpeculativeModel:
    """A model and its speculative `generate`; made by `wrap`.

    Attributes:
        model: The very object that was wrapped.
        stats: Counters over all requests, a `SpecStats`.
        enabled: The switch: False leaves every call to transformers' own loop.
        options: The `SpecConfig`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: str | Drafter | Sequence[Drafter],
        options: SpecConfig,
    ) -> None:
        if isinstance(model, SpeculativeModel):
            raise TypeError("model is wrapped already; pass wrapper.model to wrap it anew.")
        if not isinstance(model, nn.Module) or not isinstance(model, GenerationMixin):
            raise TypeError(
                f"model is a {type(model).__name__}; wrap takes a transformers model with "
                "`generate`, such as AutoModelForCausalLM gives."
            )
        self.model: Any = model
        self.options = options
        self.enabled = True
        self.stats = SpecStats()
        self._drafter_argument = drafter
        self._drafter, switch = resolve(drafter)
        self._off_switch = switch if options.off_switch is None else options.off_switch
        self._costs = StepCosts()
        self._drafter_lock = threading.Lock()
        self._warned: set[str] = set()
        self._call: threading.local = threading.local()  # what `generate` does not pass on
        self._look()
        self._shadow = self._make_shadow()
        logger.info("%s", self)

    def _look(self) -> None:
        """Find out what the model can do, and fit drafter and decoder to it."""
        self._target = Target(self.model, self.options.deterministic)
        architecture = self._target.architecture
        name = type(self.model).__name__
        if architecture.support == "none":
            raise ValueError(
                f"{name} cannot be wrapped: {architecture.reason}. Use model.generate as it is."
            )
        drafters = (
            self._drafter.drafters
            if isinstance(self._drafter, CombinedDrafter)
            else [self._drafter]
        )
        for drafter in drafters:
            if hasattr(drafter, "bind"):
                drafter.bind(architecture)
        self._decoder = Decoder(self._target, self.options)

    def _make_shadow(self) -> Any:
        """An object that *is* the model (one `__dict__`) but decodes with our loop.

        `generate` looks `_sample` up on the type, so that a subclass is enough, and everything that
        `generate` prepares (processors, criteria, streamers, padding, pipelines) reaches it. Beams
        and other modes never get here.
        """
        spec = self
        base = type(self.model)

        def _sample(shadow: Any, input_ids: Tensor, **kwargs: Any) -> Any:
            return spec._decode(base, shadow, input_ids, **kwargs)

        shadow: Any = object.__new__(type(base.__name__, (base,), {"_sample": _sample}))
        shadow.__dict__ = self.model.__dict__
        return shadow

    # ------------------------------------------------------------------ what users call

    def generate(self, *args: Any, generator: Generators = None, **kwargs: Any) -> Any:
        """Transformers' `generate`, sooner: same arguments, return types, errors and text.

        What cannot be decoded in blocks exactly (see the README) goes to transformers' own loop,
        with one log line per reason.

        Args:
            *args: As for `model.generate`.
            generator: Where sampling draws from instead of torch's own generator: one on the
                model's device, or one for every sequence, which then gets the text that it would
                get alone.
            **kwargs: As for `model.generate`.

        Raises:
            TypeError: If `generator` is something else.
            ValueError: If there are not as many generators as sequences, or the request has to go
                to transformers' own loop, which takes none.
        """
        check_generator(generator)
        self._call.generator = generator
        try:
            result = self._shadow.generate(*args, **kwargs)
        finally:
            unused = self._call.__dict__.pop("generator", None)
        if unused is not None:  # beams and the like never reach our loop
            raise ValueError("generator: only greedy and sampled decoding takes one.")
        return result

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Step]:
        """Generate step by step.

        Args:
            *args: As for `generate`.
            **kwargs: As for `generate`.

        Yields:
            A `Step` per target forward; `step.tokens[b]` are the new tokens of row b.

        Raises:
            ValueError: If the request has to go to transformers' own loop, which has no steps.
        """

        def run(on_step: Callable[[Step], None]) -> None:
            self._call.on_step = on_step
            self.generate(*args, **kwargs)
            if "on_step" in self._call.__dict__:  # beams and the like never reach our loop
                raise ValueError("stream: only greedy and sampled decoding has steps.")

        return stream_steps(run)

    def unwrap(self) -> PreTrainedModel:
        """The model. Nothing has to be undone: between calls nothing of ours is on it."""
        return self.model

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's default generation config."""
        return self.model.generation_config

    @property
    def device(self) -> torch.device:
        """The model's device."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    # What transformers' pipelines want of a model besides `generate`.

    def can_generate(self) -> bool:
        """True."""
        return True

    @property
    def input_modalities(self) -> Any:
        """The model's."""
        return self.model.input_modalities

    @property
    def output_modalities(self) -> Any:
        """The model's."""
        return self.model.output_modalities

    def to(self, *args: Any, **kwargs: Any) -> SpeculativeModel:
        """Move or cast the model, in place."""
        self.model.to(*args, **kwargs)
        return self

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model."""
        return self.model.save_pretrained(*args, **kwargs)

    def __repr__(self) -> str:
        architecture = self._target.architecture
        kind = {"tree": "token trees", "chain": "chains only"}[architecture.support]
        why = f" ({architecture.reason})" if architecture.support == "chain" else ""
        drafter = label(self._drafter_argument, self._drafter)
        lossy = " · LOSSY when sampling" if self.options.acceptance == "lossy-typical" else ""
        switch = "off switch on" if self._off_switch else "off switch off"
        return (
            f"selfspec: {type(self.model).__name__} · drafts: {drafter}, up to "
            f"{self.options.max_draft_tokens} tokens, {switch} · verifies {kind}{why}{lossy}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SpeculativeModel:
        model = copy.deepcopy(self.model, memo)
        return _restore(
            model, copy.deepcopy(self._drafter_argument, memo), self.options, self.enabled
        )

    def __reduce__(self) -> Any:
        return _restore, (self.model, self._drafter_argument, self.options, self.enabled)

    # ------------------------------------------------------------------ decoding

    def _decode(
        self,
        base: type,
        shadow: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Any:
        request = Request(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus,
            model_kwargs,
        )
        if not self._target.is_current:
            self._look()
            logger.info("the model has changed since it was wrapped: %s", self)
        on_step = self._call.__dict__.pop("on_step", None)
        generator = self._call.__dict__.pop("generator", None)
        obstacle = (
            request.obstacle(self._target.architecture, self.model.training)
            if self.enabled
            else "it is switched off"
        )
        if obstacle is not None:
            if on_step is not None:
                raise ValueError(f"stream: this request cannot be decoded in steps: {obstacle}.")
            if generator is not None:
                raise ValueError(f"generator: transformers' own loop takes none: {obstacle}.")
            if self.enabled and obstacle not in self._warned:
                self._warned.add(obstacle)
                logger.warning("selfspec: left to transformers' own loop: %s.", obstacle)
            self.stats.add(SpecStats(fallbacks=1))
            return base._sample(  # type: ignore[attr-defined]
                shadow,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        drafter, release = self._borrow_drafter()
        stats = SpecStats(requests=1)
        try:
            check_taps(drafter, self._target.architecture.num_layers)
            drafter.reset()
            controller = self._controller(request)
            source = Source(generator)
            return self._decoder.decode(
                request, drafter, controller, source, streamer, stats, on_step
            )
        finally:
            release()
            self.stats.add(stats)

    def _controller(self, request: Request) -> Controller:
        most = self.options.max_draft_tokens
        if self._drafter_argument == "none":
            return FixedBudget(0)
        if self._off_switch:
            return OffSwitch(self._costs, most)
        return FixedBudget(most)

    def _borrow_drafter(self) -> tuple[Drafter, Callable[[], None]]:
        """The drafter, or a copy of it while another call has it."""
        if self._drafter_lock.acquire(blocking=False):
            return self._drafter, self._drafter_lock.release
        return copy.copy(self._drafter), lambda: None


def _restore(model: Any, drafter: Any, options: SpecConfig, enabled: bool) -> SpeculativeModel:
    """A wrapper from what `copy` and `pickle` keep of one."""
    spec = SpeculativeModel(model, drafter, options)
    spec.enabled = enabled
    return spec

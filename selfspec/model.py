"""wrap(): a model whose `generate` speculates, beside the model as it was."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch import Tensor

from selfspec.borrowing import borrowed
from selfspec.config import SpecConfig
from selfspec.controller import Controller, FixedBudget, OffSwitch
from selfspec.costs import StepCosts
from selfspec.decode import Decoder
from selfspec.detours import option_of_call
from selfspec.double import Call, adapter_obstacle, check_model, doubled
from selfspec.drafters import CombinedDrafter, Drafter
from selfspec.drafters.fitting import fit, say_what_does_not_pay
from selfspec.drafters.named import label, networks_for, resolve
from selfspec.drift import DRIFT, DriftMonitor
from selfspec.facade import Facade
from selfspec.generation_options import other_loop
from selfspec.kill_switch import why_off
from selfspec.metrics import SpecStats
from selfspec.noise import Generators, Source, check_generator
from selfspec.patch import compiled_parts
from selfspec.propose import check_taps
from selfspec.request import Request
from selfspec.step import Step
from selfspec.stream import ending_streamer, stream_steps
from selfspec.target import Target
from selfspec.time_files import TimeFile
from selfspec.trace import Tracer, tracing

if TYPE_CHECKING:
    from torch import nn
    from transformers import (
        GenerationConfig,
        LogitsProcessorList,
        PreTrainedModel,
        StoppingCriteriaList,
    )
    from transformers.generation.streamers import BaseStreamer

    from selfspec.decode import Run

logger = logging.getLogger("selfspec")


def wrap(
    model: PreTrainedModel,
    drafter: str | Drafter | Sequence[str | Drafter] = "auto",
    drafts: str | PathLike[str] | Mapping[str, nn.Module] | None = None,
    *,
    strict_base: bool = True,
    **config: Any,
) -> SpeculativeModel:
    """Give `model` a `generate` that speculates. The model itself is not changed.

    Args:
        model: A transformers decoder, as it is, with adapters of PEFT, or compiled (requests then
            run the code that was compiled, uncompiled).
        drafter: "auto" (copies of texts, and those of a trained draft if there is one, with the off
            switch), "suffix", "ngram", "layer-skip", "early-exit", "heads", "feature", "mtp",
            "none", a drafter, or a list of drafters whose drafts are merged.
        drafts: Where trained drafts are: a folder, a repository on the Hugging Face Hub, or
            networks by kind ("feature", "heads", "exit"). None: in the folder `drafts` beside the
            model's weights, if it was loaded from a folder that has one.
        strict_base: Whether drafts that were made for another model are refused. False lets those
            of a model of the same sizes through, with a warning: a fine-tune's text stays its own,
            less of it is drafted right.
        **config: See `SpecConfig`.

    Returns:
        The wrapper. Its `generate` has the signature, the return types and the text of
        `model.generate`.

    Raises:
        TypeError: If `model` is no transformers model that generates, `drafter` is no drafter, or
            `drafts` is nothing of the above.
        ValueError: If the model cannot be verified in blocks (recurrent state, encoder-decoder), an
            option is unknown or out of range, or drafts are missing, broken, made for another
            model or of a kind that `drafter` does not use.

    Example:
        >>> spec = selfspec.wrap(model)
        >>> out = spec.generate(**inputs, max_new_tokens=256)
        >>> print(spec.stats)
    """
    options = SpecConfig.from_dict(config)
    return SpeculativeModel(model, drafter, options, drafts, strict_base)


class SpeculativeModel(Facade):
    """A model and its speculative `generate`; made by `wrap`.

    Attributes:
        model: The very object that was wrapped.
        stats: Counters over all requests, a `SpecStats`.
        enabled: The switch: False, or SELFSPEC_DISABLE=1, leaves all to transformers' own loop.
        options: The `SpecConfig`.
        costs: What was measured and learned over all requests; `costs.notes` says it in words.
    """

    def __new__(cls, model: PreTrainedModel, *args: Any, **kwargs: Any) -> SpeculativeModel:
        """Of a subclass called like the model's class: pipelines go by that name."""
        return object.__new__(_named(type(model).__name__) if cls is SpeculativeModel else cls)

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: str | Drafter | Sequence[str | Drafter],
        options: SpecConfig,
        drafts: str | PathLike[str] | Mapping[str, nn.Module] | None = None,
        strict_base: bool = True,
    ) -> None:
        if isinstance(model, SpeculativeModel):
            raise TypeError("model is wrapped already; pass wrapper.model to wrap it anew.")
        self.model: Any = model
        self._decoder_model: Any = check_model(model)
        self.options = options
        self.enabled = True
        self.stats = SpecStats()
        self._drafter_argument = drafter
        self._drafts = networks_for(drafter, self._decoder_model, drafts, strict_base)
        self._drafter, switch = resolve(drafter, self._drafts)
        switch = switch and options.adaptive
        self._off_switch = switch if options.off_switch is None else options.off_switch
        self.costs = StepCosts(options.adaptive)
        self._warned: set[str] = set()
        self._call: threading.local = threading.local()  # what `generate` does not pass on
        self._tracer: Tracer | None = None
        self._times: TimeFile | None = None
        self._look()
        found = self._target.architecture
        if found.support == "none":
            raise ValueError(
                f"{type(self._decoder_model).__name__} cannot be wrapped: {found.reason}. Use "
                "model.generate as it is."
            )
        logger.info("%s", self)
        say_what_does_not_pay(self._parts(), self.costs.notes)
        self._warn_of_compiled_code()

    def _warn_of_compiled_code(self) -> None:
        warning = f"{type(self._decoder_model).__name__} is compiled; requests run it uncompiled"
        if warning not in self._warned and compiled_parts(self.model):
            self._warned.add(warning)
            logger.warning("selfspec: %s.", warning)

    def _look(self) -> None:
        """Find out what the model can do, and fit drafter and decoder to it."""
        self._target = Target(self._decoder_model, self.options.deterministic)
        architecture = self._target.architecture
        if architecture.support == "none":
            return
        fit(self._parts(), self._decoder_model, architecture, self._drafts.get("skip_set"))
        self._decoder = Decoder(self._target, self.options)
        if self.options.adaptive and self.options.keep_times:
            self._times = TimeFile(self._decoder_model)
            self._times.read(self.costs)

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
        return self._request(args, kwargs, generator, None)

    def _request(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        generator: Generators,
        on_step: Callable[[Step], None] | None,
    ) -> Any:
        own = self._call.__dict__
        outer = dict(own)  # of a request that this one is inside of
        own.clear()
        own.update(generator=generator, on_step=on_step, seen=False)
        try:
            call = Call(self._decoder_model, self._decode, self._leave)
            with ending_streamer(args, kwargs) as (args, kwargs):
                check_generator(generator)
                with doubled(self.model, call) as double:
                    result = double.generate(*args, **kwargs)
            if not self._call.seen:
                self._leave(other_loop(option_of_call(self.model, kwargs)))
            return result
        finally:
            own.clear()
            own.update(outer)

    def _leave(self, reason: str) -> None:
        """Count a request that is left to transformers' own loop; say why, once a reason.

        Raises:
            ValueError: If it cannot be, because of what that loop has not.
        """
        self._call.seen = True
        own = self._call.__dict__
        if own.pop("on_step", None) is not None:
            raise ValueError(f"stream: this request cannot be decoded in steps: {reason}.")
        if own.pop("generator", None) is not None:
            raise ValueError(f"generator: transformers' own loop takes none: {reason}.")
        if self.enabled and reason not in self._warned:
            self._warned.add(reason)
            logger.warning("selfspec: left to transformers' own loop: %s.", reason)
        self.stats.add(SpecStats(fallbacks=1))

    def stream(self, *args: Any, generator: Generators = None, **kwargs: Any) -> Iterator[Step]:
        """Generate step by step.

        Args:
            *args: As for `generate`.
            generator: As for `generate`.
            **kwargs: As for `generate`.

        Yields:
            A `Step` per target forward; `step.tokens[b]` are the new tokens of row b.

        Raises:
            ValueError: If the request has to go to transformers' own loop, which has no steps.
        """

        def run(on_step: Callable[[Step], None]) -> None:
            self._request(args, kwargs, generator, on_step)

        return stream_steps(run)

    def trace(
        self, path: str | PathLike[str], every_position: bool = False
    ) -> AbstractContextManager[None]:
        """Write down what requests do, for `selfspec.simulate`: `with spec.trace("t.jsonl"): ...`.

        Args:
            path: Of the file, JSONL (see `selfspec/trace.py`); one that is there is overwritten. It
                holds the tokens that were generated.
            every_position: Whether to let all drafters draft at every position and follow none, as
                simulations of drafting need it. The text is the same, and takes longer than plain.

        Raises:
            ValueError: If the wrapper is being traced already, or a drafter cannot be so.
            OSError: If the file cannot be written.
        """
        return tracing(self, path, every_position)

    def unwrap(self) -> PreTrainedModel:
        """The model. Nothing has to be undone: between calls nothing of ours is on it."""
        return self.model

    def __repr__(self) -> str:
        architecture = self._target.architecture
        kinds = {"tree": "token trees", "chain": "chains only", "none": "nothing"}
        kind = kinds[architecture.support]
        why = f" ({architecture.reason})" if architecture.support != "tree" else ""
        drafter = label(self._drafter_argument, self._drafter)
        lossy = " · LOSSY when sampling" if self.options.acceptance == "lossy-typical" else ""
        if getattr(self._drafter, "is_lossy", False):
            lossy += " · LOSSY: tokens of the exit are kept unseen"
        switch = "off switch on" if self._off_switch else "off switch off"
        enabled = "" if why_off(self.enabled) is None else "NOT ENABLED · "
        return (
            f"selfspec: {enabled}{type(self.model).__name__} · drafts: {drafter}, up to "
            f"{self.options.max_draft_tokens} tokens, {switch} · verifies {kind}{why}{lossy}"
            + "".join(f" · {note}" for note in self.costs.notes.values())
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SpeculativeModel:
        return _restore(
            copy.deepcopy(self.model, memo),
            copy.deepcopy(self._drafter_argument, memo),
            self.options,
            self.enabled,
            copy.deepcopy(self._drafts, memo) or None,
            copy.copy(self.costs.kept.get(DRIFT)),
        )

    def __reduce__(self) -> Any:
        parts = self.model, self._drafter_argument, self.options, self.enabled, self._drafts or None
        return _restore, (*parts, self.costs.kept.get(DRIFT))

    # ------------------------------------------------------------------ decoding

    def _decode(
        self,
        base: type,
        double: Any,
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
        self._call.seen = True
        if not self._target.is_current:
            self._look()
            logger.info("the model has changed since it was wrapped: %s", self)
        obstacle = (
            why_off(self.enabled)
            or adapter_obstacle(self.model, self._decoder_model)
            or request.obstacle(self._target.architecture, self._target.is_training)
        )
        if obstacle is not None:
            self._leave(obstacle)
            return base._sample(  # type: ignore[attr-defined]
                double,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        self._warn_of_compiled_code()
        on_step = self._call.__dict__.pop("on_step", None)
        generator = self._call.__dict__.pop("generator", None)
        stats = SpecStats(requests=1)
        try:
            with borrowed(self._drafter, self._parts()) as drafter:
                check_taps(drafter, self._target.architecture.num_layers)
                drafter.reset()
                run: Run = drafter, self._controller(), self.costs, on_step
                tracer = self._tracer
                with tracer.follow(request, self._target, run) if tracer else nullcontext(run) as r:
                    return self._decoder.decode(request, r, Source(generator), streamer, stats)
        finally:
            self.stats.add(stats)
            if self._times is not None:
                self._times.write(self.costs)

    def _controller(self) -> Controller:
        most = self.options.max_draft_tokens
        if self._drafter_argument == "none":
            return FixedBudget(0)
        if self._off_switch:
            return OffSwitch(self.costs, most, getattr(self._drafter, "sizes_itself", False))
        return FixedBudget(most)

    def _parts(self) -> Sequence[Drafter]:
        drafter = self._drafter
        return drafter.drafters if isinstance(drafter, CombinedDrafter) else [drafter]


@cache
def _named(name: str) -> type[SpeculativeModel]:
    names = {"__module__": __name__, "__qualname__": f"SpeculativeModel[{name}]"}
    return type(name, (SpeculativeModel,), names)


def _restore(
    model: Any,
    drafter: Any,
    options: SpecConfig,
    enabled: bool,
    drafts: Mapping[str, nn.Module] | None,
    drift: DriftMonitor | None = None,
) -> SpeculativeModel:
    """A wrapper from what `copy` and `pickle` keep of one."""
    spec = SpeculativeModel(model, drafter, options, drafts)
    spec.enabled = enabled
    if drift is not None:  # what was not to be trusted is not to be trusted in a copy
        spec.costs.kept[DRIFT] = drift
    return spec

"""One request through the loop: from what `generate` prepared to what it returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from selfspec.arena import Arena, graph_obstacle
from selfspec.clock import Clock
from selfspec.loop import speculate
from selfspec.record import Record
from selfspec.sampling import Sampler
from selfspec.state import DecodeState
from selfspec.stopping import StopRules
from selfspec.stream import ColumnStreamer
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

    from selfspec.cache import TreeCache
    from selfspec.config import SpecConfig
    from selfspec.controller import Controller
    from selfspec.costs import StepCosts
    from selfspec.drafters.protocol import Drafter
    from selfspec.fixed_step import FixedSteps
    from selfspec.metrics import SpecStats
    from selfspec.noise import Source
    from selfspec.request import Request
    from selfspec.state import TargetOutput
    from selfspec.step import Step
    from selfspec.target import Target

    # Drafter, controller, costs, and what is called with every step.
    Run = tuple[Drafter, Controller, StepCosts, Callable[[Step], None] | None]


class Decoder:
    """Decodes the requests of one wrapper.

    Args:
        target: The model.
        options: Of the wrapper.

    Raises:
        ValueError: If `cuda_graphs=True` was asked for and the model does not allow it.
    """

    def __init__(self, target: Target, options: SpecConfig) -> None:
        self.target = target
        self.options = options
        self._arena: Arena | None = None
        if options.cuda_graphs:
            obstacle = graph_obstacle(target.architecture, target.model)
            if obstacle is None:
                self._arena = Arena(target, options.max_draft_tokens + 1)
            elif options.cuda_graphs is True:
                raise ValueError(
                    f"cuda_graphs=True: steps of {type(target.model).__name__} cannot be captured: "
                    f'{obstacle}. Use "auto" or False.'
                )

    def decode(
        self,
        request: Request,
        run: Run,
        source: Source,
        streamer: BaseStreamer | None,
        stats: SpecStats,
    ) -> Any:
        """Decode until every row has ended.

        Args:
            request: One that our loop takes.
            run: The drafter, freshly reset; the controller, which sets draft budgets; the costs,
                which measure every step; and what is called with every step.
            source: Of random numbers.
            streamer: As passed to `generate`.
            stats: Counts every step.

        Returns:
            What transformers' `_sample` returns.
        """
        drafter, controller, costs, on_step = run
        options = request.generation_config
        architecture = self.target.architecture
        batch = request.batch
        source.check(batch)
        stops = StopRules(request.criteria, batch)
        sampler = Sampler(
            request.processors,
            options.do_sample,
            keep_scores=options.return_dict_in_generate and options.output_scores,
            keep_logits=options.return_dict_in_generate and options.output_logits,
            rule=self.options.acceptance,
            source=source,
            ends=stops.ends,
        )
        pad = options._pad_token_tensor
        columns = ColumnStreamer(streamer, batch, 0 if pad is None else int(pad))
        if streamer is not None and (stops.others or sampler.stateful):
            stops.on_token = columns.put_token
        longest = request.slots + request.limit - request.input_ids.shape[1]
        taps = frozenset(drafter.hidden_taps)
        clock, record = Clock(), Record(batch)
        with self._lend_steps(request, longest) as steps, self.target.ready():
            cache, verify = self._place(steps, request, longest, taps, sampler)
            with clock("prefill"):
                if request.user_cache is not None:
                    cache.load(request.user_cache, request.pads)
                arguments = {**request.model_kwargs, architecture.cache_argument: cache}
                prompt = self.target.prefill(
                    lambda: self.target.model._prefill(request.input_ids, options, arguments),
                    cache,
                    request.pads,
                    taps,
                )
            state = DecodeState(
                self.target, cache, request.input_ids, request.start, request.limit, sampler, costs
            )
            made = speculate(state, prompt, verify, drafter, controller, sampler, stops, clock)
            del prompt
            try:
                for step in made:
                    stats.count(step)
                    record.add(step)
                    ends = stops.last_length
                    most_columns = None if ends is None else ends - state.prompt_length
                    if stops.on_token is None:
                        columns.put(step, state.frozen, most_columns)
                    if on_step is not None:
                        on_step(step)
            except RuntimeError as error:
                if isinstance(error.__cause__, StopIteration):  # a generator may not raise it
                    raise error.__cause__ from None
                raise
            columns.end()
            length = stops.final_length(state)
            returned = None
            if options.return_dict_in_generate or request.user_cache is not None:
                self._run_padding(state, length, columns.pad)
                config = self.target.model.config.get_text_config(decoder=True)
                slots = request.slots + length - state.prompt_length - 1
                returned = cache.export(slots, config, request.user_cache)
        sampler.finish(length - state.prompt_length)
        sequences = state.sequences(length, columns.pad)
        if not options.return_dict_in_generate:
            return sequences
        new = length - state.prompt_length
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=record.columns(record.scores, new, columns.pad) if sampler.keep_scores else None,
            logits=record.columns(record.logits, new, columns.pad) if sampler.keep_logits else None,
            **{architecture.cache_argument: returned},
        )

    def _run_padding(self, state: DecodeState, length: int, pad: int) -> None:
        """Cache what transformers caches of rows that have ended: padding up to the last token.

        Whoever continues the returned cache sees it, unless a mask hides it.
        """
        root, most = state.root, self.options.max_draft_tokens + 1
        missing = [max(length - end, 0) for end in state.length]
        while any(missing):
            count = min(max(missing), most)
            tree = TokenTree.chain(root, root.new_full((state.batch, count - 1), pad))
            self.target.verify(tree, state.cache)
            path = torch.arange(count, dtype=torch.int32).expand(state.batch, -1)
            state.cache.commit(path, [min(left, count) for left in missing], moved=False)
            missing = [max(left - count, 0) for left in missing]
            root = torch.full_like(root, pad)

    def _lend_steps(
        self, request: Request, longest: int
    ) -> AbstractContextManager[FixedSteps | None]:
        """Steps of fixed shape for one request, if there are any for it."""
        wanted = self.options.cuda_graphs is True or self.target.device.type == "cuda"
        if self._arena is None or not wanted:
            return nullcontext()
        return self._arena.lend(request.batch, request.slots, longest)

    def _place(
        self,
        steps: FixedSteps | None,
        request: Request,
        longest: int,
        taps: frozenset[int],
        sampler: Sampler,
    ) -> tuple[TreeCache, Callable[[TokenTree], TargetOutput]]:
        """The cache of a request, and what verifies trees in it."""
        if steps is not None:
            return steps.cache, steps.verifier(taps, sampler)
        most = self.options.max_draft_tokens + 1
        cache = self.target.architecture.new_cache(
            request.batch, reserve=request.slots + most + 64, longest=longest, extra=most
        )
        return cache, partial(self.target.verify, cache=cache, taps=taps)

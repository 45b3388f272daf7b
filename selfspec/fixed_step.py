"""Verify, accept and commit as one step of fixed shape, captured and replayed on a CUDA device.

A tree is padded to a bucket of nodes and copied into buffers that stay. What follows reads nothing
back to the host and allocates nothing of another size, so that one CUDA graph replays all of it:
hundreds of launches become one. On other devices, and at the first use of a bucket, the same code
runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from selfspec.accept import follow
from selfspec.sampling import first_choice
from selfspec.state import TargetOutput
from selfspec.step import step_table
from selfspec.topology import WORD_BITS
from selfspec.tree import Resume, TokenTree

if TYPE_CHECKING:
    from selfspec.fixed_cache import FixedCache
    from selfspec.sampling import Sampler
    from selfspec.target import Target

logger = logging.getLogger("selfspec")


def bucket(nodes: int) -> int:
    """Nodes of the smallest fixed shape that holds `nodes`: the next power of two."""
    return 1 << (nodes - 1).bit_length()


class FixedStep:
    """One shape of step over one cache.

    Args:
        target: Verifies.
        cache: Where it writes.
        nodes: N, nodes of the padded tree.
        taps: Layers whose input is returned as `hidden`.
        resume_layer: Layer that verification starts at, with states from drafting; 0 is none.
        greedy: Whether acceptance (by argmax) and commit are part of the step.
    """

    def __init__(
        self,
        target: Target,
        cache: FixedCache,
        nodes: int,
        taps: frozenset[int],
        resume_layer: int,
        greedy: bool,
    ) -> None:
        self.target = target
        self.cache = cache
        self.nodes = nodes
        self.taps = taps
        self.resume_layer = resume_layer
        self.greedy = greedy
        self.tree: TokenTree | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output: TargetOutput | None = None

    def load(self, tree: TokenTree) -> None:
        """Copy a tree into the buffers, padded."""
        padded = pad_tree(tree, self.nodes)
        if self.tree is None:
            # Not inference tensors: they outlive a user's `torch.inference_mode()`.
            with torch.inference_mode(False):
                self.tree = _buffers(padded, self.target.device)
        for mine, new in zip(_tensors(self.tree), _tensors(padded), strict=True):
            mine.copy_(new)

    def body(self) -> TargetOutput:
        """The step itself, from buffers to buffers."""
        assert self.tree is not None
        output = self.target.verify(self.tree, self.cache, self.taps)
        if not self.greedy:
            return output
        acceptance = follow(self.tree, first_choice(output.logits))
        self.cache.move(acceptance.path, acceptance.num_accepted, self.cache.prefix_len)
        table = step_table(self.tree, acceptance)
        return replace(output, acceptance=replace(acceptance, in_place=True, table=table))

    def run(self, tree: TokenTree) -> TargetOutput:
        """Verify `tree`; what is returned holds until the next run."""
        self.load(tree)
        if self.graph is None:
            return self.body()
        self.graph.replay()
        assert self.output is not None
        return self.output

    def capture(self, pool: Any) -> None:
        """Record `body` for replay; nothing is executed. It must have run as it is before.

        Args:
            pool: Memory pool shared by the graphs of one cache.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = self.body()
        self.graph, self.output = graph, output


class FixedSteps:
    """The fixed shapes in use over one cache, made and captured when first needed.

    Args:
        target: Verifies.
        cache: Where it writes.
    """

    def __init__(self, target: Target, cache: FixedCache) -> None:
        self.target = target
        self.cache = cache
        self.steps: dict[tuple[Any, ...], FixedStep] = {}
        self.captures = cache.prefix_len.is_cuda
        self._generation = cache.generation
        self._pool: Any = None

    def verifier(
        self, taps: frozenset[int], sampler: Sampler
    ) -> Callable[[TokenTree], TargetOutput]:
        """What the loop verifies a request's trees with.

        Args:
            taps: Layers whose input the drafter wants to see.
            sampler: How tokens are chosen; only plain argmax becomes part of the step.
        """

        def verify(tree: TokenTree) -> TargetOutput:
            return self._run(tree, taps, sampler.is_argmax and tree.given is None)

        return verify

    def _run(self, tree: TokenTree, taps: frozenset[int], greedy: bool) -> TargetOutput:
        self.cache.make_room()  # growing voids what is captured
        if self.cache.generation != self._generation:
            self.steps.clear()
            self._generation = self.cache.generation
        layer = tree.resume.layer if tree.resume is not None else 0
        key = (bucket(tree.width), taps, layer, greedy)
        step = self.steps.get(key)
        if step is None:
            step = FixedStep(self.target, self.cache, *key)
            output = step.run(tree)
            if self.captures:
                self._capture(step)
            self.steps[key] = step
        else:
            output = step.run(tree)
        return _own(output, tree.width)

    def _capture(self, step: FixedStep) -> None:
        try:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            step.capture(self._pool)
        except Exception as error:  # whatever a model's own code does that a capture forbids
            self.captures = False
            reason = str(error).strip().split("\n")[0]
            logger.warning(
                "selfspec: no CUDA graphs: %s could not be captured (%s: %s).",
                type(self.target.model).__name__,
                type(error).__name__,
                reason,
            )


def pad_tree(tree: TokenTree, nodes: int) -> TokenTree:
    """The tree with more padding: nodes that see the prefix and themselves and are never kept.

    Args:
        tree: At most `nodes` wide, without `log_q` (acceptance has the tree as it was).
        nodes: N of the result.
    """
    batch, width = tree.tokens.shape
    more = nodes - width
    ancestors = tree.ancestors.new_zeros(batch, nodes, -(-nodes // WORD_BITS))
    ancestors[:, :width, : tree.ancestors.shape[2]] = tree.ancestors
    own = torch.arange(width, nodes, device=ancestors.device)
    ancestors[:, own, own // WORD_BITS] = torch.ones_like(own) << own % WORD_BITS
    resume = tree.resume
    if resume is not None:
        resume = Resume(resume.layer, pad(resume.hidden, (0, 0, 0, more)))
    return TokenTree(
        tokens=pad(tree.tokens, (0, more)),
        parents=pad(tree.parents, (0, more), value=-1),
        depth=pad(tree.depth, (0, more)),
        ancestors=ancestors,
        num_nodes=tree.num_nodes,
        resume=resume,
        max_depth=nodes - 1,
        max_nodes=nodes,
    )


def _tensors(tree: TokenTree) -> list[Tensor]:
    found = [tree.tokens, tree.parents, tree.depth, tree.ancestors, tree.num_nodes]
    return [*found, tree.resume.hidden] if tree.resume is not None else found


def _buffers(tree: TokenTree, device: torch.device) -> TokenTree:
    """A tree of the same shapes on `device`, its content to be copied in."""
    tokens, parents, depth, ancestors, num_nodes, *hidden = (
        torch.empty_like(t, device=device, memory_format=torch.contiguous_format)
        for t in _tensors(tree)
    )
    return replace(
        tree,
        tokens=tokens,
        parents=parents,
        depth=depth,
        ancestors=ancestors,
        num_nodes=num_nodes,
        resume=Resume(tree.resume.layer, *hidden) if tree.resume is not None else None,
    )


def _own(output: TargetOutput, width: int) -> TargetOutput:
    """Without the padding; hidden states, which drafters keep, no longer in the graph's memory."""
    hidden = {layer: states[:, :width].clone() for layer, states in output.hidden.items()}
    return replace(output, logits=output.logits[:, :width], hidden=hidden)

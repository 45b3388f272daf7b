"""Watching a drafter: what it was given before and after every call, and what it proposed.

For `selfspec.testing`; nothing of it runs in a request that is not being tested.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfspec.propose import check_resume
from selfspec.testing.rules import DrafterError
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from selfspec.state import Acceptance, DecodeState, TargetOutput


class Watched:
    """Stands before a drafter and looks at every call.

    Args:
        inner: The drafter.
        rule: That an exception of the drafter breaks.
        most: Budget that it gets at most.
        measures: Whether to keep where drawn tokens lie in their distributions.
        before_second: Called before the second draft.
    """

    def __init__(
        self,
        inner: Any,
        rule: str,
        *,
        most: int = 1 << 30,
        measures: bool = False,
        before_second: Callable[[], None] | None = None,
    ) -> None:
        self.inner, self.rule, self.name = inner, rule, type(inner).__name__
        self.trees: list[tuple[list[int], list[int], Any]] = []
        self.drawn = False
        self.copies: list[Watched] = []
        self.measured = 0
        self._most = most
        self._measures = measures
        self._before_second = before_second
        self._noise = torch.Generator().manual_seed(0)
        self._uniform: dict[int, list[Tensor]] = {}

    @property
    def hidden_taps(self) -> Sequence[int]:
        """The drafter's."""
        taps: Sequence[int] = self.inner.hidden_taps
        return taps

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """Let it draft, and check the draft and what became of the state."""
        if len(self.trees) == 1 and self._before_second is not None:
            self._before_second()
        budget = min(budget, self._most)
        before = _look(state)
        tree = self._call("draft", state, budget)
        self._compare(before, _look(state), "draft")
        if not isinstance(tree, TokenTree):
            self._breach("tree", f"draft returned a {type(tree).__name__}")
        if int(tree.num_nodes.max()) - 1 > budget or int(tree.depth.max()) > budget:
            found = f"{int(tree.num_nodes.max()) - 1} tokens to depth {int(tree.depth.max())}"
            self._breach("budget", f"{found} for a budget of {budget}")
        try:
            tree.validate(state.root, state.target.vocab_size, budget)
            check_resume(tree, state.target.architecture.num_layers)
        except ValueError as error:
            self._breach("tree", str(error))
        if tree.log_q is not None:
            self.drawn = True
            self._check_log_q(tree, state)
        lengths = [n - start for n, start in zip(state.length, state.start, strict=True)]
        counts = tree.num_nodes.tolist()
        nodes = [
            (tokens[:count], parents[:count])
            for tokens, parents, count in zip(
                tree.tokens.tolist(), tree.parents.tolist(), counts, strict=True
            )
        ]
        self.trees.append((lengths, [b for b, f in enumerate(state.frozen) if not f], nodes))
        return tree

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Let it observe, and check that it only did that."""
        before = _look(state)
        shown = [output.logits, *output.hidden.values(), acceptance.path, acceptance.next_token]
        copies = [tensor.clone() for tensor in shown]
        self._call("observe", state, output, acceptance)
        self._compare(before, _look(state), "observe")
        if not all(map(_same, shown, copies)):
            self._breach("observe", "logits, hidden states or the acceptance were changed")

    def reset(self) -> None:
        """Let it forget."""
        self._call("reset")

    def __copy__(self) -> Watched:
        """Stands before a copy: what a wrapper makes for a concurrent request."""
        try:
            inner = copy.copy(self.inner)
        except Exception as error:
            self._breach("copy", f"copy.copy raised {type(error).__name__}: {error}", error)
        self.copies.append(Watched(inner, self.rule))
        return self.copies[-1]

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self.inner, method)(*args)
        except Exception as error:
            self._breach(self.rule, f"{method} raised {type(error).__name__}: {error}", error)

    def _breach(self, rule: str, seen: str, cause: Exception | None = None) -> Any:
        raise DrafterError(rule, self.name, seen) from cause

    def _compare(self, before: dict[str, Any], after: dict[str, Any], method: str) -> None:
        for name, (rule, value) in before.items():
            found = after[name][1]
            if name == "generator" and after["seeds"][1] != before["seeds"][1]:
                continue  # the request's keys were drawn, as they have to be once
            if name != "seeds" and not _same(value, found):
                self._breach(rule, f"{method} changed {name}")

    # ------------------------------------------------------------------ drawn drafts

    def _check_log_q(self, tree: TokenTree, state: DecodeState) -> None:
        log_q = tree.log_q
        assert log_q is not None
        if not log_q.is_floating_point() or log_q.ndim != 3:
            self._breach("log_q", f"it is {log_q.dtype} {tuple(log_q.shape)}")
        totals = log_q.double().exp().sum(-1).tolist()
        drawn: list[tuple[Tensor, list[int], int]] = []
        for b in range(tree.batch):
            if state.frozen[b]:
                continue
            parents = tree.parents[b, : int(tree.num_nodes[b])].tolist()
            for node in sorted({p for p in parents if p >= 0}):
                total = totals[b][node]
                if not abs(total - 1) < 1e-3:
                    self._breach("log_q", f"node {node} of row {b}: exp(log_q) sums to {total:.4f}")
                children = [n for n, p in enumerate(parents) if p == node]
                tokens, depth = tree.tokens[b, children].tolist(), int(tree.depth[b, node]) + 1
                if float(log_q[b, node, tokens].min()) == float("-inf"):
                    self._breach("log_q", f"one of {tokens} was drawn, and log_q says never")
                drawn.append((log_q[b, node].double().clone(), tokens, depth))
        if self._measures:
            self._measure(drawn)

    def _measure(self, drawn: list[tuple[Tensor, list[int], int]]) -> None:
        """Siblings of one rank at a time, those before them taken out of their distribution."""
        for rank in range(max((len(tokens) for _, tokens, _ in drawn), default=0)):
            # The first repeat ends a row: it counts as not drafted.
            drawn = [
                item
                for item in drawn
                if len(item[1]) > rank and float(item[0][item[1][rank]]) > float("-inf")
            ]
            if not drawn:
                return
            ids = torch.tensor([tokens[rank] for _, tokens, _ in drawn])
            laws = torch.stack([left for left, _, _ in drawn]).log_softmax(-1)
            for value, (left, tokens, depth) in zip(
                self.uniform(laws, ids, self._noise), drawn, strict=True
            ):
                self._uniform.setdefault(depth, []).append(value[None])
                left[tokens[rank]] = float("-inf")
            self.measured += len(drawn)

    @staticmethod
    def uniform(log_p: Tensor, tokens: Tensor, noise: torch.Generator) -> Tensor:
        """Where tokens lie in their distributions: uniform in 0..1 if they follow them.

        With u uniform, P(before x) + u P(x) is uniform whatever P is; so one test serves for draws
        from many distributions. Two orders of tokens: by id, and by probability, ties as one.

        Args:
            log_p: float64 [B, V], normalised.
            tokens: int64 [B].
            noise: For u.

        Returns:
            float64 [B, 2] on the CPU.
        """
        p, at = log_p.cpu().exp(), tokens.cpu()[:, None]
        own = p.gather(1, at)
        u = torch.rand(len(p), 2, generator=noise, dtype=torch.float64)
        by_id = (p.cumsum(1) - p).gather(1, at) + u[:, :1] * own
        above = (p * (p > own)).sum(1, keepdim=True)
        return torch.cat([by_id, above + u[:, 1:] * (p * (p == own)).sum(1, keepdim=True)], 1)

    def quantiles(self) -> dict[int, tuple[Tensor, ...]]:
        """What `uniform` gave, by depth, one tensor an order."""
        return {depth: torch.cat(values).unbind(1) for depth, values in self._uniform.items()}


def _look(state: DecodeState) -> dict[str, tuple[str, Any]]:
    """Everything that a drafter may not change, with the rule that says so."""
    cache = state.cache
    kept = [
        part.clone()
        for layer in cache.layers
        if layer.is_initialized
        for b in range(state.batch)
        for part in cache.row(layer, b)
    ]
    generators = [torch.get_rng_state()]
    if state.root.is_cuda:
        generators.append(torch.cuda.get_rng_state(state.root.device))
    sampler = state.sampler
    return {
        "lengths": ("state", [list(state.length), list(state.start), state.prompt_length]),
        "limit": ("state", state.limit),
        "frozen": ("state", list(state.frozen)),
        "the sampler's processors": ("state", [] if sampler is None else list(sampler.processors)),
        "tokens": ("state", [state.tokens(b).tolist() for b in range(state.batch)]),
        "root": ("state", state.root.clone()),
        "lengths of the cache": ("cache", [list(cache.lengths), list(cache.pads)]),
        "committed keys or values": ("cache", kept),
        "generator": ("generator", generators),
        "grad mode": ("settings", [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]),
        "the default dtype": ("settings", torch.get_default_dtype()),
        "seeds": ("generator", sampler is None or not sampler.has_seeds),
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):  # bit for bit: NaN equals itself
        return a.shape == b.shape and torch.equal(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5))
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def first_choices(trees: list[Any], b: int) -> dict[tuple[int, tuple[int, ...]], int]:
    """What row b drafted first, by its length and the draft before: {(length, path): token}."""
    found: dict[tuple[int, tuple[int, ...]], int] = {}
    for lengths, live, nodes in trees:
        if b not in live:
            continue
        tokens, parents = nodes[b]
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            found.setdefault((lengths[b], paths[parent]), token)
            paths.append((*paths[parent], token))
    return found


def model_marks(model: nn.Module) -> list[Any]:
    """Fingerprints of weights, modules and configs, to be compared."""
    weights = [
        (p.data_ptr(), None if p.is_inference() else p._version)
        for p in (*model.parameters(), *model.buffers())
    ]
    modules = [
        (type(m), m.training, sorted(m.__dict__), [len(h) for h in _hooks(m)])
        for m in model.modules()
    ]
    configs = [str(getattr(model, name, None)) for name in ("config", "generation_config")]
    return [weights, modules, configs]


def _hooks(module: nn.Module) -> Iterator[Any]:
    return (value for name, value in sorted(module.__dict__.items()) if name.endswith("_hooks"))


def reach(drafter: object) -> int:
    """Bytes of everything that can be reached from a drafter but models and code."""
    seen: set[int] = set()
    todo: list[Any] = [drafter]
    total = 0
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(
            item, type | ModuleType | nn.Module | BuiltinFunctionType
        ):
            continue
        seen.add(id(item))
        if isinstance(item, FunctionType):  # not its globals
            todo += [item.__closure__, item.__defaults__, item.__kwdefaults__]
        elif isinstance(item, MethodType):
            todo += [item.__self__, item.__func__]
        else:
            total += sys.getsizeof(item)
            if isinstance(item, Tensor):
                total += item.untyped_storage().nbytes()
            todo += gc.get_referents(item)
    return total

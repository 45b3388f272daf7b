"""Hold a drafter to its contract: `check_drafter`, for the tests of those who write one."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfspec.metrics import SpecStats
from selfspec.model import wrap
from selfspec.propose import check_taps
from selfspec.testing.rules import DrafterError
from selfspec.testing.watch import Watched, first_choices, model_marks, reach

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfspec.drafters import Drafter

# A Kolmogorov-Smirnov statistic times the root of its number of samples exceeds this once in 10,000
# times by chance.
_CRITICAL = 2.23
# Flattens the model's distribution, so that more than one token can be drawn and accepted.
_HOT = 1.5
_ROWS = 64


@dataclass(frozen=True)
class DrafterReport:
    """What was measured while the rules were checked (greedy requests).

    Attributes:
        drawn: Whether drafts come with `log_q` in requests that sample.
        drafted: Draft tokens; 0 says that nothing but the drafter's silence was checked.
        acceptance_rate: Accepted / drafted tokens.
        mean_accepted_length: tau, tokens a verify.
        seconds_per_draft: Time of a call of `draft` and `observe`, in seconds.
        rules: Names of the rules that were checked.
    """

    drawn: bool
    drafted: int
    acceptance_rate: float
    mean_accepted_length: float
    seconds_per_draft: float
    rules: tuple[str, ...]

    def __str__(self) -> str:
        nothing = (
            " · nothing was accepted, so what follows an accepted draft was not checked: pass a "
            "model and prompts on which some drafts are right"
        )
        return (
            f"{len(self.rules)} rules hold · {'drawn' if self.drawn else 'deterministic'} drafts · "
            f"tau {self.mean_accepted_length:.2f} · acceptance {self.acceptance_rate:.2f} of "
            f"{self.drafted} · {1e3 * self.seconds_per_draft:.2f} ms a draft"
            + nothing
            * (self.acceptance_rate == 0)
        )


def check_drafter(
    drafter: str | Drafter | Sequence[Drafter],
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]] | None = None,
    *,
    max_new_tokens: int = 20,
    draws: int = 2000,
) -> DrafterReport:
    """Hold a drafter to the contract in `selfspec.Drafter`.

    Runs some thirty short requests, each also plainly: alone and in ragged batches, with budgets of
    1, 2 and 31, up to the limit, past the end of a row, sampled, inside another request, under
    `torch.inference_mode`; and watches every call of the drafter.

    Args:
        drafter: As for `selfspec.wrap`.
        model: In evaluation mode and in float32 or float64, where the text is promised to be token
            for token that of plain `generate`. A small one will do.
        prompts: Lists of token ids, two or more, best of different length. Made up by default.
        max_new_tokens: Length of the texts.
        draws: Drawn tokens that the law of the drafts and that of the text are tested with.

    Returns:
        Acceptance, tau and draft time.

    Raises:
        DrafterError: An `AssertionError` that names the rule, what was seen, and the remedy.
        TypeError: If `model` cannot be wrapped or `prompts` is something else.
        ValueError: If the model is in another dtype or in training mode, prompts are too few or
            empty, the drafter is lossy, or requests go to transformers' own loop.

    Example:
        >>> from selfspec.testing import check_drafter
        >>> print(check_drafter(MyDrafter(), model))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass a model as it is, not wrapped.")
    if model.training or model.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"model is in {model.dtype} and training={model.training}: text is compared token for "
            "token, which takes float32 or float64; use model.float().eval()."
        )
    if max_new_tokens < 8:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 8.")
    if prompts is not None and any(isinstance(row, str) for row in prompts):
        raise TypeError("prompts must be lists of token ids, not strings.")
    rows = _made_up(model) if prompts is None else [[int(t) for t in row] for row in prompts]
    if len(rows) < 2 or not all(rows):
        raise ValueError("prompts must be two or more lists of token ids, none of them empty.")
    return _Check(drafter, model, rows, max_new_tokens).run(draws)


def _made_up(model: Any) -> list[list[int]]:
    """Prompts of different length that end by repeating their beginning."""
    draw = random.Random(0)
    most = model.get_input_embeddings().weight.shape[0]
    rows = [[draw.randrange(most) for _ in range(count)] for count in (12, 6, 3)]
    return [row + row[: max(2, len(row) // 2)] for row in rows]


_AT_LAST = ("model", "text")


class _Check:
    """One drafter on one model."""

    def __init__(self, drafter: Any, model: Any, rows: list[list[int]], new: int) -> None:
        self.model, self.rows, self.new = model, rows, new
        pad = model.generation_config.pad_token_id
        self.pad = int(pad) if isinstance(pad, int) else 0
        name = drafter if isinstance(drafter, str) else type(drafter).__name__
        try:
            spec = wrap(model, drafter, adaptive=False, off_switch=False)
        except TypeError as error:
            raise DrafterError("members", name, str(error)) from error
        self.inner: Any = spec._drafter
        if getattr(self.inner, "is_lossy", False):
            raise ValueError(f"{name} is lossy: there is no text to hold it to.")
        self.marks = model_marks(model)
        self.spec = spec
        self._plain: dict[str, Any] = {}
        self._running = 0
        try:
            check_taps(self.inner, spec._target.architecture.num_layers)
        except (TypeError, ValueError) as error:
            raise DrafterError("hidden_taps", name, str(error)) from error
        self.rules = ["members", "hidden_taps"]

    def run(self, draws: int) -> DrafterReport:
        """All rules, those first whose breach would look like another's."""
        everyone = list(range(len(self.rows)))
        alone = [self.greedy("alone", [0])]
        again = self.greedy("reset", [0])
        self.equal("reset", alone[0].trees, again.trees, "the same request twice gave other drafts")
        alone += [self.greedy("alone", [b]) for b in everyone[1:]]
        whole = self.greedy("batch", everyone)
        for most in (1, 2):
            self.greedy("budget", everyone, watched=Watched(self.inner, "budget", most=most))
        for few in (1, 2, 3):
            self.greedy("limit", everyone, max_new_tokens=few)
        self.greedy("ended", everyone, eos_token_id=self.ending(everyone))
        stats = self.spec.stats + SpecStats()
        sampled = self.sampled(everyone)
        self.rows_are_independent(alone, whole, sampled.drawn)
        if sampled.drawn:
            self.law(draws)
        self.copies(alone)
        self.inference_mode(everyone)
        self.memory()
        self.rules += ["tree", "state", "cache", "generator", "settings", "observe", *_AT_LAST]
        return DrafterReport(
            drawn=sampled.drawn,
            drafted=stats.drafted,
            acceptance_rate=stats.acceptance_rate,
            mean_accepted_length=stats.mean_accepted_length,
            seconds_per_draft=stats.seconds.get("draft", 0.0) / max(stats.forwards, 1),
            rules=tuple(sorted(set(self.rules))),
        )

    # ------------------------------------------------------------------ requests

    def inputs(self, which: list[int]) -> dict[str, Any]:
        """Rows as `generate` takes them, padded on the left."""
        rows = [self.rows[b] for b in which]
        longest = max(map(len, rows))
        ids = [[self.pad] * (longest - len(row)) + row for row in rows]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        device = self.model.get_input_embeddings().weight.device
        return {
            "input_ids": torch.tensor(ids, device=device),
            "attention_mask": torch.tensor(mask, device=device),
            "pad_token_id": self.pad,
            "return_dict_in_generate": False,  # whatever the model's own config has
        }

    def plain(self, which: list[int], **settings: Any) -> Any:
        """Transformers' own text; greedy text is computed once."""
        settings = {"max_new_tokens": self.new, "do_sample": False, **settings}
        key = str((which, settings))
        if settings["do_sample"] or key not in self._plain:
            self._plain[key] = self.model.generate(**{**self.inputs(which), **settings})
        return self._plain[key]

    def ending(self, which: list[int]) -> int:
        """A token that ends some rows well before others."""
        new = [row[-self.new :] for row in self.plain(which).tolist()]

        def spread(token: int) -> int:
            ends = [row.index(token) if token in row else self.new for row in new]
            return max(ends) - min(ends) if min(ends) > 0 else 0

        return max(sorted({token for row in new for token in row}), key=spread)

    def ours(
        self,
        rule: str,
        which: list[int],
        *,
        watched: Watched | None = None,
        **settings: Any,
    ) -> tuple[Any, Watched]:
        """The same with drafts; whatever the drafter raises breaks `rule`."""
        watched = watched or Watched(self.inner, rule)
        previous, self.spec._drafter = self.spec._drafter, watched
        fallbacks = self.spec.stats.fallbacks
        settings = {"max_new_tokens": self.new, "do_sample": False, **settings}
        self._running += 1
        try:
            text = self.spec.generate(**{**self.inputs(which), **settings})
        except DrafterError:
            raise
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
            raise DrafterError(rule, watched.name, seen) from error
        finally:
            self.spec._drafter = previous
            self._running -= 1
        if self.spec.stats.fallbacks > fallbacks:
            raise ValueError("model: its requests go to transformers' own loop; see the log.")
        # Inside another request the model carries what that one needs.
        if not self._running and model_marks(self.model) != self.marks:
            seen = "weights, modules or configs are not what they were"
            raise DrafterError("model", watched.name, seen)
        self.rules.append(rule)
        return text, watched

    def greedy(
        self, rule: str, which: list[int], watched: Watched | None = None, **settings: Any
    ) -> Watched:
        """A greedy request; its text and the generator have to be plain's."""
        expected = self.plain(which, **settings)
        before = torch.get_rng_state()
        text, watched = self.ours(rule, which, watched=watched, **settings)
        self.equal("text", expected.tolist(), text.tolist(), "greedy text is not plain generate's")
        self.equal("generator", before, torch.get_rng_state(), "torch's generator was moved")
        return watched

    def sampled(self, which: list[int]) -> Watched:
        """Sampled requests: plain's text under its seed, or at least the same text twice."""
        settings: dict[str, Any] = {"do_sample": True, "temperature": _HOT}
        with torch.random.fork_rng(devices=self.devices()):
            torch.manual_seed(1)
            expected = self.plain(which, **settings)
            left = torch.get_rng_state()
            torch.manual_seed(1)
            text, watched = self.ours("seed", which, **settings)
            if not watched.drawn:
                self.equal("text", expected.tolist(), text.tolist(), "sampled text is not plain's")
                self.equal("generator", left, torch.get_rng_state(), "it was left elsewhere")
            torch.manual_seed(1)
            again, _ = self.ours("seed", which, **settings)
            self.equal("seed", text.tolist(), again.tolist(), "the same seed gave another text")
        return watched

    def devices(self) -> list[int]:
        """CUDA devices whose generators a request may use."""
        device = self.model.device
        return [device.index or 0] if device.type == "cuda" else []

    # ------------------------------------------------------------------ rules

    def equal(self, rule: str, expected: Any, found: Any, seen: str) -> None:
        """Raises a breach of `rule` unless both are the same."""
        same = expected.equal(found) if isinstance(expected, Tensor) else expected == found
        if not same:
            raise DrafterError(rule, type(self.inner).__name__, seen)

    def rows_are_independent(self, alone: list[Watched], whole: Watched, drawn: bool) -> None:
        """A row alone drafts (if drafts are drawn: has the text) that it has in a batch."""
        everyone = list(range(len(self.rows)))
        texts = []
        for which in ([everyone] + [[b] for b in everyone]) if drawn else []:
            device = self.model.device
            generators = [torch.Generator(device).manual_seed(b) for b in which]
            settings: dict[str, Any] = {
                "do_sample": True,
                "temperature": _HOT,
                "generator": generators,
            }
            texts.append(self.ours("rows", which, **settings)[0][:, -self.new :].tolist())
        for b in everyone:
            seen = f"row {b} alone is not what it is in a batch of {len(everyone)}"
            if drawn:
                mine, batch = texts[1 + b][0], texts[0][b]
                shared = min(len(mine), len(batch))
                self.equal("rows", mine[:shared], batch[:shared], seen)
                continue
            lone, others = first_choices(alone[b].trees, 0), first_choices(whole.trees, b)
            both = lone.keys() & others.keys()
            self.equal("rows", {k: lone[k] for k in both}, {k: others[k] for k in both}, seen)
        self.rules.append("rows")

    def law(self, draws: int) -> None:
        """Drafts follow their `log_q`, and the text follows the target."""
        settings: dict[str, Any] = {
            "do_sample": True,
            "temperature": _HOT,
            "top_k": 0,
            "return_dict_in_generate": True,
            "output_scores": True,
            "max_new_tokens": 12,
        }
        watched = Watched(self.inner, "log_q", measures=True)
        texts: list[Tensor] = []
        noise = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=self.devices()):
            torch.manual_seed(2)
            for _ in range(-(-draws // _ROWS)):
                which = [0] * _ROWS
                out, _ = self.ours("log_q", which, watched=watched, **settings)
                tokens = out.sequences[:, -len(out.scores) :]
                for t, scores in enumerate(out.scores[1:9], 1):
                    log_p = scores.double().log_softmax(-1)
                    texts.append(watched.uniform(log_p, tokens[:, t], noise))
                if sum(map(len, texts)) >= 4 * draws and watched.measured >= draws:
                    break
        for depth, kinds in sorted(watched.quantiles().items()):
            for values in kinds:
                seen = f"tokens at depth {depth} are not distributed as their log_q says"
                self.is_uniform("log_q", values, seen)
        for kind in torch.cat(texts).unbind(1):
            self.is_uniform("law", kind, "the text does not follow the target's distribution")

    def is_uniform(self, rule: str, values: Tensor, seen: str) -> None:
        """Kolmogorov-Smirnov: both one-sided gaps between `values` and the uniform law."""
        count = len(values)
        at = values.sort().values
        steps = torch.arange(count + 1, dtype=torch.float64) / count
        gap = max(float((steps[1:] - at).max()), float((at - steps[:-1]).max()))
        if gap * count**0.5 > _CRITICAL:
            seen = f"{seen} (Kolmogorov-Smirnov {gap:.3f} over {count} draws)"
            raise DrafterError(rule, type(self.inner).__name__, seen)
        self.rules.append(rule)

    def copies(self, alone: list[Watched]) -> None:
        """A request with a copy of the drafter inside another changes neither's drafts."""
        last = len(self.rows) - 1

        def nested() -> None:
            # The wrapper's drafter is taken: this request gets a copy of it.
            self.greedy("copy", [last], watched=outer)

        outer = Watched(self.inner, "copy", before_second=nested)
        self.greedy("copy", [0], watched=outer)
        seen = "a request with copy.copy(drafter) in the middle of another changed drafts"
        self.equal("copy", alone[0].trees, outer.trees, seen)
        for watched in outer.copies:
            self.equal("copy", alone[last].trees, watched.trees, seen)

    def inference_mode(self, which: list[int]) -> None:
        """Inside `torch.inference_mode`, and outside right after it."""
        with torch.inference_mode():
            self.greedy("inference_mode", which)
        self.greedy("inference_mode", [0])

    def memory(self) -> None:
        """What the drafter holds does not grow from request to request."""
        sizes, tensors = [], []
        ids = [row[:] for row in self.rows]
        for call in range(9):
            self.rows = [row[call % len(row) :] + row[: call % len(row)] for row in ids]
            self.ours("memory", [0, 1], max_new_tokens=6)
            sizes.append(reach(self.inner))
            if call in (2, 8):
                gc.collect()
                tensors.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()))
        self.rows = ids
        late = sizes[2:]
        grows = all(b > a for a, b in pairwise(late))
        if grows or tensors[1] - tensors[0] >= 6:
            seen = f"over 6 requests it grew from {late[0]} to {late[-1]} bytes"
            seen += f" and live tensors from {tensors[0]} to {tensors[1]}"
            raise DrafterError("memory", type(self.inner).__name__, seen)

"""Multi-token prediction: draft with the module that a checkpoint ships for it.

DeepSeek-AI 2024 (DeepSeek-V3), section 2.2, https://arxiv.org/abs/2412.19437; Gloeckle et al. 2024,
https://arxiv.org/abs/2404.19737. The module is transformers' own `MtpModel`.

A module is a chain of layers. Layer k reads, at the position of a token, the embedding of that
token and what layer k - 1 made of the token before; layer 0 reads what the target made of it: the
last layer's output *after* the final norm. Layer k gives the draft token k + 1 places on. Text that
is final therefore has the same keys and values in the module whatever was drafted before it: those
of drafts are written behind them, and overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from selfspec_kernels.draft_topk import MAX_K
from torch import Tensor, nn

from selfspec.drafters.candidates import best_of
from selfspec.drafters.draw import draw, draws
from selfspec.drafters.mtp_module import MtpModule, MtpRows, load_mtp
from selfspec.drafters.states_seen import AT_ONCE, StatesSeen
from selfspec.options import check_bool, check_int, check_probability
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfspec.architectures import Architecture
    from selfspec.state import Acceptance, DecodeState, TargetOutput


class MtpDrafter:
    """Drafts a chain with the multi-token prediction (MTP) module of the model's checkpoint.

    Needs a transformers with `MtpModel` (5.24 has it) and a model whose config has
    `num_mtp_layers`: DeepSeek-V3, GLM-4.5 and others. Every row of a batch drafts for itself.

    Args:
        mtp_model: A `transformers.modeling_layers.MtpModel` of the model that is wrapped. None
            loads it from the checkpoint that the model came from, when the drafter first meets it.
        max_draft_tokens: Longest chain. None: a token for every layer of the module, which is what
            it was trained for; beyond that the last layer goes on from its own output.
        confidence: Go on with a row's chain while it is at least this probable, as the draft sees
            it.
        branches: Draft tokens at every position, 64 at most: the best one, from which the chain
            goes on, and the next best ones, which are verified beside it while the step's budget
            (`wrap`'s `max_draft_tokens`) lasts. Models that verify chains only get the best one.
        do_sample: In requests that sample, draw the draft from the module's own distribution
            instead of taking its likeliest tokens.

    Raises:
        TypeError: If an option is of another type.
        ValueError: If a number is out of range; what the model or transformers lack is found when
            the drafter first meets the model.
    """

    makes_valid_trees = True
    drafts_by_level = True  # fewer levels take less time

    def __init__(
        self,
        mtp_model: Any = None,
        max_draft_tokens: int | None = None,
        confidence: float = 0.0,
        branches: int = 1,
        do_sample: bool = False,
    ) -> None:
        missing = [m for m in ("layers", "embed_tokens", "rotary_emb") if not hasattr(mtp_model, m)]
        if mtp_model is not None and missing:
            raise TypeError(
                f"mtp_model is a {type(mtp_model).__name__} without {', '.join(missing)}; pass a "
                "transformers MtpModel, or None to load the one of the checkpoint."
            )
        if max_draft_tokens is not None:
            check_int("max_draft_tokens", max_draft_tokens, 1)
        check_probability("confidence", confidence)
        check_int("branches", branches, 1, MAX_K)
        check_bool("do_sample", do_sample)
        self.mtp_model = mtp_model
        self.max_draft_tokens = max_draft_tokens
        self.confidence = confidence
        self.branches = branches
        self.do_sample = do_sample
        self.hidden_taps: Sequence[int] = ()
        self._bound: tuple[Architecture, MtpModule] | None = None
        # Of a request: what the module keeps, and what it has not taken in yet.
        self._rows: MtpRows | None = None
        self._seen: StatesSeen | None = None

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, path: str | None = None, **options: Any
    ) -> MtpDrafter:
        """Load the module now.

        Args:
            model: The model to be wrapped.
            path: Folder or hub id of a checkpoint with MTP weights; None: the model's own.
            **options: As for `MtpDrafter`.

        Raises:
            ValueError: If the model, its checkpoint or transformers has no such module.
        """
        return cls(load_mtp(model, path), **options)

    def __copy__(self) -> MtpDrafter:
        """For a request beside another one: shares the module."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Without what a model or a request left here: whoever has the copy binds it anew."""
        return {**self.__dict__, "_bound": None, "_rows": None, "_seen": None}

    def bind(self, architecture: Architecture) -> None:
        """Find the module, and check that it fits and can be driven.

        Raises:
            ValueError: If something is missing: in the model, its checkpoint, or transformers.
        """
        readout = architecture.readout
        if readout is None:
            raise ValueError(
                "MTP modules read the state after the model's final norm, and in this model the "
                "norm before the LM head was not found; draft with something else, such as "
                "NGramDrafter()."
            )
        given = self.mtp_model is not None
        module = MtpModule(self.mtp_model if given else load_mtp(readout.model), readout.norm)
        module.check(architecture, given)
        self._bound = architecture, module
        self.hidden_taps = (architecture.num_layers,)

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """Catch up with the text, then draft one chain a row, and its branches."""
        rows, module = self._rows, self._module(state)
        branches = self.branches if state.target.architecture.support == "tree" else 1
        drawn = self.do_sample and draws(state)
        longest = self.max_draft_tokens or module.depth
        chain = _Chain(state, longest, budget, branches, self.confidence, drawn)
        if rows is None or not chain.longest:
            return TokenTree.root_only(state.root)
        self._go_on(state, rows, module, chain)
        return chain.tree()

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Keep what the target made of the tokens that are final; long texts run at once."""
        if state.done:
            self._rows = self._seen = None  # keys and values are not for keeping
            return
        module = self._module(state)
        if self._seen is None or self._rows is None:
            self._seen = StatesSeen((state.target.architecture.num_layers,), state, output)
            roots = zip(state.cache.lengths, self._seen.counts, strict=True)
            begin = [root - count + 1 for root, count in roots]
            self._rows = MtpRows.blank(module, begin, max(self._seen.counts), state.limit)
        else:
            self._seen.add(state, output, acceptance)
        while max(self._seen.counts) > AT_ONCE:
            self._go_on(state, self._rows, module)

    def _go_on(
        self, state: DecodeState, rows: MtpRows, module: MtpModule, chain: _Chain | None = None
    ) -> None:
        """Run the oldest final tokens that have not run, and perhaps draft behind them."""
        assert self._seen is not None
        hidden, counts, tokens = self._seen.take(AT_ONCE, state)
        tokens = tokens.to(state.root.device)
        longest = 0 if chain is None else chain.longest
        module.run(rows, tokens, module.normed(hidden), counts, chain, longest)

    def reset(self) -> None:
        """Forget the sequences."""
        self._rows = self._seen = None

    def _module(self, state: DecodeState) -> MtpModule:
        if self._bound is None or self._bound[0] is not state.target.architecture:
            self.bind(state.target.architecture)  # it has met another model since
        assert self._bound is not None
        return self._bound[1]


class _Chain:
    """Drafts as they come, one token a row at a time, with siblings as leaves.

    What a row gets does not depend on the rows beside it. So its leaves fill what the budget, or
    the room left in the row, has beyond the whole chain; and the nodes of a depth follow those of
    the depth before, so that a row that ends early has the first of them, leaves included.

    Args:
        state: Where decoding stands.
        longest: Tokens of a whole chain.
        budget: Most draft tokens, leaves included.
        branches: Draft tokens at every position.
        confidence: As for `MtpDrafter`.
        drawn: Whether they are drawn.
    """

    def __init__(
        self,
        state: DecodeState,
        longest: int,
        budget: int,
        branches: int,
        confidence: float,
        drawn: bool,
    ) -> None:
        self.state = state
        self.confidence = confidence
        self.drawn = drawn
        self.ended = False
        # The target adds a token of its own to what a row accepts.
        budgets = [max(0, min(budget, state.room(b) - 1)) for b in range(state.batch)]
        self._widths = [_widths(min(longest, most), most, branches) for most in budgets]
        lengths = list(map(len, self._widths))
        self.longest = max(lengths)
        self._length = torch.tensor(lengths, device=state.root.device)
        self._depth = torch.zeros_like(self._length)
        self._growing = self._length > 0
        self._levels: list[Tensor] = []
        self._chain = state.root[:, None]
        self._path = torch.ones(state.batch, device=state.root.device)  # probability of the chain
        self._log_q: list[Tensor] = []

    def add(self, logits: Tensor) -> Tensor:
        """Take the next tokens from logits [B, V]; the chain goes on by those returned, int64 [B].

        `ended` is set if no row is sure enough to go on.
        """
        state, device = self.state, self._length.device
        size = state.target.vocab_size
        if logits.shape[-1] > size:  # a head padded beyond what can be embedded
            logits = nn.functional.pad(
                logits[:, :size], (0, logits.shape[-1] - size), value=-torch.inf
            )
        logits, measured = logits.to(device), self.confidence > 0
        level = len(self._levels)
        most = max(widths[level] for widths in self._widths if level < len(widths))
        count = min(most, logits.shape[-1])
        top1 = None
        if self.drawn:
            ids, log_q = draw(state, logits, self._chain[:, 1:], count)
            self._log_q.append(log_q)
            top1 = log_q.gather(1, ids[:, :1])[:, 0].exp() if measured else None
        else:
            best = best_of(logits, count, measured)
            ids = best.ids
            top1 = None if best.probable is None else best.probable[:, 0]
        self._levels.append(ids)
        self._chain = torch.cat([self._chain, ids[:, :1]], dim=1)
        self._depth = self._depth + self._growing
        self._growing = self._growing & (self._length > level + 1)
        if top1 is not None:
            self._path = self._path * top1
            self._growing = self._growing & (self._path >= self.confidence)
            # The one host read while drafting: going on for nobody costs more than asking.
            self.ended = not bool(self._growing.any())
        return ids[:, 0]

    def tree(self) -> TokenTree:
        """All of them."""
        most = [ids.shape[1] for ids in self._levels]
        widths = tuple(tuple(map(min, own[: len(most)], most[: len(own)])) for own in self._widths)
        find = _shape
        if len(set(widths)) == 1:  # as always but at the ends of rows
            find, widths = _common_shape, widths[:1]
        shape = find(widths, tuple(most), self._length.device).expanded(len(self._widths))
        tokens = torch.cat([self._chain[:, :1], *self._levels], dim=1)
        log_q = None
        if self._log_q:  # after leaves, and after the last token, nothing was drawn
            known = torch.stack([*self._log_q, torch.zeros_like(self._log_q[0])], dim=1)
            at = shape.drawn[:, :, None].expand(-1, -1, known.shape[-1])
            log_q = known.gather(1, at)
        num_nodes = shape.ends.gather(1, self._depth[:, None])[:, 0]
        return replace(
            shape.tree, tokens=tokens.gather(1, shape.picked), num_nodes=num_nodes, log_q=log_q
        )


def _widths(longest: int, budget: int, branches: int) -> tuple[int, ...]:
    """Nodes at every depth: the chain's, and leaves while the budget lasts."""
    spare, leaves = budget - longest, branches - 1
    return tuple(1 + min(leaves, max(0, spare - depth * leaves)) for depth in range(longest))


@dataclass(frozen=True, eq=False)
class _Shape:
    """Where the nodes of a tree come from.

    Attributes:
        tree: Its tokens mean nothing.
        picked: int64 [B, N], columns of the root and all that was drafted, depth by depth.
        drawn: int64 [B, N], the depth whose draws a node has for children; the last: none.
        ends: int32 [B, D + 1], nodes up to every depth.
    """

    tree: TokenTree
    picked: Tensor
    drawn: Tensor
    ends: Tensor

    def expanded(self, batch: int) -> _Shape:
        """One row as all rows of a batch, without copies."""
        one = self.tree
        tree = replace(
            one,
            tokens=one.tokens.expand(batch, -1),
            parents=one.parents.expand(batch, -1),
            depth=one.depth.expand(batch, -1),
            ancestors=one.ancestors.expand(batch, -1, -1),
            num_nodes=one.num_nodes.expand(batch),
        )
        rest = (table.expand(batch, -1) for table in (self.picked, self.drawn, self.ends))
        return _Shape(tree, *rest)


def _shape(
    widths: tuple[tuple[int, ...], ...], most: tuple[int, ...], device: torch.device
) -> _Shape:
    """Rows of so many nodes a depth, all below the first one of the depth before.

    Made outside inference mode, as `chain_topology`.

    Args:
        widths: Of every row.
        most: Tokens that were drafted at every depth.
        device: Where the tree is.
    """
    depths = len(most)
    parents: list[list[int]] = []
    picked: list[list[int]] = []
    drawn: list[list[int]] = []
    ends: list[list[int]] = []
    for own in widths:
        parents.append([-1])
        picked.append([0])
        drawn.append([depths])
        ends.append([1])
        above, column = 0, 1
        for depth, width in enumerate(own):
            drawn[-1][above] = depth
            parents[-1] += [above] * width
            picked[-1] += range(column, column + width)
            drawn[-1] += [depths] * width
            above, column = ends[-1][-1], column + most[depth]
            ends[-1].append(above + width)
    nodes = max(map(len, parents))
    with torch.inference_mode(False):
        tree = TokenTree.from_topology(
            torch.zeros(len(widths), nodes, dtype=torch.int64, device=device), parents
        )
        return _Shape(
            replace(tree, max_children=max(map(max, filter(None, widths)))),
            _even(picked).to(device),
            _even([row + [depths] * (nodes - len(row)) for row in drawn]).to(device),
            _even([row + row[-1:] * (depths + 1 - len(row)) for row in ends]).to(device).int(),
        )


_common_shape = lru_cache(maxsize=512)(_shape)


def _even(rows: list[list[int]]) -> Tensor:
    """int64 [B, longest], filled up with 0."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int64)

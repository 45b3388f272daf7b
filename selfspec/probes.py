"""Measuring what a model can do, by a few forwards over a handful of tokens.

Trees need a model that takes positions from `position_ids` and visibility from a 4-D mask: a tree
must reproduce the logits of every path read as an ordinary sequence, and must *not* do so when
positions or masks are deliberately wrong. A model that passes for chains only is used with chains;
a recurrent one not at all. Drafts by some of the layers need layers that can be left out, and, to
spend no work twice, a forward that can start at a later one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from selfspec.attention import MaskChangedError
from selfspec.cache import AlignedCache
from selfspec.patch import LayerPlan, layer_plan, patched
from selfspec.readout import Readout, find_readout
from selfspec.tree import Resume, TokenTree

if TYPE_CHECKING:
    from selfspec.architectures import Architecture
    from selfspec.target import Target

logger = logging.getLogger("selfspec")

# Of the largest logit: sums in another order (TF32 perhaps), and roundings of two bytes or less.
_BLOCK_TOLERANCE = (0.01, 0.1)
# Of what a wrong position or mask does to the logits, likewise.
_TREE_TOLERANCE = (0.1, 0.5)

# Tokens that a step is prepared for; no forward is run.
_STEPS = 32

_PROMPT, _TREE, _PARENTS = (3, 11, 7, 19, 5), (2, 13, 6, 17, 9), (-1, 0, 0, 2, 2)


def measure(target: Target) -> Architecture:
    """Find out by a few tiny forwards whether trees, chains or neither reproduce the model.

    Args:
        target: The model with its description; its weights are only read.

    Returns:
        The description with `support`, `reason`, `attention_names`, `readout` and what there is to
        know of running some of the layers settled.
    """
    found = target.architecture
    if found.reason:
        return found
    found = target.architecture = replace(found, told_positions=_told_positions(target))
    try:
        fault = _block_fault(target) or _cache_fault(target)
    except Exception as exception:
        logger.debug("a plain call", exc_info=True)
        fault = f"a call with token ids alone raised {type(exception).__name__}: {exception}"
    if fault:
        return replace(found, support="none", reason=fault)
    settled = _measure_support(target, found)
    if settled.support == "none":
        return settled
    settled = replace(_measure_layers(target, settled), padding_fault=_padding_fault(target))
    return replace(settled, readout=_measure_readout(target, settled))


def _measure_support(target: Target, found: Architecture) -> Architecture:
    window = found.own_window
    if found.takes_position_ids:
        error = ""
        for names in [found.attention_names, []] if found.attention_names else [[]]:
            candidate = replace(found, support="tree", attention_names=names)
            try:
                if window and not names:
                    error = f"attention of its own, with {window}"
                else:
                    error = _tree_fault(target, candidate)
            except MaskChangedError:
                if window:  # which keys it selects may differ between a block and single tokens
                    return replace(found, reason=f"it selects keys by a rule of its own ({window})")
                error = "the model makes something else of its mask"
            except Exception as exception:  # whatever a model's own code raises on a 4-D mask
                logger.debug("token trees", exc_info=True)
                error = f"a verification call raised {type(exception).__name__}"
            if not error:
                return candidate
        reason = f"token trees are not reproduced ({error})"
    else:
        reason = "its forward takes no position_ids, so positions come from cache slots"
    candidate = replace(found, support="chain", attention_names=[], reason=reason)
    try:
        error = _chain_fault(target, candidate)
    except Exception as exception:
        logger.debug("chains", exc_info=True)
        error = f"a verification call raised {type(exception).__name__}: {exception}"
    if not error:
        return candidate
    return replace(found, support="none", reason=f"{reason}; chains neither ({error})")


def _block_fault(target: Target) -> str:
    """Empty if logits after a token are the same, alone or with other tokens behind it.

    They are not where activations are quantised by the range of a whole tensor, for one.
    """
    ids, at = _ids([*_PROMPT, *_TREE], target), len(_PROMPT)
    truth = target.plain(ids[:, : at + 1])
    if bool(truth.isnan().any()):
        return "its logits are NaN after a handful of tokens"
    gap, scale = _gap(target.plain(ids, at), truth), truth[truth.isfinite()].abs().amax()
    if not gap <= _BLOCK_TOLERANCE[target.model.dtype.itemsize < 4] * scale:
        return f"tokens behind a token change the logits after it (up to {scale:.2g}) by {gap:.2g}"
    return ""


def _cache_fault(target: Target, pads: int = 0) -> str:
    """Empty if a token behind transformers' own cache has the logits of the text read at once.

    Args:
        target: The model.
        pads: Left padding, with positions that skip it.
    """
    found, tokens = target.architecture, _ids([*_PROMPT, _TREE[0]], target)
    truth = target.plain(tokens)
    scale = _gap(truth, target.plain(tokens[:, :-1]))
    ids = torch.nn.functional.pad(tokens, (pads, 0))
    mask = torch.nn.functional.pad(torch.ones_like(tokens), (pads, 0))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=target.model.config.get_text_config(decoder=True))
    end = ids.shape[1]
    try:
        with patched(target.model, replace(found, attention_names=[])), layer_plan(LayerPlan()):
            for start, stop in ((0, end - 1), (end - 1, end)):
                arguments: dict[str, Any] = {found.cache_argument: cache}
                if found.takes_position_ids and found.told_positions:
                    arguments["position_ids"] = positions[:, start:stop]
                arguments |= {
                    "input_ids": ids[:, start:stop],
                    "attention_mask": mask[:, :stop],
                    "use_cache": True,
                }
                if start:
                    fault, arguments = _prepared(target, ids, mask, positions, arguments)
                    if fault:
                        return fault
                output = target.model(**arguments)
        gap = _gap(output.logits[0, -1].float(), truth)
    except Exception as exception:
        logger.debug("transformers' own cache", exc_info=True)
        return f"a call with a cache of transformers' own raised {type(exception).__name__}"
    if not gap <= _TREE_TOLERANCE[target.model.dtype.itemsize < 4] * scale:
        return f"logits behind a cache of transformers' own differ by {gap:.2g}"
    return ""


def _prepared(
    target: Target, ids: Tensor, mask: Tensor, positions: Tensor, arguments: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Whether `generate` would give a step what we give it.

    Args:
        target: The model.
        ids: [1, T] of a text whose last token is the step's.
        mask: [1, T].
        positions: [1, T].
        arguments: What we give the step.

    Returns:
        What is wrong, and what `generate` gives; ours where it makes more of a step than is said
        here, and so raises.
    """
    found, model = target.architecture, target.model
    given = {"attention_mask": mask, "use_cache": True}
    given[found.cache_argument] = arguments[found.cache_argument]
    if "position_ids" in arguments:
        given["position_ids"] = positions
    own = arguments
    for token in range(min(_STEPS, target.vocab_size)):
        text = torch.cat([ids[:, :-1], torch.full_like(ids[:, -1:], token)], 1)
        try:
            prepared = model.prepare_inputs_for_generation(text, next_sequence_length=1, **given)
            told = prepared.get("input_ids")
        except Exception:
            logger.debug("preparing a step", exc_info=True)
            return "", arguments
        if told is None or not torch.equal(told, text[:, -1:]):
            return "its prepare_inputs_for_generation gives a step other tokens", arguments
        if token == int(ids[0, -1]):
            own = prepared
    places = own.get("position_ids")
    if places is None or "position_ids" not in arguments:
        places = positions[:, -1:]
    if not bool((places == positions[:, -1]).all()):
        return "its prepare_inputs_for_generation gives a step other positions", arguments
    seen = own.get("attention_mask")
    if isinstance(seen, Tensor) and seen.ndim == 2 and not torch.equal(seen.long(), mask):
        return "its prepare_inputs_for_generation gives a step another mask", arguments
    return "", {**own, "return_dict": True}


def _padding_fault(target: Target) -> str:
    """Empty if left padding does not change what the model says."""
    if not target.architecture.told_positions:
        return "the model drops position_ids, so that padding counts as text"
    return "padding changes what the model says" if _cache_fault(target, pads=3) else ""


def _told_positions(target: Target) -> bool:
    """Whether positions that `generate` works out reach the model's forward."""
    if not target.architecture.takes_position_ids:
        return True  # and so it never asks for them
    if not target.architecture.told_positions:
        return False
    ids = _ids(_PROMPT, target)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    try:
        prepared = target.model.prepare_inputs_for_generation(
            ids,
            attention_mask=torch.ones_like(ids),
            position_ids=positions,
            use_cache=True,
            is_first_iteration=True,
        )
    except Exception:
        logger.debug("preparing inputs", exc_info=True)
        return False
    told = prepared.get("position_ids")
    return told is not None and torch.equal(told, positions)


def _gap(one: Tensor, other: Tensor) -> Tensor:
    """The largest difference; infinite logits, which mask parts of a vocabulary, may be equal."""
    return (one - other).masked_fill(one == other, 0).abs().amax()


def _ids(tokens: Sequence[int], target: Target) -> Tensor:
    return torch.tensor([[t % target.vocab_size for t in tokens]], device=target.device)


def _tree_fault(target: Target, candidate: Architecture) -> str:
    """Empty if a root alone and a branching tree give every path's logits; else what is wrong."""
    root, tokens = _ids([_TREE[0]], target)[:, 0], _ids(list(_TREE), target)
    tree = TokenTree.from_topology(tokens, list(_PARENTS))
    nodes, rows = [0, 1, 3, 4], {n: _path(n) for n in range(len(_TREE))}
    truth = torch.stack(
        [target.plain(_ids([*_PROMPT, *(_TREE[i] for i in rows[n])], target)) for n in nodes]
    )
    with target.using(candidate):
        calls = target.attention_calls
        right = _verify(target, tree)[nodes]
        if candidate.attention_names and target.attention_calls - calls < candidate.num_layers:
            return "attention layers do not consult the attention interface"
        shift = max(1, min(37, candidate.max_positions - len(_PROMPT) - len(_TREE)))
        shifted = _verify(target, tree, shift)[nodes]
        chain = TokenTree.chain(root, tokens[:, 1:])
        unmasked = _verify(target, chain)[nodes]
        alone = _verify(target, TokenTree.root_only(root))[0]
    error = torch.maximum(_gap(right, truth), _gap(alone, truth[0]))
    tolerance = _TREE_TOLERANCE[target.model.dtype.itemsize < 4]
    blind = [
        name
        for name, wrong in (("position_ids", shifted), ("the mask", unmasked))
        if not error < tolerance * _gap(wrong, truth)
    ]
    return f"{' and '.join(blind)} made no difference" if blind else ""


def _chain_fault(target: Target, candidate: Architecture) -> str:
    """Empty if a chain gives the logits of the sequence, wherever in the cache it stands.

    Rows of a batch are aligned by moving them, so their place must not matter: it does not to
    ALiBi, it does to learned positions that are read off the cache.
    """
    tokens = _ids(list(_TREE), target)
    truth = torch.stack(
        [target.plain(_ids([*_PROMPT, *_TREE[: n + 1]], target)) for n in range(len(_TREE))]
    )
    scale = _gap(truth, truth.roll(1, 0))
    chain = TokenTree.chain(tokens[:, 0], tokens[:, 1:])
    with target.using(candidate):
        for slots in (0, 3):
            error = _gap(_verify(target, chain, slots=slots), truth)
            if not error < 0.1 * scale:
                where = f" {slots} slots further on" if slots else ""
                return f"logits{where} differ by {error:.2g}"
    return ""


def _measure_readout(target: Target, settled: Architecture) -> Readout | None:
    """The readout that reproduces the logits of a chain, here at the very beginning of a text."""
    if not settled.takes_logits_to_keep:
        logger.debug("drafts are read from the model's own logits: it always computes them.")
        return None
    tokens, last = _ids([*_PROMPT, *_TREE], target), settled.num_layers
    try:
        with target.using(settled):
            cache = settled.new_cache(1, reserve=32, longest=1 << 20)
            cache.settle([0])
            chain = TokenTree.chain(tokens[:, 0], tokens[:, 1:])
            output = target.verify(chain, cache, frozenset({last}))
        return find_readout(target.model, settled.layers, output.hidden[last][0], output.logits[0])
    except Exception:
        logger.debug("drafts are read from the model's own logits", exc_info=True)
        return None


def _measure_layers(target: Target, settled: Architecture) -> Architecture:
    """Whether layers can be left out, and whether a forward can start at a later one.

    Measured at the last layer, where most of the others are missing.
    """
    last = settled.num_layers - 1
    if not last:
        return settled
    tokens = _ids(_TREE, target)
    chain = TokenTree.chain(tokens[:, 0], tokens[:, 1:])
    with target.using(settled):
        cache = settled.new_cache(1, reserve=32, longest=1 << 20)
        with _calls(settled.layers) as called:
            target.fill(_ids(_PROMPT, target), cache)
        # Layers that read another's keys and values have none of their own.
        borrowers = frozenset(i for i in called if not cache.layers[i].is_initialized)
        middle = frozenset({max(borrowers, default=settled.num_layers // 2)})
        try:
            skip = LayerPlan(skip_attention=middle, skip_mlp=middle)
            target.run(chain, chain.width, cache, skip)
            rest = LayerPlan(last=last, taps=frozenset({0, last}))
            target.run(chain, chain.width, cache, rest, with_logits=False)
            if (state := rest.captured.get(0)) is None:
                fault = "text alone does not pass through the first of them"
                return replace(settled, layers_fault=fault, states_fault=fault, resumable=False)
            if state.dim() != 3:
                fault = f"they have {state.dim()} dimensions, not 3"
                settled = replace(settled, states_fault=fault)
        except Exception as exception:
            logger.debug("leaving layers out", exc_info=True)
            fault = f"a call without some of its layers raised {type(exception).__name__}"
            return replace(settled, layers_fault=fault, resumable=False, borrowers=borrowers)
        try:
            resumed = replace(chain, resume=Resume(last, rest.captured[last]))
            logits = target.verify(resumed, cache).logits[0].float()
            with _calls(settled.layers) as order:
                whole = target.verify(chain, cache).logits[0].float()
            error = (logits - whole).abs().amax()
            in_turn = order == list(range(settled.num_layers))  # not in loops
            resumable = in_turn and bool(error < 0.1 * (whole - whole.roll(1, 0)).abs().amax())
        except Exception:
            logger.debug("starting at a later layer", exc_info=True)
            resumable = False
    return replace(settled, resumable=resumable, borrowers=borrowers)


@contextmanager
def _calls(layers: list[nn.Module]) -> Iterator[list[int]]:
    """The layers by number, in the order in which they are called inside the block."""
    order: list[int] = []

    def note(i: int, *args: object) -> None:
        order.append(i)

    hooks = [layer.register_forward_pre_hook(partial(note, i)) for i, layer in enumerate(layers)]
    try:
        yield order
    finally:
        for hook in hooks:
            hook.remove()


def _verify(target: Target, tree: TokenTree, shift: int = 0, slots: int = 0) -> Tensor:
    cache = target.architecture.new_cache(1, reserve=32, longest=1 << 20)
    target.fill(_ids(list(_PROMPT), target), cache)
    if isinstance(cache, AlignedCache):
        cache.shift(slots)
    return target.verify(tree, cache, position_shift=shift).logits[0].float()


def _path(node: int) -> list[int]:
    path = [node]
    while _PARENTS[path[0]] >= 0:
        path.insert(0, _PARENTS[path[0]])
    return path

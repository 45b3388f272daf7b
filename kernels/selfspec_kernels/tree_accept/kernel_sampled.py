# mypy: allow-untyped-defs
"""Triton kernels of sampled tree acceptance: coins, walk and next token, and the launches.

The chances come from `kernel_levels.py`. All programs of a row walk alike; each then races its
block of tokens: the least of noise over weight wins, which needs no sum and no second pass. Bytes
moved: scores and log_q of the node where the walk stops, once.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import philox
from .._dispatch import device_guard
from .._specimen import Specimen
from ..tuning import part_of, rows
from . import kernel_levels as levels
from .kernel import first_child, pad_path
from .kernel_levels import LEVEL, LINKS, STATE, P, T, probability

_ACCEPT = tl.constexpr(philox.ACCEPT)
_RESIDUAL = tl.constexpr(philox.RESIDUAL)


@triton.jit
def _uniform(seed, index, position, STREAM: tl.constexpr):
    """`philox.uniform`, bit by bit."""
    zero = index * 0
    a, b, c, d = tl.philox(seed, index >> 2, zero + position, zero + STREAM, zero)
    lane = index & 3
    word = tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)


@triton.jit
def _exponential(u):
    """-log(1 - u) without the loss of 1 - u near u = 0."""
    series = u * (1.0 + u * (0.5 + u * (1 / 3 + u * (0.25 + u * 0.2))))
    return tl.where(u < 0.0625, series, -tl.log(1.0 - u))


@triton.jit
def _either(a, b):
    return a | b


@triton.jit(do_not_specialize=["size", "max_depth", "num_blocks"])
def _emit_kernel(
    path_ptr,
    num_accepted_ptr,
    best_ptr,
    best_token_ptr,
    state_ptr,
    parents_ptr,
    ancestors_ptr,
    depth_ptr,
    scores_ptr,
    logsumexp_ptr,
    log_q_ptr,
    seed_ptr,
    position_ptr,
    scores_stride_b,
    scores_stride_n,
    log_q_stride_b,
    log_q_stride_n,
    size,
    vocab,
    max_depth,
    num_blocks,
    TRAVERSAL: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Walk, which every program of a row does alike, and race one block of the next token."""
    block, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    state_ptr += b * STATE * size
    depth_ptr += b * size
    path_ptr += b * (max_depth + 1)
    seed = tl.load(seed_ptr + b)
    position = tl.load(position_ptr + b)
    node = tl.arange(0, BLOCK_N)
    inside = node < size
    parents = tl.load(parents_ptr + b * size + node, mask=inside, other=-1)
    level = tl.load(state_ptr + LEVEL * size + node, mask=inside, other=-1.0)
    drafted = tl.load(state_ptr + P * size + node, mask=inside, other=-1.0) >= 0
    # By the root's position: the number of a node recurs in later steps, that position never does.
    passed = drafted & (_uniform(seed, node, position, _ACCEPT) < level)
    if TRAVERSAL:
        # A subtree emits if one of its nodes passes: bit m of the ancestors of some such node.
        emits = node < 0
        for w in tl.static_range(WORDS):
            words = tl.load(ancestors_ptr + (b * size + node) * WORDS + w, mask=passed, other=0)
            bits = tl.reduce(words, 0, _either) >> (node % 64)
            emits |= (node // 64 == w) & ((bits & 1) == 1)
        passed = drafted & emits

    level_reached = tl.zeros([], tl.int32)
    here = tl.zeros([], tl.int32)
    child = first_child(passed, parents, here, BLOCK_N)
    if block == 0:
        tl.store(path_ptr, here)
    while (child < BLOCK_N) & (level_reached < max_depth):
        level_reached += 1
        here = child
        if block == 0:
            tl.store(path_ptr + level_reached, here)
        child = first_child(passed, parents, here, BLOCK_N)
    if block == 0:
        pad_path(path_ptr, level_reached, max_depth, BLOCK_N)
        tl.store(num_accepted_ptr + b, level_reached)

    t = tl.load(state_ptr + T * size + here)
    lane = block * BLOCK + tl.arange(0, BLOCK)
    mask = lane < vocab
    at = here.to(tl.int64)
    score = tl.load(
        scores_ptr + b * scores_stride_b + at * scores_stride_n + lane,
        mask=mask,
        other=float("-inf"),
    )
    # A node without children has t = 0; what its row of log_q holds does not matter.
    log_q = tl.load(
        log_q_ptr + b * log_q_stride_b + at * log_q_stride_n + lane,
        mask=lane < tl.where(t > 0, vocab, 0),
        other=float("-inf"),
    )
    p = probability(score.to(tl.float32) - tl.load(logsumexp_ptr + b * size + here))
    weight = tl.maximum(p - t * probability(log_q), 0.0)
    at_position = position + tl.load(depth_ptr + here)
    key = weight / _exponential(_uniform(seed, lane, at_position, _RESIDUAL))
    key = tl.where(mask, key, -1.0)
    best = tl.max(key, 0)
    tl.store(best_ptr + b * num_blocks + block, best)
    token = tl.min(tl.where(key == best, lane, vocab - 1), 0)
    tl.store(best_token_ptr + b * num_blocks + block, token)


@triton.jit(do_not_specialize=["num_blocks"])
def _pick_kernel(next_token_ptr, best_ptr, best_token_ptr, num_blocks, BLOCK: tl.constexpr):
    """The winner of all blocks of a row; of equal ones, the first token."""
    b = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    mask = block < num_blocks
    best = tl.load(best_ptr + b * num_blocks + block, mask=mask, other=-1.0)
    token = tl.load(best_token_ptr + b * num_blocks + block, mask=mask, other=2147483647)
    token = tl.where(best == tl.max(best, 0), token, 2147483647)
    tl.store(next_token_ptr + b, tl.min(token, 0).to(tl.int64))


def tree_accept_sampled_triton(
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    depth: Tensor,
    num_nodes: Tensor,
    scores: Tensor,
    logsumexp: Tensor,
    log_q: Tensor,
    seed: Tensor,
    position: Tensor,
    max_depth: int,
    max_children: int,
    rule: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels; see `selfspec_kernels.tree_accept_sampled`."""
    batch, size, vocab = scores.shape
    device = tokens.device
    path = torch.empty((batch, max_depth + 1), dtype=torch.int32, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int32, device=device)
    next_token = torch.empty(batch, dtype=torch.int64, device=device)
    if batch == 0:
        return path, num_accepted, next_token
    row = rows("tree_accept", part_of(device))[0]
    num_blocks = triton.cdiv(vocab, row["block"])
    tokens, parents, ancestors = tokens.contiguous(), parents.contiguous(), ancestors.contiguous()
    depth, logsumexp = depth.contiguous(), logsumexp.contiguous()
    # Tokens of one node have to be neighbours; nodes and rows may be apart.
    scores, log_q = (x if x.stride(2) == 1 else x.contiguous() for x in (scores, log_q))
    strides = (scores.stride(0), scores.stride(1), log_q.stride(0), log_q.stride(1))
    best = torch.empty((batch, num_blocks), dtype=torch.float32, device=device)
    best_token = torch.empty((batch, num_blocks), dtype=torch.int32, device=device)
    with device_guard(tokens):
        state = _chances(
            tokens,
            parents,
            depth,
            num_nodes.contiguous(),
            scores,
            logsumexp,
            log_q,
            max_depth,
            max_children,
            rule,
        )
        _emit_kernel[(num_blocks, batch)](
            path,
            num_accepted,
            best,
            best_token,
            state,
            parents,
            ancestors,
            depth,
            scores,
            logsumexp,
            log_q,
            seed.contiguous(),
            position.contiguous(),
            *strides,
            size,
            vocab,
            max_depth,
            num_blocks,
            TRAVERSAL=rule == "traversal",
            WORDS=ancestors.shape[2],
            BLOCK_N=_lanes(size),
            BLOCK=row["block"],
            num_warps=row["warps"],
        )
        _pick_kernel[(batch,)](
            next_token,
            best,
            best_token,
            num_blocks,
            BLOCK=_lanes(num_blocks),
            num_warps=1,
        )
    return path, num_accepted, next_token


def _lanes(count: int) -> int:
    return max(16, triton.next_power_of_2(count))


def _chances(
    tokens: Tensor,
    parents: Tensor,
    depth: Tensor,
    num_nodes: Tensor,
    scores: Tensor,
    logsumexp: Tensor,
    log_q: Tensor,
    max_depth: int,
    max_children: int,
    rule: str,
) -> Tensor:
    """The state of all nodes, float32 [B, STATE, N], once every child has been tried."""
    batch, size, vocab = scores.shape
    row = rows("tree_accept", part_of(tokens.device))[0]
    num_blocks = triton.cdiv(vocab, row["block"])
    max_children = min(max_children, size)
    stages = max_depth * (max_children - 1) + 1 if rule == "traversal" else max_children
    stages = min(stages, size - 1) if max_depth > 0 else 0
    device = tokens.device
    state = torch.empty((batch, STATE.value, size), dtype=torch.float32, device=device)
    links = torch.empty((batch, LINKS.value, size), dtype=torch.int32, device=device)
    children = torch.empty((batch, size, max_children), dtype=torch.int32, device=device)
    sums = torch.empty((batch, 2, size, num_blocks), dtype=torch.float32, device=device)
    strides = (scores.stride(0), scores.stride(1), log_q.stride(0), log_q.stride(1))
    for stage in range(stages + 1):
        if stage > 0:
            levels.sum_kernel[(num_blocks, size, batch)](
                sums,
                state,
                links,
                children,
                tokens,
                scores,
                logsumexp,
                log_q,
                *strides,
                size,
                vocab,
                max_children,
                num_blocks,
                BLOCK=row["block"],
                num_warps=row["warps"],
            )
        levels.advance_kernel[(batch,)](
            state,
            links,
            children,
            sums,
            tokens,
            parents,
            depth,
            num_nodes,
            scores,
            logsumexp,
            log_q,
            *strides,
            size,
            vocab,
            max_depth,
            max_children,
            num_blocks,
            FIRST=stage == 0,
            TRAVERSAL=rule == "traversal",
            BLOCK=_lanes(size),
            CHUNK=16,
            num_warps=min(8, max(1, _lanes(size) // 32)),
        )
    return state


def specimens(part: str) -> Iterator[Specimen]:
    """What the compile gate compiles for `part`."""
    by_type = {
        "*i32": "links children parents depth num_nodes path num_accepted best_token position",
        "*i64": "tokens ancestors seed next_token",
        "*fp32": "state sums logsumexp log_q best",
    }
    types = {f"{name}_ptr": kind for kind, names in by_type.items() for name in names.split()}

    def of(kernel, label, warps, **constants):
        known = {name: types[name] for name in kernel.arg_names if name in types}
        return Specimen(label, kernel, known, constants, warps)

    yield of(_pick_kernel, "pick-64", 1, BLOCK=64)
    for row in rows("tree_accept", part):
        block, warps = row["block"], row["warps"]
        for scores in ("fp32", "bf16"):
            types["scores_ptr"] = f"*{scores}"
            yield of(levels.sum_kernel, f"sum-{block}-{scores}", warps, BLOCK=block)
            for rule in ("traversal", "multiround"):
                walk = {"TRAVERSAL": rule == "traversal", "WORDS": 2, "BLOCK_N": 128}
                yield of(_emit_kernel, f"emit-{block}-{scores}-{rule}", warps, BLOCK=block, **walk)
    for rule in ("traversal", "multiround"):
        for first in (True, False):
            label = f"{'plant' if first else 'advance'}-128-{rule}"
            nodes = {"FIRST": first, "TRAVERSAL": rule == "traversal", "BLOCK": 128, "CHUNK": 16}
            yield of(levels.advance_kernel, label, 4, **nodes)

# mypy: allow-untyped-defs
"""Triton kernels that find the chance of every drafted node, and what is left of p behind it.

Neither the chance of a node nor the residual of its parent depends on a coin, so all nodes are
worked on at once, a child of every node at a time. Nested positive parts collapse: when some
children of a node have failed, what is left of its distribution p is max(p - t * q, 0) / mass, with
one scalar t a node. That holds for the tokens of those children too, though q without replacement
is 0 there from then on: a child can fail only where nothing of p is left at its token, and t grows.
So a stage is two sums over the vocabulary at a t known before (`sum_kernel`), and scalars by node
(`advance_kernel`). In a chain every node has its turn in the one stage there is. Bytes moved: the
scores and log_q of a node once a child.
"""

import triton
import triton.language as tl

# Rows of `state`, float32 by node. LEVEL is the chance of a node that is tried: 0 below a node of
# chance 0, negative while its turn has not come. P and Q are those of its own token in its parent's
# distributions; P is negative for nodes that do not count. T, MASS and REST (of q, less the tokens
# of failed children) belong to it as a parent; NEXT_T is t in the coming stage, -1 for none.
T, MASS, REST, LEVEL, P, Q, NEXT_T = (tl.constexpr(i) for i in range(7))
STATE = tl.constexpr(7)
# Rows of `links`, int32 by node: place among siblings, children tried, children.
RANK, DONE, COUNT = (tl.constexpr(i) for i in range(3))
LINKS = tl.constexpr(3)
LARGEST = tl.constexpr(3.0e38)


@triton.jit
def probability(log):
    """exp, and 0 for what is no probability: NaN, and differences with an infinite sum."""
    p = tl.exp(log)
    return tl.where(p < float("inf"), p, 0.0)


@triton.jit
def _plant(
    tokens,
    parents,
    depth,
    tokens_ptr,
    parents_ptr,
    depth_ptr,
    node,
    num_nodes,
    vocab,
    max_depth,
    CHUNK: tl.constexpr,
):
    """Which nodes count, whether a sibling before has their token, their rank, their children."""
    drafted = _drafted(tokens, parents, depth, node, num_nodes, vocab, max_depth)
    rank, repeats, count = node * 0, node * 0, node * 0
    for start in range(0, num_nodes, CHUNK):
        m = start + tl.arange(0, CHUNK)
        inside = m < num_nodes
        other_tokens = tl.load(tokens_ptr + m, mask=inside, other=-1)
        other_parents = tl.load(parents_ptr + m, mask=inside, other=-1)
        other_depth = tl.load(depth_ptr + m, mask=inside, other=0)
        counts = _drafted(other_tokens, other_parents, other_depth, m, num_nodes, vocab, max_depth)[
            None, :
        ]
        before = (
            counts & (parents[:, None] == other_parents[None, :]) & (m[None, :] < node[:, None])
        )
        rank += tl.sum(before.to(tl.int32), 1)
        same = tokens[:, None] == other_tokens[None, :]
        repeats += tl.sum((before & same).to(tl.int32), 1)
        below = counts & (node[:, None] == other_parents[None, :])
        count += tl.sum(below.to(tl.int32), 1)
    return drafted, repeats, rank, count


@triton.jit
def _drafted(tokens, parents, depth, node, num_nodes, vocab, max_depth):
    here = (node < num_nodes) & (parents >= 0) & (parents < node) & (depth <= max_depth)
    return here & (tokens >= 0) & (tokens < vocab)


@triton.jit(do_not_specialize=["size", "max_depth", "max_children", "num_blocks"])
def advance_kernel(
    state_ptr,
    links_ptr,
    children_ptr,
    sums_ptr,
    tokens_ptr,
    parents_ptr,
    depth_ptr,
    num_nodes_ptr,
    scores_ptr,
    logsumexp_ptr,
    log_q_ptr,
    scores_stride_b,
    scores_stride_n,
    log_q_stride_b,
    log_q_stride_n,
    size,
    vocab,
    max_depth,
    max_children,
    num_blocks,
    FIRST: tl.constexpr,
    TRAVERSAL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Let the children of the last stage fail, and say what the next stage needs: a row each."""
    b = tl.program_id(0).to(tl.int64)
    state_ptr += b * size * STATE
    links_ptr += b * size * LINKS
    children_ptr += b * size * max_children
    sums_ptr += b * size * 2 * num_blocks
    tokens_ptr += b * size
    parents_ptr += b * size
    depth_ptr += b * size
    node = tl.arange(0, BLOCK)
    inside = node < size
    state = state_ptr + node
    links = links_ptr + node
    parents = tl.load(parents_ptr + node, mask=inside, other=-1)
    if FIRST:
        num_nodes = tl.minimum(tl.load(num_nodes_ptr + b), size)
        tokens = tl.load(tokens_ptr + node, mask=inside, other=-1)
        depth = tl.load(depth_ptr + node, mask=inside, other=0)
        drafted, repeats, rank, count = _plant(
            tokens,
            parents,
            depth,
            tokens_ptr,
            parents_ptr,
            depth_ptr,
            node,
            num_nodes,
            vocab,
            max_depth,
            CHUNK,
        )
        drafted &= rank < max_children
        count = tl.minimum(count, max_children)
        tl.store(children_ptr + parents * max_children + rank, node, mask=drafted)
        drafted &= repeats == 0
        lse = tl.load(logsumexp_ptr + b * size + parents, mask=drafted, other=0.0)
        at = parents.to(tl.int64)
        score = tl.load(
            scores_ptr + b * scores_stride_b + at * scores_stride_n + tokens,
            mask=drafted,
            other=0.0,
        )
        log_q = tl.load(
            log_q_ptr + b * log_q_stride_b + at * log_q_stride_n + tokens, mask=drafted, other=0.0
        )
        q = probability(log_q)
        # What q cannot have drawn was not drawn, whatever the drafter says.
        p = tl.where(drafted & (q > 0), probability(score.to(tl.float32) - lse), -1.0)
        t = tl.zeros([BLOCK], tl.float32)
        mass, rest = t + 1.0, t + 1.0
        level = tl.where(node == 0, 1.0, -1.0)
        done = node * 0
        tl.store(state + P * size, p, mask=inside)
        tl.store(state + Q * size, q, mask=inside)
        tl.store(links + RANK * size, rank, mask=inside)
        tl.store(links + COUNT * size, count, mask=inside)
    else:
        p = tl.load(state + P * size, mask=inside, other=-1.0)
        q = tl.load(state + Q * size, mask=inside, other=0.0)
        t = tl.load(state + T * size, mask=inside, other=0.0)
        mass = tl.load(state + MASS * size, mask=inside, other=1.0)
        rest = tl.load(state + REST * size, mask=inside, other=1.0)
        level = tl.load(state + LEVEL * size, mask=inside, other=-1.0)
        next_t = tl.load(state + NEXT_T * size, mask=inside, other=-1.0)
        rank = tl.load(links + RANK * size, mask=inside, other=0)
        done = tl.load(links + DONE * size, mask=inside, other=0)
        count = tl.load(links + COUNT * size, mask=inside, other=0)

        active = next_t >= 0
        over, q_left = t * 0, t * 0
        for start in range(0, num_blocks, CHUNK):
            k = start + tl.arange(0, CHUNK)
            mask = active[:, None] & (k < num_blocks)[None, :]
            sums = sums_ptr + node[:, None] * num_blocks + k[None, :]
            over += tl.sum(tl.load(sums, mask=mask, other=0.0), 1)
            q_left += tl.sum(tl.load(sums + size * num_blocks, mask=mask, other=0.0), 1)
        child = tl.load(children_ptr + node * max_children + done, mask=active, other=0)
        child_p = tl.load(state_ptr + P * size + child, mask=active, other=-1.0)
        failed = active & (child_p >= 0)  # a repeated token was never tried
        # Nothing is left where p was q: then the child cannot fail, and what p is matters no more.
        some = failed & (over > 0)
        if TRAVERSAL:
            kept = level * over / (level * over + (1 - level) * mass)
            level = tl.where(failed & (level < 1), kept, level)
        t = tl.where(some, next_t, t)
        mass = tl.where(some, over, mass)
        rest = tl.where(failed, tl.where(q_left > 0, q_left, 1.0), rest)
        done += active.to(tl.int32)

    # The chance of a child depends on that of its parent, so turns come from the root down.
    parents = tl.where(p >= 0, parents, 0)
    moving = tl.full([], 1, tl.int32)
    while moving > 0:
        r = level if TRAVERSAL else t * 0 + 1.0
        is_open = level > 0 if TRAVERSAL else (p >= 0) | (node == 0)
        turn = tl.gather(tl.where(is_open, done, -1), parents, 0)
        arrives = (p >= 0) & (level < 0) & (turn == rank)
        over = tl.maximum(p - tl.gather(t, parents, 0) * q, 0.0) / tl.gather(mass, parents, 0)
        over *= tl.gather(r, parents, 0)
        under = q / tl.gather(rest, parents, 0)
        chance = tl.where(over >= under, tl.where(over > 0, 1.0, 0.0), over / under)
        level = tl.where(arrives, chance, level)
        moving = tl.max(arrives.to(tl.int32), 0)

    r = level if TRAVERSAL else t * 0 + 1.0
    is_open = level > 0 if TRAVERSAL else (p >= 0) | (node == 0)
    next_t = tl.minimum(t + mass / (rest * r), LARGEST)
    next_t = tl.where(is_open & (done < count), next_t, -1.0)
    tl.store(state + T * size, t, mask=inside)
    tl.store(state + MASS * size, mass, mask=inside)
    tl.store(state + REST * size, rest, mask=inside)
    tl.store(state + LEVEL * size, level, mask=inside)
    tl.store(state + NEXT_T * size, next_t, mask=inside)
    tl.store(links + DONE * size, done, mask=inside)


@triton.jit(do_not_specialize=["size", "max_children", "num_blocks"])
def sum_kernel(
    sums_ptr,
    state_ptr,
    links_ptr,
    children_ptr,
    tokens_ptr,
    scores_ptr,
    logsumexp_ptr,
    log_q_ptr,
    scores_stride_b,
    scores_stride_n,
    log_q_stride_b,
    log_q_stride_n,
    size,
    vocab,
    max_children,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Sums over one block of tokens: of max(p - t q, 0), and of q but for children that fail."""
    block, n, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    t = tl.load(state_ptr + (b * STATE + NEXT_T) * size + n)
    if t >= 0:
        children_ptr += (b * size + n) * max_children
        lane = block * BLOCK + tl.arange(0, BLOCK)
        mask = lane < vocab
        at = n.to(tl.int64)
        score = tl.load(
            scores_ptr + b * scores_stride_b + at * scores_stride_n + lane,
            mask=mask,
            other=float("-inf"),
        )
        log_q = tl.load(
            log_q_ptr + b * log_q_stride_b + at * log_q_stride_n + lane,
            mask=mask,
            other=float("-inf"),
        )
        p = probability(score.to(tl.float32) - tl.load(logsumexp_ptr + b * size + n))
        q = probability(log_q)
        sums_ptr += (b * 2 * size + n) * num_blocks + block
        tl.store(sums_ptr, tl.sum(tl.maximum(p - t * q, 0.0), 0))
        for i in range(tl.load(links_ptr + (b * LINKS + DONE) * size + n) + 1):
            token = tl.load(tokens_ptr + b * size + tl.load(children_ptr + i))
            q = tl.where(lane == token, 0.0, q)
        tl.store(sums_ptr + size * num_blocks, tl.sum(q, 0))

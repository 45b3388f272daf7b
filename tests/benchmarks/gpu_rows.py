"""The ops on rows of logits, hidden states and the cache, beside torch: eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from selfspec_kernels import kv_commit, tree_accept
from selfspec_kernels.draft_topk import draft_topk
from selfspec_kernels.exit_confidence import exit_confidence
from selfspec_kernels.row_stats import row_stats
from selfspec_kernels.tree_accept import tree_accept_sampled
from torch import Tensor

from tests.ops.trees import Forest, chain, random_forest

from .gpu_clock import Clock, Launch, copies

Method = Callable[..., object]


@dataclass(frozen=True)
class Work:
    """One shape of one op.

    Attributes:
        op: The op that is measured.
        case: The shape, in words.
        bytes: What has to be read and written.
        inputs: Gives tensors, new ones at every call.
        method: Takes them and `backend`; the op, and with "reference" its definition in torch.
        others: Other ways to the same result.
        compiles: Whether torch.compile takes its turn, which costs some 10 s.
        rounds: Whether 16-bit rounding of intermediate results tells op and definition apart.
        most_copies: Sets of inputs at most, where much more is held than is read.
    """

    op: str
    case: str
    bytes: int
    inputs: Callable[[], tuple[Tensor, ...]]
    method: Method
    others: dict[str, Method]
    compiles: bool = False
    rounds: bool = False
    most_copies: int = 64


def measurements(clock: Clock, tiny: bool) -> Iterator[dict[str, Any]]:
    """One entry a case: times by method, and whether the op agrees with its definition."""
    for work in works(clock.device, tiny):
        methods: dict[str, Method] = {
            "selfspec": partial(work.method, backend="auto"),
            "eager": partial(work.method, backend="reference"),
        }
        if work.compiles:
            methods["compiled"] = _compiled(work, tiny)
        methods |= work.others
        times = {name: clock.measure(partial(_rotated, work, m)) for name, m in methods.items()}
        times["copy"] = clock.measure(partial(_copies, work, clock.device))
        yield {
            "op": work.op,
            "case": work.case,
            "bytes": work.bytes,
            "times": times,
            "check": _checked(work),
        }


def _compiled(work: Work, tiny: bool) -> Method:
    def reference(*tensors: Tensor) -> object:
        return work.method(*tensors, backend="reference")

    # Tracing takes long enough for a dry run; what comes after it needs a compiler for C++.
    return torch.compile(reference, dynamic=False, backend="eager" if tiny else "inductor")


def _rotated(work: Work, method: Method) -> list[Launch]:
    sets = [work.inputs()]
    if sets[0][0].is_cuda:
        count = min(copies(work.bytes), work.most_copies)
        sets += [work.inputs() for _ in range(count - 1)]
    return [partial(method, *tensors) for tensors in sets]


def _copies(work: Work, device: torch.device) -> list[Launch]:
    """A device copy that reads and writes as many bytes as the op has to."""

    def one() -> Launch:
        source = torch.empty(max(work.bytes // 2, 1), dtype=torch.int8, device=device)
        return partial(torch.empty_like(source).copy_, source)

    return [one() for _ in range(copies(work.bytes) if device.type == "cuda" else 1)]


def _checked(work: Work) -> dict[str, Any]:
    """The share of results that the op and its definition agree on."""
    tensors = work.inputs()
    again = tuple(tensor.clone() for tensor in tensors)
    got = flat(work.method(*tensors, backend="auto"), tensors)
    wanted = flat(work.method(*again, backend="reference"), again)
    # The definition rounds logits to 16 bits, and ids go by what is left of their differences.
    tolerance = 0.1 if work.rounds else 1e-2
    shares = []
    for ours, theirs in zip(got, wanted, strict=True):
        if ours.is_floating_point():
            alike = torch.isclose(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)
        elif work.rounds:
            continue
        else:
            alike = ours == theirs
        shares.append(alike.double().mean().item())
    assert min(shares) >= 0.9, (work.op, work.case, shares)
    return {"agree": min(shares)}


def flat(result: object, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    if result is None:  # in place
        return list(tensors)
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple):
        return list(result)
    return list(vars(result).values())


# ------------------------------------------------------------------------------------------- works


def works(device: torch.device, tiny: bool) -> Iterator[Work]:
    vocab, hidden, layers, slots = (300, 64, 2, 40) if tiny else (128_256, 4096, 32, 8192)
    sizes = [(1, 5)] if tiny else [(1, 32), (8, 32), (1, 64)]
    for batch, nodes in sizes:
        yield _greedy(device, batch, nodes, vocab, compiles=(batch, nodes) == sizes[0])
    yield _sampled(device, chain(sizes[0][1] // 4 + 1, [0]), vocab, "chain", compiles=True)
    yield _sampled(device, random_forest(sizes[0][1], [0]), vocab, "tree")
    for rows, filters in ((1, False), (32, False), (32, True)):
        yield _stats(device, min(rows, 3) if tiny else rows, vocab, filters, compiles=rows == 32)
    yield _walk(device, random_forest(sizes[0][1], [0] * sizes[0][0]))
    yield _commit(device, layers, slots)
    for rows in (1, 32):
        for reduced in (False, True):
            compiles = rows == 1 and not reduced
            yield _head(device, "exit_confidence", rows, vocab, hidden, reduced, compiles)
            yield _head(device, "draft_topk", rows, vocab, hidden, reduced, compiles)


def _logits(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16) * 3


def _tree(forest: Forest, device: torch.device, vocab: int) -> dict[str, Tensor]:
    layout = forest.layout()
    parents = torch.tensor(forest.parents, dtype=torch.int32)
    return {
        "tokens": torch.randint(vocab, parents.shape).to(device),
        "parents": parents.to(device),
        "ancestors": layout.ancestors.to(device),
        "depth": layout.depth.to(device),
        "num_nodes": torch.full((len(parents),), forest.num_nodes, dtype=torch.int32).to(device),
    }


def _greedy(device: torch.device, batch: int, nodes: int, vocab: int, compiles: bool) -> Work:
    """Logits to path: argmax of every row, and the walk."""
    forest = random_forest(nodes, [0] * batch)
    depth = max(forest.depth(b, n) for b in range(batch) for n in range(nodes))

    def inputs() -> tuple[Tensor, ...]:
        logits, tree = _logits(device, batch, nodes, vocab), _tree(forest, device, vocab)
        tokens = tree["tokens"]
        # Some of the drafts are right, so that there is something to walk.
        rows = torch.arange(batch, device=device)[:, None]
        right = logits.argmax(-1)[rows, tree["parents"][:, 1:].long().clamp(min=0)]
        tokens[:, 1::2] = right[:, ::2]
        return logits, tokens, tree["parents"], tree["num_nodes"]

    def method(logits: Tensor, *tree: Tensor, backend: Any) -> object:
        choices = row_stats(logits, backend=backend).argmax
        return tree_accept(*tree, choices, max_depth=depth, backend=backend)

    def host(logits: Tensor, tokens: Tensor, parents: Tensor, num_nodes: Tensor) -> object:
        """A read-back, and the walk in Python."""
        found = []
        for row, parent, choice in zip(
            tokens.tolist(), parents.tolist(), logits.argmax(-1).tolist(), strict=True
        ):
            path = [0]
            while True:
                node = path[-1]
                children = [n for n in range(len(row)) if parent[n] == node]
                following = [n for n in children if row[n] == choice[node]]
                if not following:
                    break
                path.append(following[0])
            found.append(path)
        return found

    return Work(
        "tree_accept",
        f"greedy from logits, B{batch} N{nodes} V{vocab}",
        2 * batch * nodes * vocab,
        inputs,
        method,
        {"host walk": host},
        compiles,
    )


def _sampled(
    device: torch.device, forest: Forest, vocab: int, kind: str, compiles: bool = False
) -> Work:
    """Scores and draft distributions to path and next token."""
    nodes = forest.num_nodes
    depth = max(forest.depth(0, n) for n in range(nodes))
    children = max(forest.parents[0].count(n) for n in range(nodes))

    def inputs() -> tuple[Tensor, ...]:
        scores = _logits(device, 1, nodes, vocab)
        log_q = (scores.float() + torch.randn_like(scores, dtype=torch.float32)).log_softmax(-1)
        tree = _tree(forest, device, vocab)
        for node, parent in enumerate(forest.parents[0]):
            if parent >= 0:
                rank = sum(p == parent for p in forest.parents[0][:node])
                tree["tokens"][0, node] = log_q[0, parent].topk(rank + 1).indices[rank]
        seed = torch.tensor([7], device=device)
        position = torch.tensor([3], dtype=torch.int32, device=device)
        return *tree.values(), scores, log_q, seed, position

    def method(*tensors: Tensor, backend: Any) -> object:
        *tree, scores, log_q, seed, position = tensors
        return tree_accept_sampled(
            *tree,
            scores,
            row_stats(scores, backend=backend).logsumexp,
            log_q,
            seed=seed,
            position=position,
            max_depth=depth,
            max_children=children,
            backend=backend,
        )

    case = f"sampled, {kind} of N{nodes} V{vocab}"
    return Work("tree_accept", case, 6 * nodes * vocab, inputs, method, {}, compiles)


def _stats(device: torch.device, rows: int, vocab: int, filters: bool, compiles: bool) -> Work:
    options = {"temperature": 0.7, "top_k": 50, "top_p": 0.9} if filters else {}
    return Work(
        "row_stats",
        f"R{rows} V{vocab}" + (" top-k 50, top-p 0.9" if filters else ""),
        2 * rows * vocab,
        lambda: (_logits(device, rows, vocab),),
        partial(row_stats, **options),
        {},
        compiles,
    )


def _walk(device: torch.device, forest: Forest) -> Work:
    nodes = forest.num_nodes
    depth = max(forest.depth(0, n) for n in range(nodes))

    def inputs() -> tuple[Tensor, ...]:
        tree = _tree(forest, device, 4)
        choices = torch.randint(4, tree["tokens"].shape, device=device)
        return tree["tokens"], tree["parents"], tree["num_nodes"], choices

    method = partial(tree_accept, max_depth=depth)
    return Work("tree_accept", f"walk alone, N{nodes}", 20 * nodes, inputs, method, {}, True)


def _commit(device: torch.device, layers: int, slots: int) -> Work:
    """Five accepted nodes, four of which move, in every layer."""
    heads, size, moved = 8, 128, 4
    path = torch.tensor([[0, 2, 3, 7, 9, 12]], dtype=torch.int32, device=device)
    count = torch.tensor([5], dtype=torch.int32, device=device)
    prefix = torch.tensor([slots - 20], dtype=torch.int32, device=device)

    def inputs() -> tuple[Tensor, ...]:
        shape = (1, heads, slots, size)
        return tuple(
            torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2 * layers)
        )

    def method(*buffers: Tensor, backend: Any) -> None:
        keys, values = buffers[:layers], buffers[layers:]
        kv_commit(keys, values, path, count, prefix, backend=backend)

    def copies_a_layer(*buffers: Tensor) -> None:
        """What code without a kernel does once the path is known to the host."""
        source = (prefix + path[0, 1:]).long()
        for buffer in buffers:
            kept = buffer.index_select(2, source)
            buffer[:, :, slots - 19 : slots - 14] = kept

    return Work(
        "kv_commit",
        f"{layers} layers, {moved} nodes move",
        2 * 2 * layers * moved * heads * size * 2,
        inputs,
        method,
        {"index_select, copy": copies_a_layer},
        most_copies=4,
    )


def _head(
    device: torch.device,
    op: str,
    rows: int,
    vocab: int,
    size: int,
    reduced: bool,
    compiles: bool,
) -> Work:
    taken = vocab // 4 if reduced else vocab
    ids = torch.randperm(vocab)[:taken].sort().values.to(device) if reduced else None

    def inputs() -> tuple[Tensor, ...]:
        weight = torch.randn(vocab, size, device=device, dtype=torch.bfloat16) * size**-0.5
        hidden = torch.randn(rows, size, device=device, dtype=torch.bfloat16) * 2
        return hidden, weight, torch.ones(size, device=device, dtype=torch.bfloat16)

    def method(hidden: Tensor, weight: Tensor, norm: Tensor, backend: Any) -> object:
        more = {"norm_weight": norm, "token_ids": ids, "backend": backend}
        if op == "draft_topk":
            return draft_topk(hidden, weight, 8, **more)
        return exit_confidence(hidden, weight, **more)

    name = f"R{rows} C{size} V{vocab}" + (f", {taken} of them" if reduced else "")
    return Work(op, name, 2 * taken * size, inputs, method, {}, compiles, True)

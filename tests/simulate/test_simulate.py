"""Oracles against trying everything; the controller on texts of which the answer is known."""

from __future__ import annotations

import random
from typing import Any

import pytest

from selfspec import simulate
from selfspec.simulate import Draft, Request, Trace, WhatIf
from selfspec.tree_rows import Nodes

PLAIN, NODE = 1.0, 0.02  # seconds of a step, and of one node more
ABOUT = {"every_position": True, "support": "tree", "batch": 1, "prompt": 10}


def timed(batch: int = 1, node: float = NODE) -> list[tuple[int, int, float, int | None]]:
    sizes = (1, 2, 3, 5, 9, 17, 33, 65)
    return [(batch, n, PLAIN + node * (batch * n - 1), None) for n in sizes]


def verify(nodes: int) -> float:
    return PLAIN + NODE * (nodes - 1)


def chain(root: int, tokens: list[int], seconds: float = 0.01, **options: Any) -> Draft:
    probable = [0.9**depth for depth in range(len(tokens) + 1)]
    nodes = Nodes([root, *tokens], list(range(-1, len(tokens))), probable)
    return Draft(nodes, seconds, **{"shared": 0.0, "by_level": False, "network": False, **options})


def trace_of(text: list[int], drafts: Any, **options: Any) -> Trace:
    """`drafts(at)` are those before the token `at`."""
    own = [{}] + [drafts(at) for at in range(1, len(text))]
    return Trace([Request(ABOUT, text, own, prefill=2.0)], timed(**options))


def random_tree(source: random.Random, root: int, text: list[int]) -> Draft:
    tokens, parents, expected = [root], [-1], [1.0]
    for _ in range(source.randrange(7)):
        parent = source.randrange(len(tokens))
        depth, at = 0, parent
        while at:
            depth, at = depth + 1, parents[at]
        right = depth < len(text) and source.random() < 0.6
        token = text[depth] if right else source.randrange(50)
        if (parent, token) in zip(parents, tokens, strict=True):
            continue
        tokens.append(token)
        parents.append(parent)
        expected.append(expected[parent] * source.uniform(0.2, 1.0))
    return Draft(Nodes(tokens, parents, expected), source.uniform(0.01, 0.3), 0.0, True, True)


def all_ways(trace: Trace, names: list[str], at: int) -> float:
    """Seconds of the best of all choices, each tried."""
    (request,) = trace.requests
    text = request.tokens
    if at >= len(text):
        return 0.0
    best = PLAIN + all_ways(trace, names, at + 1)
    for name in names:
        draft = request.drafts[at][name]
        nodes = draft.nodes
        assert nodes.expected is not None
        order = sorted(range(1, len(nodes.tokens)), key=lambda n: -nodes.expected[n])
        for size in range(1, len(order) + 1):
            kept = {0, *order[:size]}
            node, depth = 0, 0
            while True:  # walk what was kept
                rest = text[at + depth : at + depth + 1]
                found = [
                    n for n in kept - {0} if nodes.parents[n] == node and [nodes.tokens[n]] == rest
                ]
                if not found:
                    break
                node, depth = found[0], depth + 1
            if depth:
                seconds = draft.seconds * depth / draft.depth + verify(1 + size)
                best = min(best, seconds + all_ways(trace, names, at + depth + 1))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_oracle_is_the_best_of_all_ways(seed: int) -> None:
    source = random.Random(seed)
    text = [source.randrange(50) for _ in range(7)]

    def drafts(at: int) -> dict[str, Draft]:
        return {name: random_tree(source, text[at - 1], text[at:]) for name in ("A", "B")}

    trace = trace_of(text, drafts)
    found = simulate.oracle(trace)
    assert found["plain"] == [pytest.approx(2.0 + 6 * PLAIN)]
    for name, of in (("A", ["A"]), ("B", ["B"]), ("together", ["A", "B"])):
        assert found[name] == [pytest.approx(2.0 + all_ways(trace, of, 1))]
    assert found["together"][0] <= min(found["A"][0], found["B"][0]) + 1e-9
    # Whoever knows the branch as well is no slower, and whoever knows nothing is no faster.
    assert simulate.oracle(trace, branches=True)["together"][0] <= found["together"][0] + 1e-9
    (replayed,) = simulate.replay(trace)
    assert replayed.seconds >= found["together"][0] - 1e-9


def test_an_oracle_pays_for_what_it_chose_alone() -> None:
    text = list(range(9))
    cheap = trace_of(text, lambda at: {"A": chain(at - 1, [99], 5.0), "B": chain(at - 1, [at])})
    # Four times two tokens: B's draft and two nodes.
    assert simulate.oracle(cheap)["together"] == [pytest.approx(2.0 + 4 * (0.01 + verify(2)))]
    assert simulate.oracle(cheap)["A"] == simulate.oracle(cheap)["plain"]
    shared = trace_of(text, lambda at: {"A": chain(at - 1, [at], 0.3, shared=0.25)})
    assert simulate.oracle(shared)["A"] == [pytest.approx(2.0 + 4 * (0.3 + 0.75 * verify(2)))]


def test_sizes_go_by_what_the_drafter_said() -> None:
    """The right token is its second choice: the first has to be verified along with it."""
    text = list(range(3))

    def drafts(at: int) -> dict[str, Draft]:
        nodes = Nodes([at - 1, 99, at], [-1, 0, 0], [1.0, 0.6, 0.3])
        return {"A": Draft(nodes, 0.1, 0.0, False, False)}

    trace = trace_of(text, drafts)
    assert simulate.oracle(trace)["A"] == [pytest.approx(2.0 + 0.1 + verify(3))]
    assert simulate.oracle(trace, branches=True)["A"] == [pytest.approx(2.0 + 0.1 + verify(2))]
    one = WhatIf(max_nodes=1)
    assert simulate.oracle(trace, one)["A"] == [pytest.approx(2.0 + 2 * PLAIN)]


def test_the_controller_finds_the_drafter_that_is_right() -> None:
    text = [at % 40 for at in range(600)]

    def drafts(at: int) -> dict[str, Draft]:
        return {
            "Wrong": chain(text[at - 1], [99, 99, 99], 0.05),
            "Right": chain(text[at - 1], text[at : at + 7], 0.05),
        }

    trace = trace_of(text, drafts)
    (both,) = simulate.replay(trace)
    (alone,) = simulate.replay(trace, ["Right"])
    (wrong,) = simulate.replay(trace, ["Wrong"])
    best = simulate.oracle(trace)
    assert both.tokens == alone.tokens == 600
    assert both.speedup >= 0.85 * alone.speedup
    assert both.seconds <= best["together"][0] / 0.8
    assert wrong.speedup >= 0.93
    assert alone.steps == pytest.approx(600 / 8, rel=0.25)


def test_a_replay_repeats() -> None:
    source = random.Random(3)
    text = [source.randrange(50) for _ in range(80)]
    drafts = [{}] + [{"A": random_tree(source, text[at - 1], text[at:])} for at in range(1, 80)]
    trace = Trace([Request(ABOUT, text, drafts, prefill=1.0)] * 3, timed())
    assert simulate.replay(trace) == simulate.replay(trace)


def test_what_if_the_batch_were_larger() -> None:
    text = [at % 40 for at in range(120)]

    def drafts(at: int) -> dict[str, Draft]:
        return {"A": chain(text[at - 1], text[at : at + 7], 0.05, network=True)}

    one = trace_of(text, drafts)
    many = Trace(one.requests * 32, one.timed)
    speeds = []
    for batch in (1, 4, 16, 32):
        found = simulate.replay(many, what_if=WhatIf(batch=batch))
        assert [len(each.requests) for each in found] == [batch] * (32 // batch)
        assert sum(each.tokens for each in found) == 32 * 120
        speeds.append(sum(f.plain_seconds for f in found) / sum(f.seconds for f in found))
    assert speeds == sorted(speeds, reverse=True)
    # A batch that was timed takes what it took: here as long as it would with one text.
    timed_too = Trace(many.requests, many.timed + [(16, n, s, c) for _, n, s, c in many.timed])
    (found, _) = simulate.replay(timed_too, what_if=WhatIf(batch=16))
    assert found.speedup > speeds[2] * 1.2


def test_what_if_the_target_were_larger() -> None:
    text = list(range(60))
    trace = trace_of(text, lambda at: {"A": chain(at - 1, text[at : at + 3], 0.4)})
    small, large = (simulate.oracle(trace, WhatIf(target=size)) for size in (1.0, 10.0))
    # Copies take what they took; so they are worth more beside a larger target.
    assert large["plain"][0] / large["A"][0] > 1.2 * small["plain"][0] / small["A"][0]
    by_network = trace_of(
        text, lambda at: {"A": chain(at - 1, text[at : at + 3], 0.4, network=True)}
    )
    same = simulate.oracle(by_network, WhatIf(target=10.0))
    assert (same["A"][0] - 2.0) / 10 == pytest.approx(small["A"][0] - 2.0)


def test_one_timed_size_is_too_little() -> None:
    trace = Trace(trace_of([1, 2, 3], lambda at: {"A": chain(at, [at + 1])}).requests, timed()[:1])
    for simulated in (simulate.oracle, simulate.replay):
        with pytest.raises(ValueError, match="one size only"):
            simulated(trace)


def test_unknown_drafters_and_conditions_are_named() -> None:
    trace = trace_of([1, 2, 3], lambda at: {"A": chain(at, [at + 1])})
    with pytest.raises(ValueError, match="no B; it has A"):
        simulate.replay(trace, ["B"])
    with pytest.raises(ValueError, match="target=0 must be a positive number"):
        WhatIf(target=0)
    with pytest.raises(ValueError, match="batch=0"):
        WhatIf(batch=0)


def test_the_textbook_formula() -> None:
    # By enumeration: k of d tokens are right with probability a^k (1 - a), all d with a^d.
    a, d = 0.7, 5
    tokens = sum((k + 1) * a**k * (1 - a) for k in range(d)) + (d + 1) * a**d
    assert simulate.expected_speedup(a, d, 0.1, 1.2) == pytest.approx(tokens / (0.5 + 1.2))
    assert simulate.expected_speedup(1.0, 3, 0.0) == pytest.approx(4.0)
    assert simulate.expected_speedup(0.3, 0, 0.5) == pytest.approx(1.0)
    best, length = simulate.chain_speedup(a, 0.1, [1.0] * 9)
    each = [simulate.expected_speedup(a, n, 0.1) for n in range(1, 9)]
    assert (best, length) == (pytest.approx(max(each)), each.index(max(each)) + 1)
    with pytest.raises(ValueError, match=r"acceptance=1\.2"):
        simulate.expected_speedup(1.2, 3, 0.1)
    with pytest.raises(ValueError, match="must not be negative"):
        simulate.expected_speedup(0.5, -1, 0.1)


def test_steps_over_longer_texts_take_longer() -> None:
    """A request over a long text is not charged the time of one over a short text."""
    token, text = 0.001, list(range(9))
    of = [(n, c) for c in range(0, 4000, 7) for n in (1, 2, 3, 5, 9)]
    timed_over = [(1, n, verify(n) + token * c, c) for n, c in of]
    own = [{}] + [{"A": chain(at - 1, [at])} for at in range(1, 9)]
    requests = [Request({**ABOUT, "prompt": prompt}, text, own) for prompt in (10, 3000)]
    trace = Trace(requests, timed_over)
    short, long = simulate.oracle(trace)["plain"]
    assert short == pytest.approx(8 * PLAIN, rel=0.02)
    assert long == pytest.approx(8 * (PLAIN + 3.0), rel=0.02)
    short, long = simulate.oracle(trace)["A"]
    assert long == pytest.approx(4 * (0.01 + verify(2) + 3.0), rel=0.02)
    found = simulate.replay(trace)
    assert found[1].plain_seconds == pytest.approx(8 * (PLAIN + 3.0), rel=0.02)
    assert 1 < found[1].seconds / found[0].seconds < 6

"""Sampled acceptance spelt out in fractions, a node at a time, and the law of what it emits.

`kept` is the recursion of the papers on one drafted tree, `decide` has it toss given coins; `law`
takes the expectation over drafts and coins; `chances` has what the decisions rest on. All are made
of `chance` and `failed`, which take floats too. `text` is speculation step by step, with numbers
that may serve twice, and `enumerated` its law.
Nothing here shares code with the package.
"""

import random
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

Law = list[Fraction]
Prefix = tuple[int, ...]


def chance(r: Fraction, p: Law, q: Law, x: int) -> Fraction:
    """The level at which a child with token x is tried; r is its parent's."""
    if q[x] == 0:
        return Fraction(r * p[x] > 0)
    return min(Fraction(1), r * p[x] / q[x])


def failed(r: Fraction, p: Law, q: Law, x: int) -> tuple[Fraction, Law, Law]:
    """Level, p and q of a node once its child with token x has failed."""
    residual = [max(r * a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    mass = sum(residual)
    if mass > 0:
        p, r_next = [a / mass for a in residual], mass / (mass + 1 - r)
    else:
        r_next = Fraction(r == 1)
    left = [Fraction(0) if y == x else b for y, b in enumerate(q)]
    total = sum(left)
    return r_next, p, [b / total for b in left] if total else left


def children(
    tokens: list[int], parents: list[int], node: int, depth: int = 0, max_depth: int = 99
) -> list[int]:
    """Children of a node, without those that repeat a sibling's token."""
    found: dict[int, int] = {}
    for n in range(1, len(parents)):
        if parents[n] == node and depth < max_depth:
            found.setdefault(tokens[n], n)
    return list(found.values())


def chances(
    tokens: list[int], parents: list[int], p: list[Law], q: list[Law], rule: str
) -> tuple[dict[int, Fraction], dict[int, Law]]:
    """The level at which a node tosses its coin, and what its next token would be drawn from.

    Of the nodes that can come to it: behind a child that is sure to emit nothing does.
    """
    level: dict[int, Fraction] = {0: Fraction(1)}
    left: dict[int, Law] = {}

    def visit(node: int, r: Fraction) -> None:
        here_p, here_q = p[node], q[node]
        for child in children(tokens, parents, node):
            tried = chance(r, here_p, here_q, tokens[child])
            level[child] = tried
            visit(child, tried if rule == "traversal" else Fraction(1))
            if tried > 0.999:
                level.pop(node if rule == "traversal" else None, None)
                return
            r, here_p, here_q = failed(r, here_p, here_q, tokens[child])
        if r > 0:
            left[node] = here_p
        if rule == "traversal":
            level[node] = r

    visit(0, Fraction(1))
    return level, left


def decide(
    tokens: list[int],
    parents: list[int],
    p: list[Law],
    q: list[Law],
    coins: list[Fraction],
    rule: str,
    max_depth: int = 99,
) -> tuple[list[int], Law, Fraction]:
    """The accepted path, what the next token is drawn from, and how close a coin came to its level.

    p and q are by node.
    """
    margin = Fraction(1)

    def tossed(node: int, level: Fraction) -> bool:
        nonlocal margin
        margin = min(margin, abs(coins[node] - level))
        return coins[node] < level

    path, left = kept(tokens, parents, p, q, tossed, rule, max_depth)
    return path, left, margin


def kept(
    tokens: list[int],
    parents: list[int],
    p: list[Law],
    q: list[Law],
    tossed: Callable[[int, Fraction], bool],
    rule: str,
    max_depth: int = 99,
) -> tuple[list[int], Law]:
    """The accepted path and what the next token is drawn from; `tossed` is asked for coins."""

    def below(path: list[int]) -> list[int]:
        return children(tokens, parents, path[-1], len(path) - 1, max_depth)

    def visit(path: list[int], r: Fraction) -> tuple[list[int], Law] | None:
        here_p, here_q = p[path[-1]], q[path[-1]]
        for child in below(path):
            emitted = visit([*path, child], chance(r, here_p, here_q, tokens[child]))
            if emitted:
                return emitted
            r, here_p, here_q = failed(r, here_p, here_q, tokens[child])
        return (path, here_p) if len(path) == 1 or tossed(path[-1], r) else None

    def walk(path: list[int]) -> tuple[list[int], Law]:
        here_p, here_q = p[path[-1]], q[path[-1]]
        for child in below(path):
            if tossed(child, chance(Fraction(1), here_p, here_q, tokens[child])):
                return walk([*path, child])
            _, here_p, here_q = failed(Fraction(1), here_p, here_q, tokens[child])
        return path, here_p

    emitted = visit([0], Fraction(1)) if rule == "traversal" else walk([0])
    assert emitted is not None
    return emitted


def law(
    p: Callable[[Prefix], Law], q: Callable[[Prefix], Law], shape: tuple[int, ...], rule: str
) -> dict[Prefix, Fraction]:
    """Probability of every output: path and next token.

    A node at depth d has `shape[d]` children, drawn without replacement from q; fewer where q has
    no more tokens.
    """

    def emit(prefix: Prefix, r: Fraction) -> tuple[dict[Prefix, Fraction], Fraction]:
        """What the subtree emits if it is tried at level r, and the chance that it does not."""
        breadth = shape[len(prefix)] if len(prefix) < len(shape) else 0
        outputs: dict[Prefix, Fraction] = {}
        missed = Fraction(0)

        def add(output: Prefix, weight: Fraction) -> None:
            if weight:
                outputs[output] = outputs.get(output, Fraction(0)) + weight

        def turn(rank: int, weight: Fraction, r: Fraction, here_p: Law, here_q: Law) -> None:
            nonlocal missed
            if rank == breadth or not any(here_q):
                passes = r if rule == "traversal" else Fraction(1)
                for y, chance_of_y in enumerate(here_p):
                    add((*prefix, y), weight * passes * chance_of_y)
                missed += weight * (1 - passes)
                return
            for x, drawn in enumerate(here_q):
                if drawn == 0:
                    continue
                level = chance(r, here_p, here_q, x)
                below, miss = emit((*prefix, x), level)
                if rule == "multiround":  # the coin is tossed before the subtree is looked at
                    below = {output: level * part for output, part in below.items()}
                    miss = 1 - level
                for output, part in below.items():
                    add(output, weight * drawn * part)
                if miss:
                    turn(rank + 1, weight * drawn * miss, *failed(r, here_p, here_q, x))

        start = r if rule == "traversal" else Fraction(1)
        turn(0, Fraction(1), start, p(prefix), q(prefix))
        return outputs, missed

    outputs, missed = emit((), Fraction(1))
    assert missed == 0
    return outputs


def continued(
    outputs: dict[Prefix, Fraction], p: Callable[[Prefix], Law], length: int
) -> dict[Prefix, Fraction]:
    """The law of the first `length` tokens, where the target alone goes on behind an output."""
    result: dict[Prefix, Fraction] = {}
    for output, weight in outputs.items():
        head = output[:length]
        for tail in product(range(len(p(()))), repeat=length - len(head)):
            part, text = weight, head
            for token in tail:
                part *= p(text)[token]
                text = (*text, token)
            if part:
                result[text] = result.get(text, Fraction(0)) + part
    return result


class Uniform:
    """A number from 0 to 1, known as exactly as the questions about it asked for.

    Args:
        draw: Draws the place of an outcome from a list of their probabilities.
    """

    def __init__(self, draw: Callable[[Law], int]) -> None:
        self.draw, self.low, self.high = draw, Fraction(0), Fraction(1)

    def below(self, level: Fraction) -> bool:
        level = min(max(level, self.low), self.high)
        share = (level - self.low) / (self.high - self.low)
        passes = self.draw([1 - share, share]) == 1
        self.low, self.high = (self.low, level) if passes else (level, self.high)
        return passes

    def pick(self, weights: Law) -> int:
        """A token by its weight: the one into whose part of the interval the number falls."""
        total, bound = sum(weights), Fraction(0)
        for x, weight in enumerate(weights):
            bound += weight / total
            if self.below(bound):
                return x
        raise AssertionError("weights do not add up to their sum")


class Course:
    """One course of a random process: its numbers, each with a key of its own.

    Args:
        open_ways: For every draw, the outcomes that are still to be gone through; the first is the
            one of this course. Grows with the draws.
    """

    def __init__(self, open_ways: list[list[int]]) -> None:
        self.open_ways, self.turn, self.weight = open_ways, 0, Fraction(1)
        self.numbers: dict[tuple[str, int, int], Uniform] = {}

    def __call__(self, purpose: str, position: int, which: int) -> Uniform:
        """The number of a key; asked for twice, it is the same one."""
        return self.numbers.setdefault((purpose, position, which), Uniform(self._draw))

    def _draw(self, weights: Law) -> int:
        if self.turn == len(self.open_ways):
            self.open_ways.append([way for way, weight in enumerate(weights) if weight])
        way = self.open_ways[self.turn][0]
        self.turn, self.weight = self.turn + 1, self.weight * weights[way]
        return way


def enumerated(process: Callable[[Course], Prefix]) -> dict[Prefix, Fraction]:
    """The exact law of what a process returns: it is run once for every course it can take."""
    outputs: dict[Prefix, Fraction] = {}
    open_ways: list[list[int]] = []
    while True:
        course = Course(open_ways)
        output = process(course)
        outputs[output] = outputs.get(output, Fraction(0)) + course.weight
        while open_ways and len(open_ways[-1]) == 1:
            open_ways.pop()
        if not open_ways:
            return outputs
        del open_ways[-1][0]


def text(
    number: Course, pair: Any, shape: tuple[int, ...], rule: str, length: int, sure: float = 0
) -> Prefix:
    """The first `length` tokens, a step after the other: draft, keep, draw the token behind it.

    Below a token whose q is less than `sure` nothing is drafted.
    """
    emitted: Prefix = ()
    while len(emitted) < length:
        emitted = _step(number, pair, shape[: length - len(emitted)], rule, emitted, sure)
    return emitted[:length]


def _step(
    number: Course, pair: Any, shape: tuple[int, ...], rule: str, emitted: Prefix, sure: float
) -> Prefix:
    at = len(emitted)
    tokens, parents, prefixes = [0], [-1], [emitted]
    first = 0
    for breadth in shape:
        last = len(tokens)
        for node in range(first, last):
            law = pair.q(prefixes[node])
            if node and pair.q(prefixes[parents[node]])[tokens[node]] < sure:
                continue
            drawn: list[int] = []
            while len(drawn) < min(breadth, sum(chance > 0 for chance in law)):
                left = [Fraction(0) if x in drawn else chance for x, chance in enumerate(law)]
                drawn.append(number("draft", at, len(tokens) + len(drawn)).pick(left))
            for x in drawn:
                tokens.append(x)
                parents.append(node)
                prefixes.append((*prefixes[node], x))
        first = last
    p, q = [pair.p(prefix) for prefix in prefixes], [pair.q(prefix) for prefix in prefixes]

    def tossed(node: int, level: Fraction) -> bool:
        return number("coin", at, node).below(level)

    path, left = kept(tokens, parents, p, q, tossed, rule)
    return (*prefixes[path[-1]], number("residual", at + len(path), 0).pick(left))


def accepted(outputs: dict[Prefix, Fraction]) -> Fraction:
    """Mean number of accepted draft tokens."""
    return sum((weight * (len(text) - 1) for text, weight in outputs.items()), Fraction(0))


class Pair:
    """Random target and draft: a distribution for every prefix, of one of five kinds.

    Dense; with zeros in both; of disjoint supports; draft equal to target; draft near it.
    """

    def __init__(self, seed: int, vocabulary: int = 3) -> None:
        self.seed, self.vocabulary = seed, vocabulary
        self.known: dict[Prefix, tuple[Law, Law]] = {}

    def p(self, prefix: Prefix) -> Law:
        return self._both(prefix)[0]

    def q(self, prefix: Prefix) -> Law:
        return self._both(prefix)[1]

    def _both(self, prefix: Prefix) -> tuple[Law, Law]:
        if prefix not in self.known:
            rng = random.Random(repr((self.seed, prefix)))
            kind = rng.choice(["dense", "zeros", "disjoint", "equal", "near"])
            least = 0 if kind == "zeros" else 1
            p, q = ([rng.randint(least, 6) for _ in range(self.vocabulary)] for _ in "pq")
            if kind == "near":
                q = [a + rng.randint(0, 1) for a in p]
            if kind == "disjoint":
                inside = set(
                    rng.sample(range(self.vocabulary), rng.randint(1, self.vocabulary - 1))
                )
                p = [a if x in inside else 0 for x, a in enumerate(p)]
                q = [0 if x in inside else a for x, a in enumerate(q)]
            if kind == "equal":
                q = p
            p, q = (weights if any(weights) else [1] * self.vocabulary for weights in (p, q))
            self.known[prefix] = tuple(
                [Fraction(a, sum(weights)) for a in weights] for weights in (p, q)
            )
        return self.known[prefix]

    def draft(self, shape: tuple[int, ...], rng: random.Random) -> tuple[list[int], list[int]]:
        """Tokens and parents of a tree drawn from q, level by level; node 0 is the root."""
        tokens, parents, prefixes = [0], [-1], [()]
        first = 0
        for breadth in shape:
            last = len(tokens)
            for n in range(first, last):
                weights = [float(a) for a in self.q(prefixes[n])]
                for _ in range(breadth):
                    if not any(weights):
                        break
                    x = rng.choices(range(self.vocabulary), weights)[0]
                    weights[x] = 0.0
                    tokens.append(x)
                    parents.append(n)
                    prefixes.append((*prefixes[n], x))
            first = last
        self.prefixes = prefixes
        return tokens, parents

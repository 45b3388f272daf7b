"""Traces as `SpeculativeModel.trace` writes them, read back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfspec.trace import FORMAT
from selfspec.tree_rows import Nodes


@dataclass(frozen=True)
class Draft:
    """What one drafter drafted for one row at one position.

    Attributes:
        nodes: The tree, root first.
        seconds: What that took, for all rows of the batch.
        shared: Part of a verification that its layers have done.
        by_level: Whether fewer levels take less time.
        network: Whether a network drafted, which a larger target would have larger.
    """

    nodes: Nodes
    seconds: float
    shared: float
    by_level: bool
    network: bool

    def right(self, text: Sequence[int]) -> list[int]:
        """Nodes on the way that the text went: the first, second, ... that is accepted."""
        children: dict[tuple[int, int], int] = {}
        for node in range(1, len(self.nodes.tokens)):
            children.setdefault((self.nodes.parents[node], self.nodes.tokens[node]), node)
        at, found = 0, []
        for token in text:
            child = children.get((at, token))
            if child is None:
                break
            found.append(child)
            at = child
        return found

    @property
    def depth(self) -> int:
        """Levels of the tree."""
        depths = [0]
        for parent in self.nodes.parents[1:]:
            depths.append(depths[parent] + 1)
        return max(depths)

    def seconds_to(self, depth: int) -> float:
        """What drafting no deeper than this takes; levels are taken to be alike."""
        return (
            self.seconds * min(depth / max(self.depth, 1), 1.0) if self.by_level else self.seconds
        )


@dataclass
class Request:
    """One row of a request.

    Attributes:
        about: The line that the request starts with, see `selfspec/trace.py`.
        tokens: The text that was generated.
        drafts: In a trace of every position, what was drafted before each token, by drafter; none
            before the first, which the prompt gave.
        prefill: Seconds of the prompt.
        seconds: Of all other steps.
        steps: Target forwards, the prompt's not counted.
    """

    about: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    drafts: list[dict[str, Draft]] = field(default_factory=list)
    prefill: float = 0.0
    seconds: float = 0.0
    steps: int = 0

    def context(self, at: int) -> int:
        """Tokens of the text before the token `at`, the prompt's among them."""
        prompt: int = self.about["prompt"]
        return prompt + at


@dataclass(frozen=True)
class Trace:
    """What a file holds.

    Attributes:
        requests: Row by row.
        timed: (batch, nodes a row, seconds, context) of every step, without what drafting took, and
            of what the wrapper had measured before, the context of which is None: as if over the
            first text.
    """

    requests: list[Request]
    timed: list[tuple[int, int, float, int | None]]

    @property
    def drafters(self) -> list[str]:
        """All that drafted, in the order in which they are asked."""
        return list(dict.fromkeys(n for r in self.requests for d in r.drafts for n in d))

    @property
    def every_position(self) -> list[Request]:
        """Requests that can be simulated.

        Raises:
            ValueError: If there are none.
        """
        found = [r for r in self.requests if r.about["every_position"] and r.tokens]
        if not found:
            raise ValueError(
                "this trace does not say what would have been drafted at every position; record "
                "one with spec.trace(path, every_position=True)."
            )
        return found


def read(*paths: str | Path) -> Trace:
    """Read traces, of one model on one machine, as one.

    Args:
        *paths: JSONL files.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a line is none of a trace, or the trace is of a later version.
    """
    requests: list[Request] = []
    timed: list[tuple[int, int, float, int | None]] = []
    for path in paths:
        rows: dict[int, list[Request]] = {}
        text = Path(path).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            try:
                _take(json.loads(line), rows, timed)
            except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
                raise ValueError(
                    f"{path}, line {number} is no line of a trace: {error!r}."
                ) from error
        requests += [row for of in rows.values() for row in of]
    return Trace(requests, timed)


def _take(
    line: dict[str, Any],
    rows: dict[int, list[Request]],
    timed: list[tuple[int, int, float, int | None]],
) -> None:
    kind, number = line["type"], line["request"]
    if kind == "request":
        if line["format"] > FORMAT:
            raise ValueError(
                f"this trace is of format {line['format']}, a later version of selfspec; this one "
                f"reads format {FORMAT}."
            )
        rows[number] = [Request(line) for _ in range(line["batch"])]
        return
    own = rows[number]
    if kind == "end":
        timed += [(len(own), round(nodes), seconds, None) for nodes, seconds in line["verify"]]
        return
    seconds = line["seconds"]
    after_draft = sum(value for key, value in seconds.items() if key != "draft")
    if not line["is_prefill"]:
        context = max(row.context(len(row.tokens)) for row in own)
        timed.append((len(own), line["nodes"], after_draft, context))
    for b, row in enumerate(own):
        new = line["tokens"][b]
        if not new:
            continue
        drafts = {d["drafter"]: _draft(d, b) for d in line.get("drafts", ())}
        row.drafts.extend([drafts] * len(new))
        row.tokens.extend(new)
        if line["is_prefill"]:
            row.prefill = after_draft
        else:
            row.seconds += sum(seconds.values())
            row.steps += 1


def _draft(line: dict[str, Any], b: int) -> Draft:
    row = line["rows"][b]
    nodes = Nodes(row["tokens"], row["parents"], row["expected"])
    return Draft(nodes, line["seconds"], line["shared"], line["by_level"], line["network"])

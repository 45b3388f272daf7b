"""Options of a wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from typing_extensions import Self

# How drafts are taken where tokens are drawn.
Rule = Literal["traversal", "multiround", "lossy-typical"]


@dataclass(frozen=True)
class Options:
    """What is written as JSON and read back by a later version, perhaps."""

    def to_dict(self) -> dict[str, Any]:
        """All options and the version they were written by."""
        from selfspec import __version__

        return {**asdict(self), "selfspec_version": __version__}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; options that are not there have their defaults.

        Raises:
            ValueError: If an option is unknown (written by a newer version, or misspelt).
        """
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in values.items() if k != "selfspec_version"}
        if unknown := sorted(set(values) - known):
            raise ValueError(
                f"unknown option {', '.join(unknown)}; known: {', '.join(sorted(known))}."
            )
        return cls(**values)


@dataclass(frozen=True)
class SpecConfig(Options):
    """How a wrapper speculates.

    None of it changes the text in float32 and float64, nor, where drafts are drawn, its
    distribution. What is drafted does matter for which text a seed gives when drafts are drawn, and
    for rounding in lower precision. Blocks are chosen by measured time; `adaptive=False` makes
    calls repeatable where that matters.

    Attributes:
        max_draft_tokens: Most draft tokens a row and step, the root not counted.
        adaptive: Draft as much as pays by measured time, and learn over requests how often drafts
            hold. False: as much as would pay on assumed hardware. Drafts that are drawn always do
            that, so that a seed gives the same text again.
        off_switch: Stop drafting while measured time says that it does not pay. None: on for
            `drafter="auto"`, "early-exit" and "layer-skip" if `adaptive`; off for other drafters
            that were asked for.
        cuda_graphs: "auto": on a CUDA device, verify, accept and commit are captured as one graph
            per size of tree and replayed, where the model allows it. The cache they work on is
            then kept between calls. False: never. True: as "auto", but a model that does not
            allow it is refused; on other devices the same steps of fixed shape run uncaptured.
        acceptance: Rule for drafts that were drawn (`log_q`). Lossless are "traversal", traversal
            verification, on a chain block verification, and "multiround", rejection sampling token
            by token and sibling by sibling, which accepts no more. "lossy-typical" is not: in
            requests that sample it keeps any draft that is likely enough (typical acceptance),
            and the text no longer follows the model's distribution.
        keep_times: Keep times of steps in a file of the user's cache, by model and machine, so that
            the next process need not try sizes first (`selfspec/time_files.py`). No text is kept.
        deterministic: Verify with attention whose order of summation does not depend on the rest
            of the batch. Costs time at small batches on a GPU; CPUs and float64 ignore it.
    """

    max_draft_tokens: int = 31
    adaptive: bool = True
    off_switch: bool | None = None
    cuda_graphs: bool | Literal["auto"] = "auto"
    acceptance: Rule = "traversal"
    deterministic: bool = False
    keep_times: bool = True

    def __post_init__(self) -> None:
        """Check values.

        Raises:
            ValueError: If a value is out of range.
        """
        most = self.max_draft_tokens
        if not isinstance(most, int) or isinstance(most, bool) or not 1 <= most <= 1024:
            raise ValueError(
                f"max_draft_tokens={self.max_draft_tokens!r} must be an int in 1..1024."
            )
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive={self.adaptive!r} must be True or False.")
        if self.off_switch is not None and not isinstance(self.off_switch, bool):
            raise ValueError(f"off_switch={self.off_switch!r} must be True, False or None.")
        graphs = self.cuda_graphs
        if not isinstance(graphs, bool) and not (isinstance(graphs, str) and graphs == "auto"):
            raise ValueError(f'cuda_graphs={self.cuda_graphs!r} must be "auto", True or False.')
        if not isinstance(self.acceptance, str) or self.acceptance not in get_args(Rule):
            known = ", ".join(f'"{rule}"' for rule in get_args(Rule))
            raise ValueError(f"acceptance={self.acceptance!r} must be one of {known}.")
        for name in ("deterministic", "keep_times"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")

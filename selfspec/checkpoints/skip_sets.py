"""A skip set in a file: what a search found, for which model, and what it is worth."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec.checkpoints.base_model import BaseModel, check_base
from selfspec.checkpoints.tensors import read_json, write_json
from selfspec.layer_times import LayerTimes
from selfspec.options import check_number
from selfspec.skip_set import SkipSet

if TYPE_CHECKING:
    import os

    from transformers import PreTrainedModel

FILE = "skip_set.json"
FORMAT, VERSION = "selfspec-skip-set", 1


@dataclass(frozen=True)
class FoundSkipSet:
    """The best skip set that a search came upon.

    Attributes:
        skip_set: What drafts leave out.
        acceptance: How many draft tokens are right, of those after right ones; on texts that did
            not choose the set.
        compared: Tokens that this was counted on.
        draft_step: Time of a draft token over that of a plain step.
        speedup: Expected speed of the best chain over plain decoding.
        length: Of that chain.
        needed: The acceptance from which it would be faster than plain; None: it cannot be.
        tried: Sets that were tried.
        base: The model.
        times: Of its parts, on the machine of the search.
        frontier: What it would take: by time of a draft token (over a plain step), the highest
            acceptance that was seen, and the one from which it would pay (None: it cannot).
    """

    skip_set: SkipSet
    acceptance: float
    compared: int
    draft_step: float
    speedup: float
    length: int
    needed: float | None
    tried: int
    base: BaseModel
    times: LayerTimes
    frontier: tuple[tuple[float, float, float | None], ...] = ()

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        skip_set: SkipSet,
        *,
        acceptance: float,
        compared: int,
        length: int,
        times: LayerTimes,
        tried: int,
        frontier: tuple[tuple[float, float, float | None], ...] = (),
    ) -> FoundSkipSet:
        """What a search found; the rest follows from the times."""
        return cls(
            skip_set=skip_set,
            acceptance=acceptance,
            compared=compared,
            draft_step=times.draft_step(skip_set),
            speedup=times.speedup(skip_set, acceptance)[0],
            length=length,
            needed=times.needed(skip_set),
            tried=tried,
            base=BaseModel.of(model),
            times=times,
            frontier=frontier,
        )

    def table(self) -> str:
        """The frontier, for people: what it would take."""
        rows = [
            f"{step:14.2f}  {seen:10.2f}  {'never' if needed is None else f'{needed:.2f}':>8}"
            for step, seen, needed in self.frontier
        ]
        return "\n".join(["a draft token  best right  to pay", *rows])

    @property
    def pays(self) -> bool:
        """Whether it is expected to be faster than plain decoding."""
        return self.speedup > 1

    def __str__(self) -> str:
        """What is to be said of it, in one line."""
        one = f"without {self.skip_set} a draft token takes {self.draft_step:.2f} of a plain step"
        right = f"and is right {self.acceptance:.2f} of the time"
        if self.pays:
            return f"layer skip pays, {self.speedup:.2f}x expected: {one} {right}."
        take = "no acceptance would do" if self.needed is None else f"{self.needed:.2f} would do"
        return (
            f"layer skip does not pay on this model, {self.speedup:.2f}x at best of {self.tried} "
            f"skip sets: {one} {right}; {take}."
        )

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write `skip_set.json` into a folder, which is made if need be.

        `wrap(model, "layer-skip", drafts=folder)` reads it, and so does `wrap(model, "layer-skip")`
        if the folder is that of the model's drafts (`drafts` beside its weights).
        """
        path = Path(folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {**asdict(self), "skip_set": self.skip_set.to_dict()}
        values["times"] = self.times.to_dict()
        write_json({"format": FORMAT, "version": VERSION, **values}, path)
        return path


def read_skip_set(path: str | os.PathLike[str]) -> FoundSkipSet:
    """The inverse of `save`; a file, or the folder that holds it.

    Raises:
        ValueError: If there is none, or it is not what it should be.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path} does not exist: find a skip set and save it there.")
    values = read_json(path)
    if values.pop("format", None) != FORMAT or values.pop("version", None) != VERSION:
        raise ValueError(f"{path} is no {FORMAT} of version {VERSION}: search and save anew.")
    try:
        for name in ("acceptance", "compared", "draft_step", "speedup", "length", "tried"):
            check_number(name, values[name], least=0)
        if values["needed"] is not None:
            check_number("needed", values["needed"], least=0)
        return FoundSkipSet(
            **{
                **values,
                "skip_set": SkipSet.from_dict(values["skip_set"]),
                "base": BaseModel.from_dict(values["base"], path),
                "times": LayerTimes.from_dict(values["times"]),
                "frontier": tuple(tuple(row) for row in values["frontier"]),
            }
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): search and save anew.") from error


def skip_set_in(
    folder: Path, model: PreTrainedModel, strict_base: bool = True
) -> FoundSkipSet | None:
    """The skip set that a folder of drafts holds for a model, or None.

    Raises:
        ValueError: If it is broken or of another model.
    """
    if not (folder / FILE).is_file():
        return None
    found = read_skip_set(folder)
    check_base(found.base, model, strict_base)
    return found

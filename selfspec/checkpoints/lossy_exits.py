"""What a lossy exit was calibrated to, in a file: for which model, which exits, and how sure."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.checkpoints.base_model import BaseModel
from selfspec.checkpoints.tensors import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE = "lossy_exit.json"
FORMAT, VERSION = "selfspec-lossy-exit", 1
_FIELDS = ("exit_layers", "threshold", "max_exits", "delta", "weights")


def write_lossy_exit(values: Mapping[str, Any], folder: Path, base: BaseModel) -> Path:
    """Write options of a `LossyExitDrafter`.

    Args:
        values: Those in `_FIELDS`; `weights` by exit layer, or None.
        folder: Is made if need be.
        base: The model that they were found on.

    Returns:
        The file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: values[name] for name in _FIELDS}
    if kept["weights"] is not None:  # keys of JSON are text
        kept["weights"] = {str(layer): list(row) for layer, row in kept["weights"].items()}
    about = {"format": FORMAT, "version": VERSION, "base": asdict(base)}
    write_json({**about, **kept}, folder / FILE)
    return folder / FILE


def read_lossy_exit(folder: Path) -> tuple[dict[str, Any], BaseModel]:
    """The inverse: options, and the model they were found on.

    Raises:
        ValueError: If there is no such file, or it is not what it should be.
    """
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: calibrate an exit and save its drafter there.")
    values = read_json(path)
    if values.pop("format", None) != FORMAT or values.pop("version", None) != VERSION:
        raise ValueError(f"{path} is no {FORMAT} of version {VERSION}: calibrate and save anew.")
    base = BaseModel.from_dict(values.pop("base", None), path)
    if set(values) != set(_FIELDS):
        raise ValueError(f"{path} has {sorted(values)}; it must have {sorted(_FIELDS)}.")
    try:
        if values["weights"] is not None:
            values["weights"] = {int(layer): row for layer, row in values["weights"].items()}
    except (AttributeError, ValueError) as error:
        raise ValueError(f"{path}: weights are not by exit layer ({error}).") from error
    return values, base

"""Times of steps, kept between processes: one file for a model on a machine.

A wrapper begins with what an earlier process measured instead of trying sizes first; where that no
longer holds, the first steps say so (`StepTimes`). The files have times and names of drafters,
nothing of any text. They lie in `selfspec/times` of the user's cache (XDG_CACHE_HOME, or ~/.cache);
SELFSPEC_CACHE names another folder, and set to nothing none is read or written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from selfspec.step_times import StepTimes

logger = logging.getLogger("selfspec")

_FORMAT = 1
_EVERY = 64  # steps between two writes


class TimeFile:
    """The file of one model as it is: its device, dtype and attention, and the threads of torch.

    Args:
        model: Transformers' model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._about = _about(model)
        self._path = _path(self._about)
        self._written = 0

    def read(self, times: StepTimes) -> None:
        """Let `times` begin with what is known; nothing if that is not there or cannot be read."""
        if self._path is None:
            return
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            if found["about"] == self._about:
                times.begin_with(found["batches"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.debug("times in %s are not used: %r", self._path, error)
        self._written = times.steps

    def write(self, times: StepTimes) -> None:
        """Write what is known, if that has changed by many steps; other batches stay there."""
        if self._path is None or times.steps < self._written + _EVERY:
            return
        batches = times.to_dict()
        if not batches or _about(self._model) != self._about:
            return
        self._written = times.steps
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # What cannot be read, or is not there, is replaced.
            with suppress(OSError, ValueError, KeyError, TypeError):
                known = json.loads(self._path.read_text(encoding="utf-8"))["batches"]
                batches = {**known, **batches}
            text = json.dumps({"about": self._about, "batches": batches})
            handle, name = tempfile.mkstemp(dir=self._path.parent, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, self._path)  # other processes read all of it or what was there
        except OSError as error:
            logger.debug("times are not kept in %s: %r", self._path, error)


def _about(model: Any) -> dict[str, Any]:
    """What times depend on."""
    from selfspec import __version__

    config = model.config.to_dict()
    fixed = {key: value for key, value in config.items() if not key.startswith("_")}
    fixed.pop("transformers_version", None)
    sizes = json.dumps(fixed, sort_keys=True, default=str)
    weights = sum(parameter.numel() for parameter in model.parameters())
    device = model.device
    return {
        "format": _FORMAT,
        "selfspec": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": type(model).__name__,
        "config": hashlib.sha256(sizes.encode()).hexdigest(),
        "weights": weights,
        "attention": str(getattr(model.config, "_attn_implementation", None)),
        "dtype": str(model.dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processor": _processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def _path(about: dict[str, Any]) -> Path | None:
    named = os.environ.get("SELFSPEC_CACHE")
    if named == "":
        return None
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfspec"
    except RuntimeError:  # a user without a home
        return None
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return (Path(named) if named else cache) / "times" / f"{about['model']}-{key}.json"

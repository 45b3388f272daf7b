"""Times of every op and of whole steps: `python -m tests.benchmarks.gpu`, best by `gpu.sh`."""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from . import gpu_attention, gpu_rows, gpu_step
from .gpu_clock import Clock, copy_bandwidth

RESULTS = Path(__file__).parent / "results"
# Name, what gives its entries, and the seconds it may take; what is left over goes to the next.
SECTIONS: list[tuple[str, Callable[[Clock, bool], Iterator[dict[str, Any]]], float]] = [
    ("attention", gpu_attention.measurements, 110),
    ("rows", gpu_rows.measurements, 90),
    ("step", gpu_step.measurements, 80),
]
# Not another way to the same result, but the time that moving the bytes takes.
BOUNDS = ("copy", "no mask")
# What follows from the times: heading and format.
DERIVED = {
    "gb_per_second": ("GB/s", ",.0f"),
    "share_of_copy": ("of copy", ".0%"),
    "speedup_over_best": ("best other / ours", ".2f"),
    "over_one_token": ("over one token", ".3f"),
}


def main(argv: list[str] | None = None) -> int:
    """Measure, and write one JSON and one markdown file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--only", choices=[name for name, _, _ in SECTIONS], action="append")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=280, help="of all sections together")
    arguments = parser.parse_args(argv)
    if not arguments.cpu and not torch.cuda.is_available():
        raise SystemExit("gpu: torch sees no GPU; --cpu runs every path with tiny shapes")
    device = torch.device("cpu" if arguments.cpu else "cuda")
    torch.manual_seed(0)

    start = time.monotonic()
    scale = arguments.seconds / sum(seconds for _, _, seconds in SECTIONS)
    result: dict[str, Any] = {"machine": machine(device), "failed": {}, "entries": []}
    bandwidth = copy_bandwidth(Clock(device, 60))
    result["copy_bytes_per_second"] = bandwidth
    spent = 0.0
    for name, section, seconds in SECTIONS:
        spent += scale * seconds
        if arguments.only and name not in arguments.only:
            continue
        clock = Clock(device, spent - (time.monotonic() - start))
        try:
            for entry in section(clock, arguments.cpu):
                result["entries"].append(_related(entry, bandwidth))
                print(_line(entry), flush=True)
        except Exception as error:  # the other sections are worth having
            result["failed"][name] = f"{type(error).__name__}: {error}"
            print(f"FAILED {name}: {error}", flush=True)
    result["seconds"] = time.monotonic() - start

    slug = re.sub(r"[^a-z0-9]+", "-", result["machine"]["device"].lower()).strip("-")
    folder = arguments.output or RESULTS / slug
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "gpu.md").write_text(markdown(result))
    return int(bool(result["failed"]))


def machine(device: torch.device) -> dict[str, str]:
    """What a number has to name to be worth quoting."""
    git = "git rev-parse HEAD 2>/dev/null || true"  # a copy of the tree need not have it
    commit = subprocess.run(git, shell=True, capture_output=True, text=True, cwd=RESULTS.parent)
    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown",
        "cuda": str(torch.version.cuda or torch.version.hip),
    }
    for package in ("torch", "triton", "transformers", "xformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def _related(entry: dict[str, Any], bandwidth: float | None) -> dict[str, Any]:
    """Add what follows from the times: the rate, and the ratio to the best other method."""
    times = {name: t["us"] for name, t in entry["times"].items() if "us" in t}
    first = next(iter(entry["times"]))
    others = [t for name, t in times.items() if name != first and name not in BOUNDS]
    if first in times:
        entry["gb_per_second"] = entry["bytes"] / (1e3 * times[first])
        if bandwidth:
            entry["share_of_copy"] = 1e9 * entry["gb_per_second"] / bandwidth
        if others:
            entry["speedup_over_best"] = min(others) / times[first]
    return entry


def _line(entry: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {_time(t)}" for name, t in entry["times"].items())
    return f"{entry['op']} {entry['case']}: {times}"


def _time(measured: dict[str, Any]) -> str:
    if "us" not in measured:
        return "-"
    return f"{measured['us']:.1f}" + ("" if measured.get("graph") else "*")


def markdown(result: dict[str, Any]) -> str:
    """A table an op."""
    about = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    bandwidth = result["copy_bytes_per_second"]
    text = [f"# {result['machine']['device']}\n", f"{about}.\n"]
    if bandwidth:
        text.append(f"A plain device copy reads and writes {bandwidth / 1e9:,.0f} GB/s.")
    text.append(
        "Times in microseconds, medians of replayed CUDA graphs (* of single launches, host "
        "included) over inputs that are not in the level-2 cache. `copy` and `no mask` are bounds, "
        "not ways to the same result; a dash failed or was left out, the JSON says why.\n"
    )
    for name, reason in result["failed"].items():
        text.append(f"Section {name} failed: {reason}\n")
    for op in dict.fromkeys(entry["op"] for entry in result["entries"]):
        entries = [entry for entry in result["entries"] if entry["op"] == op]
        methods = list(dict.fromkeys(name for entry in entries for name in entry["times"]))
        derived = [name for name in DERIVED if any(name in entry for entry in entries)]
        head = [op, *methods, *(DERIVED[name][0] for name in derived)]
        text.append(f"## {op}\n")
        text.append(f"| {' | '.join(head)} |")
        text.append("|" + " --- |" * len(head))
        for entry in entries:
            cells = [entry["case"]]
            cells += [_time(entry["times"].get(name, {})) for name in methods]
            for name in derived:
                value = entry.get(name)
                cells.append("-" if value is None else format(value, DERIVED[name][1]))
            text.append(f"| {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


if __name__ == "__main__":
    raise SystemExit(main())

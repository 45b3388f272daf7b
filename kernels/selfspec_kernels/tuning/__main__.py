"""Compile what ships, look for tiles, measure them: `python -m selfspec_kernels.tuning --help`."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import PARTS, gate, part_of, rows


def main(argv: list[str] | None = None) -> int:
    """Run one command; 1 if something that ships must not."""
    parser = argparse.ArgumentParser(prog="python -m selfspec_kernels.tuning", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("gate", help="compile every configuration that ships; no GPU needed")
    one.add_argument("--op", choices=gate.ops(), help="this op alone")
    one.add_argument("--part", choices=PARTS, help="this part alone")
    one.add_argument("--jobs", type=int, default=1, help="processes side by side")
    one.add_argument("--markdown", action="store_true", help="a line an op and part")
    one.add_argument(
        "--json", dest="file", type=Path, metavar="FILE", help="write all numbers there"
    )
    two = commands.add_parser("search", help="list candidate rows that compile well; no GPU needed")
    two.add_argument("--op", choices=gate.ops(), required=True)
    two.add_argument("--part", choices=PARTS, required=True)
    two.add_argument("--row", type=json.loads, help="a row (JSON) to vary, instead of the table's")
    three = commands.add_parser("tune", help="measure candidates on the GPU at hand")
    three.add_argument("--op", choices=gate.ops(), required=True)
    three.add_argument("--write", action="store_true", help="rewrite the rows of this part")
    arguments = vars(parser.parse_args(argv))
    runs: dict[str, Callable[..., int]] = {"gate": _gate, "search": _search, "tune": _tune}
    return runs[arguments.pop("command")](**arguments)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _gate(op: str | None, part: str | None, jobs: int, markdown: bool, file: Path | None) -> int:
    reports = []
    for report in gate.reports([op] if op else gate.ops(), [part] if part else list(PARTS), jobs):
        reports.append(report)
        if not markdown or report.faults:
            _say(_line(report))
    if markdown:
        _say(summary(reports))
    if file:
        file.write_text(_dumped(reports))
    faulty = sum(bool(report.faults) for report in reports)
    _say(f"{len(reports)} configurations, {faulty} of them faulty")
    return int(faulty > 0)


def _line(report: gate.Report) -> str:
    return (
        f"{report.op} {report.part} {report.label}: {report.registers} registers, "
        f"{report.spilled} spilled, {report.shared_memory} bytes shared"
        + "".join(f"; FAULT: {fault}" for fault in report.faults)
    )


def _dumped(reports: list[gate.Report]) -> str:
    """The compiler's version and one line a configuration."""
    lines = ",\n  ".join(json.dumps(asdict(report)) for report in reports)
    return f'{{"triton": "{version("triton")}", "configurations": [\n  {lines}\n]}}\n'


def summary(reports: list[gate.Report]) -> str:
    """A markdown table with a line for every op and part."""
    lines = [
        "| op | part | configurations | most registers | spills | most shared memory, of | matrix "
        "instructions |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups: dict[tuple[str, str], list[gate.Report]] = {}
    for report in reports:
        groups.setdefault((report.op, report.part), []).append(report)
    for (op, part), group in groups.items():
        meant = [report for report in group if report.tensor_cores]
        got = sum(report.matrix_instructions for report in meant)
        lines.append(
            f"| `{op}` | {part} | {len(group)} | {max(r.registers for r in group)} "
            f"| {sum(r.spilled > 0 for r in group)} "
            f"| {max(r.shared_memory for r in group):,}, {group[0].shared_memory_limit:,} "
            f"| {f'{got} of {len(meant)} meant' if meant else 'none meant'} |"
        )
    return "\n".join(lines)


def _search(op: str, part: str, row: dict[str, Any] | None) -> int:
    from .search import passing

    for template in [row] if row else rows(op, part):
        for candidate, reports in passing(op, part, template):
            registers = max(report.registers for report in reports)
            shared = max(report.shared_memory for report in reports)
            _say(f"{json.dumps(candidate)}  {registers} registers, {shared} bytes shared")
    return 0


def _tune(op: str, write: bool) -> int:
    import torch

    from .table import replace
    from .tune import device_timer, tuned

    if not torch.cuda.is_available():
        raise SystemExit("tune: needs a GPU, and torch sees none; gate and search need none")
    device = torch.device("cuda")
    part, chosen = part_of(device), []
    for old, new, ratio in tuned(op, part, device_timer(device)):
        chosen.append(new)
        _say(f"{json.dumps(new)}  {ratio:.3f} of the time of {json.dumps(old)}")
    if write:
        replace(op, part, chosen)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

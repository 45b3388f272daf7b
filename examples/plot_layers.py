"""Plot what `train_early_exits.py` and `benchmark_layers.py` have written as JSON.

    python examples/plot_layers.py --training training.json --layers layers.json --out plots

Three figures, as SVG: how often every layer says what the whole model says, before and after
training; layers that run for a token by the threshold of lossy early exit; and the reliability of
what was said of draft tokens. Needs the extra `plots`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt


def figure(path: Path, title: str, x: str, y: str) -> tuple[Any, Any]:
    """A new one; `path` is where it will be saved."""
    drawing, axes = plt.subplots(figsize=(5, 3.4))
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    return drawing, axes


def save(drawing: Any, path: Path) -> Path:
    """Write and close a figure."""
    drawing.tight_layout()
    drawing.savefig(path)
    plt.close(drawing)
    return path


def by_exit(training: dict[str, Any], path: Path) -> Path:
    """Acceptance by exit layer, before and after."""
    drawing, axes = figure(path, training["model"], "layers", "says what the model says")
    for name, style in (("before", "--"), ("after", "-")):
        rows = training[name]["agreement by exit layer"]
        axes.plot([int(layer) for layer in rows], list(rows.values()), style, label=name)
    axes.set_ylim(0, 1.02)
    axes.legend()
    return save(drawing, path)


def layers_per_token(lossy: dict[str, Any], path: Path) -> Path:
    """Mean loss over layers a token, one point a threshold."""
    title = f"{lossy['model']}, exits after {lossy['exit layers']} of {lossy['of layers']}"
    drawing, axes = figure(path, title, "layers a token", "mean loss of a prompt")
    rows = lossy["thresholds"]
    axes.plot(
        [r["layers a token"] for r in rows.values()], [r["loss"] for r in rows.values()], "o-"
    )
    for threshold, row in rows.items():
        axes.annotate(threshold, (row["layers a token"], row["loss"]), fontsize=7)
    axes.axhline(lossy["delta"], color="gray", linestyle=":")
    return save(drawing, path)


def reliability(calibration: dict[str, Any], path: Path) -> Path:
    """Accepted over predicted; the area of a point goes by its tokens."""
    error = calibration["expected calibration error"]
    title = f"{calibration['model']}, error {error:.3f}"
    drawing, axes = figure(path, title, "predicted", "accepted")
    axes.plot([0, 1], [0, 1], color="gray", linestyle=":")
    for part, bins in calibration["bins"].items():
        most = max(bins["tokens"])
        sizes = [120 * count / most for count in bins["tokens"]]
        axes.scatter(bins["predicted"], bins["accepted"], sizes, label=part)
    axes.legend()
    return save(drawing, path)


def main(arguments: list[str] | None = None) -> None:
    """Draw what there is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--training", type=Path, help="JSON of train_early_exits.py --output")
    parser.add_argument("--layers", type=Path, help="JSON of benchmark_layers.py --output")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    args = parser.parse_args(arguments)
    made = []
    if args.training:
        made.append(by_exit(json.loads(args.training.read_text()), args.out / "exits.svg"))
    parts = json.loads(args.layers.read_text()) if args.layers else {}
    if "lossy" in parts:
        made.append(layers_per_token(parts["lossy"], args.out / "layers.svg"))
    if "calibration" in parts:
        made.append(reliability(parts["calibration"], args.out / "reliability.svg"))
    if not made:
        raise SystemExit("nothing to draw: pass --training, or --layers with lossy or calibration.")
    print(*made, sep="\n")


if __name__ == "__main__":
    main()

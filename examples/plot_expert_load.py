"""Draw the expert load that training measured on held-out text: `python examples/plot_expert_load.py OUT.svg`.

Reads ``expert_counts`` of the shipped checkpoint's training.json. Needs `pip install rankmoe[plots]`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

from rankmoe.models.nano import CHECKPOINT_DIRECTORY

matplotlib.use("Agg")
import matplotlib.pyplot as plt

INK, GRID, BAR, MEAN = "#3a3f47", "#d9dce1", "#4c78a8", "#d1603d"


def main() -> None:
    """Draw one row of bars for each layer; the line is the mean load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--training", type=Path, default=CHECKPOINT_DIRECTORY / "training.json")
    arguments = parser.parse_args()
    layers = json.loads(arguments.training.read_text())["expert_counts"]
    plt.rcParams.update(
        {"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "svg.hashsalt": "rankmoe", "svg.fonttype": "none"}
    )
    figure, axes = plt.subplots(len(layers), 1, figsize=(8, 1.5 * len(layers)), sharex=True, layout="constrained")
    for layer, (axis, counts) in enumerate(zip(axes, layers, strict=True)):
        share = [100 * count / sum(counts) for count in counts]
        axis.bar(range(len(share)), sorted(share, reverse=True), width=0.8, color=BAR)
        axis.axhline(100 / len(share), color=MEAN, linewidth=1.2)
        axis.set_title(f"layer {layer}: least {min(share):.2f} %, most {max(share):.2f} %", loc="left", fontsize=10)
        axis.set_ylabel("% of slots")
        axis.set_axisbelow(True)
        axis.grid(axis="y", color=GRID, linewidth=0.6)
        axis.tick_params(colors=INK)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel("experts, most used first; the line is the mean")
    figure.savefig(arguments.output, metadata={"Date": None} if arguments.output.suffix == ".svg" else None)


if __name__ == "__main__":
    main()

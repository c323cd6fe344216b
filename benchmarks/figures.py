"""Draw the README's figures from the benchmark records: ``python benchmarks/figures.py``; ``--check`` only looks.

Each is written twice, since a page that shows them says by its own theme which one it wants.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from rankmoe.report.front_section import front_chart
from rankmoe.report.layer_section import layer_chart
from rankmoe.report.line_chart import draw_lines
from rankmoe.report.records import read_records
from rankmoe.report.theme import THEMES, standalone

ROOT = Path(__file__).resolve().parent.parent


def figures() -> dict[Path, str]:
    """Every file and what it holds."""
    records = {stored.name: stored.record for stored in read_records(ROOT / "benchmarks" / "results")}
    charts = {
        "layer-time": (layer_chart(records["layer-kimi-k3-nvidia-h200"], "layer"), "one Kimi-K3 EP8 layer, µs (log)"),
        "front-time": (front_chart(records["front-nvidia-h200"], with_passes=False), "logits to schedule, µs"),
    }
    files = {}
    for name, (chart, title) in charts.items():
        assert chart is not None, f"{name}: its record has what is drawn"
        svg = draw_lines(dataclasses.replace(chart, title=title))
        files.update({ROOT / "docs" / "images" / f"{name}-{theme}.svg": standalone(svg, theme) for theme in THEMES})
    return files


def main() -> None:
    """Write the files, or with ``--check`` exit with 1 where one differs from the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    stale = {
        path: content
        for path, content in figures().items()
        if not path.exists() or path.read_text(encoding="utf-8") != content
    }
    for path, content in stale.items():
        print(f"{path.relative_to(ROOT)}: {'differs from the records' if is_check else 'written'}")
        if not is_check:
            path.write_text(content, encoding="utf-8")
    sys.exit(bool(stale) and is_check)


if __name__ == "__main__":
    main()

"""Write the tables of the documents from the benchmark records: ``python benchmarks/tables.py``.

``--check`` only looks. A table stands between ``<!-- record: NAME -->`` and ``<!-- end -->``; NAME is a file of
``benchmarks/results`` without its ending.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from rankmoe.bench import front, layer_cuda
from rankmoe.bench.record import Record, markdown

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(<!-- record: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str) -> str:
    """A document's text with every table written anew."""
    return _BLOCK.sub(lambda match: f"{match[1]}{table_of(match['name'])}\n{match[3]}", text)


def table_of(name: str) -> str:
    """A record's table, and a line on where it was measured."""
    values = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    record = Record(**values)
    table = markdown(_rows_of(record))
    versions = ", ".join(f"{key} {value}" for key, value in record.versions.items() if key != "rankmoe")
    return f"{table}\n\n{record.device}, {record.date}, commit {record.commit}, {versions}."


def _rows_of(record: Record) -> list[list[str]]:
    if record.bench.startswith("front"):
        return front.table_rows(record)
    if any("routing" in row for row in record.rows):
        return layer_cuda.table_rows(record)
    rows = [["tokens", "active experts", "variant", "stage", "ms", "spread", "GB/s"]]
    for row in record.rows:
        cells: list[Any] = [row["tokens"], row["active_experts"], row["variant"], row["stage"]]
        cells += [f"{row['us'] / 1e3:.1f}", f"{row['spread'] / 1e3:.1f}", f"{row['bytes'] / row['us'] / 1e3:.2f}"]
        rows.append([str(cell) for cell in cells])
    return rows


def main() -> None:
    """Write the documents, or with ``--check`` exit with 1 where one differs from the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    stale = [document for document in DOCUMENTS if render(document.read_text()) != document.read_text()]
    for document in stale:
        print(f"{document.relative_to(ROOT)}: {'differs from the records' if is_check else 'written'}")
        if not is_check:
            document.write_text(render(document.read_text()))
    sys.exit(bool(stale) and is_check)


if __name__ == "__main__":
    main()

"""Write the tables of the documents from the benchmark records: ``python benchmarks/tables.py``.

``--check`` only looks. A table stands between ``<!-- record: NAME -->`` and ``<!-- end -->``; NAME is a file of
``benchmarks/results`` without its ending. ``<!-- layers: NAME NAME ... -->`` makes one table of several models' layers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from rankmoe.bench.record import Record, markdown
from rankmoe.bench.tables import table_rows

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(<!-- (?P<kind>record|layers): (?P<names>[\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str) -> str:
    """A document's text with every table written anew."""
    make = {"record": table_of, "layers": table_of_layers}
    return _BLOCK.sub(lambda match: f"{match[1]}{make[match['kind']](match['names'])}\n{match[4]}", text)


def table_of(name: str) -> str:
    """A record's table, and a line on where it was measured."""
    record = _read(name)
    return f"{markdown(table_rows(record))}\n\n{_origin(record)}"


def table_of_layers(names: str) -> str:
    """Microseconds of several models' native layers, and in brackets how many times as long the composition takes."""
    records = [_read(name) for name in names.split()]
    counts = sorted({row["tokens"] for record in records for row in record.rows})
    rows = [["us at T =", *map(str, counts)]]
    for record in records:
        us = {(row["variant"], row["tokens"]): row["us"] for row in record.rows if row["stage"] == "layer"}
        cells = [f"{us['native', n]:.1f} ({us['composition', n] / us['native', n]:.2f})" for n in counts]
        rows.append([record.model, *cells])
    return f"{markdown(rows)}\n\n" + " ".join(dict.fromkeys(_origin(record) for record in records))


def _read(name: str) -> Record:
    return Record(**json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()))


def _origin(record: Record) -> str:
    versions = ", ".join(f"{key} {value}" for key, value in record.versions.items() if key != "rankmoe")
    return f"{record.device}, {record.date}, commit {record.commit}, {versions}."


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

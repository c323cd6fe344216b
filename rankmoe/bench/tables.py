"""The table of a record, whatever benchmark it is of."""

from __future__ import annotations

from typing import Any

from rankmoe.bench import decode, front, layer_cuda
from rankmoe.bench.record import Record


def table_rows(record: Record) -> list[list[str]]:
    """The record as rows of cells, the header first."""
    if record.bench.startswith("front"):
        return front.table_rows(record)
    if record.bench == "decode":
        return decode.table_rows(record)
    if any("routing" in row for row in record.rows):
        return layer_cuda.table_rows(record)
    rows = [["tokens", "active experts", "variant", "stage", "ms", "spread", "GB/s"]]
    for row in record.rows:
        cells: list[Any] = [row["tokens"], row["active_experts"], row["variant"], row["stage"]]
        cells += [f"{row['us'] / 1e3:.1f}", f"{row['spread'] / 1e3:.1f}", f"{row['bytes'] / row['us'] / 1e3:.2f}"]
        rows.append([str(cell) for cell in cells])
    return rows

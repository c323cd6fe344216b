"""The records of a folder, each looked at before anything is drawn; what is wrong with one names its file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rankmoe.bench.record import Record
from rankmoe.models.presets import PRESETS


class RecordError(ValueError):
    """A file that is no record, or one whose values cannot be drawn. Names the file."""


@dataclass(frozen=True)
class StoredRecord:
    """A record and the name of its file, without ending."""

    name: str
    record: Record

    @property
    def is_cpu(self) -> bool:
        """Whether the record is of a processor and not of a GPU: no engine of a GPU is in it."""
        return any(row.get("variant") == "cpu" for row in self.record.rows)


def read_records(directory: Path) -> list[StoredRecord]:
    """Every ``*.json`` of a folder, in the order that a page shows them.

    Raises RecordError where there is none, and for any file that is not a record.
    """
    if not directory.is_dir():
        raise RecordError(f"{directory}: expected a folder of records, found none")
    found = [StoredRecord(path.stem, _read(path)) for path in sorted(directory.glob("*.json"))]
    if not found:
        raise RecordError(f"{directory}: expected records (*.json), found none")
    return sorted(found, key=_order)


def _order(stored: StoredRecord) -> tuple[bool, int, bool, float, str]:
    """GPUs first, models as the presets have them, uniform routing before skewed, few tokens before many."""
    names, rows = list(PRESETS), stored.record.rows
    model = names.index(stored.record.model) if stored.record.model in names else len(names)
    is_skewed = any(row.get("routing") == "skewed" for row in rows)
    return stored.is_cpu, model, is_skewed, min((row.get("tokens", 0) for row in rows), default=0), stored.name


def _read(path: Path) -> Record:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: expected JSON, got {str(error) or type(error).__name__}") from error
    names = {field.name for field in fields(Record)}
    if not isinstance(values, dict) or values.keys() != names:
        raise RecordError(f"{path}: expected a record with exactly {', '.join(sorted(names))}")
    for name, kind in {"rows": list, "versions": dict, "notes": dict}.items():
        _expect(path, isinstance(values[name], kind), name, f"a {kind.__name__}", values[name])
    for name in ("bench", "model", "device", "commit", "date"):
        _expect(path, isinstance(values[name], str), name, "text", values[name])
    record = Record(**values)
    if record.bench in _ROWS:
        _check_rows(path, record)
    return record


def _check_rows(path: Path, record: Record) -> None:
    _expect(path, bool(record.rows), "rows", "at least one", record.rows)
    if record.bench != "decode":
        size = record.notes.get("ep_size")
        _expect(path, _is_count(size), "notes.ep_size", "a whole number above 0", size)
    checks, identity = _ROWS[record.bench]
    seen = set()
    for index, row in enumerate(record.rows):
        _expect(path, isinstance(row, dict), f"rows[{index}]", "an object", row)
        for name, (is_right, expected) in checks.items():
            _expect(path, name in row and is_right(row[name]), f"rows[{index}].{name}", expected, row.get(name))
        key = tuple(row[name] for name in identity)
        _expect(path, key not in seen, f"rows[{index}]", f"one row for each {', '.join(identity)}", key)
        seen.add(key)
        if record.bench == "routing":
            _expect(
                path, len(row["counts"]) >= record.notes["ep_size"], f"rows[{index}].counts", "an expert a rank", key
            )


def _expect(path: Path, is_right: bool, name: str, expected: str, got: object) -> None:
    if not is_right:
        raise RecordError(f"{path}: {name}: expected {expected}, got {got!r:.60}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_Check = tuple[Callable[[Any], bool], str]
_COUNT: _Check = (_is_count, "a whole number above 0")
_TIME: _Check = (lambda value: _is_number(value) and value > 0, "a number above 0")
_AMOUNT: _Check = (lambda value: _is_number(value) and value >= 0, "a number, 0 or more")
_TEXT: _Check = (lambda value: isinstance(value, str) and bool(value), "text")
_INDEX: _Check = (lambda value: value == 0 or _is_count(value), "a whole number, 0 or more")


def _one_of(*names: str) -> _Check:
    return (lambda value: value in names, f"one of {', '.join(names)}")


def _are_slots(value: object) -> bool:
    is_list = isinstance(value, list) and all(count == 0 or _is_count(count) for count in value)
    return is_list and isinstance(value, list) and sum(value) > 0


#: What a row of each benchmark holds, and which of it no two rows share.
_ROWS: Mapping[str, tuple[dict[str, _Check], tuple[str, ...]]] = {
    "front": ({"tokens": _COUNT, "variant": _TEXT, "us": _TIME}, ("tokens", "variant")),
    "layer": (
        {
            "tokens": _COUNT,
            "variant": _TEXT,
            "stage": _TEXT,
            "us": _TIME,
            "spread": _AMOUNT,
            "bytes": _AMOUNT,
            "active_experts": _AMOUNT,
        },
        ("tokens", "variant", "stage"),
    ),
    "decode": (
        {
            "batch": _COUNT,
            "arm": _one_of("a", "b", "c"),
            "tuning": _one_of("held", "fresh"),
            "tokens_per_s": _TIME,
            "step_us": _TIME,
            "spread": _AMOUNT,
        },
        ("batch", "arm", "tuning"),
    ),
    "routing": ({"layer": _INDEX, "counts": (_are_slots, "slots of each expert, not all 0")}, ("layer",)),
}

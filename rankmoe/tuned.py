"""Which configuration a GEMM was tuned to. Here it is only looked up; ``rankmoe.tuning`` searches, when asked to.

The key of a configuration is the work that one rank does, and nothing of how ids are written: calls with global and
with rank-local ids share it by construction.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rankmoe.env import cache_directory

FILE_FORMAT = 1
_SHIPPED = Path(__file__).parent / "tuned_configs"
_LOG = logging.getLogger("rankmoe")

Stage = Literal["gate_up", "down"]
Source = Literal["explicit", "user cache", "shipped", "heuristic"]


@dataclass(frozen=True, order=True)
class TuningKey:
    """One GEMM's work on one rank: MXFP8 rows by MXFP4 weights.

    num_outputs, num_inputs: of the logical weight; of gate_up, gates and ups.
    activation: ``situ``, ``swiglu`` or ``swiglu-limit``, which gate_up is compiled for; empty for down.
    expected_rows: rows that uniform routing gives the rank, up to a power of two.
    architecture: as ``sm_90``.
    """

    stage: Stage
    num_local_experts: int
    num_outputs: int
    num_inputs: int
    activation: str
    has_bias: bool
    expected_rows: int
    architecture: str

    def __str__(self) -> str:
        """The key in a file."""
        bias = "-bias" if self.has_bias else ""
        activation = f"-{self.activation}" if self.activation else ""
        sizes = f"{self.num_local_experts}x{self.num_outputs}x{self.num_inputs}"
        return f"{self.stage}-{sizes}-mxfp8-mxfp4{activation}{bias}-rows{self.expected_rows}-{self.architecture}"


class Answer(NamedTuple):
    """A configuration's fields, or None where the caller's heuristic decides, and where it comes from."""

    values: Mapping[str, Any] | None
    source: Source


def expected_rows(num_slots: int, num_local_experts: int, num_experts: int) -> int:
    """Rows that uniform routing gives a rank, up to a power of two.

    num_slots: tokens by experts a token. Known from shapes: the same for both forms of ids, and no look at a schedule.
    """
    return 1 << max(0, math.ceil(num_slots * num_local_experts / num_experts) - 1).bit_length()


class _State(threading.local):
    explicit: Mapping[str, Mapping[str, Any]] = {}
    recorded: dict[TuningKey, Answer] | None = None


_state = _State()
_files: dict[Path, Mapping[str, Any]] = {}
_answers: dict[tuple[TuningKey, str, str], Answer] = {}


@contextmanager
def use(configs: Mapping[TuningKey, Mapping[str, Any]]) -> Iterator[None]:
    """Have this thread's calls take the given configurations before any file's."""
    before = _state.explicit
    _state.explicit = {**before, **{str(key): values for key, values in configs.items()}}
    try:
        yield
    finally:
        _state.explicit = before


@contextmanager
def recording() -> Iterator[dict[TuningKey, Answer]]:
    """Collect what this thread's calls look up, and what they are told."""
    before, _state.recorded = _state.recorded, {}
    try:
        yield _state.recorded
    finally:
        _state.recorded = before


def lookup(key: TuningKey, fingerprint: str, device_name: str) -> Answer:
    """The configuration for a key: an explicit one, the user's, the shipped one, else the caller's heuristic.

    fingerprint: of the kernels' sources and compiler, see ``experts_common.fingerprint``. Entries made with other
        sources do not count, nor do the user's of another compiler; the shipped ones were made with one that few have.
    Files are read once and answers kept until ``forget``, since every launch asks. A miss is logged once a key.
    """
    answer = _answer(key, fingerprint, device_name)
    if _state.recorded is not None:
        _state.recorded[key] = answer
    return answer


def _answer(key: TuningKey, fingerprint: str, device_name: str) -> Answer:
    if _state.explicit and str(key) in _state.explicit:
        return Answer(_state.explicit[str(key)], "explicit")
    question = (key, fingerprint, device_name)
    answer = _answers.get(question)
    if answer is None:
        answer = _answers[question] = _look(key, fingerprint, device_name)
        if answer.values is None:
            _LOG.info("no tuned configuration for %s on %s; `rankmoe tune` makes one", key, device_name)
    return answer


def _look(key: TuningKey, fingerprint: str, device_name: str) -> Answer:
    files: tuple[tuple[Path, Source, bool], ...] = (
        (user_file(fingerprint, device_name), "user cache", False),
        (shipped_file(device_name), "shipped", True),
    )
    for path, source, any_compiler in files:
        if path not in _files:
            _files[path] = read_file(path, fingerprint, any_compiler=any_compiler)
        entry = _files[path].get(str(key))
        if entry is not None:
            return Answer(entry["config"], source)
    return Answer(None, "heuristic")


def user_file(fingerprint: str, device_name: str) -> Path:
    """Where ``rankmoe tune`` writes for these kernels and this device."""
    sources, _, compiler = fingerprint.partition("-")
    return cache_directory() / "tuning" / f"{_slug(device_name)}-{sources[:16]}-{compiler}.json"


def shipped_file(device_name: str) -> Path:
    """What the package brings for a device; most have none."""
    return _SHIPPED / f"{_slug(device_name)}.json"


def _slug(device_name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def forget() -> None:
    """Read files again when they are next asked for, and log misses anew."""
    _files.clear()
    _answers.clear()


def read_file(path: Path, fingerprint: str, *, any_compiler: bool = False) -> dict[str, Any]:
    """A file's entries by key; none where it is absent or made by other kernels, nor, with a warning, where damaged.

    any_compiler: entries count that were made with the same sources and whatever compiler.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return {}
    try:
        content = json.loads(text)
        made_with, wanted = content["fingerprint"], fingerprint
        if any_compiler:
            made_with, wanted = made_with.partition("-")[0], wanted.partition("-")[0]
        if content["format"] != FILE_FORMAT or made_with != wanted:
            return {}
        entries = content["entries"]
        for entry in entries.values():
            dict(entry["config"])
    except (ValueError, KeyError, TypeError, AttributeError):
        warnings.warn(f"{path}: damaged tuning file; its configurations do not count", stacklevel=2)
        return {}
    return dict(entries)

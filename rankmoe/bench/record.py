"""One JSON record a benchmark run: what was measured, on what, with which versions."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import re
import subprocess
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import rankmoe
from rankmoe.env import recorded_commit
from rankmoe.files import replacing


@dataclass(frozen=True)
class Record:
    """A run's record.

    rows: one dict a measurement; times in microseconds (``us``, a median) with their interquartile range (``spread``).
    """

    bench: str
    model: str
    device: str
    rows: list[dict[str, Any]]
    versions: dict[str, str] = field(default_factory=lambda: _versions())
    commit: str = field(default_factory=lambda: _commit())
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).date().isoformat())
    notes: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def write(self, path: Path) -> None:
        """Write the record, whole or not at all."""
        write_whole(path, self.to_json())


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader never sees half of it and a fault leaves none."""
    with replacing(path) as file:
        file.write(text.encode())


def device_name(device_type: str) -> str:
    """Name of the processor as a person would write it: the GPU's, or the CPU's with the threads that torch uses."""
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    return f"{_cpu_model()}, {torch.get_num_threads()} threads"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "rankmoe": rankmoe.__version__}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    for name in ("cuda-bindings", "nvidia-cuda-nvrtc", "triton", "humming-kernels", "sglang"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _commit() -> str:
    """What the environment says, else the checkout's commit, with ``+changes`` where files differ from it."""
    chosen = recorded_commit()
    if chosen is not None:
        return chosen
    git = ["git", "-C", str(Path(rankmoe.__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--", "rankmoe"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def markdown(rows: list[list[str]]) -> str:
    """A table in Markdown; the first row is the header."""
    header, *body = ("| " + " | ".join(cells) + " |" for cells in rows)
    return "\n".join([header, "|---" * (header.count("|") - 1) + "|", *body])

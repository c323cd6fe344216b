"""What the README shows runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(example.splitlines()) <= 12
    names: dict[str, object] = {}
    exec(example, names)
    assert tuple(names["partial"].shape) == (8, 128)  # type: ignore[attr-defined]


def test_every_file_that_the_documents_link_to_exists() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_test_that_the_numerics_name_exists() -> None:
    tests = {
        path.stem.removeprefix("test_"): set(re.findall(r"def test_(\w+)", path.read_text()))
        for path in (ROOT / "tests").glob("test_*.py")
    }
    num_named = 0
    for line in (ROOT / "docs" / "numerics.md").read_text().splitlines():
        cells = line.split(" | ")
        stem = None
        for name in re.findall(r"`((?:\w+::)?\w+_\w+)`", cells[1] if len(cells) == 2 else ""):
            module, _, test = name.rpartition("::")
            stem = module or stem
            assert stem is not None
            assert test in tests[stem], f"docs/numerics.md names {stem}::{test}"
            num_named += 1
    assert num_named > 50


def test_the_tables_of_the_documents_are_those_of_the_records() -> None:
    check = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"]
    result = subprocess.run(check, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "<!-- record: front-nvidia-h200 -->" in (ROOT / "docs" / "benchmarks.md").read_text()

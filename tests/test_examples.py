"""The short examples run as they stand, each in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_the_plain_example_adds_up_two_ranks():
    lines = run("layer.py")
    norms = [float(re.search(r"norm ([\d.]+)", line)[1]) for line in lines]
    assert len(lines) == 3
    assert abs(norms[0] - norms[1]) < norms[2] < norms[0] + norms[1]
    assert all(norm > 1 for norm in norms)


def test_the_compiled_example_compiles_once():
    # With code generated, as its default has it, a compiler would have to be there.
    lines = run("compiled_layer.py", "aot_eager")
    assert [int(line.split()[0]) for line in lines] == [1, 2, 7, 33, 64]

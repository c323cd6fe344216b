"""Files that other processes may read or write at the same time: whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes ``path``'s place when the block ends and all of it is on the disk.

    It is made in a hidden folder beside its place. A block that raises leaves what was there, and nothing else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as hidden:
        staging = Path(hidden) / path.name
        with staging.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)

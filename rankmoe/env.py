"""Every environment variable that the package reads, in one place; each is read when it is needed."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``RANKMOE_CACHE_DIR``, else ``rankmoe`` under the user's cache directory."""
    chosen = os.environ.get("RANKMOE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rankmoe"


def uses_programmatic_launch() -> bool:
    """Whether launches may start before the stream's previous kernel ends: yes, unless ``RANKMOE_PDL`` is 0."""
    return os.environ.get("RANKMOE_PDL", "1") != "0"


def is_batch_invariant() -> bool:
    """``RANKMOE_BATCH_INVARIANT`` is 1: a token's result has the same bits in any batch, at the price of speed."""
    return os.environ.get("RANKMOE_BATCH_INVARIANT", "0") == "1"


def recorded_commit() -> str | None:
    """``RANKMOE_COMMIT``: the commit that benchmark records name, for a copy whose checkout does not know it."""
    return os.environ.get("RANKMOE_COMMIT")


def is_under_torchrun() -> bool:
    """Whether torchrun, or anything else that sets its variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_rank() -> int:
    """This process's number on its machine, as torchrun gives it; 0 elsewhere."""
    return int(os.environ.get("LOCAL_RANK", "0"))

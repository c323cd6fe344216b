"""Seconds since the start, which the training time counts from, and the log that shows them."""

from __future__ import annotations

import time

_START = time.monotonic()


def elapsed_seconds() -> float:
    """Seconds since this module was imported."""
    return time.monotonic() - _START


def log(message: str) -> None:
    """Print a line with the seconds since the start, at once."""
    print(f"[{elapsed_seconds():6.1f} s] {message}", flush=True)

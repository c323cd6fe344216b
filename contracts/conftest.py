"""Sources for the contract tests; without a package index they are skipped and say so, or fail if they must not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from contract_sources import Distribution, UnreachableError, sources


@pytest.fixture(scope="session")
def source_tree() -> Callable[[Distribution], Path]:
    """The folder of a distribution's sources."""
    unreachable: list[UnreachableError] = []

    def find(distribution: Distribution) -> Path:
        try:
            if not unreachable:
                return sources(distribution)
        except UnreachableError as error:
            unreachable.append(error)
        if os.environ.get("CONTRACTS_REQUIRED") == "1":
            raise unreachable[0]
        pytest.skip(f"the package index cannot be reached: {unreachable[0]}")

    return find

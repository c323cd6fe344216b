"""Sources for the contract tests; without a package index they are skipped and say so, or fail if they must not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import engines
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
        _skip_unless_required(f"the package index cannot be reached: {unreachable[0]}")
        raise AssertionError("unreachable")

    return find


@pytest.fixture(scope="session")
def put_on_path(source_tree: Callable[[Distribution], Path]) -> Callable[[Distribution], None]:
    """Makes a distribution's packages importable in this process."""

    def put(distribution: Distribution) -> None:
        if sys.version_info < engines.MIN_PYTHON or not sys.platform.startswith("linux"):
            pytest.skip("the engines' requirements are pinned for Linux and Python 3.11 or newer")
        requirements = engines.packages()
        if requirements is None:
            _skip_unless_required(
                f"contracts/requirements.txt is not installed at ENGINE_PACKAGES={os.environ.get('ENGINE_PACKAGES')}"
            )
        engines.put_on_path(source_tree(distribution), requirements)

    return put


def _skip_unless_required(reason: str) -> None:
    (pytest.fail if os.environ.get("CONTRACTS_REQUIRED") == "1" else pytest.skip)(reason)

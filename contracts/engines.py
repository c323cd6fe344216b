"""Engines' published packages made importable, to run an adapter inside the engine itself on a CPU.

Each run_*.py file needs a process of its own: an engine sets up its world when it is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path

#: The oldest Python that contracts/requirements.txt is pinned for, on Linux alone.
MIN_PYTHON = (3, 11)


def packages() -> Path | None:
    """``ENGINE_PACKAGES``: the folder with what the engines import beside this environment, or None without one."""
    folder = os.environ.get("ENGINE_PACKAGES")
    return Path(folder).resolve() if folder and (Path(folder) / ".installed").exists() else None


def put_on_path(sources: Path, requirements: Path) -> None:
    """Make an engine's packages importable, before all else, and what they need after this environment's own."""
    sys.path.insert(0, str(sources))
    sys.path.append(str(requirements))


def stand_in_for_torchvision() -> None:
    """Let ``import torchvision`` pass where no build of it fits this PyTorch; no expert looks at pictures."""
    from transformers.utils import import_utils

    # Transformers looks once and remembers: it must not take the stand-in for the library.
    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()
    sys.meta_path.append(_StandIn("torchvision"))


class _Anything(types.ModuleType):
    """A module each of whose names is an empty class."""

    __path__: list[str] = []  # noqa: RUF012 - what makes a module a package

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a package and all under it as modules of that kind."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""

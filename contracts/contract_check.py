"""What an adapter relies on in an engine's sources, and the comparison with them; nothing of the engine is imported."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Function:
    """A function or method that the adapter calls or overrides.

    path: file under the sources. name: ``function`` or ``Class.method``.
    parameters: names that the adapter passes or takes; ``name=text`` where it also relies on a default.
    is_complete: there are no others, this is their order, and ``*`` stands before those that go by keyword alone.
    """

    path: str
    name: str
    parameters: tuple[str, ...]
    is_complete: bool = False

    def check(self, root: Path) -> None:
        """Raise AssertionError, naming expected and found parameters, where they differ."""
        node = _find(root, self.path, self.name)
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), f"{self.path}: {self.name} is no function"
        arguments = node.args
        by_place = [*arguments.posonlyargs, *arguments.args]
        found = [a.arg for a in by_place]
        if arguments.kwonlyargs:
            found += ["*", *(a.arg for a in arguments.kwonlyargs)]
        first_default = len(by_place) - len(arguments.defaults)
        defaults = {a.arg: ast.unparse(d) for a, d in zip(by_place[first_default:], arguments.defaults, strict=True)}
        keyword_defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        defaults |= {a.arg: ast.unparse(d) for a, d in keyword_defaults if d is not None}
        names = [parameter.partition("=")[0] for parameter in self.parameters]
        missing = [name for name in names if name not in found]
        added = [name for name in found if name not in names and name != "*"]
        if missing:
            raise AssertionError(f"{self.path}: {self.name}: expected parameters {missing}, found instead {added}")
        if self.is_complete and found != names:
            raise AssertionError(f"{self.path}: {self.name}: expected parameters {names}, found {found}")
        for name, has_default, expected in (parameter.partition("=") for parameter in self.parameters):
            if has_default and defaults.get(name) != expected:
                raise AssertionError(
                    f"{self.path}: {self.name}: expected {name}={expected}, found {defaults.get(name, 'no default')}"
                )


@dataclass(frozen=True)
class Fields:
    """Attributes that a class declares: dataclass fields, assignments, methods, or what ``__init__`` sets."""

    path: str
    name: str
    fields: tuple[str, ...]
    is_complete: bool = False

    def check(self, root: Path) -> None:
        """Raise AssertionError, naming expected and found fields, where they differ."""
        node = _find(root, self.path, self.name)
        assert isinstance(node, ast.ClassDef), f"{self.path}: {self.name} is no class"
        declared = [
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
        found = declared + [name for name in _set_names(node) if name not in declared]
        missing = [name for name in self.fields if name not in found]
        if missing:
            raise AssertionError(
                f"{self.path}: {self.name}: expected {missing}, found {[n for n in found if n not in self.fields]}"
            )
        if self.is_complete and tuple(declared) != self.fields:
            raise AssertionError(f"{self.path}: {self.name}: expected fields {list(self.fields)}, found {declared}")


@dataclass(frozen=True)
class Member:
    """A member of an enumeration, and its value."""

    path: str
    name: str
    member: str
    value: object

    def check(self, root: Path) -> None:
        """Raise AssertionError where the member is gone or has another value."""
        node = _find(root, self.path, self.name)
        assert isinstance(node, ast.ClassDef), f"{self.path}: {self.name} is no class"
        values = {
            target.id: ast.literal_eval(item.value)
            for item in node.body
            if isinstance(item, ast.Assign) and _is_literal(item.value)
            for target in item.targets
            if isinstance(target, ast.Name)
        }
        values = {name: value[0] if isinstance(value, tuple) else value for name, value in values.items()}
        if self.member not in values:
            raise AssertionError(f"{self.path}: {self.name}: expected member {self.member}, found {sorted(values)}")
        if values[self.member] != self.value:
            raise AssertionError(
                f"{self.path}: {self.name}.{self.member}: expected {self.value!r}, found {values[self.member]!r}"
            )


@dataclass(frozen=True)
class Name:
    """Something that can be imported from a module: defined there, assigned, or imported into it."""

    path: str
    name: str

    def check(self, root: Path) -> None:
        """Raise AssertionError where the module has no such name."""
        if self.name not in _names(root / self.path):
            raise AssertionError(f"{self.path}: expected the name {self.name}, found none")


@dataclass(frozen=True)
class Text:
    """A string literal that must stand in a file: the name of an entry-point group, say."""

    path: str
    literal: str

    def check(self, root: Path) -> None:
        """Raise AssertionError where no string of the file is the literal."""
        literals = {node.value for node in ast.walk(_tree(root / self.path)) if isinstance(node, ast.Constant)}
        if self.literal not in literals:
            raise AssertionError(f"{self.path}: expected the string {self.literal!r}, found none")


@cache
def _tree(path: Path) -> ast.Module:
    assert path.exists(), f"{path.name}: expected a file at {path}, found none"
    return ast.parse(path.read_text(encoding="utf-8"))


def _find(root: Path, path: str, name: str) -> ast.AST:
    """The last definition of a dotted name, as Python would have it."""
    node: ast.AST = _tree(root / path)
    for part in name.split("."):
        found = [
            item
            for item in ast.walk(node)
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and item.name == part
        ]
        if not found:
            raise AssertionError(f"{path}: expected {name}, found no {part}")
        node = found[-1] if len(found) == 1 else next((f for f in found if f in getattr(node, "body", [])), found[-1])
    return node


def _names(path: Path) -> set[str]:
    names: set[str] = set()
    node: ast.AST
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def _set_names(node: ast.ClassDef) -> list[str]:
    """Methods, class variables, and attributes that methods set on ``self``."""
    names: list[str] = []
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(item.name)
        elif isinstance(item, ast.Assign):
            names += [target.id for target in item.targets if isinstance(target, ast.Name)]
    for inner in ast.walk(node):
        targets = (
            inner.targets
            if isinstance(inner, ast.Assign)
            else [inner.target]
            if isinstance(inner, ast.AnnAssign)
            else []
        )
        names += [
            target.attr
            for target in targets
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
        ]
    return names


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True

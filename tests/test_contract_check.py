"""The checker of engines' sources: what it finds, and what it says, on small made-up ones."""

import hashlib
import io
import json
import sys
import tarfile
import urllib.error
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "contracts"))

import contract_sources
from contract_check import Fields, Function, Member, Name, Text
from contract_sources import Distribution, UnreachableError, sources

SOURCE = """
import enum
from os import path as where
LIMIT: int = 3

def run(x, ids, *, weights=None): ...

class Kind(enum.IntEnum):
    One = 1
    Two = (2,)

class Runner:
    tile: int
    rows: list
    name = "a.group"

    def __init__(self):
        self.left, self.right = 1, 2
        self.cache = {}

    def run(self, dispatch_output, hooks=None): ...

def outer():
    class Runner:
        def run(self, other): ...
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "m.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    "expected",
    [
        Function("m.py", "run", ("x", "ids", "*", "weights=None"), is_complete=True),
        Function("m.py", "run", ("weights",)),
        Function("m.py", "Runner.run", ("self", "dispatch_output", "hooks=None"), is_complete=True),
        Fields("m.py", "Runner", ("tile", "rows"), is_complete=True),
        Fields("m.py", "Runner", ("cache", "run", "name")),
        Member("m.py", "Kind", "One", 1),
        Member("m.py", "Kind", "Two", 2),
        Name("m.py", "where"),
        Name("m.py", "LIMIT"),
        Text("m.py", "a.group"),
    ],
    ids=str,
)
def test_what_is_there_is_found(root, expected):
    expected.check(root)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (Function("m.py", "run", ("x", "topk_ids")), r"expected parameters \['topk_ids'\], found instead \['ids', 'w"),
        (
            Function("m.py", "run", ("ids", "x", "weights"), True),
            r"expected parameters \['ids', 'x', 'weights'\], found",
        ),
        (
            Function("m.py", "run", ("x", "ids", "weights"), True),
            r"expected parameters .*, found \['x', 'ids', '\*', 'w",
        ),
        (Function("m.py", "run", ("weights=1",)), "run: expected weights=1, found None"),
        (Function("m.py", "Runner.run", ("hooks=()",)), r"run: expected hooks=\(\), found None"),
        (Function("m.py", "run", ("ids=None",)), "run: expected ids=None, found no default"),
        (Function("m.py", "walk", ()), "m.py: expected walk, found no walk"),
        (Function("m.py", "Runner.stop", ()), "expected Runner.stop, found no stop"),
        (Function("m.py", "Kind", ()), "Kind is no function"),
        (Fields("m.py", "Runner", ("tile", "offset")), r"Runner: expected \['offset'\], found \['rows'"),
        (
            Fields("m.py", "Runner", ("tile",), is_complete=True),
            r"expected fields \['tile'\], found \['tile', 'rows'\]",
        ),
        (Member("m.py", "Kind", "Three", 3), r"Kind: expected member Three, found \['One', 'Two'\]"),
        (Member("m.py", "Kind", "Two", 3), "Kind.Two: expected 3, found 2"),
        (Name("m.py", "gone"), "expected the name gone, found none"),
        (Text("m.py", "b.group"), "expected the string 'b.group', found none"),
        (Name("n.py", "x"), "n.py: expected a file"),
    ],
    ids=str,
)
def test_what_differs_fails_with_both_names(root, expected, message):
    with pytest.raises(AssertionError, match=message):
        expected.check(root)


def archive_of(kind: str) -> bytes:
    """A release file with one module, one shared library and, in a wheel, entry points."""
    buffer, files = (
        io.BytesIO(),
        {"pkg/m.py": b"x = 1", "pkg/lib.so": b"\0" * 9, "pkg.dist-info/entry_points.txt": b"[g]"},
    )
    if kind == "whl":
        with zipfile.ZipFile(buffer, "w") as wheel:
            for name, data in files.items():
                wheel.writestr(name, data)
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz") as source:
            for name, data in files.items():
                info = tarfile.TarInfo(f"pkg-1.0/{name}")
                info.size = len(data)
                source.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize(("kind", "root_folder"), [("whl", ""), ("tar.gz", "pkg-1.0")])
def test_sources_are_fetched_once_and_only_what_is_text(tmp_path, monkeypatch, kind, root_folder):
    data, asked = archive_of(kind), []
    entry = {"filename": f"pkg-1.0.{kind}", "url": "files/pkg", "hashes": {"sha256": hashlib.sha256(data).hexdigest()}}
    other = {"filename": f"pkg-1.1.{kind}", "url": "files/other", "hashes": {"sha256": ""}}

    def urlopen(request, timeout):
        url = request if isinstance(request, str) else request.full_url
        asked.append(url)
        return io.BytesIO(data if url.endswith("files/pkg") else json.dumps({"files": [other, entry]}).encode())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple/")
    monkeypatch.setattr(contract_sources.urllib.request, "urlopen", urlopen)
    distribution = Distribution("pkg", "1.0", f".{kind}", root_folder)
    found = sources(distribution)
    assert (found / "pkg" / "m.py").read_text() == "x = 1"
    assert not (found / "pkg" / "lib.so").exists()
    assert sources(distribution) == found
    assert asked == ["https://mirror.example/simple/pkg/", "https://mirror.example/simple/pkg/files/pkg"]
    entry["hashes"]["sha256"] = "0" * 64
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(RuntimeError, match=f"expected sha256 {'0' * 64}, got"):
        sources(distribution)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (urllib.error.URLError("no route"), UnreachableError),
        (urllib.error.HTTPError("https://pypi.org/simple/pkg/", 403, "Forbidden", None, None), UnreachableError),
        (urllib.error.HTTPError("https://pypi.org/simple/pkg/", 404, "Not Found", None, None), urllib.error.HTTPError),
    ],
)
def test_an_index_that_does_not_answer_is_told_from_a_release_that_is_gone(tmp_path, monkeypatch, error, expected):
    def urlopen(request, timeout):
        assert request.full_url == "https://pypi.org/simple/pkg/"
        raise error

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.setattr(contract_sources.urllib.request, "urlopen", urlopen)
    with pytest.raises(expected):
        sources(Distribution("pkg", "1.0", ".whl"))

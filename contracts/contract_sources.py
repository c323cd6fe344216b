"""Published sources of the engines, fetched from the package index without being installed, and kept."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

#: Where projects' files are listed as JSON (PEP 691), unless pip is told of another index.
PYPI = "https://pypi.org/simple"
_INDEX_TYPE = {"Accept": "application/vnd.pypi.simple.v1+json"}
_TIMEOUT = 180


@dataclass(frozen=True)
class Distribution:
    """One file of a release: the smallest that has the Python sources.

    ending: how its name ends. root: the folder in it that holds the import packages.
    data: endings of files beside the Python ones without which its packages cannot be imported.
    """

    name: str
    version: str
    ending: str
    root: str = ""
    data: tuple[str, ...] = ()


SGLANG = Distribution("sglang", "0.5.23", "cp312-cp312-manylinux_2_34_x86_64.whl", data=(".json", ".cuh"))
VLLM = Distribution("vllm", "0.33.0", ".tar.gz", "vllm-0.33.0")
FLASHINFER = Distribution("flashinfer-python", "0.7.4", "py3-none-any.whl")


class UnreachableError(RuntimeError):
    """The package index did not answer: no contract can be checked here, which is no contract broken."""


def sources(distribution: Distribution) -> Path:
    """The folder with the distribution's Python files; fetched on first use.

    Raises UnreachableError where the index or a proxy before it refuses or does not answer; whatever else goes wrong
    with an index that does answer, a release that is gone among it, is an error of its own.
    """
    folder = _cache() / f"{distribution.name}-{distribution.version}"
    if not (folder / ".complete").exists():
        try:
            archive = _download(distribution)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise
            raise UnreachableError(f"{error.url}: {error}") from error
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            raise UnreachableError(f"{_index(distribution)}: {error}") from error
        folder.mkdir(parents=True, exist_ok=True)
        _extract(archive, folder, (".py", *distribution.data))
        archive.unlink()
        (folder / ".complete").touch()
    return folder / distribution.root


def _index(distribution: Distribution) -> str:
    return f"{os.environ.get('PIP_INDEX_URL', PYPI).rstrip('/')}/{distribution.name}/"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rankmoe-engines"


def _download(distribution: Distribution) -> Path:
    index = _index(distribution)
    with urllib.request.urlopen(urllib.request.Request(index, headers=_INDEX_TYPE), timeout=_TIMEOUT) as response:
        files = json.load(response)["files"]
    stem = f"{distribution.name.replace('-', '_')}-{distribution.version}"
    (file,) = (f for f in files if f["filename"].startswith(stem) and f["filename"].endswith(distribution.ending))
    _cache().mkdir(parents=True, exist_ok=True)
    target, digest = _cache() / f"{file['filename']}.part", hashlib.sha256()
    url = urllib.parse.urljoin(index, file["url"])
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as response, target.open("wb") as out:
        while chunk := response.read(1 << 20):
            out.write(chunk)
            digest.update(chunk)
    if digest.hexdigest() != file["hashes"]["sha256"]:
        raise RuntimeError(f"{url}: expected sha256 {file['hashes']['sha256']}, got {digest.hexdigest()}")
    return target


def _extract(archive: Path, folder: Path, endings: tuple[str, ...]) -> None:
    """The files with these endings, and the metadata of a wheel or of a source archive."""
    if ".whl" in archive.name:
        with zipfile.ZipFile(archive) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(endings) or ".dist-info/" in name]
            wheel.extractall(folder, names)
    else:
        with tarfile.open(archive) as source:
            members = [member for member in source if member.isfile() and member.name.endswith((*endings, ".toml"))]
            source.extractall(folder, members, filter="data")

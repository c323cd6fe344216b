"""Source files as documents: what is trained on, random windows of it, and the windows that are held out."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rankmoe.models.nano_config import is_held_out, is_test_file, list_source_files

#: Parts of a standard library: what is no test, and its tests.
PARTS = ("library", "tests")


@dataclass(frozen=True)
class Documents:
    """Files as one string of bytes, a separator before each and one at the end.

    tokens: [N] uint8.  starts: [files] int64, the position of each file's separator.
    """

    tokens: Tensor
    starts: Tensor

    @classmethod
    def read(cls, directory: Path, paths: Sequence[str], separator: int) -> Documents:
        """Read files; one that holds the separator byte is left out."""
        parts = [content for path in paths if separator not in (content := (directory / path).read_bytes())]
        joined = bytes([separator]) + b"".join(content + bytes([separator]) for content in parts)
        starts = torch.tensor([0, *(len(content) + 1 for content in parts)]).cumsum(0)[:-1]
        return cls(torch.frombuffer(bytearray(joined), dtype=torch.uint8), starts)

    def to(self, device: torch.device) -> Documents:
        """The same on a device."""
        return Documents(self.tokens.to(device), self.starts.to(device))

    def sample(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Random windows [batch, length] int64; every 16th begins at the beginning of a file."""
        device = self.tokens.device
        start = torch.randint(self.tokens.numel(), (batch,), generator=generator, device=device)
        at_file = self.starts[torch.randint(self.starts.numel(), (batch,), generator=generator, device=device)]
        begins_file = torch.rand(batch, generator=generator, device=device) < 1 / 16
        start = torch.where(begins_file, at_file, start).clamp(max=max(self.tokens.numel() - length, 0))
        return self.tokens[start[:, None] + torch.arange(length, device=device)].long()


class Window(NamedTuple):
    """A stretch of a held-out file.

    tokens: [length] int64.  is_scored: [length - 1] bool, for the predictions of tokens[1:].
    """

    tokens: Tensor
    is_scored: Tensor


def held_out_windows(
    directory: Path, paths: Sequence[str], separator: int, length: int, max_bytes: int
) -> Iterator[Window]:
    """Windows that score every byte of the held-out files once.

    A file is a separator and its bytes. Windows advance by half their length and score their second half, the first
    one all of it, so that a byte has at least half a window of context where the file offers it. Files come in the
    order of their paths' hashes until ``max_bytes`` are reached.
    """
    remaining = max_bytes
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.encode()).digest()):
        content = (directory / path).read_bytes()[:remaining]
        remaining -= len(content)
        tokens = torch.tensor([separator, *content])
        scored_until = 0  # predictions of tokens[1 : scored_until + 1] are counted already
        for start in range(0, max(len(content), 1), (length - 1) // 2):
            window = tokens[start : start + length]
            is_scored = torch.zeros(length - 1, dtype=torch.bool)
            is_scored[scored_until - start : len(window) - 1] = True
            scored_until = start + len(window) - 1
            yield Window(functional.pad(window, (0, length - len(window))), is_scored)
            if scored_until >= len(content):
                break
        if remaining <= 0:
            return


@dataclass(frozen=True)
class Corpus:
    """A directory of sources, by part; a part that is too small or has no file is absent.

    train: documents to sample from.
    held_out: windows to measure on.  held_out_files: the files that they come from, if all were read.
    """

    train: dict[str, Documents]
    held_out: dict[str, list[Window]]
    held_out_files: dict[str, int]

    @classmethod
    def read(cls, directory: Path, separator: int, length: int, held_out_bytes: int, device: torch.device) -> Corpus:
        """Read a directory.

        length: tokens in a window.
        held_out_bytes: how much is measured on, half of it from each part.
        Raises ValueError where nothing is left for training or for measuring.
        """
        paths: dict[tuple[str, bool], list[str]] = defaultdict(list)
        for path in list_source_files(directory):
            paths["tests" if is_test_file(path) else "library", is_held_out(path)].append(path)
        train = {part: Documents.read(directory, paths[part, False], separator).to(device) for part in PARTS}
        train = {part: documents for part, documents in train.items() if documents.tokens.numel() > length}
        held_out_files = {part: len(paths[part, True]) for part in PARTS if paths[part, True]}
        held_out = {
            part: list(held_out_windows(directory, paths[part, True], separator, length, held_out_bytes // 2))
            for part in held_out_files
        }
        if not train or not held_out:
            num_files = sum(map(len, paths.values()))
            raise ValueError(f"directory: expected sources for training and held-out ones, got {num_files} files")
        return cls(train, held_out, held_out_files)

    def sample(self, batch_sizes: Mapping[str, int], length: int, generator: torch.Generator) -> Tensor:
        """Random windows [batch, length] int64, so many of each part."""
        return torch.cat([self.train[part].sample(size, length, generator) for part, size in batch_sizes.items()])

    def batch_sizes(self, batch: int, library_share: float) -> dict[str, int]:
        """How many windows of a step come from each part that there is."""
        shares = {"library": library_share, "tests": 1 - library_share}
        in_use = sum(shares[part] for part in self.train)
        return {part: round(batch * shares[part] / in_use) for part in self.train}

"""One safetensors file: its header, reads into place, and a writer that holds one expert at a time.

A file is eight bytes (the header's length, little endian), a JSON header, and the tensors' bytes without gaps
(https://github.com/huggingface/safetensors#format). The header is read here rather than through the library because
its errors name no tensor, and tensors are read with plain reads into their destination rather than through a mapping:
nothing is held twice, and a file that shrinks under a reader is an error instead of a killed process.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rankmoe.files import replacing

# fmt: off
DTYPES = {  # safetensors' names
    "BOOL": torch.bool, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}
# fmt: on
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(ValueError):
    """A fault of a checkpoint: which file, which tensor (None where the file as a whole is at fault), and what."""

    def __init__(self, file: str | Path, tensor: str | None, expected: str, got: str) -> None:
        super().__init__(file, tensor, expected, got)  # all of them, so that the error survives pickling
        self.file, self.tensor, self.expected, self.got = str(file), tensor, expected, got

    def __str__(self) -> str:
        tensor = "" if self.tensor is None else f" tensor {self.tensor}:"
        return f"{self.file}:{tensor} expected {self.expected}, got {self.got}"


class TensorEntry(NamedTuple):
    """What a file's header says of one tensor.

    dtype: safetensors' name of it, such as ``U8``.
    start, stop: where its bytes lie, counted from the start of the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def check(self, name: str, shape: Sequence[int] | None, dtype: torch.dtype | None) -> None:
        """Raise CheckpointError unless torch has the dtype, and the tensor is as asked; None asks for nothing."""
        if self.dtype not in DTYPES:
            raise CheckpointError(self.file, name, "a dtype that torch has", self.dtype)
        if dtype is not None and DTYPES[self.dtype] != dtype:
            raise CheckpointError(self.file, name, f"dtype {dtype}", f"{DTYPES[self.dtype]}")
        if shape is not None and self.shape != tuple(shape):
            raise CheckpointError(self.file, name, f"shape {tuple(shape)}", f"{self.shape}")


def parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    """A JSON object; CheckpointError for anything else."""
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(path, None, "a JSON object", f"{error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, None, "a JSON object", type(value).__name__)
    return value


def read_header(path: Path) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    """Read a file's header: the tensors by name, and the metadata, empty where there is none.

    Raises CheckpointError unless the file holds exactly the bytes that the header announces.
    """
    with path.open("rb") as file:
        file_size = os.fstat(file.fileno()).st_size
        data_start = 8 + int.from_bytes(file.read(8), "little")
        if file_size < max(8, data_start):
            raise CheckpointError(path, None, f"a header of {data_start} bytes", f"a file of {file_size} bytes")
        raw = file.read(data_start - 8)
    header = parse_json(path, raw)
    metadata = header.pop("__metadata__", None)
    entries = {name: _parse_entry(path, name, fields, data_start) for name, fields in header.items()}

    by_start = sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))
    expected_size = max((entry.stop for entry in entries.values()), default=data_start)
    start = data_start
    for name, entry in by_start:
        stop = start + math.prod(entry.shape) * DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else entry.stop
        if (entry.start, entry.stop) != (start, stop):
            expected = f"bytes {start} to {stop} for {entry.dtype} {entry.shape}"
            raise CheckpointError(path, name, expected, f"{entry.start} to {entry.stop}")
        if stop > file_size:
            raise CheckpointError(path, name, f"a file of {expected_size} bytes", f"{file_size}")
        start = stop
    if file_size != expected_size:
        raise CheckpointError(path, None, f"a file of {expected_size} bytes", f"{file_size}")
    return entries, metadata if isinstance(metadata, dict) else {}


def _parse_entry(path: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    try:
        start, stop = map(int, fields["data_offsets"])
        shape = tuple(map(int, fields["shape"]))
        return TensorEntry(path, str(fields["dtype"]), shape, data_start + start, data_start + stop)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(path, name, "dtype, shape and data_offsets", f"{fields}") from error


def read_into(file: io.BufferedReader, name: str, entry: TensorEntry, out: torch.Tensor) -> None:
    """Fill ``out``, contiguous, in host memory and of the entry's shape and dtype, from an open file."""
    file.seek(entry.start)
    num_bytes = file.readinto(out.view(-1).view(torch.uint8).numpy().data)
    if num_bytes != out.nbytes:  # the file shrank since its header was read
        raise CheckpointError(entry.file, name, f"{out.nbytes} bytes", f"{num_bytes}")


def read_slices_into(file: io.BufferedReader, name: str, entry: TensorEntry, out: torch.Tensor) -> None:
    """Fill ``out``, of the entry's shape and dtype on any device, one slice of its first dimension at a time.

    Host memory gets each slice in place; a device gets it through one slice's worth of pinned memory.
    """
    staging = None
    if out.device.type != "cpu":
        staging = torch.empty(out.shape[1:], dtype=out.dtype, pin_memory=out.device.type == "cuda")
    for index, destination in enumerate(out):
        start = entry.start + index * destination.nbytes
        part = entry._replace(shape=entry.shape[1:], start=start, stop=start + destination.nbytes)
        if staging is None:
            read_into(file, name, part, destination)
        else:
            read_into(file, name, part, staging)
            destination.copy_(staging)


def header_bytes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """What stands before the bytes of the tensors, which follow in this order. Tensors without memory (meta) do."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> int:
    """Write a file, replacing the one that is there; returns its size in bytes.

    Tensors may be strided and on any device; they are brought to the host one slice of their first dimension at a time.
    A failure leaves the old one as it was; see ``rankmoe.files.replacing``.
    """
    with replacing(path) as file:
        file.write(header_bytes(tensors, metadata))
        for tensor in tensors.values():
            for part in tensor:
                file.write(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return file.tell()

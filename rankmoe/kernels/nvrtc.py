"""Compile CUDA C++ at run time with NVRTC, keep the result on disk, and launch it on torch's current stream.

Importing this module needs neither a GPU nor NVIDIA's packages; ``can_compile()`` and ``can_launch()`` say what is
there. A compiled kernel is found in this process, else on disk, else compiled. Its key covers everything that could
change it: source, macros, architecture, compiler version.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import re
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rankmoe.env import cache_directory, uses_programmatic_launch
from rankmoe.files import replacing

#: Architectures whose own instructions the kernels use, by compute capability.
ARCHITECTURES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}

_FORMAT = b"rankmoe cubin 1\n"
_DIGEST_SIZE = hashlib.sha256().digest_size
# NVRTC's own cache would sometimes answer without the report of ptxas.
_OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--no-cache")


def can_compile() -> bool:
    """True where NVRTC and its Python bindings are installed."""
    return compiler_version() is not None


@cache
def compiler_version() -> tuple[int, int] | None:
    """Of NVRTC, or None where it or its Python bindings are missing."""
    try:
        from cuda.bindings import nvrtc

        error, major, minor = nvrtc.nvrtcVersion()
    except Exception:  # the package, the library it loads, or a symbol in it may be missing
        return None
    return (major, minor) if int(error) == 0 else None


def can_launch(device: torch.device | int | None = None) -> bool:
    """True where a CUDA device of a supported architecture and NVIDIA's driver bindings are there."""
    if not torch.cuda.is_available() or importlib.util.find_spec("cuda.bindings") is None:
        return False
    return torch.cuda.get_device_capability(device) in ARCHITECTURES and can_compile()


@dataclass(frozen=True)
class ResourceUsage:
    """What ptxas reports for a kernel and the functions it calls: the largest of each."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int

    @property
    def uses_local_memory(self) -> bool:
        """True where anything spills or lives on a stack."""
        return bool(self.stack_bytes or self.spill_store_bytes or self.spill_load_bytes)


def compile_cubin(source: str, macros: Mapping[str, int | str], architecture: str) -> tuple[bytes, str]:
    """Compile; nothing is cached. Returns the cubin and the log, which holds the report of ptxas.

    Raises RuntimeError with the compiler's log.
    """
    from cuda.bindings import nvrtc

    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    _check(error, "nvrtcCreateProgram")
    try:
        options = [option.encode() for option in _options(macros, architecture)]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
        if int(error) != 0:
            raise RuntimeError(f"NVRTC could not compile for {architecture}: {error.name}\n{log}")
        cubin = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin, log


def parse_resource_usage(log: str) -> ResourceUsage:
    """Read what ptxas printed with ``-v``. Raises ValueError where it printed nothing."""

    def largest(pattern: str) -> int:
        found = [int(number) for number in re.findall(pattern, log)]
        if not found:
            raise ValueError(f"log: expected ptxas to report {pattern!r}, got {log!r}")
        return max(found)

    return ResourceUsage(
        registers=largest(r"Used (\d+) registers"),
        stack_bytes=largest(r"(\d+) bytes stack frame"),
        spill_store_bytes=largest(r"(\d+) bytes spill stores"),
        spill_load_bytes=largest(r"(\d+) bytes spill loads"),
    )


def _options(macros: Mapping[str, int | str], architecture: str) -> list[str]:
    return [*_OPTIONS, f"--gpu-architecture={architecture}", *(f"-D{n}={macros[n]}" for n in sorted(macros))]


def _text(get_size: Callable[[Any], Any], get: Callable[[Any, bytes], Any], program: Any) -> bytes:
    error, size = get_size(program)
    _check(error, get_size.__name__)
    buffer = bytes(size)
    (error,) = get(program, buffer)
    _check(error, get.__name__)
    return buffer


def _check(error: Any, what: str) -> None:
    if int(error) != 0:
        raise RuntimeError(f"{what} failed: {error.name}")


def cubin_path(source: str, macros: Mapping[str, int | str], architecture: str) -> Path:
    """Where the compiled kernel is kept."""
    parts = [source, *_options(macros, architecture), repr(compiler_version())]
    return cache_directory() / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.cubin"


def load_or_compile(source: str, macros: Mapping[str, int | str], architecture: str) -> bytes:
    """The compiled kernel from disk, else from the compiler and then put on disk.

    A file that is cut short or damaged is a miss and a warning. Files are written beside and renamed, so processes that
    start with an empty directory at once do no harm. A directory that cannot be written is not an error.
    """
    path = cubin_path(source, macros, architecture)
    cubin = _read_cubin(path)
    if cubin is None:
        cubin, _ = compile_cubin(source, macros, architecture)
        _write_cubin(path, cubin)
    return cubin


def _read_cubin(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    header = len(_FORMAT) + _DIGEST_SIZE
    cubin = content[header:]
    if content[:header] == _FORMAT + hashlib.sha256(cubin).digest():
        return cubin
    warnings.warn(f"{path}: damaged compiled kernel; it is compiled again", stacklevel=2)
    return None


def _write_cubin(path: Path, cubin: bytes) -> None:
    with suppress(OSError), replacing(path) as file:
        file.write(_FORMAT + hashlib.sha256(cubin).digest() + cubin)


#: Macros of a kernel as a key of caches.
Macros = tuple[tuple[str, int], ...]


def address(tensor: torch.Tensor | None) -> int | None:
    """What a kernel's pointer argument is given: the tensor's memory, or null."""
    return None if tensor is None else tensor.data_ptr()


@dataclass
class Kernel:
    """A kernel of one source file and one set of macros.

    source: CUDA C++ text. name: the ``extern "C"`` entry point. macros: what is defined for it.
    shared_bytes: dynamic shared memory of a block.
    """

    source: str
    name: str
    macros: Mapping[str, int | str]
    shared_bytes: int = 0
    _functions: dict[int, Any] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def prepare(self, device: int) -> Any:
        """Compile and load for a device, so that a later launch may be captured. Returns the driver's function."""
        function = self._functions.get(device)
        if function is not None:
            return function
        from cuda.bindings import driver

        with self._lock:
            if device in self._functions:
                return self._functions[device]
            architecture = ARCHITECTURES[torch.cuda.get_device_capability(device)]
            cubin = load_or_compile(self.source, self.macros, architecture)
            with torch.cuda.device(device):
                _make_context_current(device)
                error, module = driver.cuModuleLoadData(cubin)
                _check(error, "cuModuleLoadData")
            error, function = driver.cuModuleGetFunction(module, self.name.encode())
            _check(error, "cuModuleGetFunction")
            if self.shared_bytes:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _check(driver.cuFuncSetAttribute(function, attribute, self.shared_bytes)[0], "cuFuncSetAttribute")
            self._functions[device] = function
            return function

    def launch(
        self,
        device: int,
        num_blocks: int,
        num_threads: int,
        arguments: ctypes.Structure,
        is_programmatic: bool | None = None,
    ) -> None:
        """Launch on torch's current stream of ``device``, which must be the current device.

        arguments: passed by value as the kernel's one parameter.
        is_programmatic: allow the launch to start before the previous kernel of the stream ends; the kernel itself
            waits where it needs that kernel's results. None: as the environment says (``RANKMOE_PDL``), by default yes.
        """
        from cuda.bindings import driver

        function = self.prepare(device)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = num_blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.hStream = torch.cuda.current_stream(device).cuda_stream
        if uses_programmatic_launch() if is_programmatic is None else is_programmatic:
            config.attrs = [_programmatic_attribute()]
            config.numAttrs = 1
        (error,) = driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0)
        if error == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # a thread that has called no runtime function yet
            _make_context_current(device)
            (error,) = driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0)
        _check(error, f"launch of {self.name}")


def _make_context_current(device: int) -> None:
    """Give this thread the device's primary context, the one that torch uses, if it has none."""
    from cuda.bindings import driver

    error, context = driver.cuCtxGetCurrent()
    _check(error, "cuCtxGetCurrent")
    if int(context) == 0:
        error, context = driver.cuDevicePrimaryCtxRetain(device)
        _check(error, "cuDevicePrimaryCtxRetain")
        _check(driver.cuCtxSetCurrent(context)[0], "cuCtxSetCurrent")


@cache
def _programmatic_attribute() -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute

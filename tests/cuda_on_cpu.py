"""CUDA kernels on a CPU, for tests: inline PTX becomes calls into ``cuda_on_cpu.h``, g++ compiles the rest as it is."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from rankmoe import backends, experts, moe
from rankmoe.kernels import experts_common, nvrtc

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
#: Multiprocessors that launches are made for: few, so that a block has several items.
NUM_MULTIPROCESSORS = 3

#: What an instruction, its spaces collapsed, becomes; {0} is its first operand.
_PTX = {
    "": "nothing()",
    "griddepcontrol.wait;": "nothing()",
    "griddepcontrol.launch_dependents;": "nothing()",
    "fence.mbarrier_init.release.cluster;": "nothing()",
    "setmaxnreg.dec.sync.aligned.u32 24;": "nothing()",
    "setmaxnreg.inc.sync.aligned.u32 %0;": "nothing()",
    "prefetch.global.L2 [%0];": "nothing({0})",
    "createpolicy.fractional.L2::evict_first.b64 %0, 1.0;": "zero({0})",
    "mov.u32 %0, %%clock;": "zero({0})",
    "wgmma.fence.sync.aligned;": "nothing()",
    "wgmma.commit_group.sync.aligned;": "nothing()",
    "wgmma.wait_group.sync.aligned %0;": "exchange()",
    "bar.sync 1, %0;": "synchronize(1, {0})",
    "bar.sync %0, 128;": "synchronize({0}, 128)",
    "barrier.cluster.arrive.release.aligned;": "cluster_arrive()",
    "barrier.cluster.wait.acquire.aligned;": "cluster_wait()",
    "mapa.shared::cluster.u32 %0, %1, 0;": "map_to_first({0}, {1})",
    "mbarrier.init.shared::cta.b64 [%0], %1;": "barrier_init({0}, {1})",
    "mbarrier.init.shared::cta.b64 [%0], 1;": "barrier_init({0}, 1)",
    "mbarrier.arrive.shared::cta.b64 _, [%0];": "barrier_arrive({0})",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;": "barrier_expect({0}, {1})",
    "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }": (
        "barrier_wait({0}, {1})"
    ),
    (
        "{.reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0; "
        "@!done bra again;}"
    ): "barrier_wait({0}, 0)",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];": (
        "copy_bulk({0}, {1}, {2}, {3})"
    ),
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;": (
        "copy_bulk({0}, {1}, {2}, {3}, {4})"
    ),
    "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.or.b32 [%0], %1, [%2];": (
        "remote_or({0}, {1}, {2})"
    ),
    "red.shared.or.b32 [%0], %1;": "or_shared({0}, {1})",
    "ld.shared.u16 %0, [%1];": "load_shared_u16({0}, {1})",
    "ld.shared.u32 %0, [%1];": "load_shared_u32({0}, {1})",
    "ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];": "load_shared_v4({0}, {1}, {2}, {3}, {4})",
    "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4]; }": (
        "load_shared_v4_if({0}, {1}, {2}, {3}, {4}, {5})"
    ),
    "ld.relaxed.gpu.global.u32 %0, [%1];": "load_global({0}, {1})",
    "st.relaxed.gpu.global.u32 [%0], %1;": "store_global({0}, {1})",
    "cvt.rn.bf16.f32 %0, %1;": "bf16_from({0}, {1})",
    "cvt.rn.bf16x2.f32 %0, %1, %2;": "bf16_pair_from({0}, {1}, {2})",
    "mul.rn.bf16x2 %0, %1, %2;": "bf16_pair_multiply({0}, {1}, {2})",
    "cvt.rn.f16x2.e4m3x2 %0, %1;": "f16_pair_from_e4m3({0}, {1})",
    "cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;": "e4m3_pair_from({0}, {1}, {2})",
    "{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }": (
        "floats_from_f16_pair({0}, {1}, {2})"
    ),
    "ex2.approx.f32 %0, %1;": "exp2_approximate({0}, {1})",
    "ex2.approx.ftz.f32 %0, %1;": "exp2_flushing({0}, {1})",
    "rcp.approx.f32 %0, %1;": "reciprocal_approximate({0}, {1})",
    "rcp.approx.ftz.f32 %0, %1;": "reciprocal_flushing({0}, {1})",
    "max.u16x2 %0, %1, %2;": "max_of_u16_pairs({0}, {1}, {2})",
    "{.reg .pred greater; setp.gt.s32 greater, %1, %2; @greater add.s32 %0, %0, 1;}": "add_if_greater({0}, {1}, {2})",
    "{.reg .pred greater; setp.gt.s32 greater, %1, %2; @greater add.f32 %0, %0, 0f3F800000;}": (
        "add_if_greater({0}, {1}, {2})"
    ),
    (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
    ): "multiply_m16n8k16({0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9})",
}
_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16 ")
_TAIL = """
extern "C" const char* launch(unsigned num_blocks, unsigned num_threads, unsigned cluster_size, unsigned dynamic_bytes,
                              unsigned max_seconds, const void* arguments) {{
  return emulated::run(num_blocks, num_threads, cluster_size, dynamic_bytes, max_seconds, {name}, arguments);
}}
"""
#: Processor time of a launch after which it counts as one that never ends.
MAX_SECONDS = 60


def can_run() -> bool:
    """Whether g++ is here."""
    return shutil.which("g++") is not None


def translate(source: str) -> str:
    """CUDA C++ without inline PTX. Raises NotImplementedError with an instruction that has no emulation."""
    parts, end = [], 0
    for match in re.finditer(r"\basm\s*(?:volatile\s*)?\(", source):
        stop = _closing(source, match.end())
        parts += [source[end : match.start()], _call(source[match.end() : stop])]
        end = stop + 1
    text = "".join([*parts, source[end:]])
    return re.sub(r"extern __shared__ [^;]*\b(\w+)\[\];", r"unsigned char* \1 = emulated::dynamic_shared();", text)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opened before ``start`` closes; strings do not count."""
    depth, is_string = 1, False
    for i in range(start, len(text)):
        if text[i] == '"' and text[i - 1] != "\\":
            is_string = not is_string
        elif not is_string:
            depth += {"(": 1, ")": -1}.get(text[i], 0)
            if depth == 0:
                return i
    raise ValueError("source: expected the parentheses of asm to close")


def _call(statement: str) -> str:
    """An asm statement's inside as a call."""
    strings = re.match(r'(?:\s*"(?:[^"\\]|\\.)*")+', statement)
    assert strings is not None, statement
    template = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', strings.group()))
    template = " ".join(template.replace("\\n", " ").split())
    operands = _operands(statement[strings.end() :])
    wgmma = _WGMMA.match(template)
    if wgmma is not None:  # its many sums follow each other in memory
        sums, rest = operands[0], operands[-5:]
        return f"emulated::multiply_columns<{wgmma[1]}>(&{sums}, {', '.join(rest)})"
    if template not in _PTX:
        raise NotImplementedError(f"tests/cuda_on_cpu.py: no emulation of {template!r}")
    return "emulated::" + _PTX[template].format(*operands)


def _operands(rest: str) -> list[str]:
    """The expressions behind constraints, outputs first; clobbers have none."""
    found, position = [], 0
    while match := re.compile(r'"[^"]*"\s*\(').search(rest, position):
        stop = _closing(rest, match.end())
        found.append(f"({rest[match.end() : stop]})")
        position = stop
    return found


def compile_kernel(source: str, name: str, macros: Mapping[str, int | str], directory: Path) -> ctypes.CDLL:
    """A kernel as a shared library with one function, ``launch``; found again where it was compiled before."""
    text = "\n".join(
        [
            HEADER.read_text(),
            *(f"#define {macro} {value}" for macro, value in macros.items()),
            translate(source),
            _TAIL.format(name=name),
        ]
    )
    path = directory / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        code = path.with_suffix(f".{os.getpid()}.cpp")
        code.write_text(text)
        made = path.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-ffp-contract=off", code, "-o", made]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"g++ could not compile {name}:\n{done.stderr[:4000]}")
        made.replace(path)  # other processes may look for it
    library = ctypes.CDLL(str(path))
    library.launch.restype = ctypes.c_char_p
    return library


def launch_on_cpu(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Let the native kernels' host code launch on the CPU's tensors, on what it takes for a small NVIDIA H200.

    The operations that choose by a tensor's device keep to their torch statements, the oracles; weights packed for
    ``cuda`` meet the kernels on either device.
    """

    def launch(self, device, num_blocks, num_threads, arguments, is_programmatic=None) -> None:
        library = compile_kernel(self.source, self.name, self.macros, directory)
        cluster = self.macros.get("CLUSTER", 1)
        error = library.launch(
            num_blocks, num_threads, cluster, self.shared_bytes, MAX_SECONDS, ctypes.byref(arguments)
        )
        assert error is None, f"{self.name}: {error.decode()}"

    monkeypatch.setattr(nvrtc.Kernel, "launch", launch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(experts_common, "num_multiprocessors", lambda device: NUM_MULTIPROCESSORS)
    monkeypatch.setattr(experts_common, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(experts_common, "device_name", lambda device: "a CPU")
    on_cpu = dataclasses.replace(backends.get_backend("cuda"), device_type="cpu")
    for module in (experts, moe):
        monkeypatch.setattr(
            module, "get_backend", lambda name: on_cpu if name == "cuda" else backends.get_backend(name)
        )

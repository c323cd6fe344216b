"""What several test modules need: random experts and batches, and comparison bit by bit."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rankmoe.experts import pack_experts
from rankmoe.types import Activation, ExpertPlacement, ExpertWeights, MXTensor, SiTU


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes: NaN equals NaN, and -0.0 differs from +0.0."""
    return tensor.contiguous().view(torch.uint8)


def assert_bitwise_equal(got: Any, expected: Any, name: str = "result") -> None:
    """Compare tensors, None, numbers, and tuples and dataclasses of them, bit by bit."""
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), name
        assert torch.equal(bits(got), bits(expected)), f"{name}: bits differ"
    elif isinstance(expected, tuple):
        for position, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_bitwise_equal(one, other, f"{name}[{position}]")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_bitwise_equal(getattr(got, field.name), getattr(expected, field.name), f"{name}.{field.name}")
    else:
        assert got == expected, name


def result_or_refusal(name: str, call: Callable[[], Any]) -> Any:
    """What the call returns, or None where it raises a ValueError that names the argument; for 'right or refused'."""
    try:
        return call()
    except ValueError as error:
        if name not in str(error):
            raise
        return None


def relative_l2(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def random_mxfp4(*shape: int, seed: int = 0, scale_bytes: tuple[int, int] = (121, 125)) -> MXTensor:
    """Random codes, and scale bytes in the given closed range."""
    *rows, width = shape
    low, high = scale_bytes
    data = torch.randint(0, 256, (*rows, width // 2), generator=seeded(seed), dtype=torch.int32)
    scale = torch.randint(low, high + 1, (*rows, width // 32), generator=seeded(seed + 1), dtype=torch.int32)
    return MXTensor(data.to(torch.uint8), scale.to(torch.uint8), "mxfp4")


def random_experts(
    placement: ExpertPlacement,
    hidden_size: int = 64,
    intermediate_size: int = 32,
    activation: Activation = SiTU(),  # noqa: B008
    *,
    has_bias: bool = False,
    backend: str = "auto",
    seed: int = 0,
) -> ExpertWeights:
    """One rank's part of a random model: every rank and placement with the same seed sees the same logical experts."""
    num_experts, mine = placement.num_logical_experts, torch.tensor(placement.logical_expert_ids)
    w13 = random_mxfp4(num_experts, 2 * intermediate_size, hidden_size, seed=seed)
    w2 = random_mxfp4(num_experts, hidden_size, intermediate_size, seed=seed + 10)
    biases = {}
    if has_bias:
        for name, width in (("w13_bias", 2 * intermediate_size), ("w2_bias", hidden_size)):
            biases[name] = torch.randn(num_experts, width, generator=seeded(seed + width))[mine]
    return pack_experts(w13[mine], w2[mine], activation, placement, backend=backend, **biases)


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a safetensors file's JSON header and leave its data as it is."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def random_batch(
    num_tokens: int, num_experts: int, hidden_size: int = 64, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [T, H] bfloat16 and router logits [T, E] float32."""
    hidden_states = torch.randn(num_tokens, hidden_size, generator=seeded(seed)).bfloat16()
    return hidden_states, torch.randn(num_tokens, num_experts, generator=seeded(seed + 1))


def put_modules(monkeypatch, names: dict[str, dict[str, object]]) -> None:
    """Make modules of a library that is not installed importable: by their dotted names, what stands in them."""
    for path, values in names.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            full = ".".join(parts[:end])
            if full not in sys.modules:
                monkeypatch.setitem(sys.modules, full, types.ModuleType(full))
            if end > 1:
                monkeypatch.setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[full], False)
        for name, value in values.items():
            monkeypatch.setattr(sys.modules[path], name, value, raising=False)

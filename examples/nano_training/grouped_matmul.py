"""The experts' GEMM over rows sorted by expert: one kernel on the GPU, one GEMM an expert anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nano_training.clock import log


class GroupedMatmul(NamedTuple):
    """One way to multiply each expert's rows by its weight.

    multiply: takes rows [R, N], by expert; weight [E, M, N]; row_ends [E] int32, the row after each expert's last, the
        last of them R. Returns [R, M].
    dtype: what rows and weight have to be.
    """

    multiply: Callable[[Tensor, Tensor, Tensor], Tensor]
    dtype: torch.dtype


def _multiply_by_loop(rows: Tensor, weight: Tensor, row_ends: Tensor) -> Tensor:
    sizes = row_ends.diff(prepend=row_ends.new_zeros(1)).tolist()
    return torch.cat([part @ w.t() for part, w in zip(rows.split(sizes), weight.unbind(), strict=True)])


def _multiply_on_device(rows: Tensor, weight: Tensor, row_ends: Tensor) -> Tensor:
    return torch._grouped_mm(rows, weight.transpose(-2, -1), offs=row_ends)


#: One GEMM an expert, in float32.
LOOP = GroupedMatmul(_multiply_by_loop, torch.float32)
#: One kernel that reads the offsets on the device.
ON_DEVICE = GroupedMatmul(_multiply_on_device, torch.bfloat16)


def select_grouped_matmul(device: torch.device) -> GroupedMatmul:
    """The one-kernel form where this GPU has it and it agrees with the loop, forward and backward."""
    if device.type != "cuda":
        return LOOP
    try:
        _check_on_device(device)
    except (RuntimeError, AttributeError) as error:
        log(f"grouped GEMM: one per expert ({error})")
        return LOOP
    log("grouped GEMM: torch._grouped_mm")
    return ON_DEVICE


def _check_on_device(device: torch.device) -> None:
    """Raise RuntimeError where output or gradients differ from the loop's by more than bf16 rounding."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(512, 128, generator=generator).to(device, torch.bfloat16)
    weight = torch.randn(8, 192, 128, generator=generator).to(device, torch.bfloat16)
    row_ends = torch.tensor([8, 8, 136, 200, 208, 208, 392, 512], dtype=torch.int32, device=device)
    upstream = torch.randn(512, 192, generator=generator).to(device, torch.bfloat16)
    results = []
    for multiply in (_multiply_by_loop, _multiply_on_device):
        leaves = [rows.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = multiply(leaves[0], leaves[1], row_ends)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    for name, expected, got in zip(("output", "rows", "weight"), *results, strict=True):
        difference = ((got - expected).float().norm() / expected.float().norm()).item()
        if not difference < 1e-2:
            raise RuntimeError(f"{name}: relative difference {difference:.2e} from the loop")

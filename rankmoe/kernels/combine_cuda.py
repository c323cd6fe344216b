"""Host side of ``combine.cu``: the weighted sum over a token's slots, from a schedule or from token masks alone."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from rankmoe.combine import MAX_TOP_K
from rankmoe.kernels import nvrtc
from rankmoe.types import MAX_FRONT_TOKENS, ExpertSchedule, Routing

_THREADS = 128
_COLUMNS_PER_BLOCK = 512


def combine(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    schedule: ExpertSchedule,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Sum this rank's slots; arguments, covered and checked by the caller, as ``rankmoe.combine.combine``.

    Returns [T, H] ``out_dtype``, the bits of the torch statement. Capturable.
    """
    arguments = CombineArguments(slot_rows=schedule.slot_rows.contiguous().data_ptr())
    return _launch(rows, topk_weights.contiguous(), out_dtype, arguments, num_local_experts=0)


def combine_masks(
    rows: torch.Tensor,
    routing: Routing,
    expert_token_mask: torch.Tensor,
    *,
    num_experts: int,
    local_expert_offset: int = 0,
    expert_map: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    is_chained: bool = False,
) -> torch.Tensor:
    """The same where only the token masks were made.

    rows: [R, H] float32, in the order that the masks imply.
    routing: global ids [T, K] int32 and weights, contiguous, T <= 64.
    expert_token_mask: [L] int64.
    is_chained: masks, ids and weights were written before the launch before this one began to run.
    """
    num_local_experts = expert_token_mask.shape[0]
    assert routing.topk_ids.shape[0] <= MAX_FRONT_TOKENS
    arguments = CombineArguments(
        expert_token_mask=expert_token_mask.data_ptr(),
        topk_ids=routing.topk_ids.data_ptr(),
        expert_map=nvrtc.address(expert_map),
        num_experts=num_experts,
        local_expert_offset=local_expert_offset,
        num_local_experts=num_local_experts,
        is_chained=is_chained,
    )
    return _launch(rows, routing.topk_weights, out_dtype, arguments, num_local_experts)


def _launch(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    out_dtype: torch.dtype,
    arguments: CombineArguments,
    num_local_experts: int,
) -> torch.Tensor:
    (num_tokens, top_k), hidden_size, device = topk_weights.shape, rows.shape[1], rows.device
    out = torch.empty(num_tokens, hidden_size, dtype=out_dtype, device=device)
    if out.numel():
        arguments.rows, arguments.row_stride = rows.data_ptr(), rows.stride(0)
        arguments.topk_weights, arguments.out = topk_weights.data_ptr(), out.data_ptr()
        arguments.hidden_size, arguments.top_k = hidden_size, top_k
        is_aligned = hidden_size % 4 == 0 and rows.stride(0) % 4 == 0 and rows.data_ptr() % 16 == 0
        kernel = _kernel(macros_of(num_local_experts, out_dtype, is_aligned=is_aligned))
        num_blocks = num_tokens * -(-hidden_size // _COLUMNS_PER_BLOCK)
        with torch.cuda.device(device):
            kernel.launch(device.index, num_blocks, _THREADS, arguments)
    return out


def macros_of(num_local_experts: int, out_dtype: torch.dtype, *, is_aligned: bool) -> nvrtc.Macros:
    """The macros that ``combine.cu`` is compiled with; 0 local experts where a schedule has the slots' rows."""
    return (
        ("FROM_MASKS", int(num_local_experts > 0)),
        ("MAX_LOCAL_EXPERTS", max(128, -(-num_local_experts // 128) * 128)),
        ("MAX_TOP_K", MAX_TOP_K),
        ("OUT_BF16", int(out_dtype == torch.bfloat16)),
        ("VECTOR", 4 if is_aligned else 1),
    )


@cache
def source() -> str:
    """The text of ``combine.cu``."""
    return (Path(__file__).parent / "combine.cu").read_text()


@cache
def _kernel(macros: nvrtc.Macros) -> nvrtc.Kernel:
    return nvrtc.Kernel(source(), "combine", dict(macros))


class CombineArguments(ctypes.Structure):
    """The kernel's parameter; the same fields in the same order as in ``combine.cu``."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "rows",
                "topk_weights",
                "slot_rows",
                "expert_token_mask",
                "topk_ids",
                "expert_map",
                "out",
            )
        ),
        ("row_stride", ctypes.c_longlong),
        *(
            (name, ctypes.c_int)
            for name in (
                "hidden_size",
                "top_k",
                "num_experts",
                "local_expert_offset",
                "num_local_experts",
                "is_chained",
            )
        ),
    ]

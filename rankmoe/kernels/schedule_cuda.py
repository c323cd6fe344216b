"""Host side of ``schedule.cu``: the standalone schedule pass for up to 64 tokens."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from rankmoe.kernels import nvrtc
from rankmoe.types import MAX_FRONT_TOKENS, ExpertSchedule

MAX_LOCAL_EXPERTS = 1024
_DTYPES = (torch.int32, torch.int64, torch.uint32)

available = nvrtc.can_launch


def covered(topk_ids: torch.Tensor, num_local_experts: int, expert_map: torch.Tensor | None = None) -> bool:
    """True where ``build_schedule`` takes these ids; looks at shapes and dtypes alone."""
    return (
        topk_ids.dim() == 2
        and topk_ids.dtype in _DTYPES
        and 0 < topk_ids.shape[0] <= MAX_FRONT_TOKENS
        and 0 < num_local_experts <= MAX_LOCAL_EXPERTS
        and (expert_map is None or (expert_map.dtype == torch.int32 and expert_map.is_contiguous()))
    )


def build_schedule(
    topk_ids: torch.Tensor,
    num_local_experts: int,
    *,
    num_experts: int,
    local_expert_offset: int = 0,
    expert_map: torch.Tensor | None = None,
    is_packed: bool = False,
    is_programmatic: bool | None = None,
) -> ExpertSchedule:
    """Schedule in one launch; arguments, checked by the caller, as ``rankmoe.schedule.build_schedule``.

    topk_ids: [T, K] int32, int64 or uint32 on a GPU, any strides, covered.
    Returns the whole schedule, ``row_tokens`` [T * K] padded by -1. No host sync.
    """
    (num_tokens, top_k), device = topk_ids.shape, topk_ids.device
    schedule = ExpertSchedule.empty(num_tokens, top_k, num_local_experts, device)
    assert schedule.expert_token_mask is not None
    arguments = ScheduleArguments(
        ids=topk_ids.data_ptr(),
        expert_map=nvrtc.address(expert_map),
        expert_token_mask=schedule.expert_token_mask.data_ptr(),
        expert_offsets=schedule.expert_offsets.data_ptr(),
        row_tokens=schedule.row_tokens.data_ptr(),
        slot_rows=schedule.slot_rows.data_ptr(),
        token_stride=topk_ids.stride(0),
        slot_stride=topk_ids.stride(1),
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        local_expert_offset=local_expert_offset,
        num_local_experts=num_local_experts,
    )
    with torch.cuda.device(device):
        _kernel(macros_of(topk_ids.dtype, num_local_experts, is_packed)).launch(
            device.index, 1, 1024, arguments, is_programmatic
        )
    return schedule


def macros_of(dtype: torch.dtype, num_local_experts: int, is_packed: bool) -> nvrtc.Macros:
    """The macros that ``schedule.cu`` is compiled with; shared memory in steps of 128 experts."""
    return (
        ("MAX_LOCAL_EXPERTS", -(-num_local_experts // 128) * 128),
        ("ID_IS_64_BIT", int(dtype == torch.int64)),
        ("IS_PACKED", int(is_packed)),
    )


@cache
def source() -> str:
    """The text of ``schedule.cu``."""
    return (Path(__file__).parent / "schedule.cu").read_text()


@cache
def _kernel(macros: nvrtc.Macros) -> nvrtc.Kernel:
    return nvrtc.Kernel(source(), "schedule", dict(macros))


class ScheduleArguments(ctypes.Structure):
    """The kernel's parameter; the same fields in the same order as in ``schedule.cu``."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("ids", "expert_map", "expert_token_mask", "expert_offsets", "row_tokens", "slot_rows")
        ),
        ("token_stride", ctypes.c_longlong),
        ("slot_stride", ctypes.c_longlong),
        *(
            (name, ctypes.c_int)
            for name in ("num_tokens", "top_k", "num_experts", "local_expert_offset", "num_local_experts")
        ),
    ]

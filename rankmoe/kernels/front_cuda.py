"""Host side of ``front.cu``: what it covers, its buffers, and the one launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from rankmoe.kernels import nvrtc
from rankmoe.quantize import check_group_multiple
from rankmoe.route import check_router_inputs
from rankmoe.types import (
    GROUP_SIZE,
    MAX_FRONT_TOKENS,
    MAX_TOKENS,
    ExpertSchedule,
    LocalRange,
    MXTensor,
    RouterConfig,
    Routing,
    ScheduleOutput,
)

MAX_EXPERTS = 1024
MAX_TOP_K = 32
MAX_HIDDEN_SIZE = 8192

_DTYPES = (torch.float32, torch.bfloat16)
_SCORINGS = ("sigmoid", "softmax", "softmax_selected")
_NUM_MULTIPROCESSORS = 132  # one block each is the aim; more are correct


@dataclass(frozen=True)
class FrontVariant:
    """Choices that change the speed of the launch and nothing else.

    route_warps: warps of a block; None lets the shape decide.
    values: neighbouring experts that a thread holds; None lets the shape decide.
    threshold: 0 the warps share the ranking of the columns, 1 each warp ranks all.
    quant_chunks: 8-element chunks a quantising thread has in flight; None lets the shape decide.
    collector: build the masks in a collecting block even where the cluster path could.
    stop_after, profile: for measurements; outputs are then incomplete.
    """

    route_warps: int | None = None
    values: int | None = None
    threshold: int = 0
    quant_chunks: int | None = None
    collector: bool = False
    stop_after: int = 9
    profile: bool = False


DEFAULT_VARIANT = FrontVariant()


@dataclass(frozen=True)
class FrontBuffers:
    """Everything that a launch writes. Contents before a launch do not matter, except for ``mailbox``.

    topk_weights: [T, K] float32. topk_ids: [T, K] int32, global; -1 in rows beyond the valid tokens.
    packed: [T, K] int32 or None.
    data: [T, H] float8_e4m3fn. scale: [T, H/32] uint8.
    expert_token_mask: [L] int64 or None. Bit t of entry e: local expert e gets token t.
    expert_offsets: [L + 1] int32, row_tokens: [T * K] int32, slot_rows: [T, K] int32, or None.
    mailbox: [T * K] int32 or None. Private to the kernel: zero when allocated, and after every launch again. Launches
        that may overlap need their own.
    """

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    packed: torch.Tensor | None
    data: torch.Tensor
    scale: torch.Tensor
    expert_token_mask: torch.Tensor | None
    expert_offsets: torch.Tensor | None
    row_tokens: torch.Tensor | None
    slot_rows: torch.Tensor | None
    mailbox: torch.Tensor | None

    @property
    def schedule_output(self) -> ScheduleOutput:
        """What of the schedule these buffers take."""
        if self.expert_token_mask is None:
            return "none"
        return "masks" if self.expert_offsets is None else "rows"

    def routing(self, local_range: LocalRange | None = None) -> Routing:
        """The routing part; ``local_range`` is the one that ``packed`` was written for."""
        return Routing(self.topk_weights, self.topk_ids, self.packed, local_range)

    def rows(self) -> MXTensor:
        """The quantised rows."""
        return MXTensor(self.data, self.scale, "mxfp8")

    def schedule(self) -> ExpertSchedule | None:
        """The whole schedule, where these buffers take it."""
        if self.expert_offsets is None or self.row_tokens is None or self.slot_rows is None:
            return None
        return ExpertSchedule(
            self.topk_ids.shape[0], self.expert_token_mask, self.expert_offsets, self.row_tokens, self.slot_rows
        )


def allocate_buffers(
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    num_local_experts: int,
    device: torch.device | str,
    *,
    packed: bool = True,
    schedule: ScheduleOutput = "masks",
    collector: bool = False,
) -> FrontBuffers:
    """Allocate a launch's outputs; ``mailbox`` is cleared here, once."""
    slots = (num_tokens, top_k)

    def empty(shape: int | tuple[int, ...], dtype: torch.dtype, wanted: bool = True) -> Any:
        return torch.empty(shape, dtype=dtype, device=device) if wanted else None

    has_masks, has_rows = schedule != "none", schedule == "rows"
    needs_mailbox = has_rows or (has_masks and collector)
    return FrontBuffers(
        topk_weights=empty(slots, torch.float32),
        topk_ids=empty(slots, torch.int32),
        packed=empty(slots, torch.int32, packed),
        data=empty((num_tokens, hidden_size), torch.float8_e4m3fn),
        scale=empty((num_tokens, hidden_size // GROUP_SIZE), torch.uint8),
        expert_token_mask=empty(num_local_experts, torch.int64, has_masks),
        expert_offsets=empty(num_local_experts + 1, torch.int32, has_rows),
        row_tokens=empty(num_tokens * top_k, torch.int32, has_rows),
        slot_rows=empty(slots, torch.int32, has_rows),
        mailbox=torch.zeros(num_tokens * top_k, dtype=torch.int32, device=device) if needs_mailbox else None,
    )


def why_not_covered(
    router_logits: torch.Tensor,
    hidden_states: torch.Tensor,
    config: RouterConfig,
    schedule: ScheduleOutput = "rows",
) -> str | None:
    """Why the launch does not take these inputs, or None where it does.

    A schedule is made for up to ``MAX_FRONT_TOKENS`` tokens; without one the launch takes ``MAX_TOKENS``.

    Looks at shapes, dtypes, strides and storage offsets alone: it works on meta and fake tensors, and launches nothing.
    """
    if router_logits.dim() != 2 or hidden_states.dim() != 2:
        return f"dimensions: expected 2 and 2, got {router_logits.dim()} and {hidden_states.dim()}"
    num_tokens, num_experts = router_logits.shape
    hidden_size = hidden_states.shape[1]
    if router_logits.dtype not in _DTYPES or hidden_states.dtype not in _DTYPES:
        return f"dtypes: expected float32 or bfloat16, got {router_logits.dtype} and {hidden_states.dtype}"
    max_tokens = MAX_TOKENS if schedule == "none" else MAX_FRONT_TOKENS
    if num_tokens > max_tokens:
        return f"num_tokens: expected at most {max_tokens}, got {num_tokens}"
    if not 1 <= num_experts <= MAX_EXPERTS:
        return f"num_experts: expected 1 to {MAX_EXPERTS}, got {num_experts}"
    if config.top_k > MAX_TOP_K:
        return f"top_k: expected at most {MAX_TOP_K}, got {config.top_k}"
    if hidden_size % GROUP_SIZE or not 0 <= hidden_size <= MAX_HIDDEN_SIZE:
        return f"hidden_size: expected a multiple of {GROUP_SIZE} up to {MAX_HIDDEN_SIZE}, got {hidden_size}"
    if router_logits.stride(1) != 1 and num_experts > 1:
        return f"router_logits: expected inner stride 1, got strides {router_logits.stride()}"
    if hidden_size == 0:  # routing alone
        return None
    if hidden_states.stride(1) != 1:
        return f"hidden_states: expected inner stride 1, got strides {hidden_states.stride()}"
    itemsize = hidden_states.element_size()
    if num_tokens > 1 and hidden_states.stride(0) * itemsize % 32:
        return (
            f"hidden_states: expected a row stride that is a multiple of 32 bytes, got strides {hidden_states.stride()}"
        )
    if hidden_states.storage_offset() * itemsize % 16:
        return (
            f"hidden_states: expected rows that start on 16 bytes, got storage offset {hidden_states.storage_offset()}"
        )
    return None


def covered(
    router_logits: torch.Tensor,
    hidden_states: torch.Tensor,
    config: RouterConfig,
    schedule: ScheduleOutput = "rows",
) -> bool:
    """True where ``launch_front`` takes these inputs; a pure predicate, see ``why_not_covered``."""
    return why_not_covered(router_logits, hidden_states, config, schedule) is None


def available(device: torch.device | int | None = None) -> bool:
    """True where the compiler, the driver's bindings and a device of a supported architecture are there."""
    return nvrtc.can_launch(device)


def launch_front(
    router_logits: torch.Tensor,
    hidden_states: torch.Tensor,
    config: RouterConfig,
    buffers: FrontBuffers,
    *,
    correction_bias: torch.Tensor | None = None,
    local_expert_offset: int = 0,
    num_local_experts: int | None = None,
    expert_map: torch.Tensor | None = None,
    packed_range: LocalRange | None = None,
    num_valid_tokens: torch.Tensor | None = None,
    is_programmatic: bool | None = None,
    variant: FrontVariant = DEFAULT_VARIANT,
    profile: torch.Tensor | None = None,
) -> None:
    """Route, quantise, pack and schedule in one launch on the current stream. No host sync, no allocation.

    router_logits: [T, E] float32 or bfloat16, inner stride 1, any row stride.
    hidden_states: [T, H] bfloat16 or float32, inner stride 1, row stride a multiple of 32 bytes; H may be 0.
    buffers: what to write, see ``allocate_buffers``.
    correction_bias: [E] float32 or None.
    local_expert_offset, num_local_experts: this rank's range, for the schedule; None means all experts.
    expert_map: [E] int32 or None. Local id or -1 of each expert, instead of a range; the offset must then be 0.
    packed_range: write rank-local packed ids for this range; None writes global ones. The caller has checked that
        they apply (``rank_local_num_experts``).
    num_valid_tokens: [1] int32 or int64 on the device, or None. Rows from this one on get ids -1, weights 0, zero rows.
    is_programmatic: programmatic dependent launch; None leaves it to ``RANKMOE_PDL``, which is on by default.
    Raises TypeError or ValueError for what does not fit, with expected and got.
    """
    check_router_inputs(router_logits, config, correction_bias)
    num_tokens, num_experts = router_logits.shape
    if hidden_states.dim() == 2 and hidden_states.shape[0] != num_tokens:
        raise ValueError(
            f"hidden_states: expected as many rows as router_logits ({num_tokens}), got {hidden_states.shape[0]}"
        )
    if hidden_states.dim() == 2:
        check_group_multiple("hidden_states.shape[1]", hidden_states.shape[1])
    reason = why_not_covered(router_logits, hidden_states, config, buffers.schedule_output)
    if reason is not None:
        raise ValueError(reason)
    if num_local_experts is None:
        num_local_experts = num_experts
    if expert_map is None:
        LocalRange(local_expert_offset, num_local_experts).validate(num_experts)
    else:
        if expert_map.dtype != torch.int32:
            raise TypeError(f"expert_map: expected int32, got {expert_map.dtype}")
        if tuple(expert_map.shape) != (num_experts,) or local_expert_offset or not expert_map.is_contiguous():
            raise ValueError(
                f"expert_map: expected contiguous ({num_experts},) with local_expert_offset 0, "
                f"got {tuple(expert_map.shape)} with {local_expert_offset}"
            )
        if not 0 <= num_local_experts <= num_experts:
            raise ValueError(f"num_local_experts: expected 0 to {num_experts}, got {num_local_experts}")
    if packed_range is not None:
        packed_range.validate(num_experts)
    if num_valid_tokens is not None and num_valid_tokens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"num_valid_tokens: expected int32 or int64, got {num_valid_tokens.dtype}")
    _check_buffers(buffers, num_tokens, config.top_k, hidden_states.shape[1], num_local_experts, hidden_states.device)
    inputs = {
        "router_logits": router_logits,
        "correction_bias": correction_bias,
        "expert_map": expert_map,
        "num_valid_tokens": num_valid_tokens,
    }
    for name, tensor in inputs.items():
        if tensor is not None and tensor.device != hidden_states.device:
            raise ValueError(f"{name}: expected device {hidden_states.device}, got {tensor.device}")
    if num_tokens == 0:
        for tensor in (buffers.expert_token_mask, buffers.expert_offsets):
            if tensor is not None:
                tensor.zero_()
        return
    macros = macros_of(
        num_tokens=num_tokens,
        num_experts=num_experts,
        hidden_size=hidden_states.shape[1],
        config=config,
        logits_dtype=router_logits.dtype,
        hidden_dtype=hidden_states.dtype,
        has_bias=correction_bias is not None,
        has_map=expert_map is not None,
        has_num_valid=num_valid_tokens is not None,
        pack="none" if buffers.packed is None else "global" if packed_range is None else "rank_local",
        schedule=buffers.schedule_output,
        has_vector_loads=_allows_vector_loads(router_logits, correction_bias, expert_map),
        variant=variant,
    )
    arguments = FrontArguments(
        router_logits=router_logits.data_ptr(),
        correction_bias=nvrtc.address(correction_bias),
        hidden_states=hidden_states.data_ptr(),
        expert_map=nvrtc.address(expert_map),
        num_valid_tokens=nvrtc.address(num_valid_tokens),
        profile=nvrtc.address(profile),
        logits_stride=router_logits.stride(0),
        hidden_stride=hidden_states.stride(0),
        num_tokens=num_tokens,
        local_expert_offset=local_expert_offset,
        num_local_experts=num_local_experts,
        packed_offset=packed_range.offset if packed_range else 0,
        packed_count=packed_range.count if packed_range else 0,
        routed_scaling_factor=config.routed_scaling_factor,
        **{name: nvrtc.address(getattr(buffers, name)) for name in _BUFFER_NAMES},
    )
    num_blocks, device = num_blocks_of(dict(macros), num_tokens), hidden_states.device
    num_threads = 32 * dict(macros)["ROUTE_WARPS"]
    with torch.cuda.device(device if device.type == "cuda" else -1):
        _kernel(macros).launch(device.index, num_blocks, num_threads, arguments, is_programmatic)


@cache
def macros_of(
    *,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
    config: RouterConfig,
    logits_dtype: torch.dtype,
    hidden_dtype: torch.dtype,
    has_bias: bool,
    has_map: bool,
    has_num_valid: bool,
    pack: Literal["none", "global", "rank_local"],
    schedule: ScheduleOutput,
    has_vector_loads: bool,
    variant: FrontVariant = DEFAULT_VARIANT,
) -> nvrtc.Macros:
    """The macros that ``front.cu`` is compiled with for a call. Token counts share all but cluster and chunk sizes."""
    schedule_code = 0 if schedule == "none" else 2 if schedule == "rows" or variant.collector else 1
    cluster = min(8, 1 << (num_tokens - 1).bit_length()) if schedule_code == 1 else 1
    route_warps = variant.route_warps or (8 if num_experts > 512 else 4)
    num_threads = 32 * route_warps
    values = variant.values or (4 if num_experts <= 4 * num_threads else 8)
    if values * num_threads < num_experts:
        raise ValueError(f"values: expected at least {num_experts} / {num_threads} threads, got {values}")
    num_routing_blocks = -(-num_tokens // cluster) * cluster
    quant_chunks = variant.quant_chunks
    if quant_chunks is None:
        num_free = max(_NUM_MULTIPROCESSORS - num_routing_blocks, 1)
        chunks_per_thread = -(-num_tokens * hidden_size // (8 * num_threads)) / num_free
        quant_chunks = 1 if chunks_per_thread <= 1 else 2 if chunks_per_thread <= 2 else 4
    return tuple(
        {
            "NUM_EXPERTS": num_experts,
            "TOP_K": config.top_k,
            "HIDDEN_SIZE": hidden_size,
            "LOGITS_BF16": int(logits_dtype == torch.bfloat16),
            "HIDDEN_BF16": int(hidden_dtype == torch.bfloat16),
            "HAS_BIAS": int(has_bias),
            "HAS_MAP": int(has_map),
            "HAS_NUM_VALID": int(has_num_valid),
            "SCORING": _SCORINGS.index(config.scoring),
            "RENORMALIZE": int(config.renormalize),
            "NUM_GROUPS": config.num_expert_groups,
            "TOPK_GROUPS": config.topk_groups,
            "ORDER_BY_VALUE": int(config.slot_order == "value"),
            "PACK": ("none", "global", "rank_local").index(pack),
            "SCHEDULE": schedule_code,
            "CLUSTER": cluster,
            "ROUTE_WARPS": route_warps,
            "VALUES": values,
            "VECTOR_LOADS": int(has_vector_loads),
            "QUANT_CHUNKS": quant_chunks,
            "THRESHOLD": variant.threshold,
            "STOP_AFTER": variant.stop_after,
            "PROFILE": int(variant.profile),
        }.items()
    )


def num_blocks_of(macros: dict[str, int], num_tokens: int) -> int:
    """Blocks of the launch: whole clusters of routing blocks, the collecting block, the quantising ones."""
    cluster = macros["CLUSTER"]
    routing = -(-num_tokens // cluster) * cluster
    chunks_per_block = 32 * macros["ROUTE_WARPS"] * macros["QUANT_CHUNKS"]
    quantizing = -(-num_tokens * macros["HIDDEN_SIZE"] // (8 * chunks_per_block))
    return -(-(routing + (macros["SCHEDULE"] == 2) + quantizing) // cluster) * cluster


def source() -> str:
    """The text of ``front.cu``."""
    return _source()


@cache
def _source() -> str:
    return (Path(__file__).parent / "front.cu").read_text()


@cache
def _kernel(macros: nvrtc.Macros) -> nvrtc.Kernel:
    return nvrtc.Kernel(_source(), "front", dict(macros))


class FrontArguments(ctypes.Structure):
    """The kernel's parameter; the same fields in the same order as in ``front.cu``."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "router_logits",
                "correction_bias",
                "hidden_states",
                "expert_map",
                "num_valid_tokens",
                "topk_weights",
                "topk_ids",
                "packed",
                "data",
                "scale",
                "expert_token_mask",
                "expert_offsets",
                "row_tokens",
                "slot_rows",
                "mailbox",
                "profile",
            )
        ),
        ("logits_stride", ctypes.c_longlong),
        ("hidden_stride", ctypes.c_longlong),
        ("num_tokens", ctypes.c_int),
        ("local_expert_offset", ctypes.c_int),
        ("num_local_experts", ctypes.c_int),
        ("packed_offset", ctypes.c_int),
        ("packed_count", ctypes.c_int),
        ("routed_scaling_factor", ctypes.c_float),
    ]


_BUFFER_NAMES = tuple(field.name for field in fields(FrontBuffers))


def _allows_vector_loads(
    router_logits: torch.Tensor, correction_bias: torch.Tensor | None, expert_map: torch.Tensor | None
) -> bool:
    """True where four neighbouring logits, biases and map entries can be read at once."""
    num_tokens, num_experts = router_logits.shape
    if num_experts % 4 or (num_tokens > 1 and router_logits.stride(0) % 4):
        return False
    if router_logits.data_ptr() % (4 * router_logits.element_size()):
        return False
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in (correction_bias, expert_map))


def _check_buffers(
    buffers: FrontBuffers, num_tokens: int, top_k: int, hidden_size: int, num_local_experts: int, device: torch.device
) -> None:
    slots = (num_tokens, top_k)
    expected = {
        "topk_weights": (slots, torch.float32),
        "topk_ids": (slots, torch.int32),
        "packed": (slots, torch.int32),
        "data": ((num_tokens, hidden_size), torch.float8_e4m3fn),
        "scale": ((num_tokens, hidden_size // GROUP_SIZE), torch.uint8),
        "expert_token_mask": ((num_local_experts,), torch.int64),
        "expert_offsets": ((num_local_experts + 1,), torch.int32),
        "row_tokens": ((num_tokens * top_k,), torch.int32),
        "slot_rows": (slots, torch.int32),
        "mailbox": ((num_tokens * top_k,), torch.int32),
    }
    for name, (shape, dtype) in expected.items():
        tensor = getattr(buffers, name)
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"buffers.{name}: expected {dtype}, got {tensor.dtype}")
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"buffers.{name}: expected contiguous {shape}, got {tuple(tensor.shape)} strides {tensor.stride()}"
            )
        if tensor.device != device:
            raise ValueError(f"buffers.{name}: expected device {device}, got {tensor.device}")
    rows = (buffers.expert_offsets, buffers.row_tokens, buffers.slot_rows)
    if any(tensor is None for tensor in rows) != all(tensor is None for tensor in rows):
        raise ValueError("buffers: expected expert_offsets, row_tokens and slot_rows together or not at all")
    if buffers.expert_offsets is not None and buffers.mailbox is None:
        raise ValueError("buffers.mailbox: expected a tensor where the schedule's rows are written, got None")

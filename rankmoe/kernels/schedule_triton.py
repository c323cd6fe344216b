# mypy: disable-error-code="no-untyped-def"
"""``build_schedule`` in Triton: one launch up to 64 tokens, four and a clearing beyond. No host sync; capturable.

Up to 64 tokens, the codes ``expert * 64 + token`` order the rows: a row *is* the number of smaller codes, an offset the
number of codes below its expert's, a mask the sum of its expert's token bits. Every program counts what it needs over
all slots by itself: no atomics, no order between programs, nothing to clear.

Beyond, every 64 tokens are a block with a mask of its own for each expert. Bits are set by atomic or, which gives the
same masks in any order; all that follows is counting them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rankmoe.kernels import triton_support
from rankmoe.kernels.triton_support import next_power_of_2
from rankmoe.schedule import check_id_space
from rankmoe.types import MAX_FRONT_TOKENS, MAX_TOKENS, ExpertSchedule

available = triton_support.available

MAX_LOCAL_EXPERTS = 4096
MAX_TOP_K = 128

_DTYPES = (torch.int32, torch.int64, torch.uint32)
_QUERIES_PER_BLOCK = 64
_SLOTS_PER_BLOCK = 512
_TOKENS_PER_MASK = tl.constexpr(MAX_FRONT_TOKENS)
_NO_CODE = tl.constexpr(2**31 - 1)


def why_not_covered(
    topk_ids: torch.Tensor, num_local_experts: int, expert_map: torch.Tensor | None = None
) -> str | None:
    """Why ``build_schedule`` does not take these ids, or None where it does. Looks at shapes, dtypes, strides alone."""
    if topk_ids.dim() != 2:
        return f"topk_ids: expected [num_tokens, top_k], got {tuple(topk_ids.shape)}"
    if topk_ids.dtype not in _DTYPES:
        return f"topk_ids: expected int32, int64 or uint32, got {topk_ids.dtype}"
    num_tokens, top_k = topk_ids.shape
    if num_tokens > MAX_TOKENS:
        return f"num_tokens: expected at most {MAX_TOKENS}, got {num_tokens}"
    if not 1 <= top_k <= MAX_TOP_K:
        return f"top_k: expected 1 to {MAX_TOP_K}, got {top_k}"
    if num_local_experts > MAX_LOCAL_EXPERTS:
        return f"num_local_experts: expected at most {MAX_LOCAL_EXPERTS}, got {num_local_experts}"
    if expert_map is not None and expert_map.dtype != torch.int32:
        return f"expert_map: expected int32, got {expert_map.dtype}"
    return None


def covered(topk_ids: torch.Tensor, num_local_experts: int, expert_map: torch.Tensor | None = None) -> bool:
    """True where ``build_schedule`` takes these ids; a pure predicate, see ``why_not_covered``."""
    return why_not_covered(topk_ids, num_local_experts, expert_map) is None


def build_schedule(
    topk_ids: torch.Tensor,
    num_local_experts: int,
    *,
    num_experts: int,
    local_expert_offset: int = 0,
    expert_map: torch.Tensor | None = None,
    is_packed: bool = False,
    out: ExpertSchedule | None = None,
) -> ExpertSchedule:
    """Schedule the slots whose expert this rank owns; every other id, negative or too large ones included, is skipped.

    topk_ids: [T, K] int32, int64 or uint32, any strides, in the id space that the other arguments describe: global ids
        with this rank's offset, or rank-local ids with ``num_experts=rank_local_num_experts(...)`` and offset 0.
    num_local_experts: L.
    num_experts: ids are valid in [0, num_experts).
    local_expert_offset: first id of this rank.
    expert_map: [num_experts] int32 on the ids' device, or None. Local id or -1 of each expert; the offset is then 0.
    is_packed: ``topk_ids`` are packed ids (int32); the id is the upper half.
    out: contiguous tensors to write, or None to allocate them.
    Returns the schedule of ``rankmoe.schedule.build_schedule``, with ``row_tokens`` [T * K] padded by -1.
    Raises TypeError for a dtype, ValueError for sizes or devices that do not fit.
    """
    reason = why_not_covered(topk_ids, num_local_experts, expert_map)
    if reason is not None:
        is_type = topk_ids.dtype not in _DTYPES or (expert_map is not None and expert_map.dtype != torch.int32)
        raise (TypeError if is_type else ValueError)(reason)
    if topk_ids.dtype == torch.uint32:
        topk_ids = topk_ids.view(torch.int32)
    if is_packed and topk_ids.dtype != torch.int32:
        raise TypeError(f"topk_ids: expected int32 where they are packed, got {topk_ids.dtype}")
    check_id_space(topk_ids, num_local_experts, num_experts, local_expert_offset, expert_map)
    if expert_map is not None:
        expert_map = expert_map.contiguous()
    (num_tokens, top_k), device = topk_ids.shape, topk_ids.device
    if out is None:
        out = ExpertSchedule.empty(num_tokens, top_k, num_local_experts, device)
    _check_out(out, num_tokens, top_k, num_local_experts)
    triton_support.check_same_device(
        device,
        expert_map=expert_map,
        expert_token_mask=out.expert_token_mask,
        expert_offsets=out.expert_offsets,
        row_tokens=out.row_tokens,
        slot_rows=out.slot_rows,
    )
    with triton_support.on_device_of(topk_ids):
        launch = _launch_small if num_tokens <= MAX_FRONT_TOKENS else _launch_large
        launch(topk_ids, expert_map, num_experts, local_expert_offset, num_local_experts, is_packed, out)
    return out


def _check_out(out: ExpertSchedule, num_tokens: int, top_k: int, num_local_experts: int) -> None:
    if out.num_tokens != num_tokens:
        raise ValueError(f"out.num_tokens: expected {num_tokens}, got {out.num_tokens}")
    if (out.expert_token_mask is None) == (num_tokens <= MAX_FRONT_TOKENS):
        raise ValueError(f"out.expert_token_mask: expected a tensor up to {MAX_FRONT_TOKENS} tokens and None beyond")
    if out.expert_token_mask is not None:
        triton_support.check_output("out.expert_token_mask", out.expert_token_mask, (num_local_experts,), torch.int64)
    triton_support.check_output("out.expert_offsets", out.expert_offsets, (num_local_experts + 1,), torch.int32)
    triton_support.check_output("out.row_tokens", out.row_tokens, (num_tokens * top_k,), torch.int32)
    triton_support.check_output("out.slot_rows", out.slot_rows, (num_tokens, top_k), torch.int32)


@triton.jit
def _local_experts(
    topk_ids, offsets, is_slot, expert_map, num_experts, local_expert_offset, num_local_experts, is_packed: tl.constexpr
):
    """Local expert (int32) of the slots at ``offsets``; -1 where this rank does not own it, or where nothing is."""
    ids = tl.load(topk_ids + offsets, mask=is_slot, other=-1)
    if is_packed:
        ids = ids >> 16
    is_valid = (ids >= 0) & (ids < num_experts)
    local = tl.where(is_valid, ids, 0).to(tl.int32)  # int64 ids fit int32 once they are known to be valid
    if expert_map is None:
        local -= local_expert_offset
    else:
        local = tl.load(expert_map + local, mask=is_valid, other=-1)
    return tl.where(is_valid & (local >= 0) & (local < num_local_experts), local, -1)


# ------------------------------------------------------------------------------------------------ up to 64 tokens


def _launch_small(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    local_expert_offset: int,
    num_local_experts: int,
    is_packed: bool,
    out: ExpertSchedule,
) -> None:
    num_tokens, top_k = topk_ids.shape
    num_slot_programs = triton.cdiv(num_tokens * top_k, _QUERIES_PER_BLOCK)
    num_expert_programs = triton.cdiv(num_local_experts + 1, _QUERIES_PER_BLOCK)
    slot_block = next_power_of_2(top_k)
    token_block = max(1, 128 // slot_block)
    _schedule_kernel[(num_slot_programs + num_expert_programs,)](
        topk_ids,
        expert_map,
        out.expert_token_mask,
        out.expert_offsets,
        out.row_tokens,
        out.slot_rows,
        num_tokens,
        topk_ids.stride(0),
        topk_ids.stride(1),
        num_experts,
        local_expert_offset,
        num_local_experts,
        num_slot_programs,
        is_packed=is_packed,
        top_k=top_k,
        slot_block=slot_block,
        token_block=token_block,
        num_token_blocks=next_power_of_2(triton.cdiv(num_tokens, token_block)),  # few values, few kernels to compile
        query_block=_QUERIES_PER_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_tokens", "local_expert_offset", "num_slot_programs"])
def _schedule_kernel(
    topk_ids,
    expert_map,
    expert_token_mask,
    expert_offsets,
    row_tokens,
    slot_rows,
    num_tokens,
    token_stride,
    slot_stride,
    num_experts,
    local_expert_offset,
    num_local_experts,
    num_slot_programs,
    is_packed: tl.constexpr,
    top_k: tl.constexpr,
    slot_block: tl.constexpr,
    token_block: tl.constexpr,
    num_token_blocks: tl.constexpr,
    query_block: tl.constexpr,
):
    """Answer ``query_block`` queries, 'how many codes are below this one?', about slots or about experts."""
    program = tl.program_id(0)
    is_about_slots = program < num_slot_programs
    query = tl.where(is_about_slots, program, program - num_slot_programs) * query_block + tl.arange(0, query_block)
    token = query // top_k
    is_slot = is_about_slots & (token < num_tokens)
    local = _local_experts(
        topk_ids,
        token.to(tl.int64) * token_stride + (query - token * top_k).to(tl.int64) * slot_stride,
        is_slot,
        expert_map,
        num_experts,
        local_expert_offset,
        num_local_experts,
        is_packed,
    )
    code = tl.where(is_about_slots, local * _TOKENS_PER_MASK + token, query * _TOKENS_PER_MASK)
    num_below = tl.zeros([query_block], tl.int32)
    num_rows = 0
    mask = tl.zeros([query_block], tl.int64)
    for block in range(num_token_blocks):
        other = _codes_of_tokens(
            topk_ids,
            block * token_block,
            num_tokens,
            token_stride,
            slot_stride,
            expert_map,
            num_experts,
            local_expert_offset,
            num_local_experts,
            is_packed,
            top_k,
            slot_block,
            token_block,
        )[:, None]  # sums run down the columns, which stay inside a thread for the most part
        num_below += tl.sum((other < code[None, :]).to(tl.int32), axis=0)
        num_rows += tl.sum((other < _NO_CODE).to(tl.int32))
        if not is_about_slots:
            bit = tl.full(other.shape, 1, tl.int64) << (other % _TOKENS_PER_MASK).to(tl.int64)
            mask += tl.sum(tl.where(other // _TOKENS_PER_MASK == query[None, :], bit, 0), axis=0)
    if is_about_slots:
        tl.store(slot_rows + query, tl.where(local >= 0, num_below, -1), mask=is_slot)
        # Slots of one token that name one expert write the same token to the same row.
        tl.store(row_tokens + num_below, token, mask=is_slot & (local >= 0))
        tl.store(row_tokens + query, tl.full([query_block], -1, tl.int32), mask=is_slot & (query >= num_rows))
    else:
        tl.store(expert_token_mask + query, mask, mask=query < num_local_experts)
        tl.store(expert_offsets + query, num_below, mask=query <= num_local_experts)


@triton.jit
def _codes_of_tokens(
    topk_ids,
    first_token,
    num_tokens,
    token_stride,
    slot_stride,
    expert_map,
    num_experts,
    local_expert_offset,
    num_local_experts,
    is_packed: tl.constexpr,
    top_k: tl.constexpr,
    slot_block: tl.constexpr,
    token_block: tl.constexpr,
):
    """[token_block * slot_block] codes; a slot without a local expert, or with an earlier slot's, has the largest."""
    token = first_token + tl.arange(0, token_block)[:, None]
    slot = tl.arange(0, slot_block)[None, :]
    local = _local_experts(
        topk_ids,
        token.to(tl.int64) * token_stride + slot.to(tl.int64) * slot_stride,
        (token < num_tokens) & (slot < top_k),
        expert_map,
        num_experts,
        local_expert_offset,
        num_local_experts,
        is_packed,
    )
    # [slot_block, token_block, slot_block]: does the first slot name the last one's expert, and come before it?
    earlier_slot = tl.arange(0, slot_block)[:, None, None]
    earlier = _local_experts(
        topk_ids,
        token[None, :, :].to(tl.int64) * token_stride + earlier_slot.to(tl.int64) * slot_stride,
        (token[None, :, :] < num_tokens) & (earlier_slot < top_k),
        expert_map,
        num_experts,
        local_expert_offset,
        num_local_experts,
        is_packed,
    )
    is_repeated = (earlier == local[None, :, :]) & (earlier_slot < slot[None, :, :])
    is_first = tl.sum(is_repeated.to(tl.int32), axis=0) == 0
    code = tl.where(is_first & (local >= 0), local * _TOKENS_PER_MASK + token, _NO_CODE)
    return tl.reshape(code, [token_block * slot_block])


# ------------------------------------------------------------------------------------------------ beyond 64 tokens


def _launch_large(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    local_expert_offset: int,
    num_local_experts: int,
    is_packed: bool,
    out: ExpertSchedule,
) -> None:
    (num_tokens, top_k), device = topk_ids.shape, topk_ids.device
    num_masks = triton.cdiv(num_tokens, MAX_FRONT_TOKENS)
    mask = torch.zeros((num_local_experts, num_masks), dtype=torch.int64, device=device)
    rows_before = torch.empty((num_local_experts, num_masks), dtype=torch.int32, device=device)
    counts = torch.empty(num_local_experts, dtype=torch.int32, device=device)
    slot_programs = (triton.cdiv(num_tokens * top_k, _SLOTS_PER_BLOCK),)
    ids = (topk_ids, expert_map, num_tokens, topk_ids.stride(0), topk_ids.stride(1))
    rank = (num_experts, local_expert_offset, num_local_experts)
    constants = {"is_packed": is_packed, "top_k": top_k, "slots_per_block": _SLOTS_PER_BLOCK}
    _set_bits_kernel[slot_programs](*ids, *rank, mask, num_masks, **constants)
    if num_local_experts:
        _count_rows_kernel[(num_local_experts,)](
            mask, rows_before, counts, num_masks, mask_block=next_power_of_2(num_masks)
        )
    _add_counts_kernel[(1,)](
        counts, out.expert_offsets, num_local_experts, expert_block=next_power_of_2(num_local_experts + 1)
    )
    _place_slots_kernel[slot_programs](
        *ids, *rank, mask, rows_before, out.expert_offsets, out.row_tokens, out.slot_rows, num_masks, **constants
    )


@triton.jit
def _slots_of_program(
    topk_ids,
    expert_map,
    num_tokens,
    token_stride,
    slot_stride,
    num_experts,
    local_expert_offset,
    num_local_experts,
    is_packed: tl.constexpr,
    top_k: tl.constexpr,
    slots_per_block: tl.constexpr,
):
    """This program's slots (places in [T, K], flat), their tokens and their local experts."""
    slot = tl.program_id(0) * slots_per_block + tl.arange(0, slots_per_block)
    token = slot // top_k
    offsets = token.to(tl.int64) * token_stride + (slot - token * top_k).to(tl.int64) * slot_stride
    local = _local_experts(
        topk_ids,
        offsets,
        token < num_tokens,
        expert_map,
        num_experts,
        local_expert_offset,
        num_local_experts,
        is_packed,
    )
    return slot, token, local


@triton.jit(do_not_specialize=["num_tokens", "local_expert_offset", "num_masks"])
def _set_bits_kernel(
    topk_ids,
    expert_map,
    num_tokens,
    token_stride,
    slot_stride,
    num_experts,
    local_expert_offset,
    num_local_experts,
    mask,
    num_masks,
    is_packed: tl.constexpr,
    top_k: tl.constexpr,
    slots_per_block: tl.constexpr,
):
    """mask: [L, num_masks], zero before. Set each slot's token bit in the mask of its expert and block of tokens."""
    _, token, local = _slots_of_program(
        topk_ids,
        expert_map,
        num_tokens,
        token_stride,
        slot_stride,
        num_experts,
        local_expert_offset,
        num_local_experts,
        is_packed,
        top_k,
        slots_per_block,
    )
    bit = tl.full([slots_per_block], 1, tl.int64) << (token % _TOKENS_PER_MASK).to(tl.int64)
    tl.atomic_or(mask + local * num_masks + token // _TOKENS_PER_MASK, bit, mask=local >= 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_masks"])
def _count_rows_kernel(mask, rows_before, counts, num_masks, mask_block: tl.constexpr):
    """For one expert: its rows before each block of tokens, and all of them."""
    expert = tl.program_id(0)
    block = tl.arange(0, mask_block)
    is_block = block < num_masks
    num_rows = _count_bits(tl.load(mask + expert * num_masks + block, mask=is_block, other=0))
    tl.store(rows_before + expert * num_masks + block, tl.cumsum(num_rows, axis=0) - num_rows, mask=is_block)
    tl.store(counts + expert, tl.sum(num_rows))


@triton.jit(do_not_specialize=["num_local_experts"])
def _add_counts_kernel(counts, expert_offsets, num_local_experts, expert_block: tl.constexpr):
    """Offsets: the rows of all experts before each one."""
    expert = tl.arange(0, expert_block)
    count = tl.load(counts + expert, mask=expert < num_local_experts, other=0)
    tl.store(expert_offsets + expert, tl.cumsum(count, axis=0) - count, mask=expert <= num_local_experts)


@triton.jit(do_not_specialize=["num_tokens", "local_expert_offset", "num_masks"])
def _place_slots_kernel(
    topk_ids,
    expert_map,
    num_tokens,
    token_stride,
    slot_stride,
    num_experts,
    local_expert_offset,
    num_local_experts,
    mask,
    rows_before,
    expert_offsets,
    row_tokens,
    slot_rows,
    num_masks,
    is_packed: tl.constexpr,
    top_k: tl.constexpr,
    slots_per_block: tl.constexpr,
):
    """A slot's row: its expert's first, plus the rows of earlier blocks of tokens, plus those of lower bits."""
    slot, token, local = _slots_of_program(
        topk_ids,
        expert_map,
        num_tokens,
        token_stride,
        slot_stride,
        num_experts,
        local_expert_offset,
        num_local_experts,
        is_packed,
        top_k,
        slots_per_block,
    )
    is_slot, is_local = token < num_tokens, local >= 0
    place = local * num_masks + token // _TOKENS_PER_MASK
    below = (tl.full([slots_per_block], 1, tl.int64) << (token % _TOKENS_PER_MASK).to(tl.int64)) - 1
    row = tl.load(expert_offsets + local, mask=is_local, other=0) + tl.load(rows_before + place, mask=is_local, other=0)
    row += _count_bits(tl.load(mask + place, mask=is_local, other=0) & below)
    tl.store(slot_rows + slot, tl.where(is_local, row, -1), mask=is_slot)
    # Slots of one token that name one expert write the same token to the same row.
    tl.store(row_tokens + row, token, mask=is_local)
    num_rows = tl.load(expert_offsets + num_local_experts)
    tl.store(row_tokens + slot, tl.full([slots_per_block], -1, tl.int32), mask=is_slot & (slot >= num_rows))


@triton.jit
def _count_bits(bits):
    """Number of ones (int32) in int64 words, by adding neighbouring fields; compilers know this for a popcount."""
    bits = bits.to(tl.uint64, bitcast=True)
    bits -= (bits >> 1) & 0x5555555555555555
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((bits * 0x0101010101010101) >> 56).to(tl.int32)

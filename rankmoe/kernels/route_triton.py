# mypy: disable-error-code="no-untyped-def"
"""``route`` and ``pack_topk`` in Triton: one program a token, one launch, any number of tokens.

A rank value becomes an integer in the order of the floats, and (integer, id) one int64 that no other expert shares.
The K-th best is then the largest one below the one before it, ties and NaN included, and nothing is marked as taken.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rankmoe.kernels import triton_support
from rankmoe.kernels.triton_support import next_power_of_2
from rankmoe.pack import rank_local_num_experts
from rankmoe.route import check_router_inputs
from rankmoe.types import LocalRange, RouterConfig, Routing

available = triton_support.available

MAX_EXPERTS = 1024
MAX_TOP_K = 32

_DTYPES = (torch.float32, torch.bfloat16)
_SIGMOID = tl.constexpr("sigmoid")
_SOFTMAX = tl.constexpr("softmax")
_SELECTED = tl.constexpr("softmax_selected")
_NO_ID = tl.constexpr(MAX_EXPERTS)
_INELIGIBLE = tl.constexpr(-(2**62))  # below every ranked expert
_NUM_ID_BITS = tl.constexpr((MAX_EXPERTS - 1).bit_length())
_ID_BITS = tl.constexpr(MAX_EXPERTS - 1)


def why_not_covered(router_logits: torch.Tensor, config: RouterConfig) -> str | None:
    """Why ``route`` does not take these inputs, or None where it does. Looks at shape, dtype and strides alone."""
    if router_logits.dim() != 2:
        return f"router_logits: expected [num_tokens, num_experts], got {tuple(router_logits.shape)}"
    if router_logits.dtype not in _DTYPES:
        return f"router_logits: expected float32 or bfloat16, got {router_logits.dtype}"
    num_experts = router_logits.shape[1]
    if not 1 <= num_experts <= MAX_EXPERTS:
        return f"num_experts: expected 1 to {MAX_EXPERTS}, got {num_experts}"
    if config.top_k > MAX_TOP_K:
        return f"top_k: expected at most {MAX_TOP_K}, got {config.top_k}"
    if router_logits.stride(1) != 1 and num_experts > 1:
        return f"router_logits: expected inner stride 1, got strides {router_logits.stride()}"
    return None


def covered(router_logits: torch.Tensor, config: RouterConfig) -> bool:
    """True where ``route`` takes these inputs; a pure predicate, see ``why_not_covered``."""
    return why_not_covered(router_logits, config) is None


def route(
    router_logits: torch.Tensor,
    config: RouterConfig,
    correction_bias: torch.Tensor | None = None,
    num_valid_tokens: torch.Tensor | None = None,
    *,
    packed: bool = False,
    local_range: LocalRange | None = None,
    out: Routing | None = None,
) -> Routing:
    """Choose each token's experts and, where asked, pack them, in one launch. No host sync; capturable.

    router_logits: [T, E] float32 or bfloat16, inner stride 1, any row stride.
    correction_bias: [E] float32 or None. Added to the scores for ranking only.
    num_valid_tokens: [1] integer on the device, or None. Rows from this one on are not read; they get ids -1 and
        weights 0, and packed ids as ``pack_topk`` makes of those.
    packed: write packed ids too. local_range: as ``pack_topk``: rank-local packed ids where they apply, else global.
    out: contiguous tensors to write, or None to allocate them; its ``packed`` may stay None where ``packed`` is False.
    Returns topk_weights [T, K] float32 and topk_ids [T, K] int32, global, and packed [T, K] int32 or None.
    Raises TypeError for a dtype, ValueError for a shape, stride, range or device that does not fit.
    """
    check_router_inputs(router_logits, config, correction_bias)
    reason = why_not_covered(router_logits, config)
    if reason is not None:
        raise ValueError(reason)
    (num_tokens, num_experts), top_k, device = router_logits.shape, config.top_k, router_logits.device
    applies = local_range is not None and rank_local_num_experts(num_experts, local_range, top_k) is not None
    written_for = local_range if packed and applies else None
    slots = (num_tokens, top_k)
    if out is None:
        out = Routing(
            torch.empty(slots, dtype=torch.float32, device=device),
            torch.empty(slots, dtype=torch.int32, device=device),
            torch.empty(slots, dtype=torch.int32, device=device) if packed else None,
        )
    topk_weights, topk_ids, packed_ids = out.topk_weights, out.topk_ids, out.packed if packed else None
    triton_support.check_output("out.topk_weights", topk_weights, slots, torch.float32)
    triton_support.check_output("out.topk_ids", topk_ids, slots, torch.int32)
    if packed:
        if packed_ids is None:
            raise ValueError("out.packed: expected a tensor where packed ids are asked for, got None")
        triton_support.check_output("out.packed", packed_ids, slots, torch.int32)
    triton_support.check_same_device(
        device,
        correction_bias=correction_bias,
        num_valid_tokens=num_valid_tokens,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        packed=packed_ids,
    )
    group_size = num_experts // config.num_expert_groups
    if num_tokens:
        with triton_support.on_device_of(router_logits):
            _route_kernel[(num_tokens,)](
                router_logits,
                None if correction_bias is None else correction_bias.contiguous(),
                num_valid_tokens,
                topk_weights,
                topk_ids,
                packed_ids,
                router_logits.stride(0),
                written_for.offset if written_for else 0,
                written_for.count if written_for else num_experts,
                config.routed_scaling_factor,
                top_k=top_k,
                scoring=config.scoring,
                renormalize=config.renormalize,
                num_groups=config.num_expert_groups,
                group_size=group_size,
                topk_groups=config.topk_groups,
                is_ordered_by_id=config.slot_order == "id",
                is_rank_local=written_for is not None,
                group_block=next_power_of_2(config.num_expert_groups),
                member_block=next_power_of_2(group_size),
                slot_block=next_power_of_2(top_k),
                # The number of warps may not depend on the number of tokens: it decides in which order softmax adds.
                num_warps=4 if num_experts > 256 else 2 if num_experts > 128 else 1,
            )
    return Routing(topk_weights, topk_ids, packed_ids, written_for)


@triton.jit(do_not_specialize=["packed_offset", "packed_count"])
def _route_kernel(
    router_logits,
    correction_bias,
    num_valid_tokens,
    topk_weights,
    topk_ids,
    packed,
    logits_stride,
    packed_offset,
    packed_count,
    routed_scaling_factor,
    top_k: tl.constexpr,
    scoring: tl.constexpr,
    renormalize: tl.constexpr,
    num_groups: tl.constexpr,
    group_size: tl.constexpr,
    topk_groups: tl.constexpr,
    is_ordered_by_id: tl.constexpr,
    is_rank_local: tl.constexpr,
    group_block: tl.constexpr,
    member_block: tl.constexpr,
    slot_block: tl.constexpr,
):
    """Route one token. Experts form a [group_block, member_block] tile, a group a row."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, group_block)[:, None]
    member = tl.arange(0, member_block)[None, :]
    expert = group * group_size + member
    is_expert = (group < num_groups) & (member < group_size)
    slot = tl.arange(0, slot_block)
    is_slot = slot < top_k
    is_read, is_slot_read = is_expert, is_slot
    if num_valid_tokens is not None:
        is_valid = token < tl.load(num_valid_tokens)
        is_read, is_slot_read = is_expert & is_valid, is_slot & is_valid
    row = router_logits + token * logits_stride

    logits = tl.load(row + expert, mask=is_read, other=0.0).to(tl.float32)
    scores = logits  # softmax_selected ranks the logits; its softmax follows on the selected ones
    if scoring == _SIGMOID:
        scores = _sigmoid(logits)
    if scoring == _SOFTMAX:
        largest, total = _softmax_terms(logits, is_expert)
        scores = tl.div_rn(_exp(logits - largest), total)
    rank_values = scores
    if correction_bias is not None:
        rank_values = scores + tl.load(correction_bias + expert, mask=is_expert, other=0.0)
    ranked = tl.where(is_expert, _ranked(rank_values, expert), _INELIGIBLE)
    if num_groups > 1:
        ranked = _keep_best_groups(ranked, group_size, num_groups, topk_groups, group_block)

    ids = tl.full([slot_block], _NO_ID, tl.int32)
    best = tl.max(ranked) + 1
    for k in range(top_k):
        best = tl.max(tl.where(ranked < best, ranked, _INELIGIBLE))
        ids = tl.where(slot == k, _id_of(best), ids)
    if is_ordered_by_id:
        ids = _ascending(ids, slot_block)

    weights = tl.load(row + ids, mask=is_slot_read, other=0.0).to(tl.float32)
    if scoring == _SIGMOID:
        weights = _sigmoid(weights)
    if scoring == _SOFTMAX:
        weights = tl.div_rn(_exp(weights - largest), total)
    if scoring == _SELECTED:
        largest, total = _softmax_terms(weights, is_slot)
        weights = tl.div_rn(_exp(weights - largest), total)
    if renormalize:
        total = 0.0
        for k in tl.static_range(top_k):  # slot order is part of the rule; unrolled, the look-ups overlap
            total += tl.sum(tl.where(slot == k, weights, 0.0))
        weights = tl.div_rn(weights, tl.where(total > 0.0, total, 1.0))
    weights = weights * routed_scaling_factor

    if num_valid_tokens is not None:
        weights, ids = tl.where(is_valid, weights, 0.0), tl.where(is_valid, ids, -1)
    tl.store(topk_weights + token * top_k + slot, weights, mask=is_slot)
    tl.store(topk_ids + token * top_k + slot, ids, mask=is_slot)
    if packed is not None:
        if is_rank_local:
            local = ids - packed_offset
            is_owned = (ids >= packed_offset) & (local < packed_count)
            ids = tl.where(is_owned, local, packed_count + slot)
        tl.store(packed + token * top_k + slot, (ids << 16) | _bfloat16_bits(weights), mask=is_slot)


@triton.jit
def _keep_best_groups(
    ranked, group_size: tl.constexpr, num_groups: tl.constexpr, topk_groups: tl.constexpr, group_block: tl.constexpr
):
    """Make every expert outside the best groups ineligible. A group's value is the sum of its two best rank values."""
    best = tl.max(ranked, axis=1)
    group_values = _value_of(best)
    if group_size > 1:
        second = tl.max(tl.where(ranked < best[:, None], ranked, _INELIGIBLE), axis=1)
        group_values += _value_of(second)
    group = tl.arange(0, group_block)
    ranked_groups = tl.where(group < num_groups, _ranked(group_values, group), _INELIGIBLE)
    last_kept = tl.max(ranked_groups) + 1
    for _ in range(topk_groups):
        last_kept = tl.max(tl.where(ranked_groups < last_kept, ranked_groups, _INELIGIBLE))
    return tl.where((ranked_groups >= last_kept)[:, None], ranked, _INELIGIBLE)


@triton.jit
def _ranked(rank_values, ids):
    """int64 in the order (rank value, then smaller id)."""
    return _key_of(rank_values).to(tl.int64) * (_ID_BITS + 1) + (ids ^ _ID_BITS)


@triton.jit
def _id_of(ranked):
    return ((ranked ^ _ID_BITS) & _ID_BITS).to(tl.int32)


@triton.jit
def _value_of(ranked):
    """The rank value (float32) in a ranked int64."""
    return _value_of_key((ranked >> _NUM_ID_BITS).to(tl.int32))


@triton.jit
def _key_of(rank_values):
    """int32 in the order of float32 values: NaN as -1e30, -0.0 equal to +0.0."""
    rank_values = tl.where(rank_values != rank_values, -1e30, rank_values)
    rank_values = tl.where(rank_values == 0.0, 0.0, rank_values)
    bits = rank_values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value_of_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _ascending(ids, slot_block: tl.constexpr):
    """Sort a few numbers by counting the smaller ones; the padding, all equal and largest, falls on one place."""
    slot = tl.arange(0, slot_block)
    place = tl.sum((ids[None, :] < ids[:, None]).to(tl.int32), axis=1)
    is_here = (place[:, None] == slot[None, :]) & (ids < _NO_ID)[:, None]
    return tl.sum(tl.where(is_here, ids[:, None], 0), axis=0)


@triton.jit
def _softmax_terms(logits, is_counted):
    """The largest counted logit and the sum of the exponentials; a NaN anywhere makes the sum NaN."""
    # Integers, since what a maximum of floats makes of NaN differs from place to place.
    largest = _value_of_key(tl.max(tl.where(is_counted, _key_of(logits), -(2**31))))
    return largest, tl.sum(tl.where(is_counted, _exp(logits - largest), 0.0))


@triton.jit
def _sigmoid(x):
    """Within a few ulp of the exact value for every x, subnormal results included."""
    power = _exp(-tl.abs(x))
    return tl.div_rn(tl.where(x < 0.0, power, 1.0), 1.0 + power)


@triton.jit
def _exp(x):
    """exp(x) for x <= 0 or NaN within a few ulp; ``tl.exp`` alone loses one more bit whenever |x| doubles."""
    clamped = tl.maximum(tl.where(x != x, 0.0, x), -105.0)
    # x = n * ln 2 + rest; n times the first part of ln 2 is exact.
    n = tl.floor(clamped * 1.44269504 + 0.5)
    rest = (clamped - n * 0.693359375) + n * 2.12194440e-4
    exponent = n.to(tl.int32)
    half = exponent >> 1  # in two steps, since 2^n itself may not be a normal number
    power = tl.exp(rest) * _power_of_2(half) * _power_of_2(exponent - half)
    return tl.where(x != x, x, power)


@triton.jit
def _power_of_2(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _bfloat16_bits(value):
    """The upper half (int32) of float32 values rounded to bfloat16, ties to even; NaN is 0x7FC0."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(value != value, 0x7FC0, rounded)

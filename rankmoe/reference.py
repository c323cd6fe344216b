"""The executable specification: every rule of docs/numerics.md in the plainest torch, one token or row at a time.

It shares no code with the operations it is the oracle of, only their value types. Slow on purpose.
"""

from __future__ import annotations

import torch

from rankmoe.types import (
    GROUP_SIZE,
    Activation,
    ExpertSchedule,
    ExpertWeights,
    LocalRange,
    MXTensor,
    RouterConfig,
    Routing,
    SiTU,
)


# --- route -----------------------------------------------------------------------------------------------------------
def route(logits: torch.Tensor, config: RouterConfig, correction_bias: torch.Tensor | None = None) -> Routing:
    """Choose each token's experts; arguments and result as ``rankmoe.route.route``."""
    weights = torch.empty(logits.shape[0], config.top_k, dtype=torch.float32)
    ids = torch.empty(logits.shape[0], config.top_k, dtype=torch.int32)
    for token in range(logits.shape[0]):
        weights[token], ids[token] = _route_token(logits[token].float(), config, correction_bias)
    return Routing(weights, ids)


def _route_token(
    logits: torch.Tensor, config: RouterConfig, correction_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if config.scoring == "sigmoid":
        scores = torch.sigmoid(logits.double()).float()
    elif config.scoring == "softmax":
        scores = torch.softmax(logits, -1)
    else:
        scores = logits
    rank_values = scores if correction_bias is None else scores + correction_bias
    rank_list = [-1e30 if value != value else value for value in rank_values.tolist()]
    eligible = set(range(len(rank_list)))
    if config.num_expert_groups > 1:
        eligible = _eligible_experts(rank_list, config)
    chosen: list[int] = []
    for _ in range(config.top_k):
        # The largest value; among equals (-0.0 == 0.0) the smallest id.
        best = min((e for e in eligible if e not in chosen), key=lambda e: (-rank_list[e], e))
        chosen.append(best)
    if config.slot_order == "id":
        chosen.sort()
    ids = torch.tensor(chosen, dtype=torch.int32)
    selected = scores[ids.long()]
    if config.scoring == "softmax_selected":
        selected = torch.softmax(selected, -1)
    if config.renormalize:
        total = torch.zeros((), dtype=torch.float32)
        for slot in range(config.top_k):
            total = total + selected[slot]
        selected = selected / (total if total > 0 else 1.0)
    return selected * config.routed_scaling_factor, ids


def _eligible_experts(rank_list: list[float], config: RouterConfig) -> set[int]:
    group_size = len(rank_list) // config.num_expert_groups
    groups = [range(g * group_size, (g + 1) * group_size) for g in range(config.num_expert_groups)]
    values = []
    for group in groups:
        best_two = sorted((rank_list[e] for e in group), reverse=True)[:2]
        value = torch.tensor(best_two, dtype=torch.float32).sum().item()
        values.append(-1e30 if value != value else value)
    best_groups = sorted(range(len(groups)), key=lambda g: (-values[g], g))[: config.topk_groups]
    return {e for g in best_groups for e in groups[g]}


# --- quantise --------------------------------------------------------------------------------------------------------
def e4m3_values() -> torch.Tensor:
    """[127] float64. Values of the finite e4m3 codes 0x00..0x7E (OCP FP8: bias 7, subnormals, no infinity)."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        values.append(mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))
    return torch.tensor(values, dtype=torch.float64)


def e2m1_values() -> torch.Tensor:
    """[8] float64. Values of the e2m1 codes 0..7."""
    return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def scale_values() -> torch.Tensor:
    """[256] float64. Values of the UE8M0 scale bytes."""
    values = [2.0 ** (byte - 127) for byte in range(255)]
    return torch.tensor([*values, torch.nan], dtype=torch.float64)


def _nearest_code(values: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """Index of the nearest magnitude, ties to the even index, saturating; values [N] float64."""
    distance = (values.abs()[:, None] - magnitudes).abs()
    is_nearest = distance == distance.amin(1, keepdim=True)
    is_even = torch.arange(len(magnitudes)) % 2 == 0
    preference = is_nearest.int() * 2 + (is_nearest & is_even).int()
    return preference.argmax(1)


def quantize_mxfp8(hidden_states: torch.Tensor) -> MXTensor:
    """Quantise rows group by group; arguments and result as ``rankmoe.quantize.quantize_mxfp8``."""
    num_tokens, hidden_size = hidden_states.shape
    codes = torch.empty(num_tokens, hidden_size, dtype=torch.uint8)
    scale = torch.empty(num_tokens, hidden_size // GROUP_SIZE, dtype=torch.uint8)
    for token in range(num_tokens):
        for group in range(hidden_size // GROUP_SIZE):
            columns = slice(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
            values = hidden_states[token, columns].float().double()
            if not values.isfinite().all():
                codes[token, columns], scale[token, group] = 0x7F, 255
                continue
            amax = max(values.abs().max().item(), torch.tensor(1e-10, dtype=torch.float32).item())
            byte = next(b for b in range(255) if 448.0 * 2.0 ** (b - 127) >= amax)
            scaled = values / 2.0 ** (byte - 127)
            codes[token, columns] = (_nearest_code(scaled, e4m3_values()) + 128 * scaled.signbit()).to(torch.uint8)
            scale[token, group] = byte
    return MXTensor(codes.view(torch.float8_e4m3fn), scale, "mxfp8")


def quantize_mxfp4(weight: torch.Tensor) -> MXTensor:
    """Quantise a finite [out, in] weight group by group; result as ``rankmoe.quantize.quantize_mxfp4``."""
    num_outputs, num_inputs = weight.shape
    codes = torch.empty(num_outputs, num_inputs, dtype=torch.uint8)
    scale = torch.empty(num_outputs, num_inputs // GROUP_SIZE, dtype=torch.uint8)
    for row in range(num_outputs):
        for group in range(num_inputs // GROUP_SIZE):
            columns = slice(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
            values = weight[row, columns].float().double()
            amax = values.abs().max().item()
            byte = next(b for b in range(255) if 6.0 * 2.0 ** (b - 127) >= amax) if amax else 0
            scaled = values / 2.0 ** (byte - 127)
            codes[row, columns] = (_nearest_code(scaled, e2m1_values()) + 8 * scaled.signbit()).to(torch.uint8)
            scale[row, group] = byte
    return MXTensor(codes[:, 0::2] + 16 * codes[:, 1::2], scale, "mxfp4")


def dequantize(tensor: MXTensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Decode to [..., N] ``dtype``."""
    if tensor.format == "mxfp8":
        bits = tensor.data.view(torch.uint8).int()
        table = torch.cat([e4m3_values(), torch.tensor([torch.nan], dtype=torch.float64)])
        values = table[bits & 0x7F] * torch.where(bits >= 128, -1.0, 1.0)
    else:
        bytes_ = tensor.data.int()
        bits = torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).flatten(-2)
        values = e2m1_values()[bits & 7] * torch.where(bits >= 8, -1.0, 1.0)
    return (values * scale_values()[tensor.scale.int()].repeat_interleave(GROUP_SIZE, dim=-1)).to(dtype)


# --- pack ------------------------------------------------------------------------------------------------------------
def rank_local_num_experts(num_experts: int, local_range: LocalRange, top_k: int) -> int | None:
    """The consumer's number of experts, or None where ids stay global."""
    rounded = local_range.count + top_k
    while rounded % 4:
        rounded += 1
    return rounded if 0 < local_range.count < num_experts and rounded < num_experts else None


def rank_local_ids(topk_ids: torch.Tensor, local_range: LocalRange) -> torch.Tensor:
    """Relabel [T, K] ids slot by slot."""
    relabelled = torch.empty_like(topk_ids)
    for token in range(topk_ids.shape[0]):
        for slot in range(topk_ids.shape[1]):
            expert = int(topk_ids[token, slot])
            is_owned = local_range.offset <= expert < local_range.offset + local_range.count
            relabelled[token, slot] = expert - local_range.offset if is_owned else local_range.count + slot
    return relabelled


def pack(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[T, K] int32 packed ids, bfloat16 rounding done on the float32 bits."""
    bits = weights.view(torch.int32).long() & 0xFFFFFFFF
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = torch.where(weights.isnan(), 0x7FC0, rounded)
    packed = ((ids.long() & 0xFFFF) << 16) | (rounded & 0xFFFF)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


# --- schedule --------------------------------------------------------------------------------------------------------
def build_schedule(local_ids: torch.Tensor, num_local_experts: int) -> ExpertSchedule:
    """Schedule [T, K] local expert ids, where anything outside [0, L) is nobody's."""
    num_tokens, top_k = local_ids.shape
    row_tokens: list[int] = []
    offsets, masks = [0], []
    slot_rows = torch.full((num_tokens, top_k), -1, dtype=torch.int32)
    for expert in range(num_local_experts):
        mask = 0
        for token in range(num_tokens):
            slots = [slot for slot in range(top_k) if int(local_ids[token, slot]) == expert]
            if slots:
                slot_rows[token, slots] = len(row_tokens)
                row_tokens.append(token)
                mask |= 1 << token
        offsets.append(len(row_tokens))
        masks.append(mask - 2**64 if mask >= 2**63 else mask)
    return ExpertSchedule(
        num_tokens=num_tokens,
        expert_token_mask=torch.tensor(masks, dtype=torch.int64) if num_tokens <= 64 else None,
        expert_offsets=torch.tensor(offsets, dtype=torch.int32),
        row_tokens=torch.tensor(row_tokens, dtype=torch.int32),
        slot_rows=slot_rows,
    )


# --- expert GEMMs ----------------------------------------------------------------------------------------------------
def activation(gate: torch.Tensor, up: torch.Tensor, kind: Activation) -> torch.Tensor:
    """SiTU or SwiGLU, element by element."""
    if isinstance(kind, SiTU):
        bounded_gate = kind.beta * torch.tanh(gate / kind.beta) / (1 + torch.exp(-gate))
        return bounded_gate * kind.linear_beta * torch.tanh(up / kind.linear_beta)
    if kind.limit is not None:
        limit = gate.new_tensor(kind.limit)
        gate, up = torch.minimum(gate, limit), torch.maximum(torch.minimum(up, limit), -limit)
    return (up + kind.up_offset) * gate / (1 + torch.exp(-kind.alpha * gate))


def gate_up_float(x: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights, dtype: torch.dtype) -> torch.Tensor:
    """[R, I] ``dtype``. The middle activation before requantisation."""
    rows = dequantize(x, dtype)
    out = torch.empty(schedule.row_tokens.shape[0], weights.intermediate_size, dtype=dtype)
    for expert in range(schedule.num_local_experts):
        start, stop = schedule.expert_offsets[expert], schedule.expert_offsets[expert + 1]
        if start == stop:
            continue
        weight = dequantize(weights.w13[expert], dtype)
        for row in range(start, stop):
            accumulators = weight @ rows[schedule.row_tokens[row]]
            if weights.w13_bias is not None:
                accumulators = accumulators + weights.w13_bias[expert].to(dtype)
            gate, up = accumulators[: weights.intermediate_size], accumulators[weights.intermediate_size :]
            out[row] = activation(gate, up, weights.activation)
    return out


def gate_up(
    x: MXTensor,
    schedule: ExpertSchedule,
    weights: ExpertWeights,
    out: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> MXTensor:
    """[R, I] mxfp8 middle; the activation is rounded to float32 and nothing else before quantisation."""
    return quantize_mxfp8(gate_up_float(x, schedule, weights, dtype).float())


def down(
    middle: MXTensor,
    schedule: ExpertSchedule,
    weights: ExpertWeights,
    out: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """[R, H] rows: float32 into ``out`` where given (as a backend), else ``dtype``."""
    rows = dequantize(middle, dtype)
    result = torch.empty(rows.shape[0], weights.hidden_size, dtype=dtype)
    for expert in range(schedule.num_local_experts):
        start, stop = schedule.expert_offsets[expert], schedule.expert_offsets[expert + 1]
        if start == stop:
            continue
        weight = dequantize(weights.w2[expert], dtype)
        for row in range(start, stop):
            result[row] = weight @ rows[row]
            if weights.w2_bias is not None:
                result[row] += weights.w2_bias[expert].to(dtype)
    return result if out is None else out.copy_(result)


# --- combine ---------------------------------------------------------------------------------------------------------
def combine(rows: torch.Tensor, topk_weights: torch.Tensor, schedule: ExpertSchedule) -> torch.Tensor:
    """[T, H] in the rows' dtype, before any rounding to the output's."""
    out = torch.zeros(schedule.num_tokens, rows.shape[1], dtype=rows.dtype)
    for token in range(schedule.num_tokens):
        for slot in range(topk_weights.shape[1]):
            row = int(schedule.slot_rows[token, slot])
            if row >= 0:
                out[token] += topk_weights[token, slot].to(rows.dtype) * rows[row]
    return out


def fused_moe(x: MXTensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """[T, H] float64. This rank's part of the layer from global ids, through an expert map."""
    local_ids = torch.full_like(topk_ids, -1)
    for local, expert in enumerate(weights.placement.expert_ids):
        local_ids[topk_ids == expert] = local
    schedule = build_schedule(local_ids, weights.num_local_experts)
    rows = down(gate_up(x, schedule, weights), schedule, weights)
    return combine(rows, topk_weights, schedule)

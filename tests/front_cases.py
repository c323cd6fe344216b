"""Inputs and checks for implementations of the front, shared by tests and benchmarks.

``check_front`` holds a launch's outputs against the torch statements of each rule: ids as docs/numerics.md allows,
weights to 1e-5, everything that follows from ids, weights and rows bit for bit.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from rankmoe.kernels.front_cuda import DEFAULT_VARIANT, FrontBuffers, FrontVariant, allocate_buffers, launch_front
from rankmoe.pack import pack_topk, rank_local_num_experts
from rankmoe.quantize import quantize_mxfp8
from rankmoe.route import route
from rankmoe.schedule import build_schedule
from rankmoe.types import LocalRange, RouterConfig

_POISON = 0x7F
_TOP_16 = RouterConfig(16)
_SECOND_OF_EIGHT = LocalRange(112, 112)


@dataclass(frozen=True)
class FrontCase:
    """One call of the front.

    rows: what logit rows hold, see ``make_logits``. extra_stride: unused elements after each logit row.
    local_range: this rank's experts; num_valid: valid tokens or None. map_stride: round-robin over so many ranks
        instead of a range.
    """

    num_tokens: int = 8
    num_experts: int = 896
    hidden_size: int = 256
    config: RouterConfig = _TOP_16
    logits_dtype: torch.dtype = torch.float32
    hidden_dtype: torch.dtype = torch.bfloat16
    has_bias: bool = True
    rows: str = "normal"
    extra_stride: int = 0
    local_range: LocalRange | None = _SECOND_OF_EIGHT
    map_stride: int = 0
    rank_local: bool = True
    num_valid: int | None = None
    schedule: str = "masks"
    variant: FrontVariant = DEFAULT_VARIANT
    seed: int = 0

    def __str__(self) -> str:
        default = FrontCase()
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(default, f.name)
        ]
        return ", ".join(changed) or "default"


@dataclass
class FrontInputs:
    """Tensors of a case, on its device."""

    router_logits: torch.Tensor
    hidden_states: torch.Tensor
    correction_bias: torch.Tensor | None
    expert_map: torch.Tensor | None
    num_valid_tokens: torch.Tensor | None
    num_local_experts: int
    local_expert_offset: int
    packed_range: LocalRange | None


def make_logits(case: FrontCase, generator: torch.Generator) -> torch.Tensor:
    """[T, E] float32 on the CPU. ``bad`` replaces the odd rows by rows of NaN and infinities of every kind."""
    shape = (case.num_tokens, case.num_experts)
    logits = torch.randn(shape, generator=generator) * 2
    if case.rows == "equal":
        logits = torch.full(shape, 0.25)
    elif case.rows == "low":
        logits = logits / 2 - 100
    elif case.rows == "very_low":
        logits = logits / 2 - 1e4
    elif case.rows == "edge":  # the range in which exp(-x) nears infinity, and sigmoid becomes subnormal
        logits = -80 - 10 * torch.rand(shape, generator=generator)
    elif case.rows == "wide":
        logits = logits * 50
    elif case.rows == "repeats":  # few distinct values, so that ties straddle every limit
        logits = (logits * 2).round() / 4
    elif case.rows == "columns":  # every large value in one warp, then in one lane's neighbourhood
        logits = logits - 10
        logits[:, : min(64, case.num_experts)] += 20
    elif case.rows == "bad":
        nan, inf = torch.nan, torch.inf
        fills = [nan, inf, -inf]
        for row in range(1, case.num_tokens, 2):
            kind = row // 2 % 6
            if kind < 3:
                logits[row] = fills[kind]
            elif kind == 3:
                logits[row, 5 % case.num_experts] = nan
            elif kind == 4:
                logits[row, ::3] = nan
                logits[row, 1::3] = -inf
            else:
                logits[row, ::2] = inf
    elif case.rows != "normal":
        raise ValueError(f"rows: got {case.rows!r}")
    return logits


def make_inputs(case: FrontCase, device: torch.device | str) -> FrontInputs:
    """Draw a case's tensors."""
    generator = torch.Generator().manual_seed(case.seed)
    logits = make_logits(case, generator).to(case.logits_dtype)
    wide = torch.full((case.num_tokens, case.num_experts + case.extra_stride), torch.nan, dtype=case.logits_dtype)
    wide[:, : case.num_experts] = logits
    hidden = torch.randn(case.num_tokens, case.hidden_size, generator=generator)
    exponents = torch.randint(-30, 12, (case.num_tokens, case.hidden_size // 32, 1), generator=generator)
    hidden = torch.ldexp(hidden.unflatten(1, (-1, 32)), exponents).flatten(1).to(case.hidden_dtype)
    special = [0.0, torch.nan, torch.inf, -torch.inf, 1e-38, 448.0, 449.0, 1.75, 3e38]
    for i, value in enumerate(special[: hidden.shape[1] // 32]):  # one group each in the last row
        if i in (0, 4):
            hidden[-1, 32 * i : 32 * i + 32] = value
        elif i >= 5:
            hidden[-1, 32 * i : 32 * i + 32] = torch.linspace(-1, 1, 32).to(hidden.dtype) * value
        else:
            hidden[-1, 32 * i + 7] = value
    bias = torch.randn(case.num_experts, generator=generator) * 0.1 if case.has_bias else None
    num_valid = None
    if case.num_valid is not None:
        num_valid = torch.tensor([case.num_valid], dtype=torch.int32 if case.seed % 2 else torch.int64)
        wide[case.num_valid :] = torch.nan
        hidden[case.num_valid :] = torch.nan
    expert_map, count, offset, packed_range = None, case.num_experts, 0, None
    if case.map_stride:
        expert_map = torch.full((case.num_experts,), -1, dtype=torch.int32)
        owned = torch.arange(1 % case.map_stride, case.num_experts, case.map_stride)
        expert_map[owned] = torch.arange(len(owned), dtype=torch.int32)
        count = len(owned)
    elif case.local_range is not None:
        count, offset = case.local_range.count, case.local_range.offset
        applies = rank_local_num_experts(case.num_experts, case.local_range, case.config.top_k) is not None
        packed_range = case.local_range if case.rank_local and applies else None

    def move(tensor):
        return None if tensor is None else tensor.to(device)

    return FrontInputs(
        router_logits=move(wide)[:, : case.num_experts],
        hidden_states=move(hidden),
        correction_bias=move(bias),
        expert_map=move(expert_map),
        num_valid_tokens=move(num_valid),
        num_local_experts=count,
        local_expert_offset=offset,
        packed_range=packed_range,
    )


def make_buffers(case: FrontCase, inputs: FrontInputs) -> FrontBuffers:
    """Buffers for a case."""
    return allocate_buffers(
        case.num_tokens,
        case.config.top_k,
        case.hidden_size,
        inputs.num_local_experts,
        inputs.hidden_states.device,
        schedule=case.schedule,
        collector=case.variant.collector,
    )


def poison(buffers: FrontBuffers) -> None:
    """Fill every output with a byte that none of them should keep."""
    for field in dataclasses.fields(buffers):
        tensor = getattr(buffers, field.name)
        if tensor is not None and field.name != "mailbox":
            tensor.view(torch.uint8).fill_(_POISON)


def run_front(case: FrontCase, inputs: FrontInputs, buffers: FrontBuffers, **options) -> None:
    """Launch a case."""
    launch_front(
        inputs.router_logits,
        inputs.hidden_states,
        case.config,
        buffers,
        correction_bias=inputs.correction_bias,
        local_expert_offset=inputs.local_expert_offset,
        num_local_experts=inputs.num_local_experts,
        expert_map=inputs.expert_map,
        packed_range=inputs.packed_range,
        num_valid_tokens=inputs.num_valid_tokens,
        variant=case.variant,
        **options,
    )


def check_front(case: FrontCase, inputs: FrontInputs, buffers: FrontBuffers) -> list[str]:
    """What is wrong with a launch's outputs; empty where nothing is."""
    problems = []

    def expect(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if got.shape != want.shape or not torch.equal(got, want):
            wrong = (got != want).sum().item() if got.shape == want.shape else -1
            problems.append(f"{name}: {wrong} of {want.numel()} differ")

    problems += _check_routing(case, inputs, buffers)
    packed = pack_topk(buffers.routing(), case.num_experts, inputs.packed_range)
    is_nan = buffers.topk_weights.isnan()
    expect("packed", buffers.packed[~is_nan], packed.packed[~is_nan])
    expect("packed ids", buffers.packed >> 16, packed.packed >> 16)
    nan_bits = (buffers.packed & 0x7FFF)[is_nan]
    if not (nan_bits > 0x7F80).all():
        problems.append("packed: a NaN weight lost its NaN")
    x = quantize_mxfp8(inputs.hidden_states, inputs.num_valid_tokens)
    expect("scale", buffers.scale, x.scale)
    expect("data", buffers.data.view(torch.uint8), x.data.view(torch.uint8))
    if buffers.expert_token_mask is not None:
        schedule = build_schedule(
            buffers.topk_ids,
            inputs.num_local_experts,
            num_experts=case.num_experts,
            local_expert_offset=inputs.local_expert_offset,
            expert_map=inputs.expert_map,
        )
        expect("expert_token_mask", buffers.expert_token_mask, schedule.expert_token_mask)
        if buffers.expert_offsets is not None:
            expect("expert_offsets", buffers.expert_offsets, schedule.expert_offsets)
            expect("slot_rows", buffers.slot_rows, schedule.slot_rows)
            row_tokens = torch.full_like(buffers.row_tokens, -1)
            row_tokens[: len(schedule.row_tokens)] = schedule.row_tokens
            expect("row_tokens", buffers.row_tokens, row_tokens)
    if buffers.mailbox is not None and buffers.mailbox.any():
        problems.append("mailbox: not empty")
    return problems


def _check_routing(case: FrontCase, inputs: FrontInputs, buffers: FrontBuffers) -> list[str]:
    want = route(inputs.router_logits, case.config, inputs.correction_bias, inputs.num_valid_tokens)
    got_ids, got_weights = buffers.topk_ids.cpu(), buffers.topk_weights.cpu()
    want_ids, want_weights = want.topk_ids.cpu(), want.topk_weights.cpu()
    logits = inputs.router_logits.double().cpu()
    if case.config.scoring == "sigmoid":
        rank_values = logits.sigmoid()
    elif case.config.scoring == "softmax":
        rank_values = logits.softmax(-1)
    else:
        rank_values = logits
    if inputs.correction_bias is not None:
        rank_values = rank_values + inputs.correction_bias.double().cpu()
    problems = []
    for token in range(case.num_tokens):
        got, expected = got_ids[token], want_ids[token]
        if torch.equal(got, expected):
            if not torch.isclose(got_weights[token], want_weights[token], rtol=1e-5, atol=1e-37, equal_nan=True).all():
                problems.append(f"topk_weights: row {token}: got {got_weights[token]}, want {want_weights[token]}")
            continue
        ids = got.tolist()
        if len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= case.num_experts:
            problems.append(f"topk_ids: row {token}: not distinct or out of range: {ids}")
        elif case.config.slot_order == "id" and ids != sorted(ids):
            problems.append(f"topk_ids: row {token}: not ascending: {ids}")
        else:
            mine = rank_values[token, got.long()].sort().values
            theirs = rank_values[token, expected.long()].sort().values
            if case.config.num_expert_groups > 1 or not torch.isclose(mine, theirs, rtol=2e-6, atol=0).all():
                problems.append(f"topk_ids: row {token}: got {ids}, want {expected.tolist()}")
    return problems[:3]


def front_cases() -> list[FrontCase]:
    """Shapes, families, bad rows, strides, ranks and schedules that every implementation of the front must hold."""
    replace = dataclasses.replace
    base = FrontCase()
    cases = [replace(base, num_tokens=t, seed=t) for t in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 24, 33, 63, 64)]
    cases += [replace(base, num_tokens=t, schedule="rows", seed=t) for t in (1, 2, 8, 9, 24, 64)]
    cases += [replace(base, num_tokens=24, schedule=s, hidden_size=h) for s in ("none", "rows") for h in (3584, 7168)]
    cases += [replace(base, num_tokens=64, hidden_size=h, hidden_dtype=torch.float32) for h in (96, 2880, 8192)]
    kinds = ("equal", "low", "very_low", "edge", "wide", "repeats", "columns", "bad")
    cases += [replace(base, num_tokens=13, rows=kind, has_bias=b) for kind in kinds for b in (True, False)]
    cases += [replace(base, num_tokens=13, rows=kind, has_bias=False, logits_dtype=torch.bfloat16) for kind in kinds]
    sizes = {8: (1, 2, 8), 30: (4, 8), 60: (4, 16), 128: (4, 8, 32), 160: (8,), 256: (8, 22), 257: (10,), 384: (8,)}
    sizes |= {512: (10, 22), 896: (1, 2, 22, 32), 1024: (16, 32)}
    for num_experts, top_ks in sizes.items():
        for top_k in top_ks:
            count = max(1, num_experts // 8)
            local_range = LocalRange(num_experts - count, count)
            for rows in ("normal", "repeats"):
                config = RouterConfig(top_k)
                cases.append(
                    replace(
                        base, num_tokens=5, num_experts=num_experts, config=config, rows=rows, local_range=local_range
                    )
                )
    for scoring in ("sigmoid", "softmax", "softmax_selected"):
        for renormalize in (True, False):
            for dtype in (torch.float32, torch.bfloat16):
                config = RouterConfig(8, scoring, renormalize, 2.5, slot_order="value" if renormalize else "id")
                for rows, has_bias in (("normal", True), ("bad", False), ("wide", False)):
                    cases.append(
                        replace(base, num_tokens=13, num_experts=128, config=config, logits_dtype=dtype, rows=rows,
                                has_bias=has_bias, local_range=LocalRange(0, 16))
                    )  # fmt: skip
    grouped = [(256, 8, 8, 4), (256, 8, 32, 4), (160, 6, 8, 3), (64, 6, 64, 8)]
    for num_experts, top_k, groups, kept in grouped:
        for rows in ("normal", "repeats", "bad"):
            config = RouterConfig(top_k, num_expert_groups=groups, topk_groups=kept, routed_scaling_factor=2.5)
            cases.append(
                replace(
                    base,
                    num_tokens=13,
                    num_experts=num_experts,
                    config=config,
                    rows=rows,
                    local_range=LocalRange(32, 32),
                )
            )
    for ep_size in (2, 8, 16):
        for rank in (0, ep_size // 2, ep_size - 1):
            count = 896 // ep_size
            cases.append(replace(base, num_tokens=24, local_range=LocalRange(rank * count, count), schedule="rows"))
    cases += [replace(base, num_tokens=24, local_range=r) for r in (None, LocalRange(0, 896), LocalRange(5, 0))]
    cases += [replace(base, num_tokens=24, local_range=None, schedule="rows")]
    cases += [replace(base, num_tokens=t, map_stride=8, schedule=s) for t in (3, 24) for s in ("masks", "rows")]
    cases += [replace(base, num_tokens=24, rank_local=False)]
    cases += [
        replace(base, num_tokens=9, extra_stride=e, logits_dtype=d)
        for e in (1, 2, 4)
        for d in (torch.float32, torch.bfloat16)
    ]
    for num_valid in (0, 1, 5, 24):
        for schedule in ("masks", "rows"):
            cases.append(replace(base, num_tokens=24, num_valid=num_valid, schedule=schedule, seed=num_valid))
    variants = [FrontVariant(4, 8), FrontVariant(4, 8, threshold=1), FrontVariant(8, 4, threshold=1)]
    variants += [FrontVariant(quant_chunks=4), FrontVariant(quant_chunks=2), FrontVariant(collector=True)]
    for variant in variants:
        for rows in ("normal", "repeats", "bad"):
            cases.append(replace(base, num_tokens=24, rows=rows, variant=variant))
    return cases

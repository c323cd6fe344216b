"""FlashInfer's routed MoE on Blackwell (SM100), fed by rankmoe: packed ids, MXFP8 rows, the schedule where asked for.

Its kernels are told a rank-local problem (``rank_local_num_experts`` experts, offset 0), or, with a schedule, get the
tiles that its routing pass would have made. Written for FlashInfer 0.7.4; contracts/ holds the names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from flashinfer import autotune, shuffle_matrix_a, shuffle_matrix_sf_a
from flashinfer.fused_moe import trtllm_fp4_block_scale_routed_moe
from flashinfer.fused_moe.core import TrtllmMoERoutingMetadataSlot
from flashinfer.tllm_enums import ActivationType, RoutingMethodType, SfLayout
from torch.nn.functional import pad

from rankmoe.front import FrontResult
from rankmoe.pack import MAX_PACKED_ID, IdSpace, id_space, pack, rank_local_num_experts
from rankmoe.quantize import quantize_mxfp8
from rankmoe.routing_metadata import allocate_routing_metadata, fill_routing_metadata
from rankmoe.types import (
    GROUP_SIZE,
    Activation,
    ExpertPlacement,
    ExpertSource,
    LocalRange,
    MXTensor,
    RouterConfig,
    SiTU,
)

#: Rows that its GEMMs shuffle together, and what both sizes of a weight are padded to.
EPILOGUE_TILE, ALIGNMENT = 128, 128


@dataclass(frozen=True)
class FlashInferExperts:
    """One rank's experts as FlashInfer's kernels read them; made once at load by ``prepare_experts``.

    H' and I' are the sizes rounded up to ``ALIGNMENT``.
    gemm1_weights: [L, 2 I', H' / 2] uint8, rows in pairs (up, gate), shuffled. gemm1_weights_scale: [L, 2 I', H' / 32]
        float8_e4m3fn, the bytes of the scales.
    gemm2_weights: [L, H', I' / 2] uint8. gemm2_weights_scale: [L, H', I' / 32].
    gemm1_bias, gemm2_bias: [L, 2 I'] and [L, H'] float32, or None.
    alpha, beta, limit: [L] float32 of the activation, or None.
    """

    placement: ExpertPlacement
    hidden_size: int
    intermediate_size: int
    gemm1_weights: torch.Tensor
    gemm1_weights_scale: torch.Tensor
    gemm2_weights: torch.Tensor
    gemm2_weights_scale: torch.Tensor
    gemm1_bias: torch.Tensor | None
    gemm2_bias: torch.Tensor | None
    activation_type: ActivationType
    alpha: torch.Tensor | None
    beta: torch.Tensor | None
    limit: torch.Tensor | None

    @property
    def local_range(self) -> LocalRange:
        """This rank's ids."""
        assert self.placement.local_range is not None, "checked when the experts were prepared"
        return self.placement.local_range


def available() -> bool:
    """Whether this process's GPU is one that these kernels run on."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10


def prepare_experts(
    w13: ExpertSource,
    w2: ExpertSource,
    activation: Activation,
    placement: ExpertPlacement,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    device: torch.device | str = "cuda",
) -> FlashInferExperts:
    """Bring checkpoint-order MXFP4 experts into FlashInfer's layout, one expert at a time.

    w13: [L, 2 I, H], gate rows first. w2: [L, H, I]. Biases: [L, 2 I] and [L, H] float32.
    Raises ValueError for a placement that is no range or has copies of experts, and for weights that do not fit it.
    """
    if placement.local_range is None or placement.physical_to_logical is not None:
        raise ValueError(f"placement: expected one range of experts without copies, got {placement}")
    num_experts, hidden_size, intermediate_size = w2.shape
    if w13.shape != (num_experts, 2 * intermediate_size, hidden_size) or num_experts != placement.num_local_experts:
        raise ValueError(
            f"w13: expected ({placement.num_local_experts}, {2 * intermediate_size}, {hidden_size}) as placement and "
            f"w2, got {tuple(w13.shape)}"
        )
    first, second = [], []
    for expert in range(num_experts):
        own = w13[expert].to(torch.device(device))
        first.append(_shuffled(_pairs(own.data), _pairs(own.scale)))
        own = w2[expert].to(torch.device(device))
        second.append(_shuffled(_padded(own.data), _padded(own.scale)))
    kind, constants = _activation_constants(activation)
    alpha, beta, limit = (None if c is None else torch.full((num_experts,), c, device=device) for c in constants)
    return FlashInferExperts(
        placement,
        hidden_size,
        intermediate_size,
        *_stacked(first),
        *_stacked(second),
        None if w13_bias is None else _shuffled_bias(w13_bias.to(device), is_gate_up=True),
        None if w2_bias is None else _shuffled_bias(w2_bias.to(device), is_gate_up=False),
        kind,
        alpha,
        beta,
        limit,
    )


def _activation_constants(
    activation: Activation,
) -> tuple[ActivationType, tuple[float | None, float | None, float | None]]:
    """Its SiTU is ``beta tanh(up / beta) * alpha tanh(gate / alpha) sigmoid(gate)``; None means 1 there."""
    if isinstance(activation, SiTU):
        return ActivationType.Situ, (activation.beta, activation.linear_beta, None)
    if (activation.alpha, activation.up_offset, activation.limit) == (1.0, 0.0, None):
        return ActivationType.Swiglu, (None, None, None)
    return ActivationType.Swiglu, (activation.alpha, activation.up_offset, activation.limit)


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _padded(part: torch.Tensor) -> torch.Tensor:
    """[rows, ...] with rows up to a multiple of ``ALIGNMENT``; zeros, which as scales are 2^-127."""
    return pad(part, (0, 0, 0, _round_up(part.shape[0]) - part.shape[0]))


def _pairs(part: torch.Tensor) -> torch.Tensor:
    """[2 I, bytes], gates first, to [2 I', bytes] in pairs (up, gate)."""
    gate, up = (_padded(half) for half in part.chunk(2))
    return torch.stack([up, gate], dim=1).flatten(0, 1)


def _shuffled(data: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_inputs = _round_up(data.shape[1] * 2)
    data = pad(data, (0, num_inputs // 2 - data.shape[1]))
    scale = pad(scale, (0, num_inputs // GROUP_SIZE - scale.shape[1]))
    shuffled_scale = shuffle_matrix_sf_a(scale.contiguous(), EPILOGUE_TILE, GROUP_SIZE)
    return shuffle_matrix_a(data.contiguous(), EPILOGUE_TILE), shuffled_scale.reshape(scale.shape)


def _stacked(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    data, scale = zip(*parts, strict=True)
    return torch.stack(data), torch.stack(scale).view(torch.float8_e4m3fn)


def _shuffled_bias(bias: torch.Tensor, *, is_gate_up: bool) -> torch.Tensor:
    rows = [_pairs(own[:, None]) if is_gate_up else _padded(own[:, None]) for own in bias]
    return torch.stack([shuffle_matrix_a(own.contiguous(), EPILOGUE_TILE)[:, 0] for own in rows])


# --- a call ----------------------------------------------------------------------------------------------------------
def run_experts(
    front: FrontResult,
    experts: FlashInferExperts,
    *,
    tile_n: int | None = None,
    do_finalize: bool = True,
    tune_max_num_tokens: int = 8192,
) -> list[torch.Tensor]:
    """Both GEMMs and the combine on what ``route_quantize`` made.

    front: rows, and packed ids, global or local to this rank's range.
    tile_n: its GEMMs' rows a tile (8 for decode steps). With it, and a schedule in ``front``, its routing pass is
        skipped: the schedule gives the tiles, and the weights stay float32.
    do_finalize: False leaves the combine to the caller: rows, weights, and the row of each slot.
    Returns FlashInfer's list: [T, H] bfloat16, or the three of a deferred combine.
    Raises ValueError where the packed ids were written for another rank, or ``tile_n`` comes without a schedule.
    """
    placement, routing = experts.placement, front.routing
    if tile_n is None:
        if routing.packed is None:
            raise ValueError("front.routing.packed: expected packed ids, got none")
        return _call(
            routing.packed,
            front.x,
            experts,
            id_space(routing, placement.num_experts, experts.local_range),
            routing.packed.shape[1],
            do_finalize=do_finalize,
            tune_max_num_tokens=tune_max_num_tokens,
        )
    if front.schedule is None or front.local_range != experts.local_range:
        raise ValueError(
            f"front.schedule: expected one for {experts.local_range} where tile_n is given, got "
            f"{'none' if front.schedule is None else front.local_range}"
        )
    space = IdSpace(placement.num_experts, experts.local_range.offset)
    metadata = allocate_routing_metadata(routing.topk_weights, space, tile_n)
    fill_routing_metadata(metadata, front.schedule, space.local_expert_offset, tile_n)
    return _call(
        (routing.topk_ids, routing.topk_weights),
        front.x,
        experts,
        space,
        routing.topk_ids.shape[1],
        do_finalize=do_finalize,
        tune_max_num_tokens=tune_max_num_tokens,
        routing_metadata=TrtllmMoERoutingMetadataSlot(tile_n, *metadata),
    )


def _call(
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    x: MXTensor,
    experts: FlashInferExperts,
    space: IdSpace,
    top_k: int,
    *,
    do_finalize: bool,
    tune_max_num_tokens: int,
    routing_metadata: TrtllmMoERoutingMetadataSlot | None = None,
) -> list[torch.Tensor]:
    missing = 2 * experts.gemm1_weights.shape[2] - experts.hidden_size
    data, scale = x.data, x.scale
    if missing:
        data = pad(data.view(torch.uint8), (0, missing)).view(torch.float8_e4m3fn)
        scale = pad(scale, (0, missing // GROUP_SIZE))
    result = trtllm_fp4_block_scale_routed_moe(
        topk_ids=topk_ids,
        routing_bias=None,
        hidden_states=data,
        hidden_states_scale=scale.view(torch.float8_e4m3fn),
        gemm1_weights=experts.gemm1_weights,
        gemm1_weights_scale=experts.gemm1_weights_scale,
        gemm1_bias=experts.gemm1_bias,
        gemm1_alpha=experts.alpha,
        gemm1_beta=experts.beta,
        gemm1_clamp_limit=experts.limit,
        gemm2_weights=experts.gemm2_weights,
        gemm2_weights_scale=experts.gemm2_weights_scale,
        gemm2_bias=experts.gemm2_bias,
        output1_scale_scalar=None,
        output1_scale_gate_scalar=None,
        output2_scale_scalar=None,
        num_experts=space.num_experts,
        top_k=top_k,
        n_group=None,
        topk_group=None,
        intermediate_size=experts.gemm1_weights.shape[1] // 2,
        local_expert_offset=space.local_expert_offset,
        local_num_experts=experts.placement.num_local_experts,
        routed_scaling_factor=None,
        routing_method_type=RoutingMethodType.TopK.value,
        do_finalize=do_finalize,
        activation_type=experts.activation_type.value,
        tune_max_num_tokens=tune_max_num_tokens,
        valid_hidden_size=experts.hidden_size if missing else None,
        valid_intermediate_size=experts.intermediate_size if experts.intermediate_size % ALIGNMENT else None,
        hidden_states_scale_layout=SfLayout.layout_linear,
        routing_metadata=routing_metadata,
    )
    return result if isinstance(result, list) else [result]


# --- tuning ----------------------------------------------------------------------------------------------------------
def tuning_ids(
    num_tokens: int,
    placement: ExpertPlacement,
    config: RouterConfig,
    *,
    popularity: torch.Tensor | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """[T, K] int32 packed ids with this rank's real share of slots, in the rank-local space.

    FlashInfer profiles with the caller's ids, but replaces a batch whose ids are few by one drawn from all of
    ``num_experts``; of rank-local ids that is about seven times an EP8 rank's load. So every slot of another rank has a
    negative id of its own, which costs no row and counts as an id.
    popularity: [E] float, how often each expert is chosen; None for all alike.
    """
    generator = torch.Generator().manual_seed(seed)
    chances = torch.ones(placement.num_experts) if popularity is None else popularity.float().cpu()
    ids = torch.multinomial(chances.expand(num_tokens, -1), config.top_k, generator=generator)
    local = placement.expert_map.long()[ids]
    slots = torch.arange(ids.numel()).view_as(ids)
    # ``pack`` would write -1 for every absent expert.
    spread = torch.where(local >= 0, local, -1 - slots % (MAX_PACKED_ID + 1)).int()
    return (spread << 16) | pack(torch.zeros_like(ids), torch.full(ids.shape, 1 / config.top_k))


def tune(
    experts: FlashInferExperts,
    config: RouterConfig,
    max_num_tokens: int = 64,
    *,
    popularity: torch.Tensor | None = None,
    cache: str | None = None,
) -> None:
    """Have FlashInfer choose its tactics for 1 to ``max_num_tokens`` tokens under this rank's real load.

    cache: FlashInfer's file of tactics, or None for this process alone.
    """
    device = experts.gemm1_weights.device
    ids = tuning_ids(max_num_tokens, experts.placement, config, popularity=popularity).to(device)
    x = quantize_mxfp8(torch.randn(max_num_tokens, experts.hidden_size, device=device).bfloat16())
    num_experts = rank_local_num_experts(experts.placement.num_experts, experts.local_range, config.top_k)
    space = IdSpace(experts.placement.num_experts if num_experts is None else num_experts, 0)
    with autotune(True, cache=cache):
        _call(ids, x, experts, space, config.top_k, do_finalize=True, tune_max_num_tokens=max_num_tokens)

"""FlashInfer's own Python around its routed MoE, on a CPU: what reaches its compiled operations from the adapter."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from contract_sources import FLASHINFER
from helpers import assert_bitwise_equal, random_mxfp4, seeded

from rankmoe.front import route_quantize
from rankmoe.pack import rank_local_num_experts
from rankmoe.types import ExpertPlacement, RouterConfig, SiTU

E, K, HIDDEN, INTERMEDIATE, TOKENS = 32, 4, 256, 128, 7
PLACEMENT = ExpertPlacement(E, 4, 1)
CONFIG = RouterConfig(K)
W13 = random_mxfp4(PLACEMENT.num_local_experts, 2 * INTERMEDIATE, HIDDEN, seed=1)
W2 = random_mxfp4(PLACEMENT.num_local_experts, HIDDEN, INTERMEDIATE, seed=2)
ROWS = torch.randn(TOKENS, HIDDEN, generator=seeded(3)).bfloat16()
LOGITS = torch.randn(TOKENS, E, generator=seeded(4))


class Compiled:
    """The compiled module: any operation can be asked for, and says what it was called with."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def operation(*arguments):
            self.calls.append((name, arguments))
            return []

        return operation


def interleave(scale, *, out=None):
    """The 128 x 4 layout of scale factors (a compiled operation as well)."""
    rows, columns = scale.shape
    return scale.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(-1)


@pytest.fixture
def flashinfer(put_on_path, monkeypatch):
    """(adapter, compiled module)."""
    put_on_path(FLASHINFER)
    core = importlib.import_module("flashinfer.fused_moe.core")
    compiled = Compiled()
    loaded = SimpleNamespace(build_and_load=lambda: compiled, get_library_paths=lambda: [])
    namespace = core._build_trtllm_moe_namespace(loaded)
    monkeypatch.setattr(core, "get_trtllm_moe_sm100_module", lambda: namespace)
    monkeypatch.setattr(core, "device_support_pdl", lambda device: True)
    for module in (core, importlib.import_module("flashinfer.quantization.fp4_quantization")):
        monkeypatch.setattr(module, "block_scale_interleave", interleave, raising=False)
    return importlib.import_module("rankmoe.integrations.flashinfer"), compiled


def arguments(call):
    """Those of the operation that are looked at, by their places in ``core.py``'s call of it."""
    name, given = call
    assert (name, len(given)) == ("trtllm_fp4_block_scale_moe", 46)
    places = {"mode": 0, "ids": 2, "weights": 3, "x": 5, "x_scale": 6, "alpha": 11, "beta": 12, "limit": 13}
    places |= {"num_experts": 21, "top_k": 22, "intermediate_size": 26, "offset": 27, "num_local": 28}
    places |= {"routing_method": 30, "activation": 33, "tactic": 35, "metadata": 38}
    return SimpleNamespace(**{name: given[place] for name, place in places.items()})


def run(flashinfer, **options):
    adapter, compiled = flashinfer
    experts = adapter.prepare_experts(W13, W2, SiTU(), PLACEMENT, device="cpu")
    front = route_quantize(LOGITS, ROWS, CONFIG, local_range=PLACEMENT.local_range)
    (output,) = adapter.run_experts(front, experts, **options)
    assert (output.shape, output.dtype) == ((TOKENS, HIDDEN), torch.bfloat16)
    calls = [arguments(call) for call in compiled.calls]
    for call in calls:
        assert_bitwise_equal(call.x, front.x.data)
        assert_bitwise_equal(call.x_scale.view(torch.uint8), front.x.scale)
        assert (call.top_k, call.intermediate_size, call.num_local) == (K, INTERMEDIATE, 8)
        assert call.alpha.tolist() == [4.0] * 8
        assert call.beta.tolist() == [25.0] * 8
        assert call.limit is None
        assert (call.routing_method, call.activation) == (5, 10)
    return front, calls


def test_packed_ids_reach_the_operation_as_a_rank_local_problem(flashinfer):
    front, (call,) = run(flashinfer)
    assert call.mode == 1  # RoutingInputMode.PackedPrecomputed
    assert_bitwise_equal(call.ids, front.routing.packed)
    assert (call.num_experts, call.offset) == (rank_local_num_experts(E, PLACEMENT.local_range, K), 0)
    assert call.metadata == []


def test_a_schedule_reaches_the_operation_in_place_of_its_routing(flashinfer):
    front, calls = run(flashinfer, tile_n=8)
    assert len(calls) == 2  # its workspace is asked for first
    for call in calls:
        assert call.mode == 2  # RoutingInputMode.UnpackedPrecomputed
        assert_bitwise_equal(call.ids, front.routing.topk_ids)
        assert_bitwise_equal(call.weights, front.routing.topk_weights)
        assert (call.num_experts, call.offset) == (E, 8)
        assert call.tactic[0] == 8
        padded, row_of_slot, token_of_row, weights = call.metadata[:4]
        local = PLACEMENT.expert_map.long()[front.routing.topk_ids.long()]
        assert int(padded) == 8 * local[local >= 0].unique().numel()  # at most eight rows an expert
        rows = row_of_slot.view(TOKENS, K)
        assert torch.equal(rows >= 0, local >= 0)
        tokens = torch.arange(TOKENS)[:, None].expand(TOKENS, K)
        assert torch.equal(token_of_row[rows[rows >= 0].long()].long(), tokens[rows >= 0])
        assert_bitwise_equal(weights, front.routing.topk_weights)


def test_weights_lie_as_flashinfers_own_permutations_put_them(flashinfer):
    adapter, _ = flashinfer
    core = importlib.import_module("flashinfer.fused_moe.core")
    experts = adapter.prepare_experts(W13, W2, SiTU(), PLACEMENT, device="cpu")

    def up_first(part):
        gate, up = part.chunk(2)
        return torch.cat([up, gate])

    for e in range(PLACEMENT.num_local_experts):
        data, scale = up_first(W13[e].data), up_first(W13[e].scale)
        order = core._maybe_get_cached_w3_w1_permute_indices({}, data, 128)
        assert_bitwise_equal(experts.gemm1_weights[e], data[order])
        order = core._maybe_get_cached_w3_w1_permute_indices({}, scale, 128, 32)
        assert_bitwise_equal(experts.gemm1_weights_scale[e].view(torch.uint8).flatten(), interleave(scale[order]))
        data, scale = W2[e].data, W2[e].scale
        assert_bitwise_equal(experts.gemm2_weights[e], data[core.get_w2_permute_indices_with_cache({}, data, 128)])
        order = core.get_w2_permute_indices_with_cache({}, scale, 128, 32)
        assert_bitwise_equal(experts.gemm2_weights_scale[e].view(torch.uint8).flatten(), interleave(scale[order]))


def test_its_tuner_keeps_our_ids_and_would_not_keep_a_decode_batchs_own(flashinfer):
    adapter, _ = flashinfer
    tuning = importlib.import_module("flashinfer.fused_moe.shared.tuning")
    placement, config = ExpertPlacement(896, 8, 3), RouterConfig(16)
    num_experts = rank_local_num_experts(896, placement.local_range, 16)
    for num_tokens in (8, 64):
        ids = adapter.tuning_ids(num_tokens, placement, config)
        kept = tuning.make_repeating_tensor_initializer(ids, num_experts=num_experts, packed=True)
        assert_bitwise_equal(kept(ids.shape, ids.dtype, ids.device), ids)
    logits = torch.randn(8, 896, generator=seeded(5))
    front = route_quantize(logits, torch.zeros(8, 32).bfloat16(), config, local_range=placement.local_range)
    assert tuning._routes_are_concentrated(front.routing.packed, num_experts, True)

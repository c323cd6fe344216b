"""SGLang itself, on a CPU, with the adapter as its plugin: an expert layer, the front's handoff, Kimi-K3's block."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Iterator
from types import SimpleNamespace

import engines
import pytest
import torch
from contract_sources import SGLANG
from helpers import assert_bitwise_equal, random_mxfp4, seeded

from rankmoe.experts import pack_experts
from rankmoe.integrations import sglang_experts
from rankmoe.moe import fused_moe, routed_moe
from rankmoe.quantize import quantize_mxfp8
from rankmoe.route import route
from rankmoe.types import ExpertPlacement, RouterConfig, Routing, SiTU

E, K, HIDDEN, INTERMEDIATE, TOKENS = 8, 4, 128, 64, 7
W13 = random_mxfp4(E, 2 * INTERMEDIATE, HIDDEN, seed=1, scale_bytes=(118, 123))
W2 = random_mxfp4(E, HIDDEN, INTERMEDIATE, seed=2, scale_bytes=(118, 123))
ROWS = torch.randn(TOKENS, HIDDEN, generator=seeded(3)).bfloat16()
LOGITS = torch.randn(TOKENS, E, generator=seeded(4))


@pytest.fixture(scope="module")
def sglang(put_on_path):
    """SGLang as ``sglang.launch_server --moe-runner-backend rankmoe`` has it at loading: `name` -> module."""
    put_on_path(SGLANG)
    torch._dynamo.config.disable = True  # its router on a CPU would be compiled by a C++ compiler
    engines.stand_in_for_torchvision()
    module = importlib.import_module
    module("sglang.srt.plugins").load_plugins()
    server_args = module("sglang.srt.server_args").ServerArgs
    parser = argparse.ArgumentParser()
    server_args.add_cli_args(parser)
    flags = ["--model-path", "none", "--load-format", "dummy", "--device", "cpu", "--moe-runner-backend", "rankmoe"]
    module("sglang.srt.runtime_context").publish(server_args.from_cli_args(parser.parse_args(flags)), role="scheduler")
    module("sglang.srt.layers.moe.utils").initialize_moe_config()
    module("sglang.srt.layers.moe.token_dispatcher.standard").get_device = lambda: "cpu"
    return lambda name: module(f"sglang.{name}")


@contextlib.contextmanager
def one_rank(sglang, size: int, rank: int) -> Iterator[None]:
    """What a rank of an expert-parallel group is told of it, without the other ranks."""
    parallel = {"tp_size": size, "tp_rank": rank, "moe_ep_size": size, "moe_ep_rank": rank, "tp_group": None}
    parallel |= {"moe_tp_size": 1, "moe_tp_rank": 0, "attn_tp_size": size, "attn_tp_rank": rank}
    with sglang("srt.runtime_context").get_parallel().override(**parallel):
        yield


def load_experts(layer) -> None:
    """A checkpoint's experts by the loader that SGLang put on the layer's parameters."""
    named = dict(layer.named_parameters())
    for e in range(E):
        parts = {"w1": W13[e][:INTERMEDIATE], "w3": W13[e][INTERMEDIATE:], "w2": W2[e]}
        for shard, part in parts.items():
            prefix = "w2_weight" if shard == "w2" else "w13_weight"
            for name, tensor in ((prefix, part.data), (f"{prefix}_scale", part.scale)):
                parameter = named[name]
                parameter.weight_loader(parameter, tensor.clone(), name, shard_id=shard, expert_id=e)
    layer.quant_method.process_weights_after_loading(layer)


def make_layer(sglang):
    """SGLang's own layer of MXFP4 experts with Kimi-K3's activation."""
    config = sglang("srt.layers.quantization.mxfp4").Mxfp4Config(is_checkpoint_mxfp4_serialized=True)
    layer = sglang("srt.layers.moe.fused_moe_triton.layer").FusedMoE(
        num_experts=E,
        top_k=K,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        layer_id=0,
        params_dtype=torch.bfloat16,
        quant_config=config,
        activation="situ",
        gemm1_alpha=4.0,
        gemm1_clamp_limit=25.0,
        gate_up_interleaved=False,
    )
    load_experts(layer)
    return layer


def topk_of(sglang, routing):
    return sglang("srt.layers.moe.topk").StandardTopKOutput(routing.topk_weights, routing.topk_ids, LOGITS)


@pytest.mark.parametrize("size", [1, 2])
def test_a_layer_gives_what_the_routed_layer_gives(sglang, size):
    routing = route(LOGITS, RouterConfig(K))
    for rank in range(size):
        with one_rank(sglang, size, rank):
            layer = make_layer(sglang)
            got = layer.forward(ROWS.clone(), topk_of(sglang, routing))
        placement = ExpertPlacement(E, size, rank)
        mine = slice(placement.local_expert_offset, placement.local_expert_offset + placement.num_local_experts)
        weights = pack_experts(W13[mine], W2[mine], SiTU(), placement)
        assert_bitwise_equal(got, routed_moe(ROWS, LOGITS, weights, RouterConfig(K)))
        assert layer.w13_weight.numel() == 0, "SGLang's own copy is freed"


def test_rows_staged_for_the_front_are_taken_by_the_runner(sglang, monkeypatch):
    handoff = sglang("srt.layers.moe.route_quant_handoff")
    sglang("srt.models.kimi_k3")
    monkeypatch.setattr(sglang_experts, "front_covered", lambda *inputs: True)  # one launch needs a GPU
    taken = []
    run_experts = sglang_experts.run_experts
    monkeypatch.setattr(
        sglang_experts, "run_experts", lambda *a, **o: taken.append(o["staged"]) or run_experts(*a, **o)
    )
    bias = torch.randn(E, generator=seeded(5)) / 8
    with one_rank(sglang, 1, 0):
        layer, rows = make_layer(sglang), ROWS.clone()
        handoff.stage(rows)
        try:
            weights, ids = handoff.try_route_quant_fused(
                LOGITS,
                bias,
                K,
                num_fused_shared_experts=0,
                renormalize=True,
                routed_scaling_factor=2.5,
                apply_routed_scaling_factor_on_output=True,
            )
            got = layer.forward(rows, sglang("srt.layers.moe.topk").StandardTopKOutput(weights, ids, LOGITS))
        finally:
            handoff.clear()
    assert taken[0] is not None, "the runner took what the front left"
    config = RouterConfig(K, routed_scaling_factor=2.5)
    experts = pack_experts(W13, W2, SiTU(), ExpertPlacement(E, 1, 0))
    assert_bitwise_equal(got, routed_moe(ROWS, LOGITS, experts, config, bias))


@pytest.fixture
def block(sglang):
    """SGLang's own Kimi-K3 block, small and random, its experts those of the module."""
    config = sglang("srt.configs.kimi_linear").KimiLinearConfig(
        hidden_size=2 * HIDDEN,
        hidden_act="situ",
        moe_intermediate_size=INTERMEDIATE,
        num_experts=E,
        num_experts_per_token=K,
        num_shared_experts=1,
        routed_scaling_factor=2.5,
        routed_expert_hidden_size=HIDDEN,
        latent_moe_use_norm=True,
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
    )
    plain = sglang("srt.layers.quantization.unquant").UnquantizedLinearMethod
    quantisation = SimpleNamespace(
        quant_format="mxfp4-pack-quantized",
        get_name=lambda: "compressed_tensors",
        get_quant_method=lambda layer, prefix: plain(),
    )
    with one_rank(sglang, 1, 0), torch.no_grad():
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            block = sglang("srt.models.kimi_k3").KimiK3MoE(config, quantisation)
        finally:
            torch.set_default_dtype(default)
        generator = seeded(6)
        for name, parameter in block.named_parameters():
            if "experts.w" not in name:
                parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) / 8
        load_experts(block.experts)
        yield block


def routed_latent(block, hidden_states, latent):
    """What the routed layer makes of the latent states with the block's own choice of experts, scaled once."""
    choice = block.topk(hidden_states, block.gate(hidden_states))
    torch.testing.assert_close(choice.topk_weights.sum(1), torch.ones(TOKENS))  # the factor is left to the runner
    routing = Routing(choice.topk_weights * 2.5, choice.topk_ids)
    experts = pack_experts(W13, W2, SiTU(), ExpertPlacement(E, 1, 0))
    return fused_moe(quantize_mxfp8(latent), routing, experts, num_experts=E)


def test_kimi_k3s_block_is_its_parts_around_the_routed_layer(sglang, block):
    hidden_states = torch.randn(TOKENS, 2 * HIDDEN, generator=seeded(7)).bfloat16()
    got = block(hidden_states)
    latent, _ = block.routed_expert_down_proj(hidden_states)
    normed = block.routed_expert_norm(routed_latent(block, hidden_states, latent))
    assert_bitwise_equal(got, block.routed_expert_up_proj(normed)[0] + block.shared_experts(hidden_states))


def test_kimi_k3s_fused_front_stages_its_rows_for_this_runner(sglang, block, monkeypatch):
    handoff, staged = sglang("srt.layers.moe.route_quant_handoff"), []
    stage = handoff.stage
    monkeypatch.setattr(handoff, "stage", lambda rows: staged.append(rows) or stage(rows))
    hidden_states = torch.randn(TOKENS, 2 * HIDDEN, generator=seeded(7)).bfloat16()
    rows, out = ROWS.clone(), torch.empty_like(ROWS)
    block._forward_routed(hidden_states, block.gate(hidden_states), rows, out)
    assert [id(tensor) for tensor in staged] == [id(rows)]
    assert handoff._handoff.request_x is None, "whatever was staged is cleared"
    assert_bitwise_equal(out, routed_latent(block, hidden_states, ROWS))


def test_another_runner_is_sglangs_own(sglang, monkeypatch):
    backend = sglang("srt.layers.moe.utils").MoeRunnerBackend.TRITON
    monkeypatch.setattr(sglang("srt.runtime_context").get_flags().moe, "runner_backend", backend)
    with one_rank(sglang, 1, 0), pytest.raises(ModuleNotFoundError, match="triton_kernels"):
        make_layer(sglang)  # what SGLang's own method decodes weights with is no requirement here
    front = sglang("kernels.ops.moe.moe_route_quant_fused")
    assert not front.covered(LOGITS, torch.zeros(E), K, ROWS)

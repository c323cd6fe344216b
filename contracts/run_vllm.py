"""vLLM itself, on a CPU, with the adapter loaded as its plugin: a routed layer from checkpoint to output, by rank."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from contract_sources import VLLM
from helpers import assert_bitwise_equal, random_mxfp4, seeded

from rankmoe.distributed import ExpertParallelGroup, launch
from rankmoe.experts import pack_experts
from rankmoe.moe import fused_moe
from rankmoe.quantize import quantize_mxfp8
from rankmoe.route import route
from rankmoe.types import ExpertPlacement, RouterConfig, Routing, SiTU

E, K, HIDDEN, INTERMEDIATE, TOKENS = 8, 4, 128, 64, 7
W13 = random_mxfp4(E, 2 * INTERMEDIATE, HIDDEN, seed=1, scale_bytes=(118, 123))
W2 = random_mxfp4(E, HIDDEN, INTERMEDIATE, seed=2, scale_bytes=(118, 123))
ROWS = torch.randn(TOKENS, HIDDEN, generator=seeded(3)).bfloat16()
LOGITS = torch.randn(TOKENS, E, generator=seeded(4))
BIAS = torch.randn(E, generator=seeded(5)) / 8
CONFIG = RouterConfig(K, routed_scaling_factor=2.5)


@pytest.fixture(autouse=True)
def engine(put_on_path, monkeypatch):
    """Fresh processes of ranks find vLLM as this one does."""
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    put_on_path(VLLM)


def vllm(name: str) -> ModuleType:
    return importlib.import_module(f"vllm.{name}")


@contextlib.contextmanager
def rank_of(group: ExpertParallelGroup, **parallel: Any) -> Iterator[Any]:
    """A process of ``vllm serve --quantization rankmoe`` when it loads a model: its configuration."""
    torch._dynamo.config.disable = True  # its operations on a CPU would be compiled by a C++ compiler
    vllm("plugins").load_general_plugins()
    config = vllm("config")
    ranks = config.ParallelConfig(
        tensor_parallel_size=group.ep_size, rank=group.ep_rank, enable_expert_parallel=group.ep_size > 1, **parallel
    )
    vllm_config = config.VllmConfig(parallel_config=ranks)
    with config.set_current_vllm_config(vllm_config), tempfile.TemporaryDirectory() as folder:
        state = vllm("distributed.parallel_state")
        # Several ranks are a group already, which vLLM takes; a single one has none yet.
        state.init_distributed_environment(group.ep_size, group.ep_rank, f"file://{folder}/store", 0, "gloo")
        state.initialize_model_parallel(group.ep_size, 1)
        with vllm("forward_context").set_forward_context(None, vllm_config):
            yield vllm_config
        vllm("distributed").cleanup_dist_env_and_memory()


def make_layer(**options: Any) -> Any:
    """vLLM's own routed layer with Kimi-K3's router and activation, loaded as a checkpoint is."""
    quantisation = vllm("model_executor.layers.quantization").get_quantization_config("rankmoe")
    layer = vllm("model_executor.layers.fused_moe").FusedMoEFactory(
        num_experts=E,
        top_k=K,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        params_dtype=torch.bfloat16,
        quant_config=quantisation.from_config({"quant_method": "mxfp4"}),
        prefix="model.layers.0.mlp.experts",
        use_grouped_topk=True,
        num_expert_group=2,  # of which both are chosen; with one there is no round-robin placement
        topk_group=2,
        scoring_func="sigmoid",
        e_score_correction_bias=BIAS,
        routed_scaling_factor=2.5,
        activation="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        **options,
    )
    named = {}
    for e in range(E):
        parts = {"gate_proj": W13[e][:INTERMEDIATE], "up_proj": W13[e][INTERMEDIATE:], "down_proj": W2[e]}
        for name, part in parts.items():
            named |= {f"{e}.{name}.weight": part.data, f"{e}.{name}.weight_scale": part.scale}
    loaded = set(layer.routed_experts.load_weights(iter(named.items())))
    assert loaded == {"w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"}
    layer.routed_experts.quant_method.process_weights_after_loading(layer.routed_experts)
    return layer


def layer_output(group: ExpertParallelGroup, is_reduced: bool, strategy: str) -> tuple[Any, ...]:
    """(every rank's output of the layer, weights and ids of vLLM's router, bytes of weights that vLLM still holds)."""
    with rank_of(group, expert_placement_strategy=strategy), torch.no_grad():
        layer = make_layer(reduce_results=is_reduced)
        weights, ids = layer.router.select_experts(ROWS, LOGITS)
        held = sum(p.numel() for name, p in layer.named_parameters() if "weight" in name)
        return group.gather_objects(layer(ROWS.clone(), LOGITS)), weights, ids, held


def expected_of(placement: ExpertPlacement, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    mine = list(placement.expert_ids)
    experts = pack_experts(W13[mine], W2[mine], SiTU(), placement)
    x, routing = quantize_mxfp8(ROWS), Routing(weights, ids)
    return fused_moe(x, routing, experts, num_experts=E, expert_map=placement.expert_map)


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize("size", [1, 2])
def test_each_rank_gives_what_the_routed_layer_gives(size, strategy):
    outputs, weights, ids, held = launch(layer_output, size, False, strategy)
    for rank, output in enumerate(outputs):
        kind = "contiguous" if strategy == "linear" else strategy
        assert_bitwise_equal(output, expected_of(ExpertPlacement(E, size, rank, strategy=kind), weights, ids))
    assert held == 0, "vLLM's own copy is freed"
    routing = route(LOGITS, CONFIG, BIAS)
    torch.testing.assert_close(weights.gather(1, ids.argsort(1)), routing.topk_weights)


def test_two_ranks_are_summed_by_vllm():
    outputs, weights, ids, _ = launch(layer_output, 2, True, "linear")
    assert_bitwise_equal(outputs[0], outputs[1])
    parts = [expected_of(ExpertPlacement(E, 2, rank), weights, ids) for rank in range(2)]
    assert_bitwise_equal(outputs[0], parts[0] + parts[1])

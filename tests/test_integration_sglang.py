"""The SGLang adapter on plain tensors and on stand-ins for the names that it takes, which contracts/ holds."""

from __future__ import annotations

import enum
import importlib
import sys
import types
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from helpers import put_modules, random_mxfp4, seeded

from rankmoe.experts import pack_experts
from rankmoe.front import route_quantize
from rankmoe.integrations import sglang_experts
from rankmoe.moe import routed_moe
from rankmoe.route import route
from rankmoe.types import ExpertPlacement, RouterConfig, SiTU, SwiGLU

E, K, HIDDEN, INTERMEDIATE = 16, 4, 128, 64
CONFIG = RouterConfig(K)


@dataclass
class Config:
    """The fields of ``MoeRunnerConfig`` that are read."""

    num_experts: int = E
    hidden_size: int = HIDDEN
    intermediate_size_per_partition: int = INTERMEDIATE
    num_fused_shared_experts: int = 0
    activation: str = "situ"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = 4.0
    gemm1_clamp_limit: float | None = 25.0
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True
    layer: Any = None
    moe_ep_size: int = 2
    moe_ep_rank: int = 1


class TopK(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


class Dispatch(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: TopK


def make_layer(rank=1, has_bias=False, ep_size=2):
    """(a layer as SGLang has loaded it, its checkpoint-order weights and biases)."""
    generator, count = seeded(rank), E // ep_size
    w13 = random_mxfp4(count, 2 * INTERMEDIATE, HIDDEN, seed=rank, scale_bytes=(118, 123))
    w2 = random_mxfp4(count, HIDDEN, INTERMEDIATE, seed=10 + rank, scale_bytes=(118, 123))
    biases = [torch.zeros(count, 2 * INTERMEDIATE), torch.zeros(count, HIDDEN)]
    if has_bias:
        biases = [torch.randn(bias.shape, generator=generator).bfloat16().float() for bias in biases]
    layer = torch.nn.Module()
    tensors = {"w13_weight": w13.data, "w13_weight_scale": w13.scale, "w2_weight": w2.data, "w2_weight_scale": w2.scale}
    tensors |= {"w13_weight_bias": biases[0].bfloat16(), "w2_weight_bias": biases[1].bfloat16()}
    for name, tensor in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return layer, w13, w2, biases


def make_batch(num_tokens=7):
    generator = seeded(num_tokens)
    hidden_states = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    return hidden_states, torch.randn(num_tokens, E, generator=generator)


# --- on plain tensors ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SiTU(4.0, 25.0)),
        ({"activation": "silu", "gemm1_alpha": None, "gemm1_clamp_limit": None}, SwiGLU()),
        ({"activation": "silu", "gemm1_alpha": None, "swiglu_limit": 7.0}, SwiGLU(limit=7.0)),
        (
            {"activation": "silu", "gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0},
            SwiGLU(alpha=1.702, limit=7.0, up_offset=1.0),
        ),
    ],
)
def test_an_activation_is_found_in_the_runners_configuration(changes, expected):
    assert sglang_experts.activation_of(replace(Config(), **changes)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_gated": False}, "is_gated: expected True"),
        ({"activation": "gelu"}, "activation: expected situ or silu, got 'gelu'"),
        ({"gemm1_alpha": None}, "expected SiTU's two constants"),
        ({"num_fused_shared_experts": 1}, "num_fused_shared_experts: expected 0, got 1"),
        ({"intermediate_size_per_partition": 48}, r"w13_weight: expected \(8, 96, 128\) unpadded, got \(8, 128, 128\)"),
    ],
)
def test_what_the_experts_cannot_have_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        sglang_experts.pack_layer(make_layer()[0], replace(Config(), **changes))


@pytest.mark.parametrize("is_alternating", [False, True])
def test_a_loaded_layer_is_packed_as_its_rows_lie(is_alternating):
    layer, w13, w2, (w13_bias, w2_bias) = make_layer(has_bias=True)
    if is_alternating:
        for name in ("w13_weight", "w13_weight_scale", "w13_weight_bias"):
            values = getattr(layer, name).data
            gates, ups = values.chunk(2, dim=1)
            getattr(layer, name).data = torch.stack([gates, ups], dim=2).flatten(1, 2).clone()
    config = replace(Config(), activation="silu", gemm1_alpha=1.702, gemm1_clamp_limit=7.0)
    got = sglang_experts.pack_layer(layer, replace(config, gate_up_interleaved=is_alternating))
    activation = SwiGLU(alpha=1.702, limit=7.0, up_offset=1.0)
    expected = pack_experts(w13, w2, activation, ExpertPlacement(E, 2, 1), w13_bias=w13_bias, w2_bias=w2_bias)
    assert torch.equal(got.w13.data, expected.w13.data)
    assert torch.equal(got.w13.scale, expected.w13.scale)
    assert torch.equal(got.w2.data, expected.w2.data)
    assert torch.equal(got.w13_bias, expected.w13_bias)
    assert (got.activation, got.placement) == (expected.activation, expected.placement)


def test_local_and_global_ids_give_each_rank_its_part_and_the_ranks_together_the_layer():
    hidden_states, logits = make_batch()
    routing = route(logits, CONFIG)
    ids = routing.topk_ids.clone()
    ids[3] = -1  # padding
    total = torch.zeros(7, HIDDEN)
    for rank in range(2):
        weights = sglang_experts.pack_layer(make_layer(rank)[0], replace(Config(), moe_ep_rank=rank))
        local = torch.where((ids >= 8 * rank) & (ids < 8 * (rank + 1)), ids - 8 * rank, -1)
        arguments = (routing.topk_weights, weights)
        part = sglang_experts.run_experts(hidden_states.float(), local, *arguments, is_global=False)
        same = sglang_experts.run_experts(hidden_states.float(), ids, *arguments, is_global=True)
        assert torch.equal(part, same)
        expected = routed_moe(hidden_states, logits, weights, CONFIG, out_dtype=torch.float32)
        expected[3] = 0
        assert torch.equal(part, expected)
        total += part
    whole = make_layer(0, ep_size=1)[0]
    for name, parameter in whole.named_parameters():
        parameter.data = torch.cat([getattr(make_layer(rank)[0], name).data for rank in range(2)])
    weights = sglang_experts.pack_layer(whole, replace(Config(), moe_ep_size=1, moe_ep_rank=0))
    alone = sglang_experts.run_experts(hidden_states.float(), ids, routing.topk_weights, weights, is_global=False)
    assert (total - alone).norm() / alone.norm() < 1e-6
    assert bool((total[3] == 0).all())


def test_a_scaling_factor_and_the_rows_dtype_are_kept():
    hidden_states, logits = make_batch()
    weights = sglang_experts.pack_layer(make_layer()[0], Config())
    routing = route(logits, CONFIG)
    run = lambda **options: sglang_experts.run_experts(  # noqa: E731
        hidden_states, routing.topk_ids, routing.topk_weights, weights, is_global=True, **options
    )
    assert run().dtype == torch.bfloat16
    assert torch.allclose(run(routed_scaling_factor=2.0).float(), 2 * run().float(), rtol=1e-2)


def test_the_front_gives_what_sglangs_does_and_its_rows_are_taken():
    hidden_states, logits = make_batch()
    bias = torch.randn(E, generator=seeded(3)) * 0.1
    weights, ids, packed, rows, scales = sglang_experts.route_quant_fused(
        logits, bias, hidden_states, K, renormalize=True, routed_scaling_factor=2.5, apply_scale=True
    )
    config = replace(CONFIG, routed_scaling_factor=2.5)
    front = route_quantize(logits, hidden_states, config, bias)
    assert torch.equal(weights, front.routing.topk_weights)
    assert torch.equal(ids, front.routing.topk_ids)
    assert torch.equal(ids, ids.sort(dim=1).values)
    assert torch.equal(packed >> 16, ids)
    assert (scales.shape, scales.dtype) == ((7, HIDDEN // 128), torch.int32)
    unscaled = sglang_experts.route_quant_fused(logits, bias, hidden_states, K, True, 2.5, False)[0]
    assert torch.allclose(unscaled * 2.5, weights)
    experts = sglang_experts.pack_layer(make_layer()[0], Config())
    staged = sglang_experts.run_experts(
        torch.full_like(hidden_states, torch.nan), ids, weights, experts, is_global=True, staged=(packed, rows, scales)
    )
    assert torch.equal(staged, sglang_experts.run_experts(hidden_states, ids, weights, experts, is_global=True))
    assert not sglang_experts.front_covered(logits, bias, K, hidden_states)  # there is one launch on a GPU alone


# --- with stand-ins for SGLang ---------------------------------------------------------------------------------------
class HookType(enum.Enum):
    AROUND = "around"


@pytest.fixture
def sglang(monkeypatch):
    """(adapter, what it registered): hooks by target, runner cores, choices, the chosen backend, what was staged."""
    state = types.SimpleNamespace(
        hooks={}, cores={}, choices=[], chosen="rankmoe", staged=None, requested=None, num_applied=0
    )
    backend = lambda name: types.SimpleNamespace(value=name)  # noqa: E731

    class Core:
        def __init__(self, config):
            self.config = config

    class QuantInfo:
        pass

    class Runner:
        def __init__(self, runner_backend, config):
            self.config, self.core = config, state.cores[runner_backend.value](config)

        def run(self, dispatch_output, quant_info):
            return self.core.run_from_dispatch(dispatch_output, quant_info, self.config)

    class Combine(NamedTuple):
        hidden_states: torch.Tensor

    class Registry:
        @staticmethod
        def register(target, hook, hook_type):
            assert hook_type is HookType.AROUND
            assert target not in state.hooks
            state.hooks[target] = hook

        @staticmethod
        def apply_hooks():
            state.num_applied += 1

    def register_core(name, factory):
        assert name not in state.cores
        state.cores[name] = factory

    names = {
        "arg_groups.choices": {"add_moe_runner_backend_choices": state.choices.extend},
        "layers.moe.route_quant_handoff": {
            "take": lambda x: state.staged,
            "stage": lambda x: setattr(state, "requested", x),
        },
        "layers.moe.moe_runner.base": {"DispatchMoeRunnerCore": Core, "MoeQuantInfo": QuantInfo},
        "layers.moe.moe_runner.runner": {"MoeRunner": Runner, "register_moe_runner_core": register_core},
        "layers.moe.token_dispatcher.standard": {"StandardCombineInput": Combine},
        "layers.moe.utils": {
            "get_moe_runner_backend": lambda: backend(state.chosen),
            "resolve_moe_runner_backend": backend,
        },
        "plugins.hook_registry": {"HookRegistry": Registry, "HookType": HookType},
    }
    put_modules(monkeypatch, {f"sglang.srt.{path}": values for path, values in names.items()})
    monkeypatch.delitem(sys.modules, "rankmoe.integrations.sglang", raising=False)
    adapter = importlib.import_module("rankmoe.integrations.sglang")
    adapter.register()
    adapter.register()  # once or twice is the same
    yield adapter, state
    sys.modules.pop("rankmoe.integrations.sglang", None)


def make_first_layer(monkeypatch, state):
    """As SGLang does with Kimi-K3's model loaded."""
    put_modules(monkeypatch, {"sglang.srt.models.kimi_k3": {}})
    method_of(state, "create_moe_runner")(fail, types.SimpleNamespace(), torch.nn.Module(), Config())


def method_of(state, name):
    return state.hooks[f"sglang.srt.layers.quantization.mxfp4.Mxfp4MoEMethod.{name}"]


def fail(*arguments: object) -> None:
    raise AssertionError("SGLang's own was called")


def test_a_layer_goes_from_loading_to_output(sglang):
    _, state = sglang
    assert (list(state.cores), state.choices) == (["rankmoe"], ["rankmoe"])
    layer, *_ = make_layer()
    expected_weights = sglang_experts.pack_layer(layer, Config())
    dispatcher = types.SimpleNamespace(skip_local_expert_mapping=False)
    layer.dispatcher = dispatcher
    method, config = types.SimpleNamespace(), replace(Config(), layer=layer)
    method_of(state, "create_moe_runner")(fail, method, layer, config)
    method_of(state, "process_weights_after_loading")(fail, method, layer)
    assert layer.w13_weight.numel() == layer.w2_weight_scale.numel() == 0
    hidden_states, logits = make_batch()
    routing = route(logits, CONFIG)
    local = torch.where(routing.topk_ids >= 8, routing.topk_ids - 8, -1)
    expected = routed_moe(hidden_states, logits, expected_weights, CONFIG)
    for is_global, ids in ((False, local), (True, routing.topk_ids)):
        dispatcher.skip_local_expert_mapping = is_global
        dispatched = Dispatch(hidden_states, None, TopK(routing.topk_weights, ids, logits))
        assert torch.equal(method_of(state, "apply")(fail, method, layer, dispatched).hidden_states, expected)
    state.staged = sglang_experts.route_quant_fused(logits, torch.zeros(E), hidden_states, K, True, 1.0, False)[2:]
    nothing = Dispatch(torch.full_like(hidden_states, torch.nan), None, dispatched.topk_output)
    assert torch.equal(method_of(state, "apply")(fail, method, layer, nothing).hidden_states, expected)


@pytest.mark.parametrize(
    ("changes", "scale", "hooks", "message"),
    [
        ({"no_combine": True}, None, None, "no_combine is not covered"),
        ({"apply_router_weight_on_input": True}, None, None, "apply_router_weight_on_input is not covered"),
        ({}, torch.ones(1), None, "rows quantised before dispatch is not covered"),
        ({}, None, object(), "LoRA is not covered"),
    ],
)
def test_what_the_runner_does_not_do_is_said(sglang, changes, scale, hooks, message):
    adapter, _ = sglang
    experts = sglang_experts.pack_layer(make_layer()[0], Config())
    config = replace(Config(), **changes)
    hidden_states, logits = make_batch()
    dispatched = Dispatch(hidden_states, scale, TopK(torch.ones(7, K), torch.zeros(7, K, dtype=torch.int32), logits))
    core = adapter.RankmoeRunnerCore(config)
    with pytest.raises(NotImplementedError, match=f"--moe-runner-backend rankmoe: {message}"):
        core.run_from_dispatch(dispatched, adapter.RankmoeQuantInfo(experts), config, hooks=hooks)


def test_the_fronts_hooks_come_with_kimi_k3s_first_layer_and_once(sglang, monkeypatch):
    _, state = sglang
    assert len(state.hooks) == 3  # of the MXFP4 method: nothing else is imported for a server that does not ask for us
    method_of(state, "create_moe_runner")(fail, types.SimpleNamespace(), torch.nn.Module(), Config())
    assert (len(state.hooks), state.num_applied) == (3, 0)  # another model
    for _ in range(2):
        make_first_layer(monkeypatch, state)
        assert (len(state.hooks), state.num_applied) == (7, 1)


def test_a_server_with_another_backend_runs_as_if_nothing_were_installed(sglang, monkeypatch):
    _, state = sglang
    make_first_layer(monkeypatch, state)
    state.chosen = "triton"
    calls = []

    def original(*arguments, **options):
        calls.append((arguments, options))
        return "own"

    for hook, arguments in (
        (
            state.hooks["sglang.srt.models.kimi_k3.KimiK3MoE._forward_routed"],
            ("block", "x", "logits", "rows", "latent"),
        ),
        (method_of(state, "create_moe_runner"), ("method", "layer", "config")),
        (method_of(state, "process_weights_after_loading"), ("method", "layer")),
        (method_of(state, "apply"), ("method", "layer", "dispatched")),
        (state.hooks["sglang.kernels.ops.moe.moe_route_quant_fused.available"], ()),
        (state.hooks["sglang.kernels.ops.moe.moe_route_quant_fused.covered"], ("scores", "bias", 16, "x")),
        (state.hooks["sglang.kernels.ops.moe.moe_route_quant_fused.route_quant_fused"], ("scores", "bias", "x", 16)),
    ):
        assert hook(original, *arguments) == "own"
        assert calls[-1][0] == arguments
    assert state.requested is None


def test_kimi_k3_stages_its_rows_for_the_front(sglang, monkeypatch):
    _, state = sglang
    make_first_layer(monkeypatch, state)
    hook = state.hooks["sglang.srt.models.kimi_k3.KimiK3MoE._forward_routed"]
    assert hook(lambda *arguments: (state.requested, arguments), 1, 2, 3, "rows", 5) == ("rows", (1, 2, 3, "rows", 5))


def test_the_front_is_ours_where_the_backend_is(sglang, monkeypatch):
    _, state = sglang
    make_first_layer(monkeypatch, state)
    front = "sglang.kernels.ops.moe.moe_route_quant_fused"
    hidden_states, logits = make_batch()
    assert state.hooks[f"{front}.available"](fail) is True
    assert state.hooks[f"{front}.covered"](fail, logits, torch.zeros(E), K, hidden_states) is False  # on a CPU
    got = state.hooks[f"{front}.route_quant_fused"](
        fail, logits, torch.zeros(E), hidden_states, K, renormalize=True, routed_scaling_factor=1.0, apply_scale=False
    )
    assert torch.equal(got[1], route(logits, CONFIG).topk_ids)


def test_the_entry_point_is_there():
    from importlib.metadata import entry_points

    (entry,) = (e for e in entry_points(group="sglang.srt.plugins") if e.name == "rankmoe")
    assert entry.value == "rankmoe.integrations.sglang:register"

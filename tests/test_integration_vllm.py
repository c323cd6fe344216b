"""The vLLM adapter on plain tensors and on stand-ins for the names that it takes, which contracts/ holds."""

from __future__ import annotations

import enum
import importlib
import sys
import types
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers import put_modules, random_mxfp4, seeded

from rankmoe.experts import pack_experts
from rankmoe.integrations import vllm_experts
from rankmoe.moe import routed_moe
from rankmoe.route import route
from rankmoe.types import ExpertPlacement, RouterConfig, SiTU, SwiGLU

E, K, HIDDEN, INTERMEDIATE = 16, 4, 128, 64
CONFIG = RouterConfig(K)
GPT_OSS = SwiGLU(alpha=1.702, limit=7.0, up_offset=1.0)


class Activation(enum.Enum):
    SILU = "silu"
    GELU = "gelu"
    SITU = "situ"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"


@dataclass
class Parallel:
    ep_size: int = 2
    ep_rank: int = 1


@dataclass
class Moe:
    """The fields of ``FusedMoEConfig`` that are read."""

    num_experts: int = E
    num_local_experts: int = 8
    activation: Activation = Activation.SITU
    moe_parallel_config: Parallel = field(default_factory=Parallel)
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    activation_situ_beta: float | None = 4.0
    activation_situ_linear_beta: float | None = 25.0


def make_layer(num_experts=8, seed=1, bias_names=()):
    """(a layer as vLLM has loaded it, its weights and biases in checkpoint order)."""
    w13 = random_mxfp4(num_experts, 2 * INTERMEDIATE, HIDDEN, seed=seed, scale_bytes=(118, 123))
    w2 = random_mxfp4(num_experts, HIDDEN, INTERMEDIATE, seed=10 + seed, scale_bytes=(118, 123))
    tensors = {"w13_weight": w13.data, "w13_weight_scale": w13.scale, "w2_weight": w2.data, "w2_weight_scale": w2.scale}
    biases = [
        torch.randn(num_experts, width, generator=seeded(seed)).bfloat16() for width in (2 * INTERMEDIATE, HIDDEN)
    ]
    tensors |= dict(zip(bias_names, biases, strict=False))
    layer = torch.nn.Module()
    for name, tensor in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return layer, w13, w2, [bias.float() for bias in biases]


def make_batch(num_tokens=7):
    generator = seeded(num_tokens)
    hidden_states = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    return hidden_states, torch.randn(num_tokens, E, generator=generator)


# --- on plain tensors ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SiTU(4.0, 25.0)),
        ({"activation": Activation.SILU}, SwiGLU()),
        ({"activation": Activation.SILU, "swiglu_limit": 7.0}, SwiGLU(limit=7.0)),
        ({"activation": Activation.SWIGLUOAI}, GPT_OSS),
        (
            {"activation": Activation.SWIGLUOAI_UNINTERLEAVE, "swiglu_alpha": 1.5, "swiglu_limit": 6.0},
            SwiGLU(alpha=1.5, limit=6.0, up_offset=1.0),
        ),
    ],
)
def test_an_activation_is_found_in_the_layers_configuration(changes, expected):
    assert vllm_experts.activation_of(replace(Moe(), **changes)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": Activation.GELU}, "expected situ, silu, swigluoai or swigluoai_uninterleave, got gelu"),
        ({"activation_situ_beta": None}, "expected two numbers, got None"),
        ({"num_local_experts": 9}, "expected 8 of 16 experts on rank 1 of 2, got 9"),
    ],
)
def test_what_the_experts_cannot_have_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        vllm_experts.pack_layer(make_layer()[0], replace(Moe(), **changes), HIDDEN, INTERMEDIATE)


def test_padded_weights_are_refused():
    with pytest.raises(ValueError, match=r"w13_weight: expected \(8, 96, 128\) unpadded, got \(8, 128, 128\)"):
        vllm_experts.pack_layer(make_layer()[0], Moe(), HIDDEN, 48)


@pytest.mark.parametrize("is_alternating", [True, False])
def test_gpt_oss_rows_are_packed_as_they_lie(is_alternating):
    layer, w13, w2, (w13_bias, w2_bias) = make_layer(bias_names=("w13_bias", "w2_bias"))
    if is_alternating:
        for name in ("w13_weight", "w13_weight_scale", "w13_bias"):
            gates, ups = getattr(layer, name).data.chunk(2, dim=1)
            getattr(layer, name).data = torch.stack([gates, ups], dim=2).flatten(1, 2).clone()
    activation = Activation.SWIGLUOAI if is_alternating else Activation.SWIGLUOAI_UNINTERLEAVE
    got = vllm_experts.pack_layer(layer, replace(Moe(), activation=activation), HIDDEN, INTERMEDIATE)
    expected = pack_experts(w13, w2, GPT_OSS, ExpertPlacement(E, 2, 1), w13_bias=w13_bias, w2_bias=w2_bias)
    assert torch.equal(got.w13.data, expected.w13.data)
    assert torch.equal(got.w13.scale, expected.w13.scale)
    assert torch.equal(got.w13_bias, expected.w13_bias)
    assert torch.equal(got.w2_bias, expected.w2_bias)
    assert got.activation == GPT_OSS


@pytest.mark.parametrize("strategy", ["contiguous", "round_robin"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_map_of_either_kind_gives_each_rank_its_part_and_padding_nothing(strategy, dtype):
    hidden_states, logits = make_batch()
    routing = route(logits, CONFIG)
    ids = routing.topk_ids.to(dtype)
    ids[2] = -1
    whole, w13, w2, _ = make_layer(E)
    total = torch.zeros(7, HIDDEN)
    for rank in range(2):
        placement = ExpertPlacement(E, 2, rank, strategy=strategy)
        layer = torch.nn.Module()
        for name, parameter in whole.named_parameters():
            own = parameter.data[list(placement.expert_ids)]
            layer.register_parameter(name, torch.nn.Parameter(own, requires_grad=False))
        weights = vllm_experts.pack_layer(
            layer, replace(Moe(), moe_parallel_config=Parallel(2, rank)), HIDDEN, INTERMEDIATE
        )
        output = torch.full((7, HIDDEN), torch.nan)
        vllm_experts.run_experts(
            output,
            hidden_states,
            ids,
            routing.topk_weights,
            weights,
            global_num_experts=E,
            expert_map=placement.expert_map,
        )
        total += output
    everything = vllm_experts.pack_layer(
        whole, replace(Moe(), num_local_experts=E, moe_parallel_config=Parallel(1, 0)), HIDDEN, INTERMEDIATE
    )
    alone = torch.full((7, HIDDEN), torch.nan)
    vllm_experts.run_experts(
        alone, hidden_states, ids, routing.topk_weights, everything, global_num_experts=E, expert_map=None
    )
    reference = pack_experts(w13, w2, SiTU(), ExpertPlacement(E))
    expected = routed_moe(hidden_states, logits, reference, CONFIG, out_dtype=torch.float32)
    expected[2] = 0
    assert torch.equal(alone, expected)
    assert (total - expected).norm() / expected.norm() < 1e-6


# --- with stand-ins for vLLM -----------------------------------------------------------------------------------------
@pytest.fixture
def vllm(monkeypatch):
    """(classes of its layers, what the adapter registered by name)."""
    registered: dict[str, type] = {}

    class MethodBase:
        def __init__(self, moe):
            self.moe, self.moe_kernel, self.moe_quant_config = moe, None, None

    class Mxfp4MoEMethod(MethodBase):
        supports_pre_processed_weights = True

        def __init__(self, moe):
            raise AssertionError("this one chooses among vLLM's kernels")

        def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition):
            self.hidden_size, self.intermediate_size = hidden_size, intermediate_size_per_partition

    class QuantizationConfig:
        pass

    class RoutedExperts(torch.nn.Module):
        def __init__(self, moe_config):
            super().__init__()
            self.moe_config = moe_config

    class LinearBase(torch.nn.Module):
        pass

    class Modular:
        def __init__(self, moe_config, quant_config):
            self.moe_config, self.quant_config = moe_config, quant_config

    class Format(enum.Enum):
        Standard = "standard"

    class Kernel:
        """What vLLM's does around the experts: problem size, workspaces, experts."""

        def __init__(self, prepare_finalize, fused_experts):
            assert prepare_finalize == "prepared"
            self.experts = fused_experts

        def apply(self, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, **rest):
            size = self.experts.moe_problem_size(hidden_states, w1, w2, topk_ids)
            assert size == (w1.shape[0], hidden_states.shape[0], w1.shape[1], w2.shape[1], topk_ids.shape[1])
            num_local, tokens, rows, hidden, top_k = size
            shapes = self.experts.workspace_shapes(
                tokens, rows, hidden, top_k, global_num_experts, num_local, None, activation
            )
            first, second, out = (torch.empty(shape, dtype=hidden_states.dtype) for shape in shapes)
            self.experts.apply(
                output=out,
                hidden_states=hidden_states,
                w1=w1,
                w2=w2,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                activation=activation,
                global_num_experts=global_num_experts,
                expert_map=rest["expert_map"],
                a1q_scale=None,
                a2_scale=None,
                workspace13=first,
                workspace2=second,
                expert_tokens_meta=None,
                apply_router_weight_on_input=rest["apply_router_weight_on_input"],
            )
            return out

    def register(name):
        return lambda cls: registered.setdefault(name, cls)

    layers = "model_executor.layers"
    names: dict[str, dict[str, Any]] = {
        f"{layers}.fused_moe.modular_kernel": {
            "FusedMoEExpertsModular": Modular,
            "FusedMoEActivationFormat": Format,
            "FusedMoEKernel": Kernel,
        },
        f"{layers}.fused_moe.all2all_utils": {"maybe_make_prepare_finalize": lambda **options: "prepared"},
        f"{layers}.fused_moe.config": {"FUSED_MOE_UNQUANTIZED_CONFIG": "unquantized"},
        f"{layers}.fused_moe.fused_moe_method_base": {"FusedMoEMethodBase": MethodBase},
        f"{layers}.fused_moe.topk_weight_and_reduce": {"TopKWeightAndReduceNoOP": lambda: "no-op"},
        f"{layers}.fused_moe": {"RoutedExperts": RoutedExperts},
        f"{layers}.linear": {"LinearBase": LinearBase, "UnquantizedLinearMethod": lambda: "unquantised"},
        f"{layers}.quantization": {"register_quantization_config": register},
        f"{layers}.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
        f"{layers}.quantization.mxfp4": {"Mxfp4MoEMethod": Mxfp4MoEMethod},
    }
    put_modules(monkeypatch, {f"vllm.{path}": values for path, values in names.items()})
    for name in ("vllm", "vllm_method"):
        monkeypatch.delitem(sys.modules, f"rankmoe.integrations.{name}", raising=False)
    adapter = importlib.import_module("rankmoe.integrations.vllm")
    adapter.register()
    adapter.register()  # vLLM calls it in every process, perhaps twice
    assert "rankmoe.integrations.vllm_method" not in sys.modules  # until a layer is made
    yield types.SimpleNamespace(RoutedExperts=RoutedExperts, LinearBase=LinearBase), registered
    for name in ("vllm", "vllm_method"):
        sys.modules.pop(f"rankmoe.integrations.{name}", None)


def test_a_layer_goes_from_loading_to_output(vllm):
    host, registered = vllm
    (config_cls,) = registered.values()
    assert list(registered) == ["rankmoe"] == [config_cls.get_name()]
    layer, w13, w2, _ = make_layer()
    config = config_cls.from_config({"quant_method": "mxfp4"})
    assert config.get_quant_method(host.LinearBase(), "model.layers.0.mlp") == "unquantised"
    assert config.get_quant_method(torch.nn.Module(), "model.layers.0.attn") is None
    method = config.get_quant_method(host.RoutedExperts(Moe()), "model.layers.0.experts")
    assert method.maybe_roundup_sizes(HIDDEN, INTERMEDIATE, torch.bfloat16, None) == (HIDDEN, INTERMEDIATE)
    method.create_weights(layer, 8, HIDDEN, INTERMEDIATE)
    layer._expert_routing_tables = lambda: None
    method.process_weights_after_loading(layer)
    assert sum(parameter.numel() for parameter in layer.parameters()) == 0
    placement = ExpertPlacement(E, 2, 1)
    layer.activation, layer.global_num_experts = Activation.SITU, E
    layer.apply_router_weight_on_input, layer.expert_map = False, placement.expert_map
    hidden_states, logits = make_batch()
    routing = route(logits, CONFIG)
    got = method.apply(layer, hidden_states, routing.topk_weights, routing.topk_ids, None, None)
    expected = routed_moe(hidden_states, logits, pack_experts(w13, w2, SiTU(), placement), CONFIG)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected)
    layer.apply_router_weight_on_input = True
    with pytest.raises(
        NotImplementedError, match="--quantization rankmoe: apply_router_weight_on_input is not covered"
    ):
        method.apply(layer, hidden_states, routing.topk_weights, routing.topk_ids, None, None)


def test_an_activation_that_is_not_covered_fails_before_weights_are_loaded(vllm):
    host, registered = vllm
    layer = host.RoutedExperts(replace(Moe(), activation=Activation.GELU))
    with pytest.raises(ValueError, match=r"moe.activation: expected situ"):
        registered["rankmoe"]().get_quant_method(layer, "model.layers.0.experts")


@pytest.mark.parametrize(
    ("checkpoint", "asked", "expected"),
    [
        ({"quant_method": "mxfp4"}, "rankmoe", "rankmoe"),
        ({"quant_method": "mxfp4"}, None, None),
        ({"quant_method": "mxfp4"}, "mxfp4", None),
        ({"quant_method": "fp8"}, "rankmoe", None),
        ({"quant_method": "gpt_oss_mxfp4"}, "rankmoe", None),
        (None, "rankmoe", None),
    ],
)
def test_a_checkpoint_is_taken_only_where_it_is_asked_for(vllm, checkpoint, asked, expected):
    _, registered = vllm
    assert registered["rankmoe"].override_quantization_method(checkpoint, asked) == expected


@pytest.mark.usefixtures("vllm")
def test_the_experts_say_what_they_cover():
    from rankmoe.integrations.vllm_method import RankmoeExperts

    experts = RankmoeExperts(Moe(), "unquantized")
    assert experts.expects_unquantized_inputs
    assert experts.activation_format().value == "standard"
    assert [a for a in Activation if not experts._supports_activation(a)] == [Activation.GELU]
    assert experts.finalize_weight_and_reduce_impl() == "no-op"
    assert experts._supports_current_device() is torch.cuda.is_available()
    assert not experts._supports_no_act_and_mul()


def test_the_entry_point_is_there():
    from importlib.metadata import entry_points

    (entry,) = (e for e in entry_points(group="vllm.general_plugins") if e.name == "rankmoe")
    assert entry.value == "rankmoe.integrations.vllm:register"

"""What `rankmoe.integrations.sglang` relies on, in SGLang's published sources."""

import pytest
from contract_check import Fields, Function, Member, Name, Text
from contract_sources import SGLANG

_MOE = "sglang/srt/layers/moe"
_METHOD = "sglang/srt/layers/quantization/mxfp4.py"
_FRONT = "sglang/kernels/ops/moe/moe_route_quant_fused.py"
_HOOKS = "sglang/srt/plugins/hook_registry.py"
EXPECTED = [
    Text("sglang/srt/plugins/__init__.py", "sglang.srt.plugins"),
    Name("sglang/srt/arg_groups/choices.py", "add_moe_runner_backend_choices"),
    Function(f"{_MOE}/moe_runner/runner.py", "register_moe_runner_core", ("backend_name", "factory"), True),
    Function(
        f"{_MOE}/moe_runner/runner.py", "MoeRunner.__init__", ("self", "runner_backend", "config", "lora_enabled")
    ),
    Function(f"{_MOE}/moe_runner/runner.py", "MoeRunner.run", ("self", "dispatch_output", "quant_info")),
    Name(f"{_MOE}/moe_runner/base.py", "MoeQuantInfo"),
    Function(
        f"{_MOE}/moe_runner/base.py",
        "DispatchMoeRunnerCore.run_from_dispatch",
        ("self", "dispatch_output", "quant_info", "runner_config", "hooks"),
        True,
    ),
    Function(f"{_MOE}/moe_runner/base.py", "DispatchMoeRunnerCore.__init__", ("self", "config"), True),
    Fields(f"{_MOE}/moe_runner/base.py", "DispatchMoeRunnerCore", ("runner_backend",)),
    Fields(
        f"{_MOE}/moe_runner/base.py",
        "MoeRunnerConfig",
        (
            *("num_experts", "hidden_size", "intermediate_size_per_partition", "num_fused_shared_experts"),
            *("activation", "is_gated", "apply_router_weight_on_input", "no_combine", "routed_scaling_factor"),
            *("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit", "gate_up_interleaved", "layer"),
            *("moe_ep_size", "moe_ep_rank"),
        ),
    ),
    Function(f"{_MOE}/utils.py", "resolve_moe_runner_backend", ("backend",), True),
    Function(f"{_MOE}/utils.py", "get_moe_runner_backend", (), True),
    Fields(f"{_MOE}/utils.py", "RegisteredMoeRunnerBackend", ("value",)),
    Fields(
        f"{_MOE}/token_dispatcher/standard.py",
        "StandardDispatchOutput",
        ("hidden_states", "hidden_states_scale", "topk_output"),
    ),
    Fields(f"{_MOE}/token_dispatcher/standard.py", "StandardCombineInput", ("hidden_states",), True),
    Fields(f"{_MOE}/token_dispatcher/standard.py", "StandardDispatcher", ("skip_local_expert_mapping",)),
    Fields(f"{_MOE}/topk.py", "StandardTopKOutput", ("topk_weights", "topk_ids", "router_logits"), True),
    Function(f"{_MOE}/route_quant_handoff.py", "take", ("x",), True),
    Function(f"{_MOE}/route_quant_handoff.py", "stage", ("x",), True),
    Function(_METHOD, "Mxfp4MoEMethod.create_moe_runner", ("self", "layer", "moe_runner_config"), True),
    Function(_METHOD, "Mxfp4MoEMethod.process_weights_after_loading", ("self", "layer"), True),
    Function(_METHOD, "Mxfp4MoEMethod.apply", ("self", "layer", "dispatch_output"), True),
    *(Text(_METHOD, name) for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")),
    *(Text(_METHOD, name) for name in ("w13_weight_bias", "w2_weight_bias")),
    Function(_FRONT, "available", (), True),
    Function(_FRONT, "covered", ("scores", "bias", "topk", "x"), True),
    Function(
        _FRONT,
        "route_quant_fused",
        ("scores", "bias", "x", "topk", "renormalize", "routed_scaling_factor", "apply_scale"),
        True,
    ),
    Function(_HOOKS, "HookRegistry.register", ("target", "hook", "hook_type")),
    Function(_HOOKS, "HookRegistry.apply_hooks", ("cls",), True),
    Member(_HOOKS, "HookType", "AROUND", "around"),
    # Where Kimi-K3's two constants of SiTU stand.
    *(Text("sglang/srt/layers/moe/fused_moe_native.py", name) for name in ("situ",)),
    Function(
        "sglang/srt/models/kimi_k3.py",
        "KimiK3MoE._forward_routed",
        ("self", "hidden_states", "router_logits", "routed_input", "latent"),
        True,
    ),
]


def _name(expected):
    return getattr(expected, "member", getattr(expected, "literal", getattr(expected, "name", "")))


@pytest.mark.parametrize("expected", EXPECTED, ids=_name)
def test_sglang_is_as_the_adapter_takes_it(expected, source_tree):
    expected.check(source_tree(SGLANG))

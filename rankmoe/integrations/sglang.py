"""SGLang: a MoE runner core named ``rankmoe``; SGLang calls ``register`` through its plugin entry point.

    python -m sglang.launch_server --model-path ... --moe-runner-backend rankmoe

Nothing changes for a server with another ``--moe-runner-backend``: every hook looks at the flag first. Written for
SGLang 0.5.23; contracts/ holds the names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.arg_groups.choices import add_moe_runner_backend_choices
from sglang.srt.layers.moe import route_quant_handoff
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeQuantInfo
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner, register_moe_runner_core
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_runner_backend, resolve_moe_runner_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from rankmoe.integrations import sglang_experts
from rankmoe.integrations.mxfp4_layers import free_loaded
from rankmoe.types import ExpertWeights

NAME = "rankmoe"
_METHOD = "sglang.srt.layers.quantization.mxfp4.Mxfp4MoEMethod"
_FRONT = "sglang.kernels.ops.moe.moe_route_quant_fused"
_KIMI_K3 = "sglang.srt.models.kimi_k3"
_ATTRIBUTE = "_rankmoe_experts"
_is_registered = _has_front = False


@dataclass
class RankmoeQuantInfo(MoeQuantInfo):
    """What the layer hands its runner."""

    experts: ExpertWeights


class RankmoeRunnerCore(DispatchMoeRunnerCore):
    """Runs one layer's experts on what the standard dispatcher gives: local ids, -1 for experts of other ranks."""

    @property
    def runner_backend(self) -> Any:
        """The registered name."""
        return resolve_moe_runner_backend(NAME)

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: MoeQuantInfo, runner_config: Any, hooks: Any = None
    ) -> StandardCombineInput:
        """This rank's part of the output. Raises NotImplementedError for what these kernels do not do."""
        assert isinstance(quant_info, RankmoeQuantInfo)
        for name, is_asked in (
            ("LoRA", hooks is not None),
            ("no_combine", runner_config.no_combine),
            ("apply_router_weight_on_input", runner_config.apply_router_weight_on_input),
            ("rows quantised before dispatch", dispatch_output.hidden_states_scale is not None),
        ):
            if is_asked:
                raise NotImplementedError(f"--moe-runner-backend {NAME}: {name} is not covered; choose another backend")
        topk = dispatch_output.topk_output
        hidden_states = dispatch_output.hidden_states
        dispatcher = getattr(runner_config.layer, "dispatcher", None)
        out = sglang_experts.run_experts(
            hidden_states,
            topk.topk_ids,
            topk.topk_weights,
            quant_info.experts,
            is_global=bool(getattr(dispatcher, "skip_local_expert_mapping", False)),
            routed_scaling_factor=runner_config.routed_scaling_factor,
            staged=route_quant_handoff.take(hidden_states),
        )
        return StandardCombineInput(hidden_states=out)


def register() -> None:
    """Register the runner core, its flag, and the MXFP4 method's use of it; once or many times is the same.

    The entry point ``rankmoe`` of the group ``sglang.srt.plugins``; SGLang calls it in each of its processes.
    """
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    register_moe_runner_core(NAME, RankmoeRunnerCore)
    add_moe_runner_backend_choices([NAME])
    for target, hook in (
        (f"{_METHOD}.create_moe_runner", _create_moe_runner),
        (f"{_METHOD}.process_weights_after_loading", _process_weights_after_loading),
        (f"{_METHOD}.apply", _apply),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)


def _register_front() -> None:
    """The front's hooks, once Kimi-K3's first layer is made: a hook imports the module that it stands in."""
    global _has_front
    if _has_front or _KIMI_K3 not in sys.modules:
        return
    _has_front = True
    for target, hook in (
        (f"{_KIMI_K3}.KimiK3MoE._forward_routed", _forward_routed),
        (f"{_FRONT}.available", _front_available),
        (f"{_FRONT}.covered", _front_covered),
        (f"{_FRONT}.route_quant_fused", _route_quant_fused),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()  # those of the start are in place already and stay as they are


def is_chosen() -> bool:
    """Whether this server was started with ``--moe-runner-backend rankmoe``."""
    return bool(get_moe_runner_backend().value == NAME)


# --- hooks: each is given what it stands around ----------------------------------------------------------------------
def _create_moe_runner(original: Callable[..., Any], method: Any, layer: Any, moe_runner_config: Any) -> Any:
    if not is_chosen():
        return original(method, layer, moe_runner_config)
    sglang_experts.activation_of(moe_runner_config)  # before weights are loaded
    _register_front()
    method.moe_runner_config = moe_runner_config
    method.runner = MoeRunner(resolve_moe_runner_backend(NAME), moe_runner_config)
    return None


def _process_weights_after_loading(original: Callable[..., Any], method: Any, layer: Any) -> Any:
    if not is_chosen():
        return original(method, layer)
    setattr(layer, _ATTRIBUTE, sglang_experts.pack_layer(layer, method.moe_runner_config))
    free_loaded(layer)
    return None


def _apply(original: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
    if not is_chosen():
        return original(method, layer, dispatch_output)
    return method.runner.run(dispatch_output, RankmoeQuantInfo(getattr(layer, _ATTRIBUTE)))


def _forward_routed(
    original: Callable[..., Any], block: Any, hidden_states: Any, router_logits: Any, routed_input: Any, latent: Any
) -> Any:
    # The block itself stages for SGLang's own runner alone; it clears whatever was staged in any case.
    if is_chosen():
        route_quant_handoff.stage(routed_input)
    return original(block, hidden_states, router_logits, routed_input, latent)


def _front_available(original: Callable[..., Any]) -> Any:
    return True if is_chosen() else original()


def _front_covered(original: Callable[..., Any], scores: Any, bias: Any, topk: int, x: Any) -> Any:
    return sglang_experts.front_covered(scores, bias, topk, x) if is_chosen() else original(scores, bias, topk, x)


def _route_quant_fused(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return (sglang_experts.route_quant_fused if is_chosen() else original)(*arguments, **options)

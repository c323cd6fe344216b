"""rankmoe: the routed part of large mixture-of-experts models, for one rank of an expert-parallel group.

logits -> route -> quantise -> pack -> schedule -> expert GEMMs -> combine. ``import rankmoe`` touches no GPU, compiler,
environment variable or file.
"""

from rankmoe.backends import backend_names, get_backend
from rankmoe.experts import down, gate_up, pack_experts
from rankmoe.front import FrontResult, route_quantize
from rankmoe.handoff import Handoff
from rankmoe.moe import ExpertRows, Workspace, expert_rows, fused_moe, routed_moe
from rankmoe.pack import IdSpace, id_space, pack_topk, rank_local_ids, rank_local_num_experts, unpack
from rankmoe.quantize import dequantize, quantize_mxfp4, quantize_mxfp8
from rankmoe.runner import RoutedMoeRunner
from rankmoe.schedule import build_schedule, schedule_routing
from rankmoe.types import (
    MAX_FRONT_TOKENS,
    Activation,
    ExpertPlacement,
    ExpertSchedule,
    ExpertSource,
    ExpertWeights,
    LocalRange,
    MXTensor,
    RouterConfig,
    Routing,
    SiTU,
    SwiGLU,
)

__version__ = "0.1.0"

__all__ = [
    "MAX_FRONT_TOKENS",
    "Activation",
    "ExpertPlacement",
    "ExpertRows",
    "ExpertSchedule",
    "ExpertSource",
    "ExpertWeights",
    "FrontResult",
    "Handoff",
    "IdSpace",
    "LocalRange",
    "MXTensor",
    "RoutedMoeRunner",
    "RouterConfig",
    "Routing",
    "SiTU",
    "SwiGLU",
    "Workspace",
    "backend_names",
    "build_schedule",
    "dequantize",
    "down",
    "expert_rows",
    "fused_moe",
    "gate_up",
    "get_backend",
    "id_space",
    "pack_experts",
    "pack_topk",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "rank_local_ids",
    "rank_local_num_experts",
    "route_quantize",
    "routed_moe",
    "schedule_routing",
    "unpack",
]

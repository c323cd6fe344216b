"""Compile, without a GPU, every kernel that calls of the Triton front would launch. Run as a script by test_triton.py.

Launching is replaced by compiling, so what is compiled is what calls launch: every variant for the first of the
architectures given as arguments, one variant of each kernel for the others. Prints the kernels' names as a JSON list.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from rankmoe.kernels import (
    activation_triton,
    combine_triton,
    experts_triton,
    pack_triton,
    quantize_triton,
    read_triton,
    route_triton,
    routing_metadata_triton,
    rows_triton,
    schedule_triton,
)
from rankmoe.pack import IdSpace
from rankmoe.routing_metadata import allocate_routing_metadata
from rankmoe.types import (
    ExpertPlacement,
    ExpertSchedule,
    ExpertWeights,
    LocalRange,
    MXTensor,
    RouterConfig,
    SiTU,
    SwiGLU,
)

ROUTED = [  # logits, config, bias, valid, local range
    ((8, 896), torch.float32, RouterConfig(16), True, False, LocalRange(112, 112)),
    ((8, 256), torch.bfloat16, RouterConfig(8, num_expert_groups=8, topk_groups=4), True, True, None),
    ((8, 128), torch.float32, RouterConfig(8, "softmax", slot_order="value"), False, False, None),
    ((8, 128), torch.bfloat16, RouterConfig(4, "softmax_selected", renormalize=False), False, False, None),
]


def compile_calls() -> None:
    num_valid = torch.tensor([3])
    for shape, dtype, config, has_bias, has_valid, local_range in ROUTED:
        bias = torch.zeros(shape[1]) if has_bias else None
        route_triton.route(
            torch.zeros(shape, dtype=dtype),
            config,
            bias,
            num_valid if has_valid else None,
            packed=True,
            local_range=local_range,
        )
    quantize_triton.quantize_mxfp8(torch.zeros(8, 3584, dtype=torch.bfloat16))
    quantize_triton.quantize_mxfp8(torch.zeros(8, 96), num_valid)
    ids = torch.zeros(65, 16, dtype=torch.int32)
    pack_triton.pack(ids, torch.zeros(65, 16), None)
    pack_triton.pack(ids.long(), torch.zeros(65, 16), LocalRange(112, 112))
    expert_map = torch.zeros(896, dtype=torch.int32)
    for num_tokens in (8, 65):
        schedule_triton.build_schedule(ids[:num_tokens], 112, num_experts=896, local_expert_offset=112, is_packed=True)
        schedule_triton.build_schedule(ids[:num_tokens].long(), 112, num_experts=896, expert_map=expert_map)
    weights, space = torch.zeros(65, 16), IdSpace(128, 0)
    metadata = allocate_routing_metadata(weights, space, 8)
    empty = torch.zeros(1, dtype=torch.int32)
    schedule = ExpertSchedule(65, None, torch.zeros(113, dtype=torch.int32), empty, ids)
    routing_metadata_triton.fill(metadata, schedule, 0, 8)
    compile_expert_calls()


def compile_expert_calls() -> None:
    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    schedule = ExpertSchedule(8, None, integers(113), integers(128), integers(8, 16))
    x = MXTensor(torch.zeros(8, 3584).to(torch.float8_e4m3fn), torch.zeros(8, 112, dtype=torch.uint8), "mxfp8")
    data, _ = rows_triton.gather_rows(x, schedule)
    rows_triton.decode_scales(MXTensor(data, torch.zeros(128, 112, dtype=torch.uint8), "mxfp8"), schedule)
    for bias, activation, dtype in (
        (None, SiTU(), torch.bfloat16),
        (torch.zeros(112, 6144), SwiGLU(1.702, 7.0, 1.0), torch.float32),
    ):
        activation_triton.activate_quantize(torch.zeros(128, 6144, dtype=dtype), activation, schedule, bias)
        rows_triton.widen_rows(torch.zeros(128, 6144).bfloat16(), schedule, bias, torch.zeros(128, 6144))
    words = torch.zeros(112, 9000, dtype=torch.int64)
    read_triton.read_experts(words, torch.arange(8), torch.zeros(8, 2, dtype=torch.int64))
    compile_gemms(schedule, x)
    for dtype in (torch.bfloat16, torch.float32):
        combine_triton.combine(torch.zeros(128, 3584), torch.zeros(8, 16), schedule, dtype)


def compile_gemms(schedule: ExpertSchedule, x: MXTensor) -> None:
    """Both GEMMs, on bfloat16 planes and by ``tl.dot_scaled``, with what each activation has."""

    def weight(num_outputs: int, num_inputs: int) -> MXTensor:
        data = torch.zeros(1, num_outputs, num_inputs // 2, dtype=torch.uint8).expand(112, -1, -1)
        scale = torch.zeros(1, num_outputs, num_inputs // 32, dtype=torch.uint8).expand(112, -1, -1)
        return MXTensor(data, scale, "mxfp4")

    w13, w2 = weight(6144, 3584), weight(3584, 3072)
    bias = (torch.zeros(112, 6144), torch.zeros(112, 3584))
    for activation, biases in ((SiTU(), (None, None)), (SwiGLU(1.702, 7.0, 1.0), bias)):
        weights = ExpertWeights(w13, w2, activation, ExpertPlacement(896, 8, 0), "triton", *biases)
        for is_scaled in (False, True):
            middle = experts_triton.gate_up(x, schedule, weights, torch.zeros(128, 3072), is_scaled=is_scaled)
            experts_triton.down(middle, schedule, weights, torch.zeros(128, 3584), is_scaled=is_scaled)


def main(architectures: list[int]) -> None:
    compiled: set[object] = set()

    def compile_instead(kernel, *args, grid, warmup, num_warps=4, num_stages=3, enable_fp_fusion=True, **constants):
        values = dict(zip(kernel.arg_names, args, strict=False)) | constants
        assert list(values) == kernel.arg_names
        signature, constexprs, attributes = {}, {}, {}
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion}
        for index, (parameter, value) in enumerate(zip(kernel.params, values.values(), strict=True)):
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constexprs[parameter.name] = "constexpr", value
                continue
            signature[parameter.name] = mangle_type(value)
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
        is_native = constants.get("is_scaled") and (kernel.__name__, True) not in compiled
        for architecture in architectures[: 1 if kernel.__name__ in compiled and not is_native else None]:
            source = ASTSource(kernel, signature, constexprs, attributes)
            binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
            if is_native and architecture == 100:
                assert "kind::mxf8f6f4.block_scale" in binary.asm["ptx"], "not the hardware's block-scaled instruction"
        compiled.update({kernel.__name__, (kernel.__name__, bool(constants.get("is_scaled")))})

    JITFunction.run = compile_instead
    compile_calls()
    print(json.dumps(sorted(name for name in compiled if isinstance(name, str))))


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])

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

from rankmoe.kernels import quantize_triton, route_triton, schedule_triton
from rankmoe.types import LocalRange, RouterConfig

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
    expert_map = torch.zeros(896, dtype=torch.int32)
    for num_tokens in (8, 65):
        schedule_triton.build_schedule(ids[:num_tokens], 112, num_experts=896, local_expert_offset=112, is_packed=True)
        schedule_triton.build_schedule(ids[:num_tokens].long(), 112, num_experts=896, expert_map=expert_map)


def main(architectures: list[int]) -> None:
    compiled: set[str] = set()

    def compile_instead(kernel, *args, grid, warmup, num_warps=4, **constants):
        values = dict(zip(kernel.arg_names, args, strict=False)) | constants
        assert list(values) == kernel.arg_names
        signature, constexprs, attributes = {}, {}, {}
        for index, (parameter, value) in enumerate(zip(kernel.params, values.values(), strict=True)):
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constexprs[parameter.name] = "constexpr", value
                continue
            signature[parameter.name] = mangle_type(value)
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
        for architecture in architectures[: 1 if kernel.__name__ in compiled else None]:
            source = ASTSource(kernel, signature, constexprs, attributes)
            triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": num_warps})
        compiled.add(kernel.__name__)

    JITFunction.run = compile_instead
    compile_calls()
    print(json.dumps(sorted(compiled)))


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])

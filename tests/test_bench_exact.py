"""The float64 GEMMs that benchmarks check against, beside the reference backend."""

import pytest
import torch
from helpers import random_mxfp4, seeded

from rankmoe.bench.exact import down_float64, gate_up_float64
from rankmoe.experts import down, gate_up, pack_experts
from rankmoe.quantize import dequantize, quantize_mxfp8
from rankmoe.schedule import build_schedule
from rankmoe.types import ExpertPlacement, SiTU, SwiGLU


@pytest.mark.parametrize(("activation", "has_bias"), [(SiTU(), False), (SwiGLU(limit=7.0), True)])
def test_both_gemms_are_the_references(activation, has_bias):
    generator = seeded(0)
    w13, w2 = random_mxfp4(4, 128, 96, scale_bytes=(118, 123)), random_mxfp4(4, 96, 64, scale_bytes=(118, 123))
    biases = {}
    if has_bias:
        biases = {
            "w13_bias": torch.randn(4, 128, generator=generator),
            "w2_bias": torch.randn(4, 96, generator=generator),
        }
    weights = pack_experts(w13, w2, activation, ExpertPlacement(8, 2, 1), backend="reference", **biases)
    ids = torch.tensor([[4, 6], [6, 0], [7, 4], [1, 2]], dtype=torch.int32)
    schedule = build_schedule(ids, 4, num_experts=8, local_expert_offset=4)
    x = quantize_mxfp8(torch.randn(4, 96, generator=generator))
    num_rows = int(schedule.expert_offsets[-1])
    middle = gate_up_float64(x, schedule, w13, biases.get("w13_bias"), activation)
    assert middle.shape == (num_rows, 64)
    expected = gate_up(x, schedule, weights)
    assert torch.equal(middle, dequantize(expected, torch.float64)[:num_rows])
    rows = down_float64(middle, schedule, w2, biases.get("w2_bias"))
    assert torch.allclose(rows, down(expected, schedule, weights)[:num_rows].double(), rtol=1e-6, atol=1e-6)

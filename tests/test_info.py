"""Figures of `rankmoe info` against ones worked out by hand, and against a simulation."""

from __future__ import annotations

import pytest
import torch

from rankmoe.info import describe_batch, describe_ranks, why_rank_local
from rankmoe.models.presets import PRESETS, get_preset
from rankmoe.types import LocalRange


def test_kimi_k3_on_ep8_is_a_128_expert_problem() -> None:
    ranks = describe_ranks(get_preset("kimi-k3"), 8)
    assert [rank.local_range for rank in ranks] == [LocalRange(112 * r, 112) for r in range(8)]
    assert {rank.rank_local_num_experts for rank in ranks} == {128}
    # 3 * 3584 * 3072 weights at 4.25 bits, 112 times.
    assert ranks[0].nbytes_per_layer == 112 * (3 * 3584 * 3072 * 17 // 32) == 1_965_293_568


@pytest.mark.parametrize(
    ("model", "ep_size", "applies", "reason"),
    [
        ("kimi-k3", 8, True, "round_up(112 + 16, 4) = 128 is below 896"),
        ("kimi-k3", 1, False, "owns all 896"),
        ("qwen3-moe", 2, True, "round_up(64 + 8, 4) = 72 is below 128"),
        ("nano-like", 2, False, "round_up(4 + 4, 4) = 8 is not below 8"),
    ],
)
def test_the_reason_names_the_numbers(model: str, ep_size: int, applies: bool, reason: str) -> None:
    import dataclasses

    from rankmoe.types import RouterConfig

    preset = (
        dataclasses.replace(get_preset("kimi-k3"), num_experts=8, router=RouterConfig(top_k=4))
        if model == "nano-like"
        else get_preset(model)
    )
    rank = describe_ranks(preset, ep_size)[0]
    assert (rank.rank_local_num_experts is not None) == applies
    assert reason in why_rank_local(preset, rank)


@pytest.mark.parametrize("model", PRESETS)
def test_every_preset_can_be_routed_and_quantised(model: str) -> None:
    preset = PRESETS[model]
    preset.router.validate(preset.num_experts)
    assert preset.hidden_size % 32 == 0
    assert preset.intermediate_size % 32 == 0


def test_expected_active_experts_agree_with_a_simulation() -> None:
    preset, num_tokens = get_preset("kimi-k3"), 8
    generator = torch.Generator().manual_seed(0)
    active = []
    for _ in range(200):
        ids = torch.rand(num_tokens, 896, generator=generator).topk(16).indices
        active.append(len(set(ids[ids < 112].tolist())))
    expected = describe_batch(preset, 8, num_tokens, 4.5).active_experts
    assert sum(active) / len(active) == pytest.approx(expected, rel=0.03)


def test_the_floor_is_bytes_over_speed() -> None:
    batch = describe_batch(get_preset("kimi-k3"), 8, 8, tb_per_s=4.5)
    assert batch.floor_us == pytest.approx(batch.nbytes / 4.5e12 * 1e6)


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"model: expected one of kimi-k3, .*got 'kimi'"):
        get_preset("kimi")

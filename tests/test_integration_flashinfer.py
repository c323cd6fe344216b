"""The FlashInfer adapter against a plain statement of its routed MoE; the names that it uses are held by contracts/."""

from __future__ import annotations

import contextlib
import enum
import importlib
import sys
from dataclasses import dataclass

import pytest
import torch
from helpers import put_modules, random_mxfp4, seeded

from rankmoe.combine import combine
from rankmoe.experts import pack_experts
from rankmoe.front import route_quantize
from rankmoe.moe import routed_moe
from rankmoe.pack import unpack
from rankmoe.quantize import dequantize, quantize_mxfp8
from rankmoe.types import ExpertPlacement, LocalRange, MXTensor, RouterConfig, SiTU, SwiGLU

HIDDEN, INTERMEDIATE, TOP_K = 160, 96, 4  # neither a multiple of 128
CONFIG = RouterConfig(TOP_K)
PLACEMENT = ExpertPlacement(32, 4, 1)
GPT_OSS = SwiGLU(alpha=1.702, limit=7.0, up_offset=1.0)


class ActivationType(enum.IntEnum):
    Swiglu = 3
    Situ = 10


class RoutingMethodType(enum.IntEnum):
    TopK = 5


class SfLayout(enum.IntEnum):
    layout_linear = 2


@dataclass(frozen=True)
class Slot:
    tile_n: int
    total_num_padded_tokens: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor
    permuted_idx_to_token_idx: torch.Tensor
    expert_weights: torch.Tensor
    expert_count_histogram: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    cta_idx_xy_to_batch_idx: torch.Tensor
    cta_idx_xy_to_mn_limit: torch.Tensor
    num_non_exiting_ctas: torch.Tensor


def shuffle(rows: torch.Tensor, tile: int, *_: int) -> torch.Tensor:
    """Some permutation of the rows of a tile; the kernel below undoes it."""
    assert rows.is_contiguous()
    assert rows.shape[0] % tile == 0 == tile % 128
    return rows.view(-1, tile, *rows.shape[1:]).flip(1).flatten(0, 1)


def routed_moe_of_flashinfer(calls: list[dict[str, object]], **a):
    """By the documented meaning of every argument; the combine as well, or rows, weights and the row of each slot."""
    calls.append(a)
    assert a["routing_method_type"] == RoutingMethodType.TopK
    assert a["hidden_states_scale_layout"] is SfLayout.layout_linear
    assert a["num_experts"] % 4 == 0
    assert a["num_experts"] > a["top_k"]
    num_local = a["local_num_experts"]
    assert a["local_expert_offset"] + num_local <= a["num_experts"]
    w1, w2 = (
        dequantize(
            MXTensor(
                torch.stack([shuffle(w, 128) for w in a[f"gemm{i}_weights"]]),
                torch.stack([shuffle(s, 128) for s in a[f"gemm{i}_weights_scale"].view(torch.uint8)]),
                "mxfp4",
            ),
            torch.float64,
        )
        for i in (1, 2)
    )
    assert w1.shape[1] == 2 * a["intermediate_size"]
    x = dequantize(MXTensor(a["hidden_states"], a["hidden_states_scale"].view(torch.uint8), "mxfp8"), torch.float64)
    slot = a["routing_metadata"]
    if slot is None:
        ids, weights = unpack(a["topk_ids"])
        rows, tokens, row_of, owner = [], [], {}, []
        for token, own in enumerate(ids.tolist()):
            for k, id_ in enumerate(own):
                local = id_ - a["local_expert_offset"]
                if 0 <= local < num_local:
                    row_of[token * len(own) + k] = len(tokens)
                    tokens.append(token)
                    owner.append(local)
        slot_rows = torch.tensor([row_of.get(i, -1) for i in range(ids.numel())])
    else:
        weights = slot.expert_weights
        num_rows, tile = int(slot.total_num_padded_tokens), slot.tile_n
        tokens = slot.permuted_idx_to_token_idx[:num_rows].tolist()
        owner = [int(slot.cta_idx_xy_to_batch_idx[row // tile]) for row in range(num_rows)]
        limits = [int(slot.cta_idx_xy_to_mn_limit[row // tile]) for row in range(num_rows)]
        assert [token >= 0 for token in tokens] == [row < limit for row, limit in enumerate(limits)]
        slot_rows = slot.expanded_idx_to_permuted_idx
    rows = torch.zeros(max(1, len(tokens)), w2.shape[1], dtype=torch.float64)
    for row, (token, expert) in enumerate(zip(tokens, owner, strict=True)):
        if token < 0:
            continue
        sums = w1[expert] @ x[token]
        if a["gemm1_bias"] is not None:
            sums = sums + shuffle(a["gemm1_bias"][expert], 128)
        middle = activated(sums[0::2], sums[1::2], a, expert).float()
        rows[row] = w2[expert] @ dequantize(quantize_mxfp8(middle[None]), torch.float64)[0]
        if a["gemm2_bias"] is not None:
            rows[row] += shuffle(a["gemm2_bias"][expert], 128)
    if a["valid_hidden_size"] is not None:
        rows = rows[:, : a["valid_hidden_size"]]
    if not a["do_finalize"]:
        return [rows, weights, slot_rows]
    out = torch.zeros(weights.shape[0], rows.shape[1], dtype=torch.float64)
    for i, row in enumerate(slot_rows.tolist()):
        if row >= 0:
            out[i // weights.shape[1]] += weights.flatten()[i].double() * rows[row]
    return out


def activated(up, gate, a, expert):
    alpha, beta, limit = (None if c is None else float(c[expert]) for c in (a[f"gemm1_{n}"] for n in NAMES))
    if a["activation_type"] == ActivationType.Situ:
        assert limit is None
        return beta * torch.tanh(up / beta) * alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate)
    assert a["activation_type"] == ActivationType.Swiglu
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + (beta or 0.0)) * gate * torch.sigmoid((alpha or 1.0) * gate)


NAMES = ("alpha", "beta", "clamp_limit")


@pytest.fixture
def flashinfer(monkeypatch):
    """(adapter, arguments of its calls, what its tuner was asked) with the host's names put in place."""
    calls: list[dict[str, object]] = []
    tuned: list[tuple[object, ...]] = []

    @contextlib.contextmanager
    def autotune(tune_mode=True, cache=None):
        tuned.append((tune_mode, cache, len(calls)))
        yield

    put_modules(
        monkeypatch,
        {
            "flashinfer": {"autotune": autotune, "shuffle_matrix_a": shuffle, "shuffle_matrix_sf_a": shuffle},
            "flashinfer.fused_moe": {
                "trtllm_fp4_block_scale_routed_moe": lambda **a: routed_moe_of_flashinfer(calls, **a)
            },
            "flashinfer.fused_moe.core": {"TrtllmMoERoutingMetadataSlot": Slot},
            "flashinfer.tllm_enums": {
                "ActivationType": ActivationType,
                "RoutingMethodType": RoutingMethodType,
                "SfLayout": SfLayout,
            },
        },
    )
    monkeypatch.delitem(sys.modules, "rankmoe.integrations.flashinfer", raising=False)
    adapter = importlib.import_module("rankmoe.integrations.flashinfer")
    yield adapter, calls, tuned
    sys.modules.pop("rankmoe.integrations.flashinfer", None)


def make_experts(adapter, activation, has_bias=False, placement=PLACEMENT):
    generator = seeded(7)
    w13 = random_mxfp4(placement.num_local_experts, 2 * INTERMEDIATE, HIDDEN, scale_bytes=(118, 123))
    w2 = random_mxfp4(placement.num_local_experts, HIDDEN, INTERMEDIATE, scale_bytes=(118, 123))
    biases = {}
    if has_bias:
        biases = {
            "w13_bias": torch.randn(placement.num_local_experts, 2 * INTERMEDIATE, generator=generator),
            "w2_bias": torch.randn(placement.num_local_experts, HIDDEN, generator=generator),
        }
    ours = pack_experts(w13, w2, activation, placement, backend="reference", **biases)
    return ours, adapter.prepare_experts(w13, w2, activation, placement, device="cpu", **biases)


def make_inputs(num_tokens=9):
    generator = seeded(num_tokens)
    return torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16(), torch.randn(
        num_tokens, 32, generator=generator
    )


@pytest.mark.parametrize("rank_local", [True, False], ids=["rank-local", "global"])
@pytest.mark.parametrize(
    ("activation", "has_bias"), [(SiTU(), False), (SwiGLU(), False), (GPT_OSS, True)], ids=["situ", "swiglu", "gpt-oss"]
)
def test_packed_ids_of_either_form_give_the_layer(flashinfer, activation, has_bias, rank_local):
    adapter, calls, _ = flashinfer
    ours, experts = make_experts(adapter, activation, has_bias)
    hidden_states, logits = make_inputs()
    front = route_quantize(logits, hidden_states, CONFIG, local_range=PLACEMENT.local_range, rank_local=rank_local)
    (got,) = adapter.run_experts(front, experts)
    expected = routed_moe(hidden_states, logits, ours, CONFIG, out_dtype=torch.float32)
    assert (calls[0]["num_experts"], calls[0]["local_expert_offset"]) == ((12, 0) if rank_local else (32, 8))
    assert got.shape == expected.shape
    assert (got - expected).norm() / expected.norm() < 3e-3  # weights are packed as bfloat16


@pytest.mark.parametrize("tile_n", [8, 16])
def test_a_schedule_takes_the_place_of_its_routing_pass(flashinfer, tile_n):
    adapter, calls, _ = flashinfer
    ours, experts = make_experts(adapter, SiTU())
    hidden_states, logits = make_inputs(33)
    front = route_quantize(logits, hidden_states, CONFIG, local_range=PLACEMENT.local_range)
    (got,) = adapter.run_experts(front, experts, tile_n=tile_n)
    expected = routed_moe(hidden_states, logits, ours, CONFIG, out_dtype=torch.float32)
    assert calls[0]["routing_metadata"].tile_n == tile_n
    assert (got - expected).norm() / expected.norm() < 1e-6


def test_a_deferred_combine_is_ours_to_finish(flashinfer):
    adapter, _, _ = flashinfer
    ours, experts = make_experts(adapter, SiTU())
    hidden_states, logits = make_inputs()
    front = route_quantize(logits, hidden_states, CONFIG, local_range=PLACEMENT.local_range)
    rows, weights, slot_rows = adapter.run_experts(front, experts, tile_n=8, do_finalize=False)
    schedule = type(front.schedule)(
        9, None, front.schedule.expert_offsets, torch.zeros(len(rows), dtype=torch.int32), slot_rows.view(9, TOP_K)
    )
    got = combine(rows.float(), weights, schedule, torch.float32)
    expected = routed_moe(hidden_states, logits, ours, CONFIG, out_dtype=torch.float32)
    assert (got - expected).norm() / expected.norm() < 1e-6


def test_what_does_not_belong_together_is_refused(flashinfer):
    adapter, calls, _ = flashinfer
    _, experts = make_experts(adapter, SiTU())
    hidden_states, logits = make_inputs()
    other = route_quantize(logits, hidden_states, CONFIG, local_range=LocalRange(16, 8))
    with pytest.raises(ValueError, match=r"routing.local_range: expected the weights' range offset=8"):
        adapter.run_experts(other, experts)
    with pytest.raises(ValueError, match=r"front.schedule: expected one for LocalRange\(offset=8, count=8\)"):
        adapter.run_experts(other, experts, tile_n=8)
    without = route_quantize(logits, hidden_states, CONFIG, local_range=PLACEMENT.local_range, schedule="none")
    with pytest.raises(ValueError, match="where tile_n is given, got none"):
        adapter.run_experts(without, experts, tile_n=8)
    w13, w2 = random_mxfp4(8, 2 * INTERMEDIATE, HIDDEN), random_mxfp4(8, HIDDEN, INTERMEDIATE)
    with pytest.raises(ValueError, match="placement: expected one range of experts without copies"):
        adapter.prepare_experts(w13, w2, SiTU(), ExpertPlacement(32, 4, 1, strategy="round_robin"), device="cpu")
    with pytest.raises(ValueError, match=r"w13: expected \(8, 192, 160\) as placement and w2, got \(7, 192, 160\)"):
        adapter.prepare_experts(w13[:7], w2, SiTU(), PLACEMENT, device="cpu")
    assert not calls


def test_ids_to_tune_with_have_the_ranks_real_share_and_are_not_taken_for_a_few_experts(flashinfer):
    adapter, _, _ = flashinfer
    placement = ExpertPlacement(896, 8, 3)
    ids, weights = unpack(adapter.tuning_ids(64, placement, RouterConfig(16)))
    own = ids[ids >= 0]
    assert ids.shape == (64, 16)
    assert int(own.max()) < 112
    assert 90 < len(own) < 170  # 128 expected
    assert len(ids[ids < 0].unique()) == (ids < 0).sum()
    # What FlashInfer asks of a batch: half the different ids that evenly drawn ones of 128 experts would have.
    for num_rows in (1, 4, 8, 32, 64):
        assert 2 * len(ids[:num_rows].unique()) >= 128 * (1 - (1 - 16 / 128) ** num_rows)
    assert weights.float().unique().tolist() == [1 / 16]
    popularity = torch.zeros(896)
    popularity[336:352] = 1.0
    ids, _ = unpack(adapter.tuning_ids(3, placement, RouterConfig(16), popularity=popularity))
    assert sorted(ids[0].tolist()) == list(range(16))


def test_tuning_runs_its_tuner_on_that_share(flashinfer):
    adapter, calls, tuned = flashinfer
    _, experts = make_experts(adapter, SiTU())
    adapter.tune(experts, CONFIG, 16, cache="tactics.json")
    assert tuned == [(True, "tactics.json", 0)]
    (call,) = calls
    assert call["topk_ids"].shape == (16, TOP_K)
    assert (call["num_experts"], call["local_expert_offset"], call["tune_max_num_tokens"]) == (12, 0, 16)


def test_without_its_host_the_module_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "rankmoe.integrations.flashinfer", raising=False)
    with pytest.raises(ImportError, match="flashinfer"):
        importlib.import_module("rankmoe.integrations.flashinfer")

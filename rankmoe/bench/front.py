"""`rankmoe bench front`: the launch from router logits to schedule, beside its parts and SGLang's fused launch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rankmoe.bench.record import Record, device_name
from rankmoe.bench.timing import Launches, capture_launches, time_launches
from rankmoe.kernels import front_cuda
from rankmoe.models.presets import ModelPreset
from rankmoe.pack import pack_topk, rank_local_num_experts
from rankmoe.quantize import quantize_mxfp8
from rankmoe.route import route
from rankmoe.schedule import build_schedule
from rankmoe.types import ExpertPlacement, LocalRange, MXTensor, ScheduleOutput

#: Sets of buffers that the launches rotate over. They stay in L2, as logits and rows do that the kernel before wrote.
NUM_SETS = 8


@dataclass(frozen=True)
class FrontOptions:
    """What to measure: the middle rank of ``ep_size``, at each token count."""

    preset: ModelPreset
    ep_size: int
    token_counts: Sequence[int]
    rounds: int = 25
    seed: int = 0


@dataclass(frozen=True)
class _Batch:
    """One set of inputs, and what the separate passes make of it."""

    logits: torch.Tensor
    hidden_states: torch.Tensor
    packed_global: torch.Tensor
    packed_local: torch.Tensor


def run(options: FrontOptions) -> Record:
    """Check every variant against the separate passes, then time all; returns the record.

    Rows: ``empty`` is the same grid doing nothing; ``front`` routes, quantises and packs in one launch;
    ``front+schedule`` writes the token masks too, ``front+rows`` the whole schedule; ``unfused`` are our separate
    passes (route and pack, quantise, schedule); ``schedule-global`` and ``schedule-rank-local`` are the separate
    schedule pass over packed ids of either form; ``sglang`` is SGLang's launch (route, quantise, pack), where it is
    importable and covers the shape.
    Raises RuntimeError where the device cannot run the launch.
    """
    if not front_cuda.available():
        raise RuntimeError("bench front: expected a Hopper or Blackwell GPU with NVRTC and cuda-bindings, got none")
    rows = []
    for num_tokens in options.token_counts:
        for name, timing in time_launches(_Bench(options, num_tokens).capture(), options.rounds).items():
            rows.append(
                {"tokens": num_tokens, "variant": name, "us": round(timing.us, 3), "spread": round(timing.spread, 3)}
            )
    return Record("front", options.preset.name, device_name("cuda"), rows, notes={"ep_size": options.ep_size})


class _Bench:
    """One token count: inputs, checked variants, captured graphs."""

    def __init__(self, options: FrontOptions, num_tokens: int) -> None:
        preset = options.preset
        placement = ExpertPlacement(preset.num_experts, options.ep_size, options.ep_size // 2)
        local_range = placement.local_range
        assert local_range is not None, "a contiguous placement has a range"
        local_num_experts = rank_local_num_experts(preset.num_experts, local_range, preset.router.top_k)
        if local_num_experts is None:
            raise ValueError(f"ep_size: expected one with rank-local ids, got {options.ep_size} for {preset.name}")
        self.preset, self.num_tokens = preset, num_tokens
        self.local_range: LocalRange = local_range
        self.local_num_experts: int = local_num_experts
        generator = torch.Generator("cuda").manual_seed(options.seed + num_tokens)
        self.bias = torch.randn(preset.num_experts, generator=generator, device="cuda") * 0.1
        self.batches = [self._batch(generator) for _ in range(NUM_SETS)]

    def _batch(self, generator: torch.Generator) -> _Batch:
        preset = self.preset
        logits = torch.randn(self.num_tokens, preset.num_experts, generator=generator, device="cuda")
        hidden_states = torch.randn(self.num_tokens, preset.hidden_size, generator=generator, device="cuda").bfloat16()
        routing = route(logits, preset.router, self.bias)
        packed = [pack_topk(routing, preset.num_experts, form).packed for form in (None, self.local_range)]
        assert packed[0] is not None
        assert packed[1] is not None
        return _Batch(logits, hidden_states, packed[0], packed[1])

    def capture(self) -> dict[str, Launches]:
        """Check, then capture every variant."""
        variants: dict[str, Callable[[int], object]] = {
            "empty": self._front("none", front_cuda.FrontVariant(stop_after=0)),
            "front": self._front("none"),
            "front+schedule": self._front("masks"),
            "front+rows": self._front("rows"),
            "unfused": self._unfused,
            "schedule-global": lambda i: self._schedule(self.batches[i].packed_global, is_local=False),
            "schedule-rank-local": lambda i: self._schedule(self.batches[i].packed_local, is_local=True),
        }
        sglang = self._sglang()
        if sglang is not None:
            variants["sglang"] = sglang
        return {name: capture_launches(run, NUM_SETS) for name, run in variants.items()}

    def _front(
        self, schedule: ScheduleOutput, variant: front_cuda.FrontVariant = front_cuda.DEFAULT_VARIANT
    ) -> Callable[[int], object]:
        preset, local_range = self.preset, self.local_range
        buffers = [
            front_cuda.allocate_buffers(
                self.num_tokens, preset.router.top_k, preset.hidden_size, local_range.count, "cuda", schedule=schedule
            )
            for _ in self.batches
        ]

        def launch(i: int) -> None:
            front_cuda.launch_front(
                self.batches[i].logits,
                self.batches[i].hidden_states,
                preset.router,
                buffers[i],
                correction_bias=self.bias,
                local_expert_offset=local_range.offset,
                num_local_experts=local_range.count,
                packed_range=local_range,
                variant=variant,
            )

        if variant == front_cuda.DEFAULT_VARIANT:
            for i, batch in enumerate(self.batches):
                launch(i)
                self._check(batch, buffers[i])
        return launch

    def _check(self, batch: _Batch, buffers: front_cuda.FrontBuffers) -> None:
        assert buffers.packed is not None
        x = quantize_mxfp8(batch.hidden_states)
        expected = {"packed": (buffers.packed, batch.packed_local), **_rows(buffers.rows(), x)}
        schedule = self._schedule(batch.packed_local, is_local=True)
        for name in ("expert_token_mask", "expert_offsets", "slot_rows"):
            made = getattr(buffers, name)
            if made is not None:
                expected[name] = (made, getattr(schedule, name))
        for name, (got, wanted) in expected.items():
            if not torch.equal(got, wanted):
                raise AssertionError(f"front, {self.num_tokens} tokens: {name} differs from the separate passes'")

    def _unfused(self, i: int) -> object:
        batch, preset = self.batches[i], self.preset
        routing = importlib.import_module("rankmoe.kernels.route_triton").route(
            batch.logits, preset.router, self.bias, packed=True, local_range=self.local_range
        )
        return routing, quantize_mxfp8(batch.hidden_states), self._schedule(routing.packed, is_local=True)

    def _schedule(self, packed: torch.Tensor, is_local: bool) -> Any:
        local_range = self.local_range
        return build_schedule(
            packed,
            local_range.count,
            num_experts=self.local_num_experts if is_local else self.preset.num_experts,
            local_expert_offset=0 if is_local else local_range.offset,
            is_packed=True,
        )

    def _sglang(self) -> Callable[[int], object] | None:
        try:
            peer = importlib.import_module("sglang.kernels.ops.moe.moe_route_quant_fused")
        except ImportError:
            return None
        router, first = self.preset.router, self.batches[0]
        if not peer.available() or not peer.covered(first.logits, self.bias, router.top_k, first.hidden_states):
            return None

        def launch(i: int) -> Any:
            batch = self.batches[i]
            return peer.route_quant_fused(
                batch.logits,
                self.bias,
                batch.hidden_states,
                router.top_k,
                renormalize=router.renormalize,
                routed_scaling_factor=router.routed_scaling_factor,
                apply_scale=False,
            )

        _, ids, packed, data, scale = launch(0)
        x = quantize_mxfp8(first.hidden_states)
        theirs = MXTensor(data, scale.view(torch.uint8), "mxfp8")
        # Their packed ids are global; a weight may differ in the last bit of its bfloat16 form.
        same_ids = torch.equal(packed >> 16, first.packed_global >> 16) and torch.equal(ids, packed >> 16)
        if not same_ids or not all(torch.equal(a, b) for a, b in _rows(theirs, x).values()):
            raise AssertionError(f"sglang, {self.num_tokens} tokens: ids or rows differ from the separate passes'")
        return launch


def _rows(got: MXTensor, expected: MXTensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {
        "data": (got.data.view(torch.uint8), expected.data.view(torch.uint8)),
        "scale": (got.scale, expected.scale),
    }


def table_rows(record: Record) -> list[list[str]]:
    """The record as a table: token counts in the first row, then a row a variant, microseconds."""
    counts = sorted({row["tokens"] for row in record.rows})
    values = {(row["variant"], row["tokens"]): f"{row['us']:.2f}" for row in record.rows}
    names = dict.fromkeys(row["variant"] for row in record.rows)
    rows = [[name, *(values.get((name, count), "") for count in counts)] for name in names]
    return [["us at T =", *map(str, counts)], *rows]

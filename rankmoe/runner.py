"""What a serving engine calls in place of its own routed-expert runner."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rankmoe.front import FrontResult
from rankmoe.handoff import Handoff
from rankmoe.moe import Workspace, fused_moe
from rankmoe.pack import IdSpace, id_space
from rankmoe.quantize import quantize_mxfp8
from rankmoe.route import mask_padding
from rankmoe.types import ExpertSchedule, ExpertWeights, LocalRange, MXTensor, Routing


@dataclass
class RoutedMoeRunner:
    """Runs one layer's experts of this rank.

    weights: may be replaced between calls; the range is read from them at every call.
    handoff: where a fused front may have left this batch's result.
    workspace: buffers to reuse, or None to allocate at each call.
    out_dtype: bfloat16, or float32 where the sum over ranks runs in float32.
    """

    weights: ExpertWeights
    handoff: Handoff | None = None
    workspace: Workspace | None = None
    out_dtype: torch.dtype = torch.bfloat16

    def __call__(
        self, hidden_states: torch.Tensor, routing: Routing, num_valid_tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute this rank's part of the layer's output.

        hidden_states: [T, H] bfloat16 or float32.
        routing: plain (weights, ids) with global ids, or with packed ids of either form.
        num_valid_tokens: [1] integer or None. Rows from this one on are not read and give zeros, whatever their ids
            are. Give the router's handoff the same tensor, and the front has masked them already.
        Returns [T, H] ``out_dtype``.
        Raises ValueError where rank-local packed ids were written for another range than the weights'.
        """
        placement = self.weights.placement
        staged = self.handoff.take(hidden_states) if self.handoff else None
        x = quantize_mxfp8(hidden_states, num_valid_tokens) if staged is None else staged.x
        published = staged if staged is not None and staged.routing.packed is routing.packed else None
        is_masked = num_valid_tokens is None or (published and published.num_valid_tokens is num_valid_tokens)
        if not is_masked and num_valid_tokens is not None:
            routing = mask_padding(routing, num_valid_tokens)
        local_range = placement.local_range if placement.physical_to_logical is None else None
        if local_range is None:  # round-robin or redundant experts: ids are global, found through the map
            if routing.local_range is not None:
                raise ValueError(
                    f"routing.local_range: expected None for a placement without one range, got {routing.local_range}"
                )
            routing = Routing(routing.topk_weights, placement.to_physical(routing.topk_ids))
            expert_map = placement.expert_map_on(hidden_states.device)
            return self._run(x, routing, IdSpace(placement.num_experts, 0), expert_map=expert_map)
        if published is not None:
            self._check_staged_range(published, local_range)
        schedule = published.schedule if published is not None and is_masked else None
        return self._run(x, routing, id_space(routing, placement.num_experts, local_range), schedule)

    def _check_staged_range(self, staged: FrontResult, local_range: LocalRange) -> None:
        assert self.handoff is not None
        assert staged.routing.packed is not None
        packed_range = self.handoff.take_local_range(staged.routing.packed)
        for written_for in (packed_range, staged.local_range):
            if written_for not in (None, local_range):
                raise ValueError(
                    f"handoff: expected the weights' range {local_range}, got a batch staged for {written_for}"
                )

    def _run(
        self,
        x: MXTensor,
        routing: Routing,
        space: IdSpace,
        schedule: ExpertSchedule | None = None,
        expert_map: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return fused_moe(
            x,
            routing,
            self.weights,
            num_experts=space.num_experts,
            local_expert_offset=space.local_expert_offset,
            expert_map=expert_map,
            schedule=schedule,
            workspace=self.workspace,
            out_dtype=self.out_dtype,
        )

"""The values that travel along the routed path: frozen dataclasses, plain data, no behaviour beyond validation.

Letters used in every shape of this package: ``T`` tokens, ``E`` experts of the whole model, ``K`` experts per token
(top-k), ``L`` experts of this rank, ``H`` hidden size of the routed experts (the latent width where the model has
one), ``I`` intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple, Protocol

import torch

#: Largest number of tokens that the fused front takes; an expert's tokens then fit one 64-bit mask.
MAX_FRONT_TOKENS = 64
#: Largest number of tokens of a batch.
MAX_TOKENS = 65_536
#: Elements that share one power-of-two scale in the OCP microscaling formats.
GROUP_SIZE = 32

Scoring = Literal["sigmoid", "softmax", "softmax_selected"]
SlotOrder = Literal["id", "value"]
MXFormat = Literal["mxfp8", "mxfp4"]
PlacementStrategy = Literal["contiguous", "round_robin"]
#: What a front makes of the schedule: nothing, the token masks alone, or the whole ``ExpertSchedule``.
ScheduleOutput = Literal["none", "masks", "rows"]


@dataclass(frozen=True)
class LocalRange:
    """The contiguous range ``[offset, offset + count)`` of expert ids that a rank owns. Count 0 means 'no range'."""

    offset: int
    count: int

    def validate(self, num_experts: int) -> None:
        """Raise ValueError unless the range lies within ``[0, num_experts)``; both numbers are named."""
        if self.offset < 0 or self.count < 0 or self.offset + self.count > num_experts:
            raise ValueError(
                f"local_range: expected 0 <= offset, 0 <= count and offset + count <= num_experts={num_experts}, "
                f"got offset={self.offset}, count={self.count}"
            )


@dataclass(frozen=True)
class ExpertPlacement:
    """Which experts this rank of an expert-parallel group holds.

    num_experts: experts in the id space that ids use. With redundant experts these are the *physical* experts.
    ep_size, ep_rank: size of the expert-parallel group and this rank in it.
    strategy: ``contiguous`` (uneven allowed: the first ``num_experts % ep_size`` ranks hold one more) or
        ``round_robin`` (expert ``e`` on rank ``e % ep_size``).
    physical_to_logical: for redundant experts (EPLB), the logical expert that each physical expert is a copy of.
    expert_ids: ids (physical) of this rank's experts, ascending; the position in it is the local id. Made here.
    expert_map: [num_experts] int32 on the CPU. Local id of each expert; -1 where another rank holds it. Made here.

    Raises ValueError for impossible sizes.
    """

    num_experts: int
    ep_size: int = 1
    ep_rank: int = 0
    strategy: PlacementStrategy = "contiguous"
    physical_to_logical: tuple[int, ...] | None = None
    expert_ids: tuple[int, ...] = field(init=False, repr=False, compare=False)
    expert_map: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise ValueError(f"num_experts: expected at least 1, got {self.num_experts}")
        if self.ep_size < 1 or self.ep_size > self.num_experts:
            raise ValueError(f"ep_size: expected 1 to num_experts={self.num_experts}, got {self.ep_size}")
        if not 0 <= self.ep_rank < self.ep_size:
            raise ValueError(f"ep_rank: expected 0 <= ep_rank < ep_size={self.ep_size}, got {self.ep_rank}")
        if self.strategy not in ("contiguous", "round_robin"):
            raise ValueError(f"strategy: expected 'contiguous' or 'round_robin', got {self.strategy!r}")
        copies = self.physical_to_logical
        if copies is not None:
            if len(copies) != self.num_experts:
                raise ValueError(
                    f"physical_to_logical: expected one entry per physical expert ({self.num_experts}), "
                    f"got {len(copies)}"
                )
            logical = set(copies)
            if logical != set(range(len(logical))):
                raise ValueError(
                    "physical_to_logical: expected every logical expert 0..n-1 to have a copy, "
                    f"got {len(logical)} distinct ids from {min(copies)} to {max(copies)}"
                )

        # Made at once, not when first asked for: torch.compile traces neither locks nor caches.
        expert_map = torch.full((self.num_experts,), -1, dtype=torch.int32, device="cpu")
        expert_ids = self._expert_ids()
        expert_map[list(expert_ids)] = torch.arange(len(expert_ids), dtype=torch.int32, device="cpu")
        object.__setattr__(self, "expert_ids", expert_ids)
        object.__setattr__(self, "expert_map", expert_map)

    def _expert_ids(self) -> tuple[int, ...]:
        if self.strategy == "round_robin":
            return tuple(range(self.ep_rank, self.num_experts, self.ep_size))
        base, extra = divmod(self.num_experts, self.ep_size)
        offset = self.ep_rank * base + min(self.ep_rank, extra)
        return tuple(range(offset, offset + base + (self.ep_rank < extra)))

    @property
    def num_logical_experts(self) -> int:
        """Experts that the router chooses from: ``num_experts`` unless experts are redundant."""
        return self.num_experts if self.physical_to_logical is None else max(self.physical_to_logical) + 1

    @property
    def logical_expert_ids(self) -> tuple[int, ...]:
        """The checkpoint's (logical) id of each of this rank's experts."""
        copies = self.physical_to_logical
        return self.expert_ids if copies is None else tuple(copies[i] for i in self.expert_ids)

    @property
    def num_local_experts(self) -> int:
        """Experts that this rank holds."""
        return len(self.expert_ids)

    @property
    def local_range(self) -> LocalRange | None:
        """This rank's range of ids, or None where its experts are not contiguous."""
        if self.strategy == "round_robin" and self.ep_size > 1:
            return None
        return LocalRange(self.expert_ids[0], len(self.expert_ids))

    @property
    def local_expert_offset(self) -> int:
        """First id of this rank's range. Raises ValueError where its experts are not contiguous."""
        local_range = self.local_range
        if local_range is None:
            raise ValueError("local_expert_offset: a round-robin placement has no offset; use expert_map")
        return local_range.offset

    def expert_map_on(self, device: torch.device) -> torch.Tensor:
        """``expert_map`` on a device, copied there once: a captured graph must not copy from the host."""
        return self.expert_map if device.type == "cpu" else _expert_map_on(self, device)

    def to_physical(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Replace logical ids by physical ones; token ``t`` takes copy ``t mod copies`` of an expert.

        topk_ids: [T, K] integer. Logical ids; negative ids stay as they are.
        Returns [T, K] of the same dtype. Every slot names exactly one physical expert, so that exactly one rank
        computes it. Without redundant experts the input is returned unchanged.
        Raises ValueError for an id of ``num_logical_experts`` or more.
        """
        if self.physical_to_logical is None:
            return topk_ids
        copies: list[list[int]] = [[] for _ in range(self.num_logical_experts)]
        for physical, logical in enumerate(self.physical_to_logical):
            copies[logical].append(physical)
        most = max(len(c) for c in copies)
        table = torch.tensor([c + [-1] * (most - len(c)) for c in copies], device=topk_ids.device)
        num_copies = torch.tensor([len(c) for c in copies], device=topk_ids.device)
        ids = widen_ids(topk_ids)
        if ids.numel() and int(ids.max()) >= len(copies):
            raise ValueError(f"topk_ids: expected logical ids below {len(copies)}, got {int(ids.max())}")
        safe = ids.clamp(min=0)
        token = torch.arange(ids.shape[0], device=ids.device)[:, None]
        physical_ids = table[safe, token % num_copies[safe]]
        return torch.where(ids < 0, ids, physical_ids).to(topk_ids.dtype)


def widen_ids(topk_ids: torch.Tensor) -> torch.Tensor:
    """Ids as int64; int32, int64 and uint32 (where 2^32 - 1 is -1) are taken, TypeError otherwise."""
    check_ids_dtype(topk_ids)
    if topk_ids.dtype == torch.uint32:
        topk_ids = topk_ids.view(torch.int32)
    return topk_ids.long()


def check_ids_dtype(topk_ids: torch.Tensor) -> None:
    """Raise TypeError unless ids have a dtype that is taken."""
    if topk_ids.dtype not in (torch.int32, torch.int64, torch.uint32):
        raise TypeError(f"topk_ids: expected int32, int64 or uint32, got {topk_ids.dtype}")


@cache
def _expert_map_on(placement: ExpertPlacement, device: torch.device) -> torch.Tensor:
    return placement.expert_map.to(device)


@dataclass(frozen=True)
class RouterConfig:
    """How a router turns logits into experts and weights.

    top_k: experts per token.
    scoring: ``sigmoid`` (Kimi-K2/K3, DeepSeek-V3), ``softmax`` over all experts (Qwen3-MoE), ``softmax_selected``
        over the chosen ones only (gpt-oss).
    renormalize: divide the chosen scores by their sum.
    routed_scaling_factor: multiplied into the weights last.
    num_expert_groups, topk_groups: grouped routing (DeepSeek-V3); 1 and 1 switch it off.
    slot_order: ``id`` puts a token's slots in ascending expert id, ``value`` in descending rank value.
    """

    top_k: int
    scoring: Scoring = "sigmoid"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_groups: int = 1
    topk_groups: int = 1
    slot_order: SlotOrder = "id"

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k: expected at least 1, got {self.top_k}")
        if self.scoring not in ("sigmoid", "softmax", "softmax_selected"):
            raise ValueError(f"scoring: expected 'sigmoid', 'softmax' or 'softmax_selected', got {self.scoring!r}")
        if not abs(self.routed_scaling_factor) < float("inf"):
            raise ValueError(f"routed_scaling_factor: expected a finite number, got {self.routed_scaling_factor}")
        if self.slot_order not in ("id", "value"):
            raise ValueError(f"slot_order: expected 'id' or 'value', got {self.slot_order!r}")
        if not 1 <= self.topk_groups <= self.num_expert_groups:
            raise ValueError(
                f"topk_groups: expected 1 to num_expert_groups={self.num_expert_groups}, got {self.topk_groups}"
            )

    def validate(self, num_experts: int) -> None:
        """Raise ValueError unless ``num_experts`` experts can be routed by this configuration."""
        if num_experts % self.num_expert_groups:
            raise ValueError(
                f"num_expert_groups: expected a divisor of num_experts={num_experts}, got {self.num_expert_groups}"
            )
        eligible = num_experts // self.num_expert_groups * self.topk_groups
        if self.top_k > eligible:
            raise ValueError(
                f"top_k: expected at most {eligible}, the experts in {self.topk_groups} of {self.num_expert_groups} "
                f"groups of {num_experts} experts, got {self.top_k}"
            )


@dataclass(frozen=True)
class Routing:
    """What the router decided for each token.

    topk_weights: [T, K] float32. Final weights.
    topk_ids: [T, K] int32. Global expert ids, always; -1 in rows beyond the valid tokens.
    packed: [T, K] int32 or None. ``(id << 16) | bf16_bits(weight)``, the wire format of external runners.
    local_range: the range that ``packed`` was written for, or None where its ids are global.
    """

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    packed: torch.Tensor | None = None
    local_range: LocalRange | None = None

    def __post_init__(self) -> None:
        if self.local_range is not None and self.packed is None:
            raise ValueError(f"local_range: expected None without packed ids, got {self.local_range}")


@dataclass(frozen=True)
class MXTensor:
    """A tensor in an OCP microscaling format: elements and one UE8M0 scale per 32 elements of the last dimension.

    data: ``mxfp8``: [..., N] float8_e4m3fn; ``mxfp4``: [..., N/2] uint8, element 2j in the low nibble of byte j.
    scale: [..., N/32] uint8, row-major. Byte b means 2^(b-127); 255 means NaN.
    """

    data: torch.Tensor
    scale: torch.Tensor
    format: MXFormat

    def __post_init__(self) -> None:
        if self.format not in ("mxfp8", "mxfp4"):
            raise ValueError(f"format: expected 'mxfp8' or 'mxfp4', got {self.format!r}")
        expected = torch.float8_e4m3fn if self.format == "mxfp8" else torch.uint8
        if self.data.dtype != expected:
            raise TypeError(f"data: expected {expected} for {self.format}, got {self.data.dtype}")
        if self.scale.dtype != torch.uint8:
            raise TypeError(f"scale: expected torch.uint8, got {self.scale.dtype}")
        if self.shape[-1] % GROUP_SIZE:
            raise ValueError(f"data, last dimension: expected a multiple of {GROUP_SIZE}, got {self.shape[-1]}")
        shape = (*self.shape[:-1], self.shape[-1] // GROUP_SIZE)
        if tuple(self.scale.shape) != shape:
            raise ValueError(f"scale: expected {shape} for elements {self.shape}, got {tuple(self.scale.shape)}")

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device | str = "cpu") -> MXTensor:
        """An uninitialised mxfp4 tensor of a logical shape."""
        *rows, columns = shape
        data = torch.empty(*rows, columns // 2, dtype=torch.uint8, device=device)
        scale = torch.empty(*rows, columns // GROUP_SIZE, dtype=torch.uint8, device=device)
        return cls(data, scale, "mxfp4")

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, counted in elements."""
        elements_per_byte = 1 if self.format == "mxfp8" else 2
        return (*self.data.shape[:-1], self.data.shape[-1] * elements_per_byte)

    @property
    def nbytes(self) -> int:
        """Bytes of elements and scales together."""
        return self.data.nbytes + self.scale.nbytes

    def __getitem__(self, index: int | slice | torch.Tensor) -> MXTensor:
        """Select along the first dimension."""
        return MXTensor(self.data[index], self.scale[index], self.format)

    def to(self, device: torch.device | str) -> MXTensor:
        """The same values on a device; nothing is copied where they are there."""
        return MXTensor(self.data.to(device), self.scale.to(device), self.format)


class ExpertSource(Protocol):
    """One weight of a rank's experts in checkpoint order, given out one expert at a time; an ``MXTensor`` is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(L, out, in), counted in elements."""
        ...

    @property
    def format(self) -> MXFormat:
        """``mxfp4``."""
        ...

    def __getitem__(self, expert: int, /) -> MXTensor:
        """A local expert's [out, in] weight. It may be read from a disk only now, and anew at each call."""
        ...


@dataclass(frozen=True)
class ExpertSchedule:
    """Which tokens each of this rank's experts gets.

    A *row* is one (expert, token) pair; rows are ordered by expert, then by token. An expert that a token names twice
    gets one row, which both slots read.

    num_tokens: T.
    expert_token_mask: [L] int64 or None (T > 64). The 64 bits say which tokens an expert gets; they **are** the
        schedule: an expert's count is the popcount, a token's row inside the expert the popcount of the bits below.
    expert_offsets: [L + 1] int32. First row of each expert; the last entry is the number of rows.
    row_tokens: [R] int32, R at least the number of rows. Token of each row; -1 in unused rows.
    slot_rows: [T, K] int32. Row of each slot; -1 where another rank, or nobody, computes it.

    Worked example (T=3, L=4), tokens of the experts {0: [0, 2], 1: [], 2: [1], 3: [0, 1, 2]}: masks 0b101, 0, 0b010,
    0b111; offsets 0, 2, 2, 3, 6; token 2 in expert 3 is row 3 + popcount(0b011) = 5.
    """

    num_tokens: int
    expert_token_mask: torch.Tensor | None
    expert_offsets: torch.Tensor
    row_tokens: torch.Tensor
    slot_rows: torch.Tensor

    @classmethod
    def empty(cls, num_tokens: int, top_k: int, num_local_experts: int, device: torch.device | str) -> ExpertSchedule:
        """Uninitialised tensors for a pass that writes them, ``row_tokens`` with an entry for each slot."""

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            num_tokens=num_tokens,
            expert_token_mask=empty(num_local_experts, dtype=torch.int64) if num_tokens <= MAX_FRONT_TOKENS else None,
            expert_offsets=empty(num_local_experts + 1),
            row_tokens=empty(num_tokens * top_k),
            slot_rows=empty(num_tokens, top_k),
        )

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.expert_offsets.shape[0] - 1

    @property
    def expert_counts(self) -> torch.Tensor:
        """[L] int32. Rows of each expert."""
        return self.expert_offsets.diff()


@dataclass(frozen=True)
class SiTU:
    """SiTU: ``beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)`` (Kimi-K3)."""

    beta: float = 4.0
    linear_beta: float = 25.0

    def __post_init__(self) -> None:
        for name, value in (("beta", self.beta), ("linear_beta", self.linear_beta)):
            if not value > 0:
                raise ValueError(f"{name}: expected above 0, got {value}")


@dataclass(frozen=True)
class SwiGLU:
    """SwiGLU: ``gate * sigmoid(alpha * gate) * (up + up_offset)``.

    alpha: 1.0 is silu; gpt-oss has 1.702.
    limit: clamp gate from above and up from both sides before anything else; None for no clamp. gpt-oss has 7.0.
    up_offset: added to up after the clamp; gpt-oss has 1.0.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit: expected above 0 or None, got {self.limit}")


Activation = SiTU | SwiGLU


@dataclass(frozen=True)
class ExpertWeights:
    """One rank's experts, made once at load by ``pack_experts`` or read from a file by ``load_packed``.

    The layout inside is private to ``backend``.

    w13: logical [L, 2 I, H] mxfp4; gate rows first, then up rows.
    w2: logical [L, H, I] mxfp4.
    activation: SiTU or SwiGLU with its options.
    placement: which experts of the model these are.
    backend: name of the backend whose layout this is.
    w13_bias, w2_bias: [L, 2 I] and [L, H] float32, or None.
    w13_factor, w2_factor: powers of two that the backend's layout takes out of the scales, or None.
    """

    w13: MXTensor
    w2: MXTensor
    activation: Activation
    placement: ExpertPlacement
    backend: str
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    w13_factor: torch.Tensor | None = None
    w2_factor: torch.Tensor | None = None

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.placement.num_local_experts

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.w13.shape[-1]

    @property
    def intermediate_size(self) -> int:
        """I."""
        return self.w2.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes that the experts' weights and scales take."""
        return self.w13.nbytes + self.w2.nbytes


class PackedExperts(NamedTuple):
    """What a backend makes of checkpoint-order weights; the fields of ``ExpertWeights`` of the same names."""

    w13: MXTensor
    w2: MXTensor
    w13_factor: torch.Tensor | None = None
    w2_factor: torch.Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """The shape of a routed-expert call, as a backend's ``covered()`` sees it: no tensors, no id space."""

    num_local_experts: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    has_bias: bool = False
    device_type: str = "cpu"

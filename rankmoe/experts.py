"""The expert GEMMs, MXFP8 activations by MXFP4 weights: gate_up with activation and requantisation, then down."""

from __future__ import annotations

import torch

from rankmoe.backends import choose_packer, get_backend
from rankmoe.quantize import check_group_multiple
from rankmoe.types import (
    Activation,
    ExpertPlacement,
    ExpertSchedule,
    ExpertSource,
    ExpertWeights,
    MXTensor,
    Problem,
)


def pack_experts(
    w13: ExpertSource,
    w2: ExpertSource,
    activation: Activation,
    placement: ExpertPlacement,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    backend: str = "auto",
    device: torch.device | str | None = None,
) -> ExpertWeights:
    """Bring one rank's experts into a backend's layout, once, at load.

    w13: [L, 2 I, H] mxfp4 in checkpoint order: gate (w1) rows first, then up (w3) rows. An MXTensor, or whatever gives
        one expert at a time; ``Checkpoint.pack_experts`` reads them from the disk that way.
    w2: [L, H, I] mxfp4.
    w13_bias, w2_bias: [L, 2 I] and [L, H] float32 or None.
    backend: its name, or ``auto`` for the preferred one. On the CPU ``cuda`` may be named on any machine: such weights
        are for ``save_packed``, and for a GPU to load.
    device: where the packed weights live; None for where w13 is, the CPU unless that is an MXTensor. Beside them it
        and the host hold at most one expert more.
    Raises ValueError naming the tensor, expected and got for shapes that do not fit, for a count of experts other than
    the placement's, and for sizes that are not multiples of 32; ScaleError, one too, for a scale that the backend's
    arithmetic cannot hold, naming weight, expert, row and group.
    """
    num_local_experts = placement.num_local_experts
    for name, tensor in (("w13", w13), ("w2", w2)):
        if tensor.format != "mxfp4":
            raise TypeError(f"{name}: expected format mxfp4, got {tensor.format}")
        if len(tensor.shape) != 3 or tensor.shape[0] != num_local_experts:
            raise ValueError(f"{name}: expected [{num_local_experts}, out, in] as the placement, got {tensor.shape}")
    hidden_size, intermediate_size = w13.shape[2], w2.shape[2]
    check_group_multiple("hidden_size", hidden_size)
    check_group_multiple("intermediate_size", intermediate_size)
    if w13.shape[1] != 2 * intermediate_size or w2.shape[1] != hidden_size:
        raise ValueError(
            f"w13: expected [L, 2 * {intermediate_size}, H] and w2 [L, H, {intermediate_size}] with the same H, "
            f"got {w13.shape} and {w2.shape}"
        )
    for name, bias, size in (
        ("w13_bias", w13_bias, 2 * intermediate_size),
        ("w2_bias", w2_bias, hidden_size),
    ):
        if bias is not None and (bias.dtype != torch.float32 or tuple(bias.shape) != (num_local_experts, size)):
            raise ValueError(
                f"{name}: expected ({num_local_experts}, {size}) float32, got {tuple(bias.shape)} {bias.dtype}"
            )
    if device is None:
        device = w13.data.device if isinstance(w13, MXTensor) else "cpu"
    device = torch.device(device)
    problem = Problem(
        num_local_experts=num_local_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        activation=activation,
        has_bias=w13_bias is not None or w2_bias is not None,
        device_type=device.type,
    )
    chosen = choose_packer(problem, backend)
    packed = chosen.pack(w13, w2, device)
    return ExpertWeights(
        packed.w13,
        packed.w2,
        activation,
        placement,
        chosen.name,
        None if w13_bias is None else w13_bias.to(device),
        None if w2_bias is None else w2_bias.to(device),
        packed.w13_factor,
        packed.w2_factor,
    )


def gate_up(x: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights, out: torch.Tensor | None = None) -> MXTensor:
    """First GEMM, activation and requantisation.

    x: [T, H] mxfp8.
    out: scratch of at least [R, I] float32 or None; R is the schedule's number of rows.
    Returns the middle activation [R, I] mxfp8, quantised from the float32 activation without a rounding between. On a
    GPU, rows beyond the schedule's last one hold anything.
    Raises ValueError where x does not fit the weights or the schedule.
    """
    _check_gate_up(x, schedule, weights)
    scratch = _scratch("out", out, schedule, weights.intermediate_size)
    return get_backend(weights.backend).gate_up(x, schedule, weights, scratch)


def down(
    middle: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Second GEMM.

    middle: [R, I] mxfp8, as ``gate_up`` returns it.
    out: buffer of at least [R, H] float32 or None.
    Returns [R, H] float32 in the schedule's row order. On a GPU, rows beyond the schedule's last one hold anything.
    """
    check_device("middle", middle.data, weights)
    expected = (schedule.row_tokens.shape[0], weights.intermediate_size)
    if middle.format != "mxfp8" or middle.shape != expected:
        raise ValueError(f"middle: expected mxfp8 {expected}, got {middle.format} {middle.shape}")
    buffer = _scratch("out", out, schedule, weights.hidden_size)
    return get_backend(weights.backend).down(middle, schedule, weights, buffer)


def gemms(
    x: MXTensor,
    schedule: ExpertSchedule,
    weights: ExpertWeights,
    middle: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """``gate_up`` and ``down``, overlapping where the backend can; the same bits.

    middle, rows: the scratch and the buffer that these take as ``out``.
    Returns [R, H] float32 as ``down``.
    """
    together = get_backend(weights.backend).gemms
    if together is None:
        return down(gate_up(x, schedule, weights, middle), schedule, weights, rows)
    _check_gate_up(x, schedule, weights)
    scratch = _scratch("middle", middle, schedule, weights.intermediate_size)
    return together(x, schedule, weights, scratch, _scratch("rows", rows, schedule, weights.hidden_size))


def check_device(name: str, rows: torch.Tensor, weights: ExpertWeights) -> None:
    """Raise ValueError unless rows are where the weights are, and the weights where their backend runs."""
    device = weights.w13.data.device
    if rows.device != device:
        raise ValueError(f"{name}: expected on {device} as the weights, got {rows.device}")
    device_type = get_backend(weights.backend).device_type
    if device.type != device_type:
        raise ValueError(
            f"weights: expected on a {device_type} device for backend {weights.backend!r}, got {device}; "
            "weights packed on the CPU for a GPU are saved, and loaded there"
        )


def _check_gate_up(x: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights) -> None:
    check_device("x", x.data, weights)
    if x.format != "mxfp8" or x.shape != (schedule.num_tokens, weights.hidden_size):
        raise ValueError(f"x: expected mxfp8 ({schedule.num_tokens}, {weights.hidden_size}), got {x.format} {x.shape}")
    if schedule.num_local_experts != weights.num_local_experts:
        raise ValueError(
            f"schedule: expected {weights.num_local_experts} local experts as the weights, "
            f"got {schedule.num_local_experts}"
        )


def _scratch(name: str, out: torch.Tensor | None, schedule: ExpertSchedule, width: int) -> torch.Tensor:
    num_rows = schedule.row_tokens.shape[0]
    if out is None:
        return torch.empty(num_rows, width, dtype=torch.float32, device=schedule.row_tokens.device)
    check_scratch(name, out, num_rows, width)
    return out[:num_rows]


def check_scratch(name: str, out: torch.Tensor, num_rows: int, width: int) -> None:
    """Raise ValueError, naming the buffer, unless it is float32 with at least ``num_rows`` rows of ``width``."""
    if out.dtype != torch.float32 or out.dim() != 2 or out.shape[0] < num_rows or out.shape[1] != width:
        raise ValueError(
            f"{name}: expected float32 with at least {num_rows} rows of {width}, got {tuple(out.shape)} {out.dtype}"
        )

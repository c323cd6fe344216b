"""The trained model as the checkpoint that ``rankmoe.models.nano`` loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from nano_training.model import Nano
from rankmoe.checkpoint import SINGLE_FILE, expert_tensors, mxfp4_quantization_config, save_checkpoint
from rankmoe.quantize import quantize_mxfp4
from rankmoe.types import MXTensor

#: What the package may carry: model.safetensors, header included.
MAX_CHECKPOINT_BYTES = 8_000_000

_UNQUANTIZED_MODULES = (
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*gate$",
    "re:.*routed_expert_.*_proj$",
    "lm_head",
)


def checkpoint_tensors(model: Nano) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its name: experts in MXFP4, the correction bias float32, the rest bf16."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if _is_routed_expert(name):
            continue
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        tensors[f"model.{name}"] = value.to("cpu", dtype)
    for layer, block in enumerate(model.moe_blocks):
        w13, w2 = (_quantize(weight.detach()) for weight in (block.experts.w13, block.experts.w2))
        tensors.update(expert_tensors(f"model.layers.{layer}.block_sparse_moe", w13, w2))
    return tensors


def _is_routed_expert(name: str) -> bool:
    return name.endswith(("experts.w13", "experts.w2"))


def _quantize(weight: Tensor) -> MXTensor:
    """Quantise where the weight is, as training does; the result on the CPU."""
    quantized = quantize_mxfp4(weight)
    return MXTensor(quantized.data.cpu(), quantized.scale.cpu(), quantized.format)


def quantization_config() -> dict[str, Any]:
    """compressed-tensors' description of MXFP4 weights and MXFP8 activations in the routed experts' linear layers."""
    config = mxfp4_quantization_config(_UNQUANTIZED_MODULES)
    (group,) = config["config_groups"].values()
    group["targets"] = ["re:.*block_sparse_moe\\.experts\\.\\d+\\.w[123]$"]
    group["input_activations"] = {**group["weights"], "num_bits": 8, "dynamic": True}
    return config


def write_checkpoint(model: Nano, out: Path, training: Mapping[str, Any]) -> int:
    """Write model.safetensors, config.json and training.json; none of them is ever half there.

    Returns the bytes of model.safetensors. Raises ValueError, with nothing written, where they are more than the
    package may carry.
    """
    tensors = checkpoint_tensors(model)
    size = len(save(tensors, metadata={"format": "pt"}))
    if size > MAX_CHECKPOINT_BYTES:
        raise ValueError(f"{SINGLE_FILE}: expected at most {MAX_CHECKPOINT_BYTES} bytes, got {size}")
    config = {
        "architectures": ["NanoForCausalLM"],
        "model_type": "rankmoe-nano",
        "dtype": "bfloat16",
        **model.config.to_dict(),
        "quantization_config": quantization_config(),
    }
    save_checkpoint(out, tensors, config)
    partial = out / "training.json.partial"
    partial.write_text(json.dumps(training, indent=1) + "\n")
    partial.replace(out / "training.json")
    return (out / SINGLE_FILE).stat().st_size


@torch.no_grad()
def round_as_checkpoint(model: Nano) -> None:
    """Round every parameter that the checkpoint holds in bf16; the routed experts keep their master values."""
    for name, parameter in model.named_parameters():
        if not _is_routed_expert(name):
            parameter.copy_(parameter.bfloat16())

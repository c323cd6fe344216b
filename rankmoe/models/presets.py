"""Routed-expert shapes of published models, for benchmarks and for `rankmoe info`."""

from __future__ import annotations

from dataclasses import dataclass

from rankmoe.types import GROUP_SIZE, Activation, RouterConfig, SiTU, SwiGLU


@dataclass(frozen=True)
class ModelPreset:
    """One model's routed experts.

    hidden_size: H, what the routed experts read: Kimi-K3's latent width, the model's hidden size elsewhere.
    num_moe_layers: layers that have routed experts.
    """

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    num_moe_layers: int
    router: RouterConfig
    activation: Activation
    has_bias: bool = False

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert in MXFP4: half a byte an element and one scale byte per 32."""
        num_weights = 3 * self.hidden_size * self.intermediate_size
        return num_weights // 2 + num_weights // GROUP_SIZE


PRESETS = {
    preset.name: preset
    for preset in (
        ModelPreset("kimi-k3", 896, 3584, 3072, 92, RouterConfig(top_k=16), SiTU()),
        ModelPreset("kimi-k2", 384, 7168, 2048, 60, RouterConfig(top_k=8, routed_scaling_factor=2.827), SwiGLU()),
        ModelPreset(
            "deepseek-v3",
            256,
            7168,
            2048,
            58,
            RouterConfig(top_k=8, routed_scaling_factor=2.5, num_expert_groups=8, topk_groups=4),
            SwiGLU(),
        ),
        ModelPreset("qwen3-moe", 128, 4096, 1536, 94, RouterConfig(top_k=8, scoring="softmax"), SwiGLU()),
        ModelPreset("nano", 64, 128, 96, 4, RouterConfig(top_k=4), SiTU()),
        ModelPreset(
            "gpt-oss-120b",
            128,
            2880,
            2880,
            36,
            RouterConfig(top_k=4, scoring="softmax_selected", renormalize=False),
            SwiGLU(alpha=1.702, limit=7.0, up_offset=1.0),
            has_bias=True,
        ),
    )
}


def get_preset(name: str) -> ModelPreset:
    """Look a preset up. Raises ValueError, naming the known ones, for another name."""
    if name not in PRESETS:
        raise ValueError(f"model: expected one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]

"""The routed layer in plain PyTorch, two ranks of an expert-parallel group in turn: `python examples/layer.py`."""

import torch

import rankmoe as rm

device = "cuda" if torch.cuda.is_available() else "cpu"
num_experts, hidden_size, intermediate_size, num_tokens = 32, 256, 128, 8
torch.manual_seed(0)
w13 = rm.quantize_mxfp4(torch.randn(num_experts, 2 * intermediate_size, hidden_size, device=device) / 16)
w2 = rm.quantize_mxfp4(torch.randn(num_experts, hidden_size, intermediate_size, device=device) / 12)
router = torch.nn.Linear(hidden_size, num_experts, bias=False, device=device)
config = rm.RouterConfig(top_k=4, scoring="softmax")

hidden_states = torch.randn(num_tokens, hidden_size, dtype=torch.bfloat16, device=device)
total = torch.zeros(num_tokens, hidden_size, dtype=torch.float32, device=device)
for ep_rank in range(2):  # each rank packs its own experts once, and runs the layer on the same tokens
    placement = rm.ExpertPlacement(num_experts, ep_size=2, ep_rank=ep_rank)
    first = placement.local_expert_offset
    own = slice(first, first + placement.num_local_experts)
    weights = rm.pack_experts(w13[own], w2[own], rm.SwiGLU(), placement)
    with torch.inference_mode():
        partial = rm.routed_moe(hidden_states, router(hidden_states.float()), weights, config, out_dtype=torch.float32)
    total += partial  # dist.all_reduce(partial) where the ranks are processes
    print(
        f"rank {ep_rank}: experts {own.start} to {own.stop - 1}, backend {weights.backend}, norm {partial.norm():.3f}"
    )
print(f"layer's output: {tuple(total.shape)}, norm {total.norm():.3f}")

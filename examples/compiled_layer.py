"""The routed layer under torch.compile, one graph from 1 to 64 tokens: `python examples/compiled_layer.py`."""

import sys

import torch

import rankmoe as rm
from rankmoe import ops

device, backend = "cuda" if torch.cuda.is_available() else "cpu", sys.argv[1] if len(sys.argv) > 1 else "inductor"
torch.manual_seed(0)
placement = rm.ExpertPlacement(32, ep_size=2, ep_rank=0)
w13 = rm.quantize_mxfp4(torch.randn(16, 2 * 128, 256, device=device) / 16)
w2 = rm.quantize_mxfp4(torch.randn(16, 256, 128, device=device) / 12)
weights = rm.pack_experts(w13, w2, rm.SwiGLU(), placement)
router = torch.nn.Linear(256, 32, bias=False, device=device)
config = rm.RouterConfig(top_k=4, scoring="softmax")


@torch.compile(fullgraph=True, dynamic=False, backend=backend)
def layer(hidden_states: torch.Tensor, num_valid_tokens: torch.Tensor) -> torch.Tensor:
    """[64, H] to [64, H]: rows from ``num_valid_tokens`` on cost no expert work and come back as they are."""
    logits = router(hidden_states.float())
    routed = ops.routed_moe(hidden_states, logits, weights, config, num_valid_tokens=num_valid_tokens)
    return hidden_states + routed


padded = torch.zeros(rm.MAX_FRONT_TOKENS, 256, dtype=torch.bfloat16, device=device)
with torch.inference_mode():
    for num_tokens in (1, 2, 7, 33, 64):
        padded[:num_tokens] = torch.randn(num_tokens, 256, device=device)
        output = layer(padded, torch.tensor([num_tokens], device=device))[:num_tokens]
        torch.compiler.set_stance("fail_on_recompile")  # the first call compiled; none compiles again
        print(f"{num_tokens:2} tokens: norm {output.float().norm():.3f}")

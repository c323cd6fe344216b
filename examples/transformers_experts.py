"""Run a Transformers MoE model on rankmoe's experts: `python examples/transformers_experts.py MODEL "a prompt"`.

MODEL is a folder or a name on the Hub whose experts pass through Transformers' experts interface, such as
Qwen/Qwen3-30B-A3B. Needs `pip install rankmoe[transformers]`.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rankmoe.integrations.transformers as rankmoe_experts

if __name__ == "__main__":
    name, prompt = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, experts_implementation="rankmoe")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    print(f"MXFP4 now: {', '.join(rankmoe_experts.quantize_experts(model))}")  # without it: bfloat16, as eager
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))

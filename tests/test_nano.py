"""The embedded model: what is shipped, what each rank reads of it, what it computes, and how well it predicts."""

from __future__ import annotations

import itertools
import json
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from rankmoe import reference
from rankmoe.checkpoint import Checkpoint
from rankmoe.distributed import ExpertParallelGroup
from rankmoe.models.nano import (
    CHECKPOINT_DIRECTORY,
    NanoModel,
    bits_per_byte,
    count_parameters,
    load_config,
    load_nano,
)
from rankmoe.models.nano_config import NanoConfig, is_held_out, is_test_file, list_source_files

STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture(scope="module")
def model() -> NanoModel:
    return load_nano()


def test_the_checkpoint_is_small_and_complete() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT_DIRECTORY.iterdir()) <= 8_000_000
    config = load_config()
    assert (config.num_experts, config.num_experts_per_token) == (64, 4)
    names = Checkpoint.open(CHECKPOINT_DIRECTORY).entries
    assert sum(".experts." in name for name in names) == config.num_hidden_layers * config.num_experts * 6


def test_training_measured_what_the_model_card_states() -> None:
    training = json.loads((CHECKPOINT_DIRECTORY / "training.json").read_text())
    card = (Path(__file__).parent.parent / "docs" / "nano.md").read_text()
    for name, measured in training["held_out_bits_per_byte"].items():
        assert measured["mxfp4_mxfp8"] <= min(1.9, 1.015 * measured["unquantized"])
        row = " | ".join(f"{measured[form]:.4f}" for form in ("unquantized", "mxfp4", "mxfp4_mxfp8"))
        assert f"| {name} | {row} |" in card
    assert all(count > 0 for layer in training["expert_counts"] for count in layer)
    assert f"{count_parameters(load_config()).total:,}" in card


def test_held_out_text_costs_less_than_1_9_bits_a_byte(model: NanoModel) -> None:
    held_out = [path for path in list_source_files(STANDARD_LIBRARY) if is_held_out(path) and not is_test_file(path)]
    sizes = {path: (STANDARD_LIBRARY / path).stat().st_size for path in held_out}
    path = min((path for path in held_out if sizes[path] > 5_000), key=lambda path: sizes[path])
    text = (STANDARD_LIBRARY / path).read_bytes()
    assert bits_per_byte(model, text) <= 1.9
    # Text of another kind is dearer: the figure is not an artefact of the measurement.
    generator = torch.Generator().manual_seed(0)
    noise = bytes(torch.randint(32, 127, (1500,), generator=generator).tolist())
    assert bits_per_byte(model, noise) > 5


def test_every_byte_is_scored_once_with_context(model: NanoModel) -> None:
    text = (STANDARD_LIBRARY / "sched.py").read_bytes()[:1300]  # longer than a window
    window = model.config.max_position_embeddings
    total = 0.0
    tokens = torch.tensor([model.config.document_separator, *text])
    for first, last in ((1, window), (window, len(tokens))):
        begin = 0 if first == 1 else window - window // 2
        logits = model(tokens[None, begin:last], model.new_caches(1))[0]
        losses = functional.cross_entropy(logits[:-1], tokens[begin + 1 : last], reduction="none")
        total += losses[first - begin - 1 :].double().sum().item()
    expected = total / torch.log(torch.tensor(2.0, dtype=torch.float64)).item() / len(text)
    assert bits_per_byte(model, text) == pytest.approx(expected, rel=1e-6)


def test_a_rank_reads_its_own_experts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    import rankmoe.checkpoint as checkpoint

    original = checkpoint.read_into

    def recording(file, name, entry, out):
        read.append(name)
        return original(file, name, entry, out)

    monkeypatch.setattr(checkpoint, "read_into", recording)
    load_nano(ExpertParallelGroup(ep_rank=2, ep_size=4))
    experts = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".experts." in name}
    assert experts == set(range(32, 48))


def test_the_model_equals_a_plain_statement_of_its_configuration(model: NanoModel) -> None:
    """Layer by layer on the served hidden states: a code that float32 rounds to its neighbour must not reach the next.

    Such a code, one in a hundred thousand, or an expert chosen otherwise between two nearly equal ones, changes a token
    visibly; a wrong layer changes all.
    """
    tokens = torch.tensor([list(b"\0import os\nimport sys\n\ndef main():\n")])
    states: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda layer, inputs, output: states.append(output[0].double()))
        for layer in model.model.layers
    ]
    served = model(tokens, model.new_caches(1))[0].double()
    for hook in hooks:
        hook.remove()
    plain = _Plain(len(tokens[0]))
    states.insert(0, plain.weight("embed_tokens.weight")[tokens[0]])
    assert len(states) == 1 + plain.config.num_hidden_layers
    for layer, (before, after) in enumerate(itertools.pairwise(states)):
        update = plain.layer(before, layer) - before
        error = (after - before - update).norm(dim=1) / update.norm(dim=1)
        assert (error < 1e-5).sum() >= 0.8 * len(error), f"layer {layer}: {error}"
        assert error.max() < 0.3
    logits = plain.norm(states[-1], "norm.weight") @ plain.weight("embed_tokens.weight").T
    torch.testing.assert_close(served, logits, rtol=0, atol=1e-4)


class _Plain:
    """The model in float64 for one sequence, from the checkpoint and NanoConfig's docstring."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.checkpoint = Checkpoint.open(CHECKPOINT_DIRECTORY)
        self.config = NanoConfig.from_dict(self.checkpoint.config)

    def weight(self, name: str) -> torch.Tensor:
        return self.checkpoint.tensor(f"model.{name}").double()

    def norm(self, values: torch.Tensor, name: str) -> torch.Tensor:
        return values / (values.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.weight(name)

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        half = self.config.head_dim // 2
        out = torch.empty_like(heads)
        for position in range(heads.shape[0]):
            for i in range(half):
                angle = torch.tensor(position * self.config.rope_theta ** (-i / half), dtype=torch.float64)
                a, b = heads[position, :, i], heads[position, :, i + half]
                out[position, :, i] = a * angle.cos() - b * angle.sin()
                out[position, :, i + half] = b * angle.cos() + a * angle.sin()
        return out

    def heads_of(self, values: torch.Tensor, name: str) -> torch.Tensor:
        return (values @ self.weight(name).T).view(self.length, -1, self.config.head_dim)

    def layer(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        config, prefix = self.config, f"layers.{layer}"
        rows = self.norm(x, f"{prefix}.input_layernorm.weight")
        attention = f"{prefix}.self_attn"
        queries = self.rotate(self.heads_of(rows, f"{attention}.q_proj.weight"))
        keys = self.rotate(self.heads_of(rows, f"{attention}.k_proj.weight"))
        values = self.heads_of(rows, f"{attention}.v_proj.weight")
        attended = torch.zeros_like(queries)
        for head in range(config.num_attention_heads):
            shared = head // (config.num_attention_heads // config.num_key_value_heads)
            for position in range(self.length):
                scores = keys[: position + 1, shared] @ queries[position, head] / config.head_dim**0.5
                attended[position, head] = scores.softmax(0) @ values[: position + 1, shared]
        x = x + attended.flatten(1) @ self.weight(f"{attention}.o_proj.weight").T
        rows = self.norm(x, f"{prefix}.post_attention_layernorm.weight")
        return x + _plain_moe(rows, self.checkpoint, config, prefix, self.norm)


def _plain_moe(rows, checkpoint, config, prefix, norm):
    block = f"model.{prefix}.block_sparse_moe"

    def project(values: torch.Tensor, name: str) -> torch.Tensor:
        return values @ checkpoint.tensor(f"{block}.{name}").double().T

    logits = project(rows, "gate.weight").float()
    routing = reference.route(logits, config.router, checkpoint.tensor(f"{block}.gate.e_score_correction_bias"))
    latent = reference.dequantize(reference.quantize_mxfp8(project(rows, "routed_expert_down_proj.weight").float()))
    summed = torch.zeros_like(latent)

    def expert_weight(expert: int, matrix: str) -> torch.Tensor:
        name = f"{block}.experts.{expert}.{matrix}"
        data, scale = checkpoint.tensor(f"{name}.weight_packed"), checkpoint.tensor(f"{name}.weight_scale")
        return reference.dequantize(reference.MXTensor(data, scale, "mxfp4"))

    for token in range(len(rows)):
        for slot, expert in enumerate(routing.topk_ids[token].tolist()):
            gate, up = (expert_weight(expert, matrix) @ latent[token] for matrix in ("w1", "w3"))
            middle = reference.activation(gate, up, config.activation).float()[None]
            middle = reference.dequantize(reference.quantize_mxfp8(middle))[0]
            summed[token] += routing.topk_weights[token, slot].double() * (expert_weight(expert, "w2") @ middle)
    routed = project(
        norm(summed, f"{prefix}.block_sparse_moe.routed_expert_norm.weight"), "routed_expert_up_proj.weight"
    )
    shared_gate, shared_up = (
        project(rows, "shared_experts.gate_proj.weight"),
        project(rows, "shared_experts.up_proj.weight"),
    )
    shared = reference.activation(shared_gate, shared_up, config.activation)
    return routed + project(shared, "shared_experts.down_proj.weight")


def test_a_sequence_beyond_the_context_is_refused(model: NanoModel) -> None:
    length = model.config.max_position_embeddings + 1
    with pytest.raises(ValueError, match=f"sequence: expected at most {length - 1} positions, got {length}"):
        model(torch.zeros(1, length, dtype=torch.int64), model.new_caches(1))


def test_held_out_files_do_not_depend_on_the_machine() -> None:
    assert is_held_out("sched.py")
    assert not is_held_out("argparse.py")

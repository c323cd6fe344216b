"""Packed experts: one at a time from a checkpoint, into a file and back bitwise; every fault is one named error."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal, edit_header, random_batch, random_mxfp4, seeded
from safetensors import safe_open
from safetensors.torch import load_file

import rankmoe
from rankmoe import packed as packed_module
from rankmoe.backends import backend_names, get_backend
from rankmoe.checkpoint import Checkpoint, expert_tensors, save_checkpoint
from rankmoe.experts import down, gate_up, gemms, pack_experts
from rankmoe.kernels import experts_common, experts_cuda, experts_humming
from rankmoe.layout import Layout
from rankmoe.moe import routed_moe
from rankmoe.packed import load_packed, packed_file_name, save_packed
from rankmoe.quantize import ScaleError, groups_with_values, quantize_mxfp8
from rankmoe.schedule import build_schedule
from rankmoe.shards import CheckpointError, TensorEntry, header_bytes, read_header, read_into, read_slices_into
from rankmoe.types import (
    Activation,
    ExpertPlacement,
    ExpertWeights,
    MXFormat,
    MXTensor,
    Problem,
    RouterConfig,
    SiTU,
    SwiGLU,
)

PREFIX = "model.layers.3.block_sparse_moe"
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 7, 96, 64
#: Backends whose layout is made on a CPU too.
BACKENDS = ["cuda", "cpu", "reference"]
ACTIVATIONS: dict[str, Activation] = {
    "situ": SiTU(),
    "situ_other_betas": SiTU(beta=1.1, linear_beta=1e-3),
    "swiglu": SwiGLU(),
    "swiglu_limit": SwiGLU(limit=0.1),
    "gpt_oss": SwiGLU(alpha=1.702, limit=7.0, up_offset=1.0),
}
PLACEMENTS = {
    "one rank": ExpertPlacement(NUM_EXPERTS),
    "contiguous": ExpertPlacement(NUM_EXPERTS, 7, 2),
    "uneven, more": ExpertPlacement(NUM_EXPERTS, 3, 0),
    "uneven, fewer": ExpertPlacement(NUM_EXPERTS, 3, 2),
    "round robin": ExpertPlacement(NUM_EXPERTS, 2, 1, "round_robin"),
    "two copies": ExpertPlacement(9, 2, 0, physical_to_logical=(4, 4, 0, 6, 1, 2, 3, 5, 4)),
    "redundant round robin": ExpertPlacement(9, 2, 1, "round_robin", (4, 4, 0, 6, 1, 2, 3, 5, 4)),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def model_experts(scale_bytes: tuple[int, int] = (100, 128)) -> tuple[MXTensor, MXTensor]:
    """Checkpoint-order experts of the whole model."""
    w13 = random_mxfp4(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, seed=1, scale_bytes=scale_bytes)
    return w13, random_mxfp4(NUM_EXPERTS, HIDDEN, INTERMEDIATE, seed=2, scale_bytes=scale_bytes)


def make_checkpoint(directory: Path, w13: MXTensor, w2: MXTensor, max_shard_bytes: int = 40_000) -> Checkpoint:
    save_checkpoint(directory, expert_tensors(PREFIX, w13, w2), {}, max_shard_bytes)
    return Checkpoint.open(directory)


def pack(
    placement: ExpertPlacement = PLACEMENTS["one rank"],
    activation: Activation = ACTIVATIONS["situ"],
    *,
    backend: str = "cpu",
    has_bias: bool = False,
    scale_bytes: tuple[int, int] = (100, 128),
    device: str | None = None,
) -> ExpertWeights:
    """One rank's packed experts of the model."""
    w13, w2 = model_experts(scale_bytes)
    mine = torch.tensor(placement.logical_expert_ids)
    biases = {}
    if has_bias:
        biases["w13_bias"] = torch.randn(len(mine), 2 * INTERMEDIATE, generator=seeded(3))
        biases["w2_bias"] = torch.randn(len(mine), HIDDEN, generator=seeded(4))
    return pack_experts(w13[mine], w2[mine], activation, placement, backend=backend, device=device, **biases)


def assert_same_weights(got: ExpertWeights, expected: ExpertWeights) -> None:
    """Everything that the dataclass holds, and every byte of the buffers, padding included."""
    assert_bitwise_equal(got, expected)
    layout = get_backend(expected.backend).layout
    for name in ("w13", "w2"):
        expected_buffers = layout.buffers(getattr(expected, name))
        for part, buffer in layout.buffers(getattr(got, name)).items():
            assert_bitwise_equal(buffer, expected_buffers[part], f"{name}.{part}")


# --- packing from the disk


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_packing_from_the_disk_is_packing_from_memory(tmp_path: Path, backend: str, placement: ExpertPlacement) -> None:
    checkpoint = make_checkpoint(tmp_path, *model_experts())
    got = checkpoint.pack_experts(PREFIX, placement, HIDDEN, INTERMEDIATE, SiTU(), backend=backend)
    assert_same_weights(got, pack(placement, backend=backend))
    assert_bitwise_equal(
        checkpoint.load_experts(PREFIX, placement, HIDDEN, INTERMEDIATE)[0],
        model_experts()[0][torch.tensor(placement.logical_expert_ids)],
    )


def test_biases_and_the_chosen_backend_are_those_of_pack_experts(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, *model_experts())
    expected = pack(activation=ACTIVATIONS["gpt_oss"], has_bias=True, backend="auto")
    biases = {"w13_bias": expected.w13_bias, "w2_bias": expected.w2_bias}
    options = (PREFIX, expected.placement, HIDDEN, INTERMEDIATE, ACTIVATIONS["gpt_oss"])
    got = checkpoint.pack_experts(*options, **biases)
    assert got.backend == "cpu"
    assert_same_weights(got, expected)


class RecordingSource:
    """Gives out an expert at a time and counts those that somebody still holds."""

    format: MXFormat = "mxfp4"

    def __init__(self, weight: MXTensor) -> None:
        self.weight, self.shape = weight, weight.shape
        self.fetched: list[int] = []
        self.most_alive = 0
        self.alive: list[weakref.ref[Any]] = []

    def __getitem__(self, expert: int) -> MXTensor:
        arrays = [part.numpy().copy() for part in (self.weight[expert].data, self.weight[expert].scale)]
        self.fetched.append(expert)
        self.alive.append(weakref.ref(arrays[0]))  # dies with the last tensor that uses its memory
        self.most_alive = max(self.most_alive, sum(reference() is not None for reference in self.alive))
        return MXTensor(torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1]), "mxfp4")


def test_experts_are_fetched_one_at_a_time_and_let_go(backend: str) -> None:
    w13, w2 = (RecordingSource(weight) for weight in model_experts())
    got = pack_experts(w13, w2, SiTU(), ExpertPlacement(NUM_EXPERTS), backend=backend)
    assert_same_weights(got, pack(backend=backend))
    for source in (w13, w2):
        assert source.fetched == list(range(NUM_EXPERTS))
        assert source.most_alive == 1


def test_the_recording_source_sees_who_holds_two_experts() -> None:
    source = RecordingSource(model_experts()[0])
    held = [source[expert] for expert in range(3)]
    assert source.most_alive == len(held) == 3


def test_progress_counts_each_tensor_once(tmp_path: Path, backend: str) -> None:
    checkpoint = make_checkpoint(tmp_path, *model_experts())
    calls: list[tuple[int, int, str]] = []
    options = (PREFIX, PLACEMENTS["two copies"], HIDDEN, INTERMEDIATE, SiTU())
    checkpoint.pack_experts(*options, backend=backend, progress=lambda *call: calls.append(call))
    total = 6 * len(set(PLACEMENTS["two copies"].logical_expert_ids))
    assert [call[:2] for call in calls] == [(done, total) for done in range(1, total + 1)]
    assert len({name for _, _, name in calls}) == total


@pytest.mark.parametrize(
    ("backend", "byte", "expected"),
    [
        ("cpu", 253, "scale bytes up to 252 or 255"),
        ("cuda", 255, "scale bytes from 0 to 254 in an expert whose largest is 128"),
    ],
)
@pytest.mark.parametrize(
    ("weight", "row", "matrix", "matrix_row"),
    [("w13", 5, "w1", 5), ("w13", INTERMEDIATE + 5, "w3", 5), ("w2", 90, "w2", 90)],
)
def test_a_scale_that_a_layout_cannot_hold_is_refused_by_the_checkpoints_name(
    tmp_path: Path, backend: str, byte: int, expected: str, weight: str, row: int, matrix: str, matrix_row: int
) -> None:
    w13, w2 = model_experts()
    tensor = {"w13": w13, "w2": w2}[weight]
    tensor.scale[5, :, 0] = 128
    tensor.scale[5, row, 1] = byte
    placement = ExpertPlacement(NUM_EXPERTS, 2, 1)  # experts 4 to 6
    checkpoint = make_checkpoint(tmp_path, w13, w2)
    with pytest.raises(CheckpointError) as error:
        checkpoint.pack_experts(PREFIX, placement, HIDDEN, INTERMEDIATE, SiTU(), backend=backend)
    name = f"{PREFIX}.experts.5.{matrix}.weight_scale"
    assert (error.value.file, error.value.tensor) == (str(checkpoint.entries[name].file), name)
    assert error.value.expected == expected
    assert error.value.got == f"{byte} in row {matrix_row}, group 1"
    with pytest.raises(ScaleError, match=f"{weight}: expected .*, got {byte} in expert 1, row {row}, group 1$"):
        pack_experts(w13[4:], w2[4:], SiTU(), placement, backend=backend)


def test_a_fault_of_the_last_expert_is_found_before_the_first_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    w13, w2 = model_experts()
    name = f"{PREFIX}.experts.6.w2.weight_scale"
    tensors = {key: value for key, value in expert_tensors(PREFIX, w13, w2) if key != name}
    save_checkpoint(tmp_path, tensors, {})
    read: list[Any] = []
    monkeypatch.setattr("rankmoe.checkpoint.read_into", lambda *arguments: read.append(arguments))
    options = (PREFIX, ExpertPlacement(NUM_EXPERTS), HIDDEN, INTERMEDIATE, SiTU())
    with pytest.raises(CheckpointError, match=rf"tensor {name}: expected this tensor, got none"):
        Checkpoint.open(tmp_path).pack_experts(*options, backend=backend)
    assert read == []


def test_layers_are_found_under_any_prefix(tmp_path: Path) -> None:
    prefixes = {layer: f"language_model.model.layers.{layer}.mlp" for layer in (11, 2)}
    tensors = [pair for prefix in prefixes.values() for pair in expert_tensors(prefix, *model_experts())]
    save_checkpoint(tmp_path, [*tensors, ("model.layers.4.mlp.gate.weight", torch.zeros(2, 2))], {})
    assert list(Checkpoint.open(tmp_path).layer_prefixes().items()) == sorted(prefixes.items())


def test_two_prefixes_of_one_layer_are_refused(tmp_path: Path) -> None:
    prefixes = [f"{tower}.layers.2.mlp" for tower in ("draft", "model")]
    tensors = [pair for prefix in prefixes for pair in expert_tensors(prefix, *model_experts())]
    save_checkpoint(tmp_path, tensors, {})
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\S+: expected one layer 2, got \S+layers\.2\.mlp too"):
        Checkpoint.open(tmp_path).layer_prefixes()


@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (700, 64), (2, 3, 96)])
def test_groups_with_values_are_found_some_rows_at_a_time(shape: tuple[int, ...]) -> None:
    weight = random_mxfp4(*shape)
    weight.data.view(-1)[::3] = 0x80
    weight.data[..., :16][::2] = 0
    groups = weight.data.unflatten(-1, (-1, 16))
    assert torch.equal(groups_with_values(weight), ((groups & 0x77) != 0).any(-1))


# --- packing on a CPU for a GPU


def test_weights_for_a_gpu_are_packed_on_a_cpu_where_they_are_named() -> None:
    weights = pack(backend="cuda")
    assert (weights.backend, weights.w13.data.device.type) == ("cuda", "cpu")
    assert pack(backend="auto").backend == "cpu"


def test_a_layout_that_is_not_made_on_a_cpu_is_refused_there() -> None:
    with pytest.raises(ValueError, match=r"backend: expected one that is available here and covers .*, got 'humming'"):
        pack(backend="humming")


def test_what_a_gpu_would_not_cover_is_not_packed_for_it() -> None:
    placement = ExpertPlacement(1025)
    w13, w2 = random_mxfp4(1025, 64, 32), random_mxfp4(1025, 32, 32)
    with pytest.raises(ValueError, match=r"backend: expected one that is available here and covers .*, got 'cuda'"):
        pack_experts(w13, w2, SiTU(), placement, backend="cuda")
    assert pack_experts(w13, w2, SiTU(), placement, backend="cpu").num_local_experts == 1025


def test_weights_for_a_gpu_do_not_run_on_the_cpu() -> None:
    weights = pack(backend="cuda")
    hidden_states, logits = random_batch(3, NUM_EXPERTS, HIDDEN)
    x = quantize_mxfp8(hidden_states)
    schedule = build_schedule(torch.tensor([[0], [1], [6]]), NUM_EXPERTS, num_experts=NUM_EXPERTS)
    middle = quantize_mxfp8(torch.zeros(3, INTERMEDIATE))
    message = "weights: expected on a cuda device for backend 'cuda', got cpu"
    for run in (
        lambda: gate_up(x, schedule, weights),
        lambda: down(middle, schedule, weights),
        lambda: gemms(x, schedule, weights),
        lambda: routed_moe(hidden_states, logits, weights, RouterConfig(2)),
    ):
        with pytest.raises(ValueError, match=message):
            run()


def test_rows_on_another_device_than_the_weights_are_refused() -> None:
    weights = pack()
    hidden_states, logits = (tensor.to("meta") for tensor in random_batch(3, NUM_EXPERTS, HIDDEN))
    with pytest.raises(ValueError, match="hidden_states: expected on cpu as the weights, got meta"):
        routed_moe(hidden_states, logits, weights, RouterConfig(2))


# --- round trips


@pytest.mark.parametrize("has_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_every_placement_comes_back(tmp_path: Path, backend: str, placement: ExpertPlacement, has_bias: bool) -> None:
    weights = pack(placement, backend=backend, has_bias=has_bias)
    path = tmp_path / "new folder" / packed_file_name(3, placement)
    assert save_packed(weights, path) == path.stat().st_size
    got = load_packed(path, device="cpu", placement=placement)
    assert_same_weights(got, weights)
    assert (got.w13_bias is None) == (not has_bias)


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_every_activation_comes_back(tmp_path: Path, backend: str, activation: Activation) -> None:
    weights = pack(activation=activation, backend=backend)
    save_packed(weights, tmp_path / "file")
    got = load_packed(tmp_path / "file", device="cpu").activation
    assert got == activation
    assert type(got) is type(activation)


def test_factors_come_back(tmp_path: Path) -> None:
    weights = pack(backend="cuda", scale_bytes=(125, 140))
    assert weights.w13_factor is not None
    assert weights.w2_factor is not None
    save_packed(weights, tmp_path / "file")
    assert_same_weights(load_packed(tmp_path / "file", device="cpu"), weights)


def test_factors_of_rows_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """humming's factors: one an expert in float32, one a row in bfloat16."""
    factors = {
        "w13_factor": torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, generator=seeded(5)).bfloat16(),
        "w2_factor": torch.randn(NUM_EXPERTS, generator=seeded(6)),
    }
    weights = dataclasses.replace(pack(has_bias=True), backend="humming", **factors)
    save_packed(weights, tmp_path / "file")
    monkeypatch.setattr(packed_module, "choose_packer", lambda *arguments: None)  # as if it ran here
    assert_same_weights(load_packed(tmp_path / "file", device="cpu"), weights)


def test_one_bias_alone_comes_back(tmp_path: Path, backend: str) -> None:
    weights = dataclasses.replace(pack(backend=backend, has_bias=True), w13_bias=None)
    save_packed(weights, tmp_path / "file")
    assert_same_weights(load_packed(tmp_path / "file", device="cpu"), weights)


def test_a_loaded_layer_runs_as_the_packed_one(tmp_path: Path) -> None:
    weights = pack(activation=ACTIVATIONS["gpt_oss"], has_bias=True)
    save_packed(weights, tmp_path / "file")
    hidden_states, logits = random_batch(9, NUM_EXPERTS, HIDDEN)
    got = routed_moe(hidden_states, logits, load_packed(tmp_path / "file"), RouterConfig(3))
    assert_bitwise_equal(got, routed_moe(hidden_states, logits, weights, RouterConfig(3)))
    assert got.any()


def test_without_a_device_the_weights_go_where_their_backend_runs(tmp_path: Path) -> None:
    save_packed(pack(), tmp_path / "file")
    assert load_packed(tmp_path / "file").w13.data.device.type == "cpu"
    save_packed(pack(backend="cuda"), tmp_path / "file")
    if experts_cuda.available():
        assert load_packed(tmp_path / "file").w13.data.device.type == "cuda"
        return
    with pytest.raises(CheckpointError) as error:
        load_packed(tmp_path / "file")
    assert error.value.file == str(tmp_path / "file")
    assert re.fullmatch(
        "a backend that is available here and covers Problem.*device_type='cuda'.*", error.value.expected
    )
    assert error.value.got == "'cuda'"


def test_experts_in_strided_memory_are_saved_by_value(tmp_path: Path) -> None:
    w13, w2 = model_experts()
    wide = MXTensor(
        w13.data.repeat(1, 1, 2)[..., : HIDDEN // 2], w13.scale.repeat(1, 1, 2)[..., : HIDDEN // 32], "mxfp4"
    )
    assert not wide.data.is_contiguous()
    save_packed(pack_experts(wide, w2, SiTU(), ExpertPlacement(NUM_EXPERTS), backend="cpu"), tmp_path / "file")
    assert_bitwise_equal(load_packed(tmp_path / "file").w13, w13)


def test_a_file_is_one_that_the_safetensors_library_reads(tmp_path: Path, backend: str) -> None:
    weights = pack(backend=backend, has_bias=True)
    save_packed(weights, tmp_path / "file.safetensors")
    expected = {"w13_bias": weights.w13_bias, "w2_bias": weights.w2_bias}
    for name, weight in (("w13", weights.w13), ("w2", weights.w2)):
        for part, buffer in get_backend(backend).layout.buffers(weight).items():
            expected[f"{name}.{part}"] = buffer
    tensors = load_file(tmp_path / "file.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert_bitwise_equal(tensor, expected[name], name)
    with safe_open(tmp_path / "file.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["backend"] == backend
    assert metadata["rankmoe_version"] == rankmoe.__version__
    assert json.loads(metadata["placement"])["num_experts"] == NUM_EXPERTS


def test_every_backend_states_a_layout_of_its_own_version() -> None:
    versions = {name: get_backend(name).layout.version for name in backend_names()}
    in_checkpoint_order = {"cpu", "reference", "triton", "triton_scaled"}
    assert {name for name, version in versions.items() if version == versions["cpu"]} == in_checkpoint_order
    assert len(set(versions.values())) == len(versions) - len(in_checkpoint_order) + 1


#: What the layouts make of the weights below. A layout that makes something else needs another version.
LAYOUT_BYTES = {
    "checkpoint/1": "edb3c09290b9ee00946c3bce5c446d1233cd86e741c48100c81f136fc98611b4",
    "cuda/1": "83caf2d7e3d82878b766a0e9cbebf2efc4b857b71f76b64f52ed6f246283d0d1",
}


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_layouts_version_stands_for_its_bytes(backend: str) -> None:
    def patterned(*shape: int) -> MXTensor:
        weight = MXTensor.empty(shape)
        weight.data.copy_((torch.arange(weight.data.numel()) * 37 % 251).view(weight.data.shape))
        weight.scale.copy_((torch.arange(weight.scale.numel()) * 7 % 12 + 119).view(weight.scale.shape))
        return weight

    weights = pack_experts(patterned(2, 192, 160), patterned(2, 160, 96), SiTU(), ExpertPlacement(2), backend=backend)
    digest, layout = hashlib.sha256(), get_backend(backend).layout
    for weight in (weights.w13, weights.w2):
        for buffer in layout.buffers(weight).values():
            digest.update(buffer.contiguous().numpy().tobytes())
    for factor in (weights.w13_factor, weights.w2_factor):
        digest.update(b"none" if factor is None else factor.numpy().tobytes())
    assert digest.hexdigest() == LAYOUT_BYTES[layout.version]


def test_hummings_layout_is_that_of_the_version_that_is_installed() -> None:
    requirements = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    (pinned,) = re.findall(r"humming-kernels==([\w.]+)", requirements)
    assert experts_humming.LAYOUT.version.startswith(f"humming-{pinned}/")


# --- faults: one error that names file, tensor, expected and got


def assert_fault(path: Path, tensor: str | None, expected: str, got: str, **options: Any) -> None:
    with pytest.raises(CheckpointError) as error:
        load_packed(path, **{"device": "cpu", **options})
    assert (error.value.file, error.value.tensor) == (str(path), tensor)
    assert (error.value.expected, error.value.got) == (expected, got)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_packed(pack(backend="cuda", has_bias=True, scale_bytes=(125, 140)), tmp_path / "file")
    return tmp_path / "file"


def edit_metadata(path: Path, **values: str | None) -> None:
    def edit(header: dict[str, Any]) -> None:
        for key, value in values.items():
            if value is None:
                del header["__metadata__"][key]
            else:
                header["__metadata__"][key] = value

    edit_header(path, edit)


WRITER = f"(written by rankmoe {rankmoe.__version__})"


def test_a_safetensors_file_of_another_kind(file: Path) -> None:
    edit_header(file, lambda header: header.pop("__metadata__"))
    assert_fault(file, None, "metadata with kind 'rankmoe packed experts'", "None")


def test_metadata_that_is_no_object(file: Path) -> None:
    edit_header(file, lambda header: header.update(__metadata__=3))
    assert_fault(file, None, "metadata with kind 'rankmoe packed experts'", "None")


def test_a_later_version_of_the_format(file: Path) -> None:
    edit_metadata(file, format_version="2", rankmoe_version="9.0")
    assert_fault(file, None, "format_version '1'", "'2' (written by rankmoe 9.0)")


def test_a_backend_that_this_library_lacks(file: Path) -> None:
    edit_metadata(file, backend="tpu")
    assert_fault(file, None, f"a backend of {', '.join(backend_names())}", f"'tpu' {WRITER}")


def test_a_layout_that_is_no_longer_made(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = dataclasses.replace(
        get_backend("cuda"), layout=dataclasses.replace(get_backend("cuda").layout, version="cuda/9")
    )
    monkeypatch.setattr(packed_module, "get_backend", lambda name: later)
    expected = "layout 'cuda/9' of backend 'cuda'; pack the checkpoint again"
    assert_fault(file, None, expected, f"'cuda/1' {WRITER}")


def test_a_layout_for_a_backend_that_does_not_run_here(file: Path) -> None:
    edit_metadata(file, backend="humming", layout=experts_humming.LAYOUT.version)
    problem = Problem(NUM_EXPERTS, HIDDEN, INTERMEDIATE, SiTU(), has_bias=True)
    assert_fault(file, None, f"a backend that is available here and covers {problem}", "'humming'")


def test_another_placement(file: Path) -> None:
    other = ExpertPlacement(NUM_EXPERTS, 1, 0, "round_robin")
    assert_fault(file, None, f"{other}", f"{ExpertPlacement(NUM_EXPERTS)}", placement=other)


@pytest.mark.parametrize(
    ("key", "value", "got"),
    [
        ("placement", None, "KeyError('placement')"),
        ("activation", None, "KeyError('activation')"),
        ("activation", '{"kind": "gelu"}', "KeyError('gelu')"),
        ("activation", '{"kind": "situ", "beta": -1.0}', "ValueError('beta: expected above 0, got -1.0')"),
        ("activation", '"situ"', """AttributeError("'str' object has no attribute 'pop'")"""),
        ("hidden_size", "95", "ValueError('size: expected a multiple of 32, got 95')"),
        ("hidden_size", "0", "ValueError('expected at least 1, got 0')"),
        ("intermediate_size", "sixty", """ValueError("invalid literal for int() with base 10: 'sixty'")"""),
    ],
)
def test_metadata_that_are_malformed(file: Path, key: str, value: str | None, got: str) -> None:
    edit_metadata(file, **{key: value})
    assert_fault(file, None, f"metadata with {key}", got)


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"num_experts": 0}', '{"num_experts": 7, "physical_to_logical": [0, 0]}']
)
def test_a_placement_that_is_malformed(file: Path, text: str) -> None:
    edit_metadata(file, placement=text)
    with pytest.raises(CheckpointError, match=r"file: expected metadata with placement, got \w+Error\("):
        load_packed(file, device="cpu")


def test_sizes_that_the_tensors_do_not_have(file: Path) -> None:
    shape = f"shape ({NUM_EXPERTS}, {experts_common.expert_nbytes(2 * INTERMEDIATE, 256)})"
    edit_metadata(file, hidden_size="256")
    assert_fault(
        file, "w13.buffer", shape, f"({NUM_EXPERTS}, {experts_common.expert_nbytes(2 * INTERMEDIATE, HIDDEN)})"
    )


def test_a_placement_that_the_tensors_do_not_have(file: Path) -> None:
    edit_metadata(file, placement=json.dumps({"num_experts": 6, "physical_to_logical": None}))
    nbytes = experts_common.expert_nbytes(2 * INTERMEDIATE, HIDDEN)
    assert_fault(file, "w13.buffer", f"shape (6, {nbytes})", f"({NUM_EXPERTS}, {nbytes})")


def rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def edit(header: dict[str, Any]) -> None:
        header[new] = header.pop(old)

    return edit


def test_a_tensor_that_is_missing_or_strange(file: Path) -> None:
    edit_header(file, rename("w2.buffer", "w2.data"))
    names = "w13.buffer, w13_bias, w13_factor, w2.buffer, w2_bias, w2_factor"
    assert_fault(file, "w2.data", f"one of {names}", "this tensor")
    edit_header(file, lambda header: header.pop("w2.data"))
    size = read_size(file)
    os.truncate(file, size)  # w2's buffer is the last one
    assert_fault(file, "w2.buffer", "this tensor", "none")


def read_size(path: Path) -> int:
    """The size that the header announces."""
    raw = path.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:size])
    return size + max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")


@pytest.mark.parametrize(
    ("name", "fields", "expected", "got"),
    [
        ("w2_bias", {"dtype": "I32"}, "dtype torch.float32", "torch.int32"),
        ("w2_bias", {"shape": [HIDDEN, NUM_EXPERTS]}, f"shape ({NUM_EXPERTS}, {HIDDEN})", f"({HIDDEN}, {NUM_EXPERTS})"),
        ("w13.buffer", {"dtype": "I8"}, "dtype torch.uint8", "torch.int8"),
        ("w2_factor", {"shape": [NUM_EXPERTS, 1]}, "no tensor or 1 dimension", "2 dimensions"),
        ("w2_factor", {"dtype": "I32"}, "dtype torch.float32", "torch.int32"),
    ],
)
def test_a_tensor_of_another_kind(file: Path, name: str, fields: dict[str, Any], expected: str, got: str) -> None:
    edit_header(file, lambda header: header[name].update(fields))
    assert_fault(file, name, expected, got)


def test_a_factor_where_the_layout_has_none(tmp_path: Path) -> None:
    weights = dataclasses.replace(pack(), w2_factor=torch.ones(NUM_EXPERTS))
    save_packed(weights, tmp_path / "file")
    assert_fault(tmp_path / "file", "w2_factor", "no tensor", "1 dimension")


def test_a_factor_that_the_layout_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = dataclasses.replace(pack(), backend="humming", w2_factor=torch.ones(NUM_EXPERTS))
    save_packed(weights, tmp_path / "file")
    monkeypatch.setattr(packed_module, "choose_packer", lambda *arguments: None)  # as if it ran here
    assert_fault(tmp_path / "file", "w13_factor", "1 dimension or 2 dimensions", "no tensor")


def test_a_truncated_file(file: Path) -> None:
    size = file.stat().st_size
    os.truncate(file, size - 1)
    assert_fault(file, "w2.buffer", f"a file of {size} bytes", f"{size - 1}")


@pytest.mark.parametrize("kept", [0, 7, 40])
def test_a_truncated_header(file: Path, kept: int) -> None:
    announced = 8 + (int.from_bytes(file.read_bytes()[:8], "little") if kept else 0)
    os.truncate(file, kept)
    assert_fault(file, None, f"a header of {announced} bytes", f"a file of {kept} bytes")


def test_surplus_bytes(file: Path) -> None:
    size = file.stat().st_size
    os.truncate(file, size + 3)
    assert_fault(file, None, f"a file of {size} bytes", f"{size + 3}")


def test_a_header_that_is_no_json(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[8] = 0xFF
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="file: expected a JSON object, got"):
        load_packed(file, device="cpu")


def test_a_file_that_shrinks_while_it_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shrinking(path: Path) -> Any:
        result = read_header(path)
        os.truncate(path, path.stat().st_size - 1)
        return result

    monkeypatch.setattr(packed_module, "read_header", shrinking)
    nbytes = experts_common.expert_nbytes(HIDDEN, INTERMEDIATE)
    assert_fault(file, "w2.buffer", f"{nbytes} bytes", f"{nbytes - 1}")


def test_faults_are_found_before_anything_is_allocated(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_metadata(file, hidden_size=str(2**40))  # would need 2^46 bytes an expert
    monkeypatch.setattr(packed_module, "choose_packer", lambda *arguments: None)
    with pytest.raises(CheckpointError, match=r"tensor w13\.buffer: expected shape"):
        load_packed(file, device="cpu")


def test_copied_parts_are_not_saved(tmp_path: Path) -> None:
    weights = pack(backend="cuda")
    copied = MXTensor(weights.w2.data.clone(), weights.w2.scale.clone(), "mxfp4")
    with pytest.raises(ValueError, match="weights: expected the buffer that pack made, got a copy of its parts"):
        save_packed(dataclasses.replace(weights, w2=copied), tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_device_gets_one_expert_at_a_time_through_one_piece_of_host_memory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device stands for one whose memory the host cannot write to."""
    entry = read_header(file)[0]["w13.buffer"]
    reads: list[tuple[int, int, int, tuple[int, ...]]] = []

    def recording(opened: Any, name: str, part: TensorEntry, out: torch.Tensor) -> None:
        read_into(opened, name, part, out)
        reads.append((part.start, part.stop, out.data_ptr(), tuple(out.shape)))

    monkeypatch.setattr("rankmoe.shards.read_into", recording)
    with file.open("rb") as opened:
        read_slices_into(opened, "w13.buffer", entry, torch.empty(entry.shape, dtype=torch.uint8, device="meta"))
    nbytes = entry.shape[1]
    starts = [entry.start + expert * nbytes for expert in range(NUM_EXPERTS)]
    assert [read[:2] for read in reads] == [(start, start + nbytes) for start in starts]
    assert starts[-1] + nbytes == entry.stop
    assert len({read[2:] for read in reads}) == 1


# --- written whole or not at all


class FailingTensor:
    """Stands for a weight's buffer whose third expert cannot be read."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer, self.dtype, self.shape, self.nbytes = buffer, buffer.dtype, buffer.shape, buffer.nbytes

    def __iter__(self) -> Any:
        yield from self.buffer[:2]
        raise KeyboardInterrupt


def failing_layout(layout: Layout) -> Layout:
    def buffers(weight: MXTensor) -> dict[str, Any]:
        return {name: FailingTensor(buffer) for name, buffer in layout.buffers(weight).items()}

    return dataclasses.replace(layout, buffers=buffers)


@pytest.mark.parametrize("has_old", [False, True])
def test_an_interrupted_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, has_old: bool
) -> None:
    path, weights = tmp_path / "file", pack(backend=backend)
    if has_old:
        save_packed(pack(ExpertPlacement(NUM_EXPERTS, 2, 1)), path)
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    failing = dataclasses.replace(get_backend(backend), layout=failing_layout(get_backend(backend).layout))
    monkeypatch.setattr(packed_module, "get_backend", lambda name: failing)
    with pytest.raises(KeyboardInterrupt):
        save_packed(weights, path)
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == before


def test_a_failed_rename_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    save_packed(pack(), path)
    before = path.read_bytes()

    def failing(source: Path, target: Path) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="disk gone"):
        save_packed(pack(activation=SwiGLU()), path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == before


def test_saving_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_packed(pack(has_bias=True), path)
    save_packed(pack(ExpertPlacement(NUM_EXPERTS, 2, 1), SwiGLU(), backend="cuda"), path)
    assert_same_weights(
        load_packed(path, device="cpu"), pack(ExpertPlacement(NUM_EXPERTS, 2, 1), SwiGLU(), backend="cuda")
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_is_as_readable_as_the_process_makes_it(tmp_path: Path) -> None:
    save_packed(pack(), tmp_path / "file")
    (tmp_path / "plain").write_text("")
    assert len({entry.stat().st_mode for entry in tmp_path.iterdir()}) == 1


# --- beyond 4 GiB and 2^31 elements, in sparse files


def sparse_file(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> int:
    """A file of these tensors (meta) with nothing but zeros; returns where their bytes begin."""
    header = header_bytes(tensors, metadata)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(tensor.nbytes for tensor in tensors.values()))
    return len(header)


def test_the_last_expert_of_a_checkpoint_beyond_4_gib_is_packed(tmp_path: Path, backend: str) -> None:
    num_experts, hidden_size, intermediate_size = 896, 3584, 3072  # a Kimi-K3 layer
    (w13, w2) = (MXTensor.empty((num_experts, *shape), "meta") for shape in ((6144, 3584), (3584, 3072)))
    names = dict(expert_tensors(PREFIX, w13, w2))
    start = sparse_file(tmp_path / "model.safetensors", names, {})
    own13, own2 = random_mxfp4(1, 2 * intermediate_size, hidden_size), random_mxfp4(1, hidden_size, intermediate_size)
    last = dict(expert_tensors(PREFIX, own13, own2, first_expert=num_experts - 1))
    offset = start
    with (tmp_path / "model.safetensors").open("r+b") as file:
        for name, tensor in names.items():
            if name in last:
                assert offset > 2**33
                file.seek(offset)
                file.write(last[name].contiguous().numpy().data)
            offset += tensor.nbytes
    assert w13.data.numel() * 2 > 2**33
    placement = ExpertPlacement(num_experts, num_experts, num_experts - 1)
    checkpoint = Checkpoint.open(tmp_path)
    got = checkpoint.pack_experts(PREFIX, placement, hidden_size, intermediate_size, SiTU(), backend=backend)
    assert_same_weights(got, pack_experts(own13, own2, SiTU(), placement, backend=backend))


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_the_last_expert_of_a_packed_file_beyond_4_gib_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    num_experts = 320
    layout, meta = get_backend(backend).layout, torch.device("meta")
    shapes = {"w13": (num_experts, 6144, 3584), "w2": (num_experts, 3584, 3072)}
    tensors = {
        f"{name}.{part}": buffer
        for name, shape in shapes.items()
        for part, buffer in layout.buffers(layout.empty(shape, meta)).items()
    }
    own = random_mxfp4(1, 6144, 3584), random_mxfp4(1, 3584, 3072)
    alone = pack_experts(*own, SiTU(), ExpertPlacement(1), backend=backend)
    save_packed(alone, tmp_path / "alone")
    with safe_open(tmp_path / "alone", "pt") as file:
        metadata = file.metadata()
    metadata["placement"] = json.dumps({"num_experts": num_experts, "physical_to_logical": None})
    offset = sparse_file(tmp_path / "file", tensors, metadata)
    assert offset + sum(tensor.nbytes for tensor in tensors.values()) > 2**32
    last_starts: dict[str, int] = {}
    with (tmp_path / "file").open("r+b") as file:
        for name, weight in (("w13", alone.w13), ("w2", alone.w2)):
            for part, buffer in layout.buffers(weight).items():
                offset += tensors[f"{name}.{part}"].nbytes
                last_starts[f"{name}.{part}"] = offset - buffer.nbytes
                file.seek(offset - buffer.nbytes)
                file.write(buffer.contiguous().numpy().data)
    assert max(last_starts.values()) > 2**32
    skipped = 0

    def read_last_expert(file: Any, name: str, entry: TensorEntry, out: torch.Tensor) -> None:
        nonlocal skipped
        skipped += entry.start < last_starts[name]
        if entry.start >= last_starts[name]:  # memory that nobody writes to is never real
            read_into(file, name, entry, out)

    monkeypatch.setattr("rankmoe.shards.read_into", read_last_expert)
    got = load_packed(tmp_path / "file", device="cpu")
    assert skipped == len(tensors) * (num_experts - 1)
    assert got.w13.data.numel() * 2 > 2**31
    for name in ("w13", "w2"):
        assert_bitwise_equal(getattr(got, name)[num_experts - 1], getattr(alone, name)[0])


def test_the_last_expert_of_a_buffer_beyond_4_gib_is_packed() -> None:
    """The memory is never touched but for the last expert, so that little of it is ever real."""
    num_experts, num_outputs, num_inputs = 70_000, 256, 512
    packed = experts_common.empty_packed((num_experts, num_outputs, num_inputs), torch.device("cpu"))
    nbytes = experts_common.expert_nbytes(num_outputs, num_inputs)
    assert num_experts * nbytes > 2**32
    assert num_experts * num_outputs * num_inputs > 2**33
    buffer = experts_common.buffer_of(packed)
    assert buffer[-1].data_ptr() - packed.data.data_ptr() == (num_experts - 1) * nbytes
    assert packed.data[-1].data_ptr() == buffer[-1].data_ptr()
    assert packed.scale[-1].data_ptr() == buffer[-1].data_ptr() + num_outputs * num_inputs // 2
    own = random_mxfp4(1, num_outputs, num_inputs)
    expected = experts_cuda.pack(random_mxfp4(1, 64, num_outputs), own, torch.device("cpu")).w2
    buffer[-1] = experts_common.buffer_of(expected)[0]
    assert_bitwise_equal(packed[num_experts - 1], expected[0])


# --- memory

MEMORY_SCRIPT = """
import json, re, sys
from rankmoe.checkpoint import Checkpoint
from rankmoe.packed import load_packed, save_packed
from rankmoe.experts import pack_experts
from rankmoe.types import ExpertPlacement, SiTU

directory, backend, num_experts, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

def status(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

def extra(make):
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew from here
    before = status("VmRSS")
    made = make()
    return status("VmHWM") - before - (made.nbytes if hasattr(made, "nbytes") else 0)

checkpoint = Checkpoint.open(directory)

def pack(ep_size=1):
    placement = ExpertPlacement(num_experts, ep_size)
    return checkpoint.pack_experts("layer", placement, size, size, SiTU(), backend=backend)

def pack_naively():
    weights = checkpoint.load_experts("layer", ExpertPlacement(num_experts), size, size)
    copies = [type(w)(w.data.clone(), w.scale.clone(), "mxfp4") for w in weights]
    return pack_experts(*copies, SiTU(), ExpertPlacement(num_experts), backend=backend)

path = directory + "/packed"
save_packed(pack(num_experts), path)  # imports and buffers that only the first call makes
load_packed(path, device="cpu")
result = {"pack": extra(pack)}
weights = pack()
result["save"] = extra(lambda: save_packed(weights, path))
del weights
result["load"] = extra(lambda: load_packed(path, device="cpu"))
result["naive"] = extra(pack_naively)
print(json.dumps(result))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak is read from /proc")
def test_peak_memory_beyond_the_packed_weights_is_at_most_one_expert(tmp_path: Path, backend: str) -> None:
    num_experts, size = 12, 2048
    expert_bytes = 3 * size * size * 17 // 32
    w13, w2 = random_mxfp4(num_experts, 2 * size, size), random_mxfp4(num_experts, size, size)
    save_checkpoint(tmp_path, expert_tensors("layer", w13, w2), {})
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path), backend, str(num_experts), str(size)]
    # glibc then gives freed memory back at once: none of it can hide what the next step takes.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    environment["PYTHONPATH"] = str(Path(packed_module.__file__).parents[1])
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    extra = json.loads(result.stdout)
    for step in ("pack", "save", "load"):
        assert extra[step] <= expert_bytes, extra
    # The yardstick sees who holds everything twice.
    assert extra["naive"] > 0.8 * num_experts * expert_bytes


# --- on a GPU

needs_gpu = pytest.mark.skipif(not experts_cuda.available(), reason="needs a Hopper or Blackwell GPU, NVRTC")
needs_humming = pytest.mark.skipif(not experts_humming.available(), reason="needs humming-kernels and a Hopper GPU")


def layer_outputs(weights: ExpertWeights) -> list[torch.Tensor]:
    """The layer's output from token masks, and from offsets, for a batch that every rank sees."""
    outputs = []
    for num_tokens in (8, 70):
        hidden_states, logits = random_batch(num_tokens, NUM_EXPERTS, HIDDEN)
        outputs.append(routed_moe(hidden_states.cuda(), logits.cuda(), weights, RouterConfig(3)))
    return outputs


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("has_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_what_a_cpu_packed_is_what_the_gpu_would_have_packed(
    tmp_path: Path, placement: ExpertPlacement, has_bias: bool
) -> None:
    options = {"backend": "cuda", "has_bias": has_bias, "scale_bytes": (125, 135)}
    on_gpu, on_cpu = pack(placement, device="cuda", **options), pack(placement, device="cpu", **options)
    assert on_cpu.w13_factor is not None
    save_packed(on_cpu, tmp_path / "from cpu")
    save_packed(on_gpu, tmp_path / "from gpu")
    assert (tmp_path / "from cpu").read_bytes() == (tmp_path / "from gpu").read_bytes()
    loaded = load_packed(tmp_path / "from cpu", placement=placement)
    assert loaded.w13.data.device.type == "cuda"
    assert_same_weights(loaded, on_gpu)
    for got, expected in zip(layer_outputs(loaded), layer_outputs(on_gpu), strict=True):
        assert expected.any()
        assert_bitwise_equal(got, expected)


@pytest.mark.gpu
@needs_gpu
def test_packing_from_the_disk_and_loading_take_little_on_the_gpu(tmp_path: Path) -> None:
    num_experts, size = 12, 2048
    w13, w2 = random_mxfp4(num_experts, 2 * size, size), random_mxfp4(num_experts, size, size)
    save_checkpoint(tmp_path, expert_tensors("layer", w13, w2), {})
    checkpoint, placement = Checkpoint.open(tmp_path), ExpertPlacement(num_experts)

    def extra(make: Callable[[], ExpertWeights]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        weights = make()
        return torch.cuda.max_memory_allocated() - before - weights.nbytes

    def from_disk() -> ExpertWeights:
        return checkpoint.pack_experts("layer", placement, size, size, SiTU(), backend="cuda", device="cuda")

    expert_bytes = 3 * size * size * 17 // 32
    assert 0 <= extra(from_disk) <= expert_bytes
    save_packed(from_disk(), tmp_path / "packed")
    assert 0 <= extra(lambda: load_packed(tmp_path / "packed")) <= expert_bytes
    assert_same_weights(load_packed(tmp_path / "packed"), from_disk())


@pytest.mark.gpu
@needs_humming
@pytest.mark.parametrize("octaves", [0, 18], ids=["a factor an expert", "a factor a row"])
def test_hummings_layout_comes_back_and_runs(tmp_path: Path, octaves: int) -> None:
    hidden_size, intermediate_size, placement = 128, 64, ExpertPlacement(NUM_EXPERTS)
    w13 = random_mxfp4(NUM_EXPERTS, 2 * intermediate_size, hidden_size, seed=1, scale_bytes=(118, 123))
    w2 = random_mxfp4(NUM_EXPERTS, hidden_size, intermediate_size, seed=2, scale_bytes=(118, 123))
    for weight in (w13, w2):
        weight.scale[:, ::2] -= octaves
    save_checkpoint(tmp_path, expert_tensors(PREFIX, w13, w2), {})
    options = {"backend": "humming", "device": "cuda"}
    weights = pack_experts(w13, w2, SiTU(), placement, **options)
    assert weights.w13_factor is not None
    assert weights.w13_factor.dim() == (2 if octaves else 1)
    checkpoint = Checkpoint.open(tmp_path)
    from_disk = checkpoint.pack_experts(PREFIX, placement, hidden_size, intermediate_size, SiTU(), **options)
    assert_same_weights(from_disk, weights)
    save_packed(weights, tmp_path / "packed")
    loaded = load_packed(tmp_path / "packed", placement=placement)
    assert_same_weights(loaded, weights)
    hidden_states, logits = (tensor.cuda() for tensor in random_batch(8, NUM_EXPERTS, hidden_size))
    expected = routed_moe(hidden_states, logits, weights, RouterConfig(3))
    assert expected.any()
    assert_bitwise_equal(routed_moe(hidden_states, logits, loaded, RouterConfig(3)), expected)

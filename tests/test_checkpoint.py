"""Checkpoints: what is written is read back bit for bit, every fault is one named error, and no byte is read in vain.

The oracle is the safetensors library: it writes files that are read here and reads files that are written here.
"""

from __future__ import annotations

import json
import os
import pickle
import stat
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers import edit_header
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rankmoe import checkpoint as checkpoint_module
from rankmoe.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    Checkpoint,
    CheckpointError,
    expert_tensors,
    mxfp4_quantization_config,
    progress_bar,
    save_checkpoint,
)
from rankmoe.types import ExpertPlacement, MXTensor

PREFIX = "model.layers.3.block_sparse_moe"
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 7, 96, 64
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * 17 // 32


def random_mxfp4(*shape: int, seed: int) -> MXTensor:
    generator = torch.Generator().manual_seed(seed)

    def random_bytes(last: int) -> torch.Tensor:
        return torch.randint(0, 256, (*shape[:-1], last), dtype=torch.uint8, generator=generator)

    return MXTensor(random_bytes(shape[-1] // 2), random_bytes(shape[-1] // 32), "mxfp4")


def random_experts(num_experts: int = NUM_EXPERTS) -> tuple[MXTensor, MXTensor]:
    w13 = random_mxfp4(num_experts, 2 * INTERMEDIATE, HIDDEN, seed=1)
    return w13, random_mxfp4(num_experts, HIDDEN, INTERMEDIATE, seed=2)


def hand_named(w13: MXTensor, w2: MXTensor, prefix: str = PREFIX) -> dict[str, torch.Tensor]:
    """The checkpoint's names, spelled out independently of the module under test."""
    tensors = {}
    for expert in range(w2.shape[0]):
        for part in ("data", "scale"):
            suffix = "weight_packed" if part == "data" else "weight_scale"
            gate_up, down = getattr(w13, part)[expert], getattr(w2, part)[expert]
            tensors[f"{prefix}.experts.{expert}.w1.{suffix}"] = gate_up[:INTERMEDIATE].clone()
            tensors[f"{prefix}.experts.{expert}.w3.{suffix}"] = gate_up[INTERMEDIATE:].clone()
            tensors[f"{prefix}.experts.{expert}.w2.{suffix}"] = down.clone()
    return tensors


def assert_same(actual: MXTensor, expected: MXTensor) -> None:
    assert torch.equal(actual.data, expected.data)
    assert torch.equal(actual.scale, expected.scale)


def load(checkpoint: Checkpoint, placement: ExpertPlacement, **options: Any) -> tuple[MXTensor, MXTensor]:
    return checkpoint.load_experts(PREFIX, placement, HIDDEN, INTERMEDIATE, **options)


def bytes_read() -> int:
    """Bytes that this process has asked of read calls so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise AssertionError("no rchar")


needs_proc = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts reads through /proc")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """One expert a shard, written by the oracle: shard 1 has expert 0, and so on."""
    named = hand_named(*random_experts())
    weight_map: dict[str, str] = {}
    for expert in range(NUM_EXPERTS):
        file_name = f"model-{expert + 1:05d}-of-{NUM_EXPERTS:05d}.safetensors"
        tensors = {name: tensor for name, tensor in named.items() if f".experts.{expert}." in name}
        save_file(tensors, tmp_path / file_name)
        weight_map |= dict.fromkeys(tensors, file_name)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


# --- round trips


PLACEMENTS = [
    *(ExpertPlacement(NUM_EXPERTS, 3, rank) for rank in range(3)),  # uneven: 3, 2, 2
    *(ExpertPlacement(NUM_EXPERTS, 2, rank, "round_robin") for rank in range(2)),
    # Nine physical experts for seven logical ones; rank 0 of 2 holds two copies of expert 4.
    *(ExpertPlacement(9, 2, rank, physical_to_logical=(4, 4, 0, 6, 1, 2, 3, 5, 4)) for rank in range(2)),
    ExpertPlacement(NUM_EXPERTS),
]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_each_placement_loads_exactly_its_experts(sharded: Path, placement: ExpertPlacement) -> None:
    w13, w2 = random_experts()
    loaded_w13, loaded_w2 = load(Checkpoint.open(sharded), placement)
    owned = list(placement.logical_expert_ids)
    assert len(owned) == placement.num_local_experts
    assert_same(loaded_w13, w13[torch.tensor(owned)])
    assert_same(loaded_w2, w2[torch.tensor(owned)])


@pytest.mark.parametrize("max_shard_bytes", [2 * EXPERT_BYTES, 10**9], ids=["sharded", "single"])
def test_saved_experts_come_back_bitwise(tmp_path: Path, max_shard_bytes: int) -> None:
    w13, w2 = random_experts()
    save_checkpoint(tmp_path, expert_tensors(PREFIX, w13, w2), {"model_type": "nano"}, max_shard_bytes)
    checkpoint = Checkpoint.open(tmp_path)
    assert (tmp_path / INDEX_FILE).exists() == (max_shard_bytes < 10**9)
    loaded_w13, loaded_w2 = load(checkpoint, ExpertPlacement(NUM_EXPERTS))
    assert_same(loaded_w13, w13)
    assert_same(loaded_w2, w2)
    assert set(checkpoint.entries) == set(hand_named(w13, w2))


def test_first_expert_shifts_the_names() -> None:
    w13, w2 = random_experts(2)
    names = [name for name, _ in expert_tensors(PREFIX, w13, w2, first_expert=5)]
    assert names[0] == f"{PREFIX}.experts.5.w1.weight_packed"
    assert {name.split(".experts.")[1][0] for name in names} == {"5", "6"}


FLOAT_DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float64]


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=8),
    dtypes=st.lists(st.sampled_from([*FLOAT_DTYPES, torch.int32, torch.bool]), min_size=8, max_size=8),
    max_shard_bytes=st.integers(1, 400),
)
def test_any_tensors_and_any_shard_size(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[int]],
    dtypes: list[torch.dtype],
    max_shard_bytes: int,
) -> None:
    directory = tmp_path_factory.mktemp("any")
    tensors = {
        f"t{i}": (torch.randn(shape) * 3).to(dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    save_checkpoint(directory, tensors, {}, max_shard_bytes)
    checkpoint = Checkpoint.open(directory)
    assert set(checkpoint.entries) == set(tensors)
    total = 0
    for path in directory.glob("*.safetensors"):
        shard = load_file(path)  # the oracle accepts every file
        size = sum(tensor.nbytes for tensor in shard.values())
        assert size <= max_shard_bytes or sum(tensor.nbytes > 0 for tensor in shard.values()) == 1
        total += size
    for name, tensor in tensors.items():
        loaded = checkpoint.tensor(name, tensor.shape, tensor.dtype)
        assert loaded.shape == tensor.shape
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    if (directory / INDEX_FILE).exists():
        index = json.loads((directory / INDEX_FILE).read_text())
        assert index["metadata"]["total_size"] == total
        assert index["weight_map"] == {name: entry.file.name for name, entry in checkpoint.entries.items()}


def test_float8_is_read(tmp_path: Path) -> None:
    codes = torch.tensor([0x38, 0x7F, 0x80, 0x7E], dtype=torch.uint8)
    save_file({"a": codes}, tmp_path / "model.safetensors")  # old versions of the library write no float8
    edit_header(tmp_path / "model.safetensors", lambda header: header["a"].update(dtype="F8_E4M3"))
    loaded = Checkpoint.open(tmp_path).tensor("a", (4,), torch.float8_e4m3fn)
    assert torch.equal(loaded.view(torch.uint8), codes)
    assert loaded.float()[[0, 3]].tolist() == [1.0, 448.0]


def test_shard_names_and_a_tensor_too_large_for_a_shard(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(10), "b": torch.zeros(1000), "c": torch.zeros(10), "d": torch.zeros(10)}
    save_checkpoint(tmp_path, tensors, {}, max_shard_bytes=100)
    assert {name: entry.file.name for name, entry in Checkpoint.open(tmp_path).entries.items()} == {
        "a": "model-00001-of-00003.safetensors",
        "b": "model-00002-of-00003.safetensors",
        "c": "model-00003-of-00003.safetensors",
        "d": "model-00003-of-00003.safetensors",
    }


def test_several_files_without_an_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config == {}
    assert checkpoint.tensor("a").tolist() == [1, 1]
    assert checkpoint.tensor("b").tolist() == [0, 0, 0]


def test_a_parameter_and_a_transposed_view_are_saved_by_value(tmp_path: Path) -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    save_checkpoint(tmp_path, {"parameter": torch.nn.Parameter(matrix.clone()), "transposed": matrix.T}, {})
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.tensor("transposed"), matrix.T)
    assert torch.equal(checkpoint.tensor("parameter"), matrix)


def test_config_names_the_format_and_the_modules_left_unpacked(tmp_path: Path) -> None:
    config = {"model_type": "nano", "num_experts": NUM_EXPERTS}
    plain = [("model.embed_tokens.weight", torch.zeros(4, 4)), (f"{PREFIX}.gate.weight", torch.zeros(7, 4))]
    save_checkpoint(tmp_path, [*plain, *expert_tensors(PREFIX, *random_experts())], config)
    assert config == {"model_type": "nano", "num_experts": NUM_EXPERTS}
    saved = Checkpoint.open(tmp_path).config
    quantization = saved.pop("quantization_config")
    assert saved == config
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "mxfp4-pack-quantized"
    assert quantization["ignore"] == ["model.embed_tokens", f"{PREFIX}.gate"]
    weights = quantization["config_groups"]["group_0"]["weights"]
    expected = {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8", "strategy": "group"}
    assert weights.items() >= expected.items()


@pytest.mark.parametrize("nesting", [lambda q: q, lambda q: {"text_config": q}], ids=["top level", "text_config"])
def test_a_stated_quantization_config_is_kept(tmp_path: Path, nesting: Callable[[Any], Any]) -> None:
    config = nesting({"quantization_config": mxfp4_quantization_config(["lm_head"])})
    save_checkpoint(tmp_path, expert_tensors(PREFIX, *random_experts()), config)
    assert Checkpoint.open(tmp_path).config == config


def test_unquantised_weights_get_no_quantization_config(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"a.weight": torch.zeros(2)}, {"model_type": "nano"})
    assert Checkpoint.open(tmp_path).config == {"model_type": "nano"}


def test_files_are_as_readable_as_the_process_makes_them(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"a": torch.zeros(2), "b": torch.zeros(2)}, {}, max_shard_bytes=8)
    (tmp_path / "plain").write_text("")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == 5
    assert len(modes) == 1


def test_expert_tensors_refuses_what_does_not_fit() -> None:
    w13, w2 = random_experts()
    with pytest.raises(ValueError, match=r"w13: expected \(7, 128, 96\) beside w2 \(7, 96, 64\), got \(6, 128, 96\)"):
        expert_tensors(PREFIX, w13[:6], w2)
    mxfp8 = MXTensor(torch.zeros(7, 96, 64, dtype=torch.float8_e4m3fn), w2.scale, "mxfp8")
    with pytest.raises(ValueError, match="expected mxfp4, got mxfp4 and mxfp8"):
        expert_tensors(PREFIX, w13, mxfp8)


# --- faults (cases.md 29): one error that names file, tensor, expected and got


def assert_fault(
    error: pytest.ExceptionInfo[CheckpointError], file: Path, tensor: str | None, expected: str, got: str
) -> None:
    assert error.value.file == str(file)
    assert error.value.tensor == tensor
    assert (error.value.expected, error.value.got) == (expected, got)
    message = str(error.value)
    assert all(part in message for part in (file.name, tensor or "", f"expected {expected}", f"got {got}"))


W2_OF_LAST = f"{PREFIX}.experts.{NUM_EXPERTS - 1}.w2.weight_packed"


def shard_of(directory: Path, expert: int) -> Path:
    return directory / f"model-{expert + 1:05d}-of-{NUM_EXPERTS:05d}.safetensors"


def remove_from_index(directory: Path, *names: str) -> None:
    index = json.loads((directory / INDEX_FILE).read_text())
    for name in names:
        del index["weight_map"][name]
    (directory / INDEX_FILE).write_text(json.dumps(index))


def rewrite(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_missing_expert(sharded: Path) -> None:
    rewrite(shard_of(sharded, 6), lambda tensors: tensors.pop(W2_OF_LAST))
    remove_from_index(sharded, W2_OF_LAST)
    checkpoint = Checkpoint.open(sharded)
    with pytest.raises(CheckpointError) as error:
        load(checkpoint, ExpertPlacement(NUM_EXPERTS, 2, 1))
    searched = ", ".join(shard_of(sharded, expert).name for expert in range(NUM_EXPERTS))
    assert_fault(error, sharded, W2_OF_LAST, "this tensor", f"none in 7 files ({searched})")
    load(checkpoint, ExpertPlacement(NUM_EXPERTS, 2, 0))  # a rank without that expert is not concerned


def test_missing_plain_tensor(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight: expected this tensor, got none in 7 files"):
        Checkpoint.open(sharded).tensor("lm_head.weight")


def test_wrong_shape(sharded: Path) -> None:
    rewrite(shard_of(sharded, 6), lambda tensors: tensors.update({W2_OF_LAST: tensors[W2_OF_LAST].T.contiguous()}))
    checkpoint = Checkpoint.open(sharded)
    with pytest.raises(CheckpointError) as error:
        load(checkpoint, ExpertPlacement(NUM_EXPERTS))
    assert_fault(error, shard_of(sharded, 6), W2_OF_LAST, "shape (96, 32)", "(32, 96)")
    with pytest.raises(CheckpointError) as error:
        checkpoint.tensor(W2_OF_LAST, shape=(96, 32))
    assert_fault(error, shard_of(sharded, 6), W2_OF_LAST, "shape (96, 32)", "(32, 96)")


def test_wrong_dtype(sharded: Path) -> None:
    rewrite(shard_of(sharded, 6), lambda tensors: tensors.update({W2_OF_LAST: tensors[W2_OF_LAST].view(torch.int8)}))
    checkpoint = Checkpoint.open(sharded)
    with pytest.raises(CheckpointError) as error:
        load(checkpoint, ExpertPlacement(NUM_EXPERTS))
    assert_fault(error, shard_of(sharded, 6), W2_OF_LAST, "dtype torch.uint8", "torch.int8")
    with pytest.raises(CheckpointError) as error:
        checkpoint.tensor(W2_OF_LAST, dtype=torch.bfloat16)
    assert_fault(error, shard_of(sharded, 6), W2_OF_LAST, "dtype torch.bfloat16", "torch.int8")


def test_dtype_that_torch_lacks_hurts_only_who_asks(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4, dtype=torch.uint8), "b": torch.ones(2)}, path)
    edit_header(path, lambda header: header["a"].update(dtype="F6_E2M3"))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensor("b").tolist() == [1, 1]
    with pytest.raises(CheckpointError) as error:
        checkpoint.tensor("a")
    assert_fault(error, path, "a", "a dtype that torch has", "F6_E2M3")


@pytest.mark.parametrize("has_index", [True, False])
def test_data_region_cut_by_one_byte(sharded: Path, has_index: bool) -> None:
    path = shard_of(sharded, 2)
    size = path.stat().st_size
    last = max(Checkpoint.open(sharded).entries.items(), key=lambda item: (item[1].file == path, item[1].stop))[0]
    os.truncate(path, size - 1)
    if not has_index:
        (sharded / INDEX_FILE).unlink()
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(sharded)
    assert_fault(error, path, last, f"a file of {size} bytes", f"{size - 1}")


def test_surplus_bytes_after_the_data(sharded: Path) -> None:
    path = shard_of(sharded, 2)
    size = path.stat().st_size
    os.truncate(path, size + 5)
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(sharded)
    assert_fault(error, path, None, f"a file of {size} bytes", f"{size + 5}")


@pytest.mark.parametrize("kept", [0, 5, 8, 100])
def test_header_cut(sharded: Path, kept: int) -> None:
    path = shard_of(sharded, 2)
    header_size = int.from_bytes(path.read_bytes()[:8], "little")
    os.truncate(path, kept)
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(sharded)
    announced = 8 + (header_size if kept >= 2 else 0)
    assert_fault(error, path, None, f"a header of {announced} bytes", f"a file of {kept} bytes")


@pytest.mark.parametrize("header", [b"{not json", b"[1, 2]", b"\xff\xfe\xfd"])
def test_header_that_is_no_json_object(sharded: Path, header: bytes) -> None:
    path = shard_of(sharded, 2)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(
        CheckpointError, match=r"model-00003-of-00007\.safetensors: expected a JSON object, got"
    ) as error:
        Checkpoint.open(sharded)
    assert error.value.file == str(path)


@pytest.mark.parametrize(
    "fields",
    [{"dtype": "U8", "shape": [2]}, {"dtype": "U8", "shape": ["x"], "data_offsets": [0, 1]}, 3],
    ids=["no offsets", "shape of words", "a number"],
)
def test_header_entry_that_is_malformed(sharded: Path, fields: Any) -> None:
    name = f"{PREFIX}.experts.2.w1.weight_scale"
    edit_header(shard_of(sharded, 2), lambda header: header.update({name: fields}))
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(sharded)
    assert_fault(error, shard_of(sharded, 2), name, "dtype, shape and data_offsets", f"{fields}")


def test_header_whose_shape_does_not_fill_its_bytes(sharded: Path) -> None:
    name = f"{PREFIX}.experts.2.w1.weight_scale"
    entry = Checkpoint.open(sharded).entries[name]
    edit_header(shard_of(sharded, 2), lambda header: header[name].update(shape=[64, 9]))
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(sharded)
    assert (error.value.file, error.value.tensor) == (str(entry.file), name)
    assert error.value.expected.endswith("for U8 (64, 9)")


def test_index_names_a_file_that_is_not_there(sharded: Path) -> None:
    shard_of(sharded, 4).unlink()
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(sharded)
    assert error.value.tensor is not None
    assert ".experts.4." in error.value.tensor
    expected = "the file that model.safetensors.index.json names"
    assert_fault(error, shard_of(sharded, 4), error.value.tensor, expected, "no such file")


def test_index_places_a_tensor_that_the_header_lacks(sharded: Path) -> None:
    rewrite(shard_of(sharded, 6), lambda tensors: tensors.pop(W2_OF_LAST))
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(sharded)
    expected = "this tensor in the header, by model.safetensors.index.json"
    assert_fault(error, shard_of(sharded, 6), W2_OF_LAST, expected, "a header without it")


def test_header_has_a_tensor_that_the_index_lacks(sharded: Path) -> None:
    remove_from_index(sharded, W2_OF_LAST)
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(sharded)
    expected = "no such tensor by model.safetensors.index.json"
    assert_fault(error, shard_of(sharded, 6), W2_OF_LAST, expected, "a header with it")


def test_index_places_a_tensor_in_another_shard(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"][W2_OF_LAST] = shard_of(sharded, 0).name
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(sharded)
    expected = "model-00001-of-00007.safetensors by model.safetensors.index.json"
    assert_fault(error, shard_of(sharded, 6), W2_OF_LAST, expected, "a header with it")


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}']
)
def test_index_that_is_malformed(sharded: Path, content: str) -> None:
    (sharded / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint.open(sharded)


def test_config_that_is_malformed(sharded: Path) -> None:
    (sharded / CONFIG_FILE).write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON object, got"):
        Checkpoint.open(sharded)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(tmp_path)
    assert_fault(error, tmp_path / "two.safetensors", "a", "a tensor of one file", "one in one.safetensors too")


def test_an_incomplete_set_of_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX_FILE).unlink()
    Checkpoint.open(sharded)
    shard_of(sharded, 6).unlink()
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(sharded)
    expected = "a shard beside model-00001-of-00007.safetensors"
    assert_fault(error, shard_of(sharded, 6), None, expected, "no such file")


@pytest.mark.parametrize("exists", [True, False])
def test_no_checkpoint_at_all(tmp_path: Path, exists: bool) -> None:
    directory = tmp_path if exists else tmp_path / "absent"
    with pytest.raises(CheckpointError, match="expected a folder with") as error:
        Checkpoint.open(directory)
    assert error.value.file == str(directory)


def test_a_placement_smaller_than_the_model(sharded: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        load(Checkpoint.open(sharded), ExpertPlacement(NUM_EXPERTS - 1))
    name = f"{PREFIX}.experts.6.w1.weight_packed"
    assert_fault(error, shard_of(sharded, 6), name, "no expert beyond the placement's 6", "this tensor")


@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(95, 64), (96, 48)])
def test_sizes_are_multiples_of_a_group(sharded: Path, hidden_size: int, intermediate_size: int) -> None:
    with pytest.raises(ValueError, match=r"_size: expected a multiple of 32, got (95|48)"):
        Checkpoint.open(sharded).load_experts(PREFIX, ExpertPlacement(NUM_EXPERTS), hidden_size, intermediate_size)


def test_error_survives_pickling() -> None:
    error = CheckpointError("shard", "tensor", "this", "that")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "shard: tensor tensor: expected this, got that"
    assert isinstance(copy, ValueError)


# --- laziness: nothing half-loaded, nothing foreign read, nothing held twice


@needs_proc
def test_a_fault_of_the_last_tensor_is_found_before_the_first_is_read(sharded: Path) -> None:
    rewrite(shard_of(sharded, 6), lambda tensors: tensors.update({W2_OF_LAST: torch.zeros(2, dtype=torch.uint8)}))
    checkpoint = Checkpoint.open(sharded)
    calls: list[str] = []
    before = bytes_read()
    with pytest.raises(CheckpointError, match="shape"):
        load(checkpoint, ExpertPlacement(NUM_EXPERTS), progress=lambda done, total, name: calls.append(name))
    assert bytes_read() - before < EXPERT_BYTES // 6
    assert calls == []


def test_a_fault_is_found_before_anything_is_allocated(sharded: Path) -> None:
    # Outputs of these sizes would need hundreds of terabytes: allocating first would be another error.
    with pytest.raises(CheckpointError, match="shape"):
        Checkpoint.open(sharded).load_experts(PREFIX, ExpertPlacement(NUM_EXPERTS), 2**24, 2**24)


@needs_proc
def test_opening_reads_headers_only(tmp_path: Path) -> None:
    size = 1 << 20
    save_checkpoint(tmp_path, {name: torch.zeros(size, dtype=torch.uint8) for name in "abcd"}, {}, max_shard_bytes=size)
    before = bytes_read()
    checkpoint = Checkpoint.open(tmp_path)
    assert bytes_read() - before < size // 4
    before = bytes_read()
    checkpoint.tensor("b")
    assert size <= bytes_read() - before < size + size // 4


@needs_proc
def test_a_rank_reads_the_bytes_of_its_own_experts_in_a_shared_shard(tmp_path: Path) -> None:
    num_experts, hidden, intermediate = 16, 256, 256
    w13 = random_mxfp4(num_experts, 2 * intermediate, hidden, seed=1)
    w2 = random_mxfp4(num_experts, hidden, intermediate, seed=2)
    save_checkpoint(tmp_path, expert_tensors(PREFIX, w13, w2), {})
    checkpoint = Checkpoint.open(tmp_path)
    assert {entry.file.name for entry in checkpoint.entries.values()} == {"model.safetensors"}
    before = bytes_read()
    loaded = checkpoint.load_experts(PREFIX, ExpertPlacement(num_experts, 8, 5), hidden, intermediate)
    read = bytes_read() - before
    own = sum(tensor.nbytes for tensor in loaded)
    assert own == (w13.nbytes + w2.nbytes) // 8
    # Each of the twelve tensors may cost a read buffer on top.
    assert own <= read < 1.5 * own


def test_foreign_shards_are_never_read(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    own, foreign = ExpertPlacement(NUM_EXPERTS, 2, 0), ExpertPlacement(NUM_EXPERTS, 2, 1)
    for expert in foreign.expert_ids:  # their data vanishes; their headers were good when the checkpoint was opened
        path = shard_of(sharded, expert)
        os.truncate(path, 8 + int.from_bytes(path.read_bytes()[:8], "little"))
    w13, w2 = random_experts()
    loaded_w13, loaded_w2 = load(checkpoint, own)
    assert_same(loaded_w13, w13[: own.num_local_experts])
    assert_same(loaded_w2, w2[: own.num_local_experts])
    with pytest.raises(CheckpointError, match=r"model-00005-of-00007.*expected \d+ bytes, got 0"):
        load(checkpoint, foreign)


MEMORY_SCRIPT = """
import json, re, sys
import torch
from safetensors.torch import load_file
from rankmoe.checkpoint import Checkpoint
from rankmoe.types import ExpertPlacement

directory, num_experts, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def status(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

def extra(load):
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew from here
    before = status("VmRSS")
    outputs = load()
    return status("VmHWM") - before - sum(t.nbytes for t in outputs)

checkpoint = Checkpoint.open(directory)
load_rank = lambda ep_size: checkpoint.load_experts("layer", ExpertPlacement(num_experts, ep_size), size, size)

def load_naively():
    tensors = load_file(directory + "/model.safetensors")
    parts = ["w1.weight_packed", "w2.weight_packed", "w3.weight_packed"]
    return [torch.stack([tensors[f"layer.experts.{e}.{part}"] for e in range(num_experts)]) for part in parts]

load_rank(num_experts)  # imports and buffers that only the first call makes
print(json.dumps({"lazy": extra(lambda: load_rank(1)), "naive": extra(load_naively)}))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak is read from /proc")
def test_peak_memory_beyond_the_weights_is_at_most_one_expert(tmp_path: Path) -> None:
    num_experts, size = 16, 1024
    expert_bytes = 3 * size * size * 17 // 32
    w13 = random_mxfp4(num_experts, 2 * size, size, seed=1)
    w2 = random_mxfp4(num_experts, size, size, seed=2)
    save_checkpoint(tmp_path, expert_tensors("layer", w13, w2), {})
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path), str(num_experts), str(size)]
    environment = os.environ | {"PYTHONPATH": str(Path(checkpoint_module.__file__).parents[1])}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    extra = json.loads(result.stdout)
    assert extra["lazy"] <= expert_bytes
    # The yardstick sees a loader that holds everything twice.
    assert extra["naive"] > 0.8 * num_experts * expert_bytes


# --- saving: whole or not at all


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def interrupted(after: int) -> Iterator[tuple[str, torch.Tensor]]:
    for i in range(after):
        yield f"new{i}", torch.full((100,), float(i))
    raise KeyboardInterrupt


@pytest.mark.parametrize("after", [0, 1, 5])
def test_interrupted_save_leaves_nothing(tmp_path: Path, after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, interrupted(after), {}, max_shard_bytes=800)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("old_shard_bytes", [400, 10**9], ids=["sharded", "single"])
def test_interrupted_save_leaves_the_old_checkpoint(tmp_path: Path, old_shard_bytes: int) -> None:
    save_checkpoint(tmp_path, {"a": torch.ones(100), "b": torch.ones(100)}, {"old": True}, old_shard_bytes)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, interrupted(5), {"old": False}, max_shard_bytes=800)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(("old", "new"), [(400, 10**9), (10**9, 400), (400, 800), (800, 400)])
def test_saving_again_leaves_nothing_of_the_old_checkpoint(tmp_path: Path, old: int, new: int) -> None:
    save_checkpoint(tmp_path, {f"old{i}": torch.zeros(100) for i in range(4)}, {}, old)
    tensors = {f"new{i}": torch.full((100,), float(i)) for i in range(4)}
    save_checkpoint(tmp_path, tensors, {}, new)
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.entries) == set(tensors)
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in tensors.items())
    in_use = {entry.file.name for entry in checkpoint.entries.values()}
    assert set(names_in(tmp_path)) == in_use | {CONFIG_FILE} | ({INDEX_FILE} if len(in_use) > 1 else set())


@pytest.mark.parametrize("failing", [2, 3, 4])
def test_failure_while_renaming_is_never_taken_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Renames come in the order config, shards 1 to 3, index; old and new shards have the same names."""
    save_checkpoint(tmp_path, {f"t{i}": torch.zeros(100) for i in range(3)}, {}, max_shard_bytes=400)
    renames: list[str] = []
    replace = os.replace

    def failing_replace(source: Path, target: Path) -> None:
        if len(renames) + 1 == failing:
            raise OSError("disk gone")
        renames.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(OSError, match="disk gone"):
        save_checkpoint(tmp_path, {f"t{i}": torch.ones(100) for i in range(3)}, {}, max_shard_bytes=400)
    assert not (tmp_path / INDEX_FILE).exists()
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path)


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    pairs = [("a", torch.zeros(1)), ("b", torch.zeros(1)), ("a", torch.zeros(1))]
    with pytest.raises(ValueError, match="expected each name once, got a twice"):
        save_checkpoint(tmp_path, pairs, {})
    assert names_in(tmp_path) == []


def test_saving_holds_one_shard_at_a_time(tmp_path: Path) -> None:
    """The memory of closed shards is let go before the next tensors are asked for."""
    alive: list[weakref.ref[Any]] = []
    most_alive = 0

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most_alive
        for i in range(12):
            array = numpy.zeros(100, numpy.float32)
            alive.append(weakref.ref(array))  # dies with the last tensor that uses its memory
            pair = (f"t{i}", torch.from_numpy(array))
            del array
            yield pair
            del pair
            most_alive = max(most_alive, sum(reference() is not None for reference in alive))

    save_checkpoint(tmp_path, tensors(), {}, max_shard_bytes=1200)
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    assert most_alive == 3  # one shard


# --- progress


def test_progress_counts_every_tensor_once(sharded: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    placement = ExpertPlacement(NUM_EXPERTS, 2, 1)
    load(Checkpoint.open(sharded), placement, progress=lambda *call: calls.append(call))
    total = 6 * placement.num_local_experts
    assert [call[:2] for call in calls] == [(done, total) for done in range(1, total + 1)]
    owned = {
        name for name in hand_named(*random_experts()) if int(name.split(".experts.")[1][0]) in placement.expert_ids
    }
    assert {name for _, _, name in calls} == owned


@pytest.mark.parametrize("force", [False, True])
def test_progress_bar_prints_to_a_terminal_or_when_forced(
    sharded: Path, capsys: pytest.CaptureFixture[str], force: bool
) -> None:
    with progress_bar("loading experts", force=force) as progress:
        load(Checkpoint.open(sharded), ExpertPlacement(NUM_EXPERTS), progress=progress)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("loading experts" in captured.err) == force
    assert ("42/42" in captured.err) == force
    assert (captured.err == "") == (not force)

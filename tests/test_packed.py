"""Packing from a checkpoint one expert at a time, and packed weights saved and loaded again."""

import dataclasses
import gc
import json
import weakref

import pytest
import torch
from helpers import assert_bitwise_equal, random_batch, random_mxfp4, seeded

from rankmoe import packed
from rankmoe.backends import backend_names, get_backend
from rankmoe.checkpoint import Checkpoint, CheckpointError, expert_tensors, read_header, save_checkpoint
from rankmoe.experts import pack_experts
from rankmoe.kernels import experts_cuda
from rankmoe.moe import routed_moe
from rankmoe.packed import load_packed, save_packed
from rankmoe.types import (
    Activation,
    ExpertPlacement,
    ExpertWeights,
    MXTensor,
    Problem,
    RouterConfig,
    SiTU,
    SwiGLU,
)

HIDDEN, INTERMEDIATE = 96, 64
PREFIX = "model.layers.0.block_sparse_moe"
ON_CPU = Problem(3, HIDDEN, INTERMEDIATE, SiTU())
#: Backends that run on this machine's CPU. The layout of the native one is made here, too, but runs on a GPU only.
BACKENDS = [name for name in backend_names() if get_backend(name).available() and get_backend(name).covered(ON_CPU)]
PLACEMENTS = {
    "one rank": ExpertPlacement(6),
    "uneven": ExpertPlacement(7, 3, 1),
    "round robin": ExpertPlacement(6, 2, 1, "round_robin"),
    "redundant": ExpertPlacement(4, 2, 1, physical_to_logical=(0, 1, 2, 0)),
}
ACTIVATIONS: list[Activation] = [SiTU(), SiTU(1.5, 3.0), SwiGLU(), SwiGLU(alpha=1.702, limit=7.0, up_offset=1.0)]
needs_gpu = pytest.mark.skipif(not experts_cuda.available(), reason="needs a Hopper or Blackwell GPU, NVRTC")


@pytest.fixture
def checkpoint(tmp_path) -> Checkpoint:
    """Six experts of one layer in several shards."""
    w13, w2 = random_mxfp4(6, 2 * INTERMEDIATE, HIDDEN, seed=1), random_mxfp4(6, HIDDEN, INTERMEDIATE, seed=2)
    directory = tmp_path / "checkpoint"
    save_checkpoint(directory, expert_tensors(PREFIX, w13, w2), {}, max_shard_bytes=20_000)
    return Checkpoint.open(directory)


def random_weights(
    placement: ExpertPlacement, activation: Activation, backend: str, has_bias: bool = True
) -> ExpertWeights:
    num_experts = placement.num_local_experts
    w13, w2 = random_mxfp4(num_experts, 2 * INTERMEDIATE, HIDDEN), random_mxfp4(num_experts, HIDDEN, INTERMEDIATE)
    biases = {}
    if has_bias:
        biases["w13_bias"] = torch.randn(num_experts, 2 * INTERMEDIATE, generator=seeded(3))
        biases["w2_bias"] = torch.randn(num_experts, HIDDEN, generator=seeded(4))
    if backend == "cuda":  # on the CPU, where it is packed but does not run
        parts = experts_cuda.pack(w13, w2, torch.device("cpu"))
        factor = torch.arange(1.0, 1 + num_experts)
        return ExpertWeights(parts.w13, parts.w2, activation, placement, "cuda", w2_factor=factor, **biases)
    return pack_experts(w13, w2, activation, placement, backend=backend, **biases)


# --- from a checkpoint -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_checkpoints_sources_hand_out_what_load_experts_loads(checkpoint, placement):
    if placement.num_logical_experts != 6:
        placement = ExpertPlacement(6, 3, 1)
    expected = checkpoint.load_experts(PREFIX, placement, HIDDEN, INTERMEDIATE)
    for source, weight in zip(
        checkpoint.expert_sources(PREFIX, placement, HIDDEN, INTERMEDIATE), expected, strict=True
    ):
        assert (source.shape, source.format) == (weight.shape, "mxfp4")
        for expert in range(placement.num_local_experts):
            assert_bitwise_equal(source[expert], weight[expert])


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_packed_from_a_checkpoint_are_those_packed_from_memory(checkpoint, backend):
    placement = ExpertPlacement(6, 2, 1)
    sources = checkpoint.expert_sources(PREFIX, placement, HIDDEN, INTERMEDIATE)
    tensors = checkpoint.load_experts(PREFIX, placement, HIDDEN, INTERMEDIATE)
    got, expected = (pack_experts(*pair, SiTU(), placement, backend=backend) for pair in (sources, tensors))
    assert_bitwise_equal((got.w13, got.w2), (expected.w13, expected.w2))


def test_the_native_layout_is_packed_from_a_checkpoint_too(checkpoint):
    placement, device = ExpertPlacement(6, 2, 1), torch.device("cpu")
    sources = checkpoint.expert_sources(PREFIX, placement, HIDDEN, INTERMEDIATE)
    tensors = checkpoint.load_experts(PREFIX, placement, HIDDEN, INTERMEDIATE)
    assert_bitwise_equal(experts_cuda.pack(*sources, device), experts_cuda.pack(*tensors, device))


class Recording:
    """A source that counts how many of the experts it handed out are still held when it is asked for another."""

    def __init__(self, weight: MXTensor) -> None:
        self.weight, self.shape, self.format = weight, weight.shape, weight.format
        self.handed_out: list[weakref.ref[torch.Tensor]] = []
        self.most_held = 0

    def __getitem__(self, index: int, /) -> MXTensor:
        gc.collect()
        self.most_held = max(self.most_held, sum(ref() is not None for ref in self.handed_out))
        own = self.weight[index]
        own = MXTensor(own.data.clone(), own.scale.clone(), "mxfp4")
        self.handed_out.append(weakref.ref(own.data))
        return own


@pytest.mark.parametrize("backend", [*BACKENDS, "cuda"])
def test_at_most_one_expert_is_held_while_the_next_is_fetched(backend):
    sources = [Recording(random_mxfp4(5, *shape)) for shape in ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))]
    get_backend(backend).pack(*sources, torch.device("cpu"))
    for source in sources:
        assert len(source.handed_out) >= 5
        assert source.most_held <= 1


def test_a_missing_expert_is_refused_before_anything_is_read(checkpoint):
    with pytest.raises(CheckpointError, match=r"experts\.6\.w1\.weight_packed: expected this tensor, got none in"):
        checkpoint.expert_sources(PREFIX, ExpertPlacement(7), HIDDEN, INTERMEDIATE)


# --- saved and loaded ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("backend", [*BACKENDS, "cuda"])
def test_loaded_weights_are_the_saved_ones(tmp_path, backend, placement, activation, monkeypatch):
    monkeypatch.setattr(packed, "choose_backend", lambda problem, name: get_backend(name))
    weights = random_weights(placement, activation, backend)
    save_packed(weights, tmp_path / "layer.safetensors")
    loaded = load_packed(tmp_path / "layer.safetensors", placement=placement)
    for field in dataclasses.fields(ExpertWeights):
        assert_bitwise_equal(getattr(loaded, field.name), getattr(weights, field.name), field.name)
    if backend == "cuda":  # the parts of one buffer again, padding and all
        buffer_of = get_backend("cuda").buffer_of
        assert_bitwise_equal(buffer_of(loaded.w13), buffer_of(weights.w13))


def test_loaded_weights_compute_the_same_bits(tmp_path):
    weights = random_weights(ExpertPlacement(6), SiTU(), "cpu")
    save_packed(weights, tmp_path / "layer")
    loaded = load_packed(tmp_path / "layer")
    hidden_states, logits = random_batch(5, 6, HIDDEN)
    expected = routed_moe(hidden_states, logits, weights, RouterConfig(2))
    assert_bitwise_equal(routed_moe(hidden_states, logits, loaded, RouterConfig(2)), expected)


def test_a_file_is_read_by_every_backend_of_its_layout(tmp_path):
    save_packed(random_weights(ExpertPlacement(3), SiTU(), "cpu"), tmp_path / "layer")
    assert load_packed(tmp_path / "layer", backend="reference").backend == "reference"


def test_weights_that_do_not_run_here_are_refused_by_backend(tmp_path):
    save_packed(random_weights(ExpertPlacement(3), SiTU(), "cuda"), tmp_path / "layer")
    with pytest.raises(ValueError, match=r"backend: expected one .* covers .*, got 'cuda'"):
        load_packed(tmp_path / "layer")


def rewrite(path, change) -> None:
    """Apply a change to a file's JSON header."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "another", r"expected format 'rankmoe packed experts 1', got 'another'"),
        ("layout", "checkpoint 0", r"expected layout 'checkpoint 1' for cpu, got 'checkpoint 0'"),
        ("activation", "{}", r"expected metadata that save_packed writes, got KeyError"),
        (
            "sizes",
            json.dumps({"hidden_size": 128, "intermediate_size": 64}),
            r"w13\.data: expected shape \(3, 128, 64\)",
        ),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path, key, value, message):
    path = tmp_path / "layer"
    save_packed(random_weights(ExpertPlacement(3), SiTU(), "cpu"), path)
    rewrite(path, lambda header: header["__metadata__"].update({key: value}))
    with pytest.raises(CheckpointError, match=message):
        load_packed(path)


def test_a_native_file_of_other_sizes_is_refused_by_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "choose_backend", lambda problem, name: get_backend(name))
    path = tmp_path / "layer"
    save_packed(random_weights(ExpertPlacement(3), SiTU(), "cuda", has_bias=False), path)
    for sizes in ((HIDDEN, 4 * INTERMEDIATE), (HIDDEN // 3, INTERMEDIATE)):
        value = json.dumps(dict(zip(("hidden_size", "intermediate_size"), sizes, strict=True)))
        rewrite(path, lambda header, value=value: header["__metadata__"].update(sizes=value))
        with pytest.raises(CheckpointError, match=r"w\d+: expected what holds a weight of"):
            load_packed(path)


def test_a_file_that_is_cut_short_lacks_a_tensor_or_is_another_ranks_is_refused(tmp_path):
    path = tmp_path / "layer"
    save_packed(random_weights(ExpertPlacement(6, 2, 0), SiTU(), "cpu"), path)
    with pytest.raises(CheckpointError, match=r"expected ExpertPlacement\(.*ep_rank=1.*got .*ep_rank=0"):
        load_packed(path, placement=ExpertPlacement(6, 2, 1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"expected a file of \d+ bytes"):
        load_packed(path)
    path.write_bytes(whole)
    rewrite(path, lambda header: header.update(other=header.pop("w2.scale")))
    with pytest.raises(CheckpointError, match=r"w2\.scale: expected this tensor, got none; there are other"):
        load_packed(path)


def test_a_failure_while_writing_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "layer"
    save_packed(random_weights(ExpertPlacement(3), SiTU(), "cpu"), path)
    before = path.read_bytes()

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(packed.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_packed(random_weights(ExpertPlacement(3), SwiGLU(), "cpu"), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_offsets_beyond_4_gib_find_the_last_expert(tmp_path):
    """A sparse file of more than 2^32 bytes: only the last expert's bytes are written and read."""
    path, num_experts, nbytes = tmp_path / "layer", 300, 16 * 2**20
    header = packed._header({"w13": torch.empty(num_experts, nbytes, dtype=torch.uint8, device="meta")}, {})
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + num_experts * nbytes)
        file.seek(-4, 2)
        file.write(b"last")
    entries, _ = read_header(path)
    entry = entries["w13"]
    assert entry.stop > 2**32
    last = entry._replace(start=entry.stop - nbytes, shape=(nbytes,))
    read = packed._read(path, {"w13": last}, "w13", (nbytes,), torch.device("cpu"))
    assert bytes(read[-4:].tolist()) == b"last"
    assert not read[:-4].any()


@pytest.mark.gpu
@needs_gpu
def test_weights_go_from_disk_to_a_gpu_and_compute_the_same_bits(tmp_path, checkpoint):
    placement = ExpertPlacement(6)
    sources = checkpoint.expert_sources(PREFIX, placement, HIDDEN, INTERMEDIATE)
    tensors = checkpoint.load_experts(PREFIX, placement, HIDDEN, INTERMEDIATE)
    expected = pack_experts(*(t.to("cuda") for t in tensors), SiTU(), placement, backend="cuda")
    from_disk = pack_experts(*sources, SiTU(), placement, backend="cuda", device="cuda")
    save_packed(from_disk, tmp_path / "layer")
    loaded = load_packed(tmp_path / "layer", device="cuda")
    hidden_states, logits = (t.cuda() for t in random_batch(5, 6, HIDDEN))
    out = routed_moe(hidden_states, logits, expected, RouterConfig(2))
    for weights in (from_disk, loaded):
        assert_bitwise_equal((weights.w13, weights.w2), (expected.w13, expected.w2))
        assert_bitwise_equal(routed_moe(hidden_states, logits, weights, RouterConfig(2)), out)

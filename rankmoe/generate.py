"""Text from ``nano`` on the ranks of an expert-parallel group, and the proof that neither ids nor ranks change it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rankmoe import reference
from rankmoe.checkpoint import progress_bar
from rankmoe.distributed import ExpertParallelGroup
from rankmoe.models.nano import CHECKPOINT_DIRECTORY, NanoModel, load_nano
from rankmoe.models.nano_config import NanoConfig
from rankmoe.pack import rank_local_num_experts
from rankmoe.runner import RoutedMoeRunner
from rankmoe.types import ExpertWeights, LocalRange, Routing

#: Another number of ranks adds partial sums in another order; the last bit of a sum can move an activation to the
#: neighbouring MXFP8 code, and through the later layers a logit by some tenths. A first difference between two runs'
#: tokens counts as agreement only where the two candidates' logits are closer than this (a ratio of 1.28 between their
#: probabilities); wrong experts move logits by whole units.
NEAR_TIE = 0.25


@dataclass(frozen=True)
class GenerateOptions:
    """What to generate.

    prompts: byte strings of equal length, one a sequence.
    num_tokens: bytes to generate for each.
    temperature: 0 takes the likeliest byte; above, bytes are drawn, by ``seed`` the same in every run.
    verify: run again with global ids and on a single rank, and compare.
    """

    prompts: tuple[bytes, ...]
    num_tokens: int
    temperature: float = 0.0
    seed: int = 0
    verify: bool = False
    directory: Path = CHECKPOINT_DIRECTORY


@dataclass(frozen=True)
class RankReport:
    """One rank's part in the run."""

    ep_rank: int
    local_range: LocalRange
    rank_local_num_experts: int | None
    handoff_hits: int
    handoff_misses: int
    tokens_per_s: float


@dataclass(frozen=True)
class Verification:
    """What the repeated runs showed.

    num_outputs: routed-expert outputs compared between the two id forms, over all ranks, layers and steps.
    num_equal_outputs: those that were equal bit for bit.
    num_id_tensors: packed id tensors that the experts read, in both runs.
    num_right_id_tensors: those that are what the reference makes of the router's ids in that run's form.
    first_differences: for each sequence the step at which a single rank first chose another byte, or None.
    gaps: at that step, how far apart the two candidates' logits are in the run where they are further apart.
    max_logit_difference: largest difference of any logit between EP R and EP 1 up to the first difference.
    """

    num_outputs: int
    num_equal_outputs: int
    num_id_tensors: int
    num_right_id_tensors: int
    first_differences: tuple[int | None, ...]
    gaps: tuple[float, ...]
    max_logit_difference: float

    @property
    def forms_agree(self) -> bool:
        """Every output is bitwise equal, and the ids really were rank-local in one run and global in the other."""
        return 0 < self.num_outputs == self.num_equal_outputs and 0 < self.num_id_tensors == self.num_right_id_tensors

    @property
    def ranks_agree(self) -> bool:
        """EP R and EP 1 chose the same bytes, or first differed at a near tie."""
        return all(gap < NEAR_TIE for gap in self.gaps)

    @property
    def passed(self) -> bool:
        """Both hold."""
        return self.forms_agree and self.ranks_agree


@dataclass(frozen=True)
class GenerateResult:
    """Texts (one a sequence), the ranks' table and, where asked for, the verification."""

    texts: tuple[bytes, ...]
    ranks: tuple[RankReport, ...]
    verification: Verification | None


@dataclass(frozen=True)
class Decoded:
    """tokens: [B, N] int64. logits: [N, B, vocabulary] float32, what each token was the maximum of."""

    tokens: torch.Tensor
    logits: torch.Tensor
    tokens_per_s: float


@dataclass(frozen=True)
class _CallRecord:
    """One routed-expert call: whether its packed ids follow the rule, and a digest of its output."""

    has_right_ids: bool
    output: bytes


class _RecordingRunner(RoutedMoeRunner):
    """A runner that keeps a record of every call. ``local_range`` is what ids have to be local to, None for global."""

    records: list[_CallRecord]
    local_range: LocalRange | None

    def __call__(
        self, hidden_states: torch.Tensor, routing: Routing, num_valid_tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = super().__call__(hidden_states, routing, num_valid_tokens)
        assert routing.packed is not None, "the model's handoff always packs"
        ids = routing.topk_ids
        expected = ids if self.local_range is None else reference.rank_local_ids(ids, self.local_range)
        self.records.append(_CallRecord(torch.equal(routing.packed >> 16, expected), _digest(out)))
        return out


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


def cut_prompts(text: bytes, batch_size: int, prompt_bytes: int, num_tokens: int, config: NanoConfig) -> list[bytes]:
    """Cut ``batch_size`` prompts of equal length out of a document, ending at evenly spaced line ends.

    The last one ends where the document ends. A prompt that reaches back to the document's start begins with the
    model's document separator. Prompts are shortened to leave ``num_tokens`` of the context length.
    Raises ValueError where that leaves nothing, or for a document without enough lines.
    """
    room = config.max_position_embeddings - num_tokens
    if room < 1:
        raise ValueError(
            f"num_tokens: expected below the context of {config.max_position_embeddings}, got {num_tokens}"
        )
    document = bytes([config.document_separator]) + text
    ends = []
    for sequence in range(1, batch_size + 1):
        target = len(document) * sequence // batch_size
        # The line end at or before the target; a document without one is cut right there.
        ends.append(target if sequence == batch_size else document.rfind(b"\n", 0, target) + 1 or target)
    length = min(prompt_bytes, room, *ends)
    if length < 1:
        raise ValueError(f"prompt: expected text for {batch_size} prompts, got {len(text)} bytes")
    return [document[end - length : end] for end in ends]


def decode(
    model: NanoModel, options: GenerateOptions, on_bytes: Callable[[Sequence[int]], None] | None = None
) -> Decoded:
    """Generate; every rank of the model's group calls this and gets the same tokens.

    on_bytes: called after each step with the new byte of every sequence.
    """
    caches = model.new_caches(len(options.prompts))
    generator = torch.Generator().manual_seed(options.seed)
    step_tokens = torch.tensor([list(prompt) for prompt in options.prompts])
    tokens, logits = [], []
    started = time.perf_counter()
    for step in range(options.num_tokens):
        scores = model(step_tokens, caches)[:, -1]
        if options.temperature > 0:
            # The maximum after adding Gumbel noise is a draw from the softmax.
            uniform = torch.rand(scores.shape, generator=generator).clamp(min=1e-20)
            scores = scores / options.temperature - torch.log(-torch.log(uniform))
        step_tokens = model.group.broadcast(scores.argmax(-1, keepdim=True))
        tokens.append(step_tokens)
        logits.append(scores)
        if on_bytes is not None:
            on_bytes(step_tokens[:, 0].tolist())
        if step == 0:
            started = time.perf_counter()  # the prompt's own pass is not decode
    steps = max(options.num_tokens - 1, 1)
    elapsed = time.perf_counter() - started
    rate = steps * len(options.prompts) / elapsed if elapsed > 0 else 0.0
    return Decoded(torch.cat(tokens, dim=1), torch.stack(logits), rate)


def generate(
    group: ExpertParallelGroup,
    options: GenerateOptions,
    on_bytes: Callable[[Sequence[int]], None] | None = None,
) -> GenerateResult:
    """Run on this rank of a group; every rank returns the same result. See ``rankmoe.distributed.launch``.

    on_bytes: called on rank 0 as bytes arrive.
    """
    torch.set_num_threads(1)  # nano's tensors are too small to share between threads
    with progress_bar("loading nano") as progress:  # on a terminal only
        model = load_nano(group, options.directory, progress=progress if group.ep_rank == 0 else None)
    placement = _experts(model).placement
    local_range = placement.local_range
    assert local_range is not None, "nano's experts are placed contiguously"
    local_num_experts = rank_local_num_experts(placement.num_experts, local_range, model.config.num_experts_per_token)
    records = _record(model, None if local_num_experts is None else local_range) if options.verify else []
    decoded = decode(model, options, on_bytes if group.ep_rank == 0 else None)
    counters = model.handoff.counters
    report = RankReport(
        ep_rank=group.ep_rank,
        local_range=local_range,
        rank_local_num_experts=local_num_experts,
        handoff_hits=counters.take_hits,
        handoff_misses=counters.take_misses,
        tokens_per_s=decoded.tokens_per_s,
    )
    verification = _verify(model, options, decoded, records) if options.verify else None
    texts = tuple(bytes(sequence) for sequence in decoded.tokens.tolist())
    return GenerateResult(texts, tuple(group.gather_objects(report)), verification)


def _experts(model: NanoModel) -> ExpertWeights:
    runner = model.moe_blocks[0].runner
    assert runner is not None, "load_nano binds the experts"
    return runner.weights


def _record(model: NanoModel, local_range: LocalRange | None) -> list[_CallRecord]:
    """Keep a record of every routed-expert call from now on, in one new list."""
    records: list[_CallRecord] = []
    for block in model.moe_blocks:
        plain = block.runner
        assert plain is not None, "load_nano binds the experts"
        block.runner = _RecordingRunner(plain.weights, plain.handoff, plain.workspace, plain.out_dtype)
        block.runner.records = records
        block.runner.local_range = local_range
    return records


def _verify(model: NanoModel, options: GenerateOptions, decoded: Decoded, records: list[_CallRecord]) -> Verification:
    group = model.group
    for block in model.moe_blocks:
        block.rank_local = False
    global_records = _record(model, None)
    decode(model, options)
    counts = (
        max(len(records), len(global_records)),
        sum(a.output == b.output for a, b in zip(records, global_records, strict=False)),
        len(records) + len(global_records),
        sum(record.has_right_ids for record in records + global_records),
    )
    totals = [sum(column) for column in zip(*group.gather_objects(counts), strict=True)]
    single = None
    if group.ep_rank == 0:
        single = decode(load_nano(None, options.directory), options)
    single = group.gather_objects(single)[0]
    return replace(compare_decoded(decoded, single), **dict(zip(_COUNT_FIELDS, totals, strict=True)))


_COUNT_FIELDS = ("num_outputs", "num_equal_outputs", "num_id_tensors", "num_right_id_tensors")


def compare_decoded(decoded: Decoded, single: Decoded) -> Verification:
    """Compare the tokens of two runs; the counts of outputs are left at 0."""
    first_differences: list[int | None] = []
    gaps = []
    max_difference = 0.0
    for sequence in range(decoded.tokens.shape[0]):
        differs = (decoded.tokens[sequence] != single.tokens[sequence]).nonzero()
        step = int(differs[0]) if len(differs) else None
        first_differences.append(step)
        comparable = slice(None) if step is None else slice(step + 1)
        difference = decoded.logits[comparable, sequence] - single.logits[comparable, sequence]
        max_difference = max(max_difference, difference.abs().max().item())
        if step is not None:
            candidates = [decoded.tokens[sequence, step], single.tokens[sequence, step]]
            gaps.append(max((run.logits[step, sequence, candidates].diff().abs().item()) for run in (decoded, single)))
    return Verification(0, 0, 0, 0, tuple(first_differences), tuple(gaps), max_difference)

"""Generation over ranks, and the verification that compares the runs: it passes on the model and catches faults."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import rankmoe.pack
from rankmoe.cli import app, verification_lines
from rankmoe.distributed import ExpertParallelGroup, launch
from rankmoe.generate import (
    NEAR_TIE,
    Decoded,
    GenerateOptions,
    Verification,
    compare_decoded,
    cut_prompts,
    decode,
    generate,
)
from rankmoe.models.nano import load_config, load_nano

TEXT = Path(dataclasses.__file__).read_bytes()[:4000]
PROMPTS = tuple(cut_prompts(TEXT, 2, 96, 8, load_config()))


def test_two_ranks_agree_with_one_and_with_global_ids() -> None:
    result = launch(generate, 2, GenerateOptions(PROMPTS, 8, verify=True))
    config = load_config()
    verification = result.verification
    assert verification.passed, verification
    calls = config.num_hidden_layers * 8 * 2
    assert (verification.num_outputs, verification.num_equal_outputs) == (calls, calls)
    assert (verification.num_id_tensors, verification.num_right_id_tensors) == (2 * calls, 2 * calls)
    assert [(rank.local_range.offset, rank.local_range.count) for rank in result.ranks] == [(0, 32), (32, 32)]
    assert all(rank.rank_local_num_experts == 36 for rank in result.ranks)
    assert all((rank.handoff_hits, rank.handoff_misses) == (config.num_hidden_layers * 8, 0) for rank in result.ranks)
    single = generate(ExpertParallelGroup(), GenerateOptions(PROMPTS, 8))
    assert result.texts == single.texts or verification.gaps


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_cache_changes_nothing_but_the_order_of_adding(temperature: float) -> None:
    model = load_nano()
    decoded = decode(model, GenerateOptions(PROMPTS, 6, temperature=temperature, seed=3))
    if temperature == 0.0:
        tokens = torch.cat([torch.tensor([list(prompt) for prompt in PROMPTS]), decoded.tokens], dim=1)
        logits = model(tokens, model.new_caches(2))[:, len(PROMPTS[0]) - 1 : -1]
        torch.testing.assert_close(logits.transpose(0, 1), decoded.logits, rtol=0, atol=NEAR_TIE)
    again = decode(model, GenerateOptions(PROMPTS, 6, temperature=temperature, seed=3))
    assert torch.equal(decoded.tokens, again.tokens)


def test_drawn_bytes_follow_the_seed() -> None:
    model = load_nano()
    texts = [decode(model, GenerateOptions(PROMPTS, 24, temperature=1.0, seed=seed)).tokens for seed in (0, 1)]
    assert not torch.equal(*texts)


def test_a_relabelling_that_picks_wrong_experts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 0 of two, alone in this process: its sum lacks the other rank's part, which both forms lack alike.
    correct = rankmoe.pack.rank_local_ids

    def broken(ids: torch.Tensor, local_range: rankmoe.LocalRange, num_experts: int) -> torch.Tensor:
        return correct(ids, local_range, num_experts) % local_range.count

    options = GenerateOptions(PROMPTS, 2, verify=True)
    assert generate(_LoneRank(0, 2), options).verification.forms_agree  # type: ignore[union-attr]
    monkeypatch.setattr(rankmoe.pack, "rank_local_ids", broken)
    verification = generate(_LoneRank(0, 2), options).verification
    assert verification is not None
    assert not verification.forms_agree
    assert "NOT EQUAL" in verification_lines(verification, 2)[0]


class _LoneRank(ExpertParallelGroup):
    """One rank of a group whose other ranks do not exist: its sums stay partial."""


def _decoded(tokens: list[int], logits: list[list[float]]) -> Decoded:
    return Decoded(torch.tensor([tokens]), torch.tensor(logits)[:, None, :], 0.0)


def test_equal_tokens_agree_and_report_the_largest_difference() -> None:
    verification = compare_decoded(
        _decoded([1, 0], [[0.0, 1.0], [1.0, 0.0]]), _decoded([1, 0], [[0.0, 1.25], [1.0, 0.0]])
    )
    assert verification.first_differences == (None,)
    assert verification.gaps == ()
    assert verification.ranks_agree
    assert verification.max_logit_difference == 0.25


@pytest.mark.parametrize(("gap", "agrees"), [(NEAR_TIE / 2, True), (NEAR_TIE * 2, False)])
def test_a_first_difference_agrees_only_at_a_near_tie(gap: float, agrees: bool) -> None:
    # The tokens after the first difference follow another text and are not compared.
    verification = compare_decoded(
        _decoded([1, 1, 1], [[0.0, 1.0], [0.0, gap], [9.0, 50.0]]),
        _decoded([1, 0, 0], [[0.0, 1.0], [gap / 2, 0.0], [7.0, 0.0]]),
    )
    assert verification.first_differences == (1,)
    assert verification.gaps == pytest.approx((gap,))
    assert verification.ranks_agree == agrees
    assert verification.max_logit_difference < 1


def test_forms_agree_only_with_equal_outputs_and_right_ids() -> None:
    assert not Verification(8, 8, 16, 15, (None,), (), 0.0).forms_agree
    assert not Verification(8, 7, 16, 16, (None,), (), 0.0).forms_agree
    assert not Verification(0, 0, 0, 0, (None,), (), 0.0).forms_agree
    assert Verification(8, 8, 16, 16, (None,), (), 0.0).forms_agree


def test_prompts_end_at_line_ends_and_are_equally_long() -> None:
    config = load_config()
    prompts = cut_prompts(TEXT, 3, 100, 16, config)
    assert {len(prompt) for prompt in prompts} == {100}
    assert all(prompt in bytes([config.document_separator]) + TEXT for prompt in prompts)
    assert all(prompt.endswith(b"\n") for prompt in prompts[:-1])
    assert TEXT.endswith(prompts[-1])


def test_a_short_document_begins_with_the_separator() -> None:
    config = load_config()
    assert cut_prompts(b"import os\n", 1, 200, 16, config) == [bytes([config.document_separator]) + b"import os\n"]


def test_prompts_leave_room_for_the_tokens() -> None:
    config = load_config()
    (prompt,) = cut_prompts(TEXT, 1, 10_000, config.max_position_embeddings - 5, config)
    assert len(prompt) == 5
    with pytest.raises(ValueError, match=r"num_tokens: expected below"):
        cut_prompts(TEXT, 1, 10, config.max_position_embeddings, config)


def test_an_empty_file_for_two_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt: expected text for 2 prompts, got 0 bytes"):
        cut_prompts(b"", 2, 10, 10, load_config())


def test_the_command_streams_text_and_prints_the_table(tmp_path: Path) -> None:
    path = tmp_path / "prompt.py"
    path.write_bytes(TEXT)
    arguments = ["generate", "--prompt-file", str(path), "--tokens", "12", "--prompt-bytes", "64"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "handoff hits" in result.output
    values = json.loads(CliRunner().invoke(app, [*arguments, "--json", "--verify"]).stdout)
    assert len(values["texts"][0].encode()) >= 12 - 4
    assert values["verification"]["forms_agree"]
    assert values["verification"]["ranks_agree"]
    assert values["texts"][0][:8] in result.output


def test_generation_runs_under_torchrun(tmp_path: Path) -> None:
    import subprocess

    path = tmp_path / "prompt.py"
    path.write_bytes(TEXT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "rankmoe"]
    arguments = ["generate", "--prompt-file", str(path), "--tokens", "4", "--prompt-bytes", "64", "--ep", "2", "--json"]
    result = subprocess.run([*launcher, *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout)
    assert [rank["ep_rank"] for rank in values["ranks"]] == [0, 1]

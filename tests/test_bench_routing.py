"""`bench routing`: every slot is counted once, the model is left as it was, and what is skewed is skewed."""

from pathlib import Path

import pytest
import torch

from rankmoe.bench.routing import count_text_slots, record_skewed, run
from rankmoe.models.nano import load_nano
from rankmoe.models.presets import get_preset


def test_every_slot_of_a_text_is_counted_once_and_the_model_is_left_as_it_was():
    model = load_nano()
    runners = [block.runner for block in model.moe_blocks]
    text = b"def main():\n    return 1\n" * 50  # longer than a window
    counts = count_text_slots(model, text)
    assert [block.runner for block in model.moe_blocks] == runners
    assert [int(layer.sum()) for layer in counts] == [len(text) * model.config.num_experts_per_token] * 4
    assert not torch.equal(counts[0], counts[1])


def test_a_skewed_record_has_every_slot_and_few_popular_experts():
    preset = get_preset("kimi-k3")
    record = record_skewed(preset, ep_size=8, num_tokens=256)
    (row,) = record.rows
    assert len(row["counts"]) == preset.num_experts
    assert sum(row["counts"]) == 256 * preset.router.top_k
    assert sum(sorted(row["counts"])[-90:]) > 0.5 * sum(row["counts"])
    assert record.rows == record_skewed(preset, ep_size=8, num_tokens=256).rows


def test_only_nano_reads_text_and_an_empty_file_is_refused(tmp_path: Path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(ValueError, match="model: expected nano"):
        run("kimi-k3", 8, empty, 1)
    with pytest.raises(ValueError, match="text: expected a file with text"):
        run("nano", 4, empty, 1)

"""The tuner's logic with a made-up clock, real files, real processes and real ranks."""

import dataclasses
import itertools
import json
import logging
import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from rankmoe import tuned
from rankmoe.distributed import ExpertParallelGroup, launch
from rankmoe.kernels import experts_common
from rankmoe.kernels.experts_cuda import ExpertsConfig, config_from, config_values
from rankmoe.kernels.experts_grouped_cuda import GroupedConfig
from rankmoe.models.presets import PRESETS, get_preset
from rankmoe.tuned import TuningKey
from rankmoe.tuning import CandidateError, candidates_of, coverage, default_of, is_valid, plan_keys, tune
from rankmoe.types import ExpertPlacement

FINGERPRINT, DEVICE = "f" * 64 + "-nvrtc13.0", "NVIDIA H200"
KEY = TuningKey("gate_up", 112, 6144, 3584, "situ", False, 16, "sm_90")
K3 = ExpertPlacement(896, 8, 0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RANKMOE_CACHE_DIR", str(tmp_path))
    tuned.forget()
    yield
    tuned.forget()


class Clock:
    """A profiler of made-up times: 100 us for the default, and what ``us`` says for others."""

    def __init__(self, us=None, checks=None) -> None:
        self.us, self.checks = us or {}, checks or {}
        self.calls: list[tuple[str, object]] = []

    def prepare(self, key, configs) -> None:
        self.calls.append(("prepare", len(configs)))

    def check(self, key, config) -> None:
        self.calls.append(("check", config))
        if config in self.checks:
            raise self.checks[config]

    def time(self, key, config) -> float:
        self.calls.append(("time", config))
        if isinstance(self.us.get(config), Exception):
            raise self.us[config]
        return self.us.get(config, 100.0 if config == default_of(key) else 120.0)


def user_path() -> Path:
    return tuned.user_file(FINGERPRINT, DEVICE)


def other_than_default(key=KEY, number=1):
    return candidates_of(key)[number]


# --- keys and candidates ---------------------------------------------------------------------------------------------
def test_a_key_tells_apart_all_that_changes_the_work():
    changes = {"num_local_experts": 56, "num_outputs": 64, "num_inputs": 64, "activation": "swiglu", "has_bias": True}
    changes |= {"expected_rows": 32, "architecture": "sm_100", "stage": "down"}
    assert changes.keys() == {field.name for field in dataclasses.fields(TuningKey)}
    names = {str(dataclasses.replace(KEY, **{name: value})) for name, value in changes.items()} | {str(KEY)}
    assert len(names) == 1 + len(changes)


def test_expected_rows_are_the_ranks_real_share_up_to_a_power_of_two():
    # 8 tokens of 16 experts each, an eighth of them here: 16 rows, not 128.
    assert tuned.expected_rows(8 * 16, 112, 896) == 16
    assert [tuned.expected_rows(t * 16, 112, 896) for t in (1, 2, 3, 64, 448)] == [2, 4, 8, 128, 1024]
    assert tuned.expected_rows(1, 1, 896) == 1


def test_a_plan_has_each_key_once_whatever_the_batches():
    keys = plan_keys(get_preset("kimi-k3"), K3, range(65), "sm_90")
    assert len(keys) == len(set(keys)) == 2 * len({1 << n for n in range(1, 8)})
    assert keys == plan_keys(get_preset("kimi-k3"), K3, [1, 2, 4, 8, 16, 32, 64], "sm_90")
    assert {key.stage for key in keys} == {"gate_up", "down"}


def test_a_batch_beyond_a_decode_step_brings_every_decode_steps_keys():
    preset = get_preset("kimi-k3")
    keys = plan_keys(preset, K3, [512], "sm_90")
    assert keys == plan_keys(preset, K3, [*range(1, 65), 512], "sm_90")
    assert {key.expected_rows for key in keys} == {2, 4, 8, 16, 32, 64, 128, 1024}
    assert {key.expected_rows for key in plan_keys(preset, K3, [64], "sm_90")} == {128}


@pytest.mark.parametrize("name", PRESETS)
def test_the_default_is_the_first_candidate_and_all_are_valid(name):
    preset = get_preset(name)
    for key in plan_keys(preset, ExpertPlacement(preset.num_experts, 8, 0), [1, 8, 64, 512, 16_384], "sm_90"):
        found = candidates_of(key)
        assert found[0] == default_of(key)
        assert len(found) == len(set(found)) >= 2
        assert all(is_valid(config, key.num_inputs, key.num_local_experts) for config in found)
        assert config_from(json.loads(json.dumps(config_values(found[-1])))) == found[-1]


def test_many_rows_bring_the_kernel_of_many_rows_and_only_where_its_instructions_are():
    many = dataclasses.replace(KEY, expected_rows=2048)
    assert isinstance(default_of(many), GroupedConfig)
    blackwell = dataclasses.replace(many, architecture="sm_100")
    assert all(isinstance(config, ExpertsConfig) for config in candidates_of(blackwell))


def test_what_was_tuned_for_one_shape_is_not_picked_for_another():
    small = TuningKey("gate_up", 8, 512, 512, "swiglu", True, 64, "sm_90")
    tune([small], Clock(), user_path(), FINGERPRINT)
    for change in ({"num_local_experts": 128}, {"has_bias": False}, {"num_inputs": 544}):
        assert tuned.lookup(dataclasses.replace(small, **change), FINGERPRINT, DEVICE).source == "heuristic"
    assert tuned.lookup(small, FINGERPRINT, DEVICE).source == "user cache"


# --- the choice ------------------------------------------------------------------------------------------------------
def test_each_candidate_is_checked_before_its_time_counts():
    clock = Clock()
    tune([KEY], clock, user_path(), FINGERPRINT)
    expected = itertools.chain.from_iterable((("check", c), ("time", c)) for c in candidates_of(KEY))
    assert clock.calls == [("prepare", len(candidates_of(KEY))), *expected]


@pytest.mark.parametrize(("us", "wins"), [(99.9, False), (98.5, False), (97.0, True)])
def test_a_tie_but_for_noise_goes_to_the_default(us, wins):
    other = other_than_default()
    report = tune([KEY], Clock({other: us}), user_path(), FINGERPRINT)
    assert report.tuned[0].chosen == (other if wins else default_of(KEY))


def test_failures_to_launch_are_counted_and_the_rest_goes_on():
    bad, good = candidates_of(KEY)[1:3]
    clock = Clock({good: 50.0, bad: CandidateError("too many registers")})
    (result,) = tune([KEY], clock, user_path(), FINGERPRINT).tuned
    assert (result.chosen, result.num_failures) == (good, 1)
    entry = json.loads(user_path().read_text())["entries"][str(KEY)]
    assert len(entry["candidates"]) == len(candidates_of(KEY))
    (failed,) = (tried for tried in entry["candidates"] if tried["us"] is None)
    assert failed == {"config": config_values(bad), "us": None, "failure": "too many registers"}


def test_where_nothing_can_be_launched_the_default_stays():
    clock = Clock({config: CandidateError("no") for config in candidates_of(KEY)})
    assert tune([KEY], clock, user_path(), FINGERPRINT).tuned[0].chosen == default_of(KEY)


@pytest.mark.parametrize("error", [AssertionError("wrong output"), RuntimeError("illegal memory access")])
def test_everything_else_ends_the_search_and_keeps_what_was_found(error):
    later = dataclasses.replace(KEY, expected_rows=32)
    clock = Clock(checks={other_than_default(later): error})
    clock.check = lambda key, config, check=clock.check: check(key, config) if key == later else None
    with pytest.raises(type(error), match=str(error)):
        tune([KEY, later], clock, user_path(), FINGERPRINT)
    assert list(json.loads(user_path().read_text())["entries"]) == [str(KEY)]


def test_a_second_search_runs_nothing_unless_forced():
    keys = plan_keys(get_preset("kimi-k3"), K3, [1, 64], "sm_90")
    tune(keys, Clock(), user_path(), FINGERPRINT)
    again = Clock()
    report = tune(keys, again, user_path(), FINGERPRINT)
    assert (again.calls, report.tuned, report.num_known) == ([], [], len(keys))
    tune(keys[:1], again, user_path(), FINGERPRINT, force=True)
    assert len(again.calls) == 1 + 2 * len(candidates_of(keys[0]))


# --- lookup ----------------------------------------------------------------------------------------------------------
def entry_of(config) -> dict[str, object]:
    return {"config": config_values(config), "candidates": []}


def write(path: Path, fingerprint: str, **entries: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": tuned.FILE_FORMAT, "fingerprint": fingerprint, "entries": entries}))


def test_explicit_comes_before_the_users_file_the_shipped_one_and_the_heuristic(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "_SHIPPED", tmp_path / "shipped")
    configs = candidates_of(KEY)[:3]
    assert tuned.lookup(KEY, FINGERPRINT, DEVICE) == (None, "heuristic")
    write(tuned.shipped_file(DEVICE), FINGERPRINT, **{str(KEY): entry_of(configs[0])})
    tuned.forget()
    assert tuned.lookup(KEY, FINGERPRINT, DEVICE) == (config_values(configs[0]), "shipped")
    write(user_path(), FINGERPRINT, **{str(KEY): entry_of(configs[1])})
    tuned.forget()
    assert tuned.lookup(KEY, FINGERPRINT, DEVICE) == (config_values(configs[1]), "user cache")
    with tuned.use({KEY: config_values(configs[2])}):
        assert tuned.lookup(KEY, FINGERPRINT, DEVICE) == (config_values(configs[2]), "explicit")
        seen = []
        thread = threading.Thread(target=lambda: seen.append(tuned.lookup(KEY, FINGERPRINT, DEVICE).source))
        thread.start()
        thread.join()
        assert seen == ["user cache"]  # explicit is this thread's own
    assert tuned.lookup(KEY, FINGERPRINT, DEVICE).source == "user cache"
    assert [c.source for c in coverage([KEY], FINGERPRINT, DEVICE)] == ["user cache"]


def test_what_a_threads_calls_ask_can_be_recorded():
    write(user_path(), FINGERPRINT, **{str(KEY): entry_of(default_of(KEY))})
    other = dataclasses.replace(KEY, expected_rows=32)
    with tuned.recording() as outer, tuned.use({other: {"kernel": "decode"}}):
        tuned.lookup(KEY, FINGERPRINT, DEVICE)
        with tuned.recording() as inner:
            tuned.lookup(other, FINGERPRINT, DEVICE)
        thread = threading.Thread(target=lambda: tuned.lookup(other, FINGERPRINT, DEVICE))
        thread.start()
        thread.join()
    tuned.lookup(other, FINGERPRINT, DEVICE)
    assert outer == {KEY: (config_values(default_of(KEY)), "user cache")}
    assert inner == {other: ({"kernel": "decode"}, "explicit")}


def test_what_was_asked_once_touches_no_file_again(monkeypatch):
    write(user_path(), FINGERPRINT, **{str(KEY): entry_of(default_of(KEY))})
    keys = (KEY, dataclasses.replace(KEY, expected_rows=32))
    answers = [tuned.lookup(key, FINGERPRINT, DEVICE) for key in keys]
    assert [answer.source for answer in answers] == ["user cache", "heuristic"]

    def fail(*arguments: object) -> None:
        raise AssertionError("a launch touched a file")

    for name in ("read_file", "user_file", "shipped_file"):
        monkeypatch.setattr(tuned, name, fail)
    assert [
        tuned.lookup(key, FINGERPRINT, DEVICE) for key in (KEY, dataclasses.replace(KEY, expected_rows=32))
    ] == answers


def test_entries_of_other_kernels_do_not_count_nor_the_users_of_another_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "_SHIPPED", tmp_path / "shipped")
    entries, other_compiler = {str(KEY): entry_of(default_of(KEY))}, FINGERPRINT.replace("13.0", "12.8")
    write(tuned.shipped_file(DEVICE), FINGERPRINT.replace("f", "0"), **entries)
    write(user_path(), other_compiler, **entries)
    assert tuned.lookup(KEY, FINGERPRINT, DEVICE).source == "heuristic"
    write(tuned.shipped_file(DEVICE), other_compiler, **entries)
    tuned.forget()
    assert tuned.lookup(KEY, FINGERPRINT, DEVICE).source == "shipped"
    assert (
        len({user_path(), *(tuned.user_file(f, DEVICE) for f in (other_compiler, FINGERPRINT.replace("f", "0")))}) == 3
    )


def test_a_shipped_file_is_one_of_the_kernels_as_they_are_and_its_choices_can_be_launched():
    """A change to a kernel's source makes these figures void: run `rankmoe tune` again and ship its file."""
    for path in (Path(tuned.__file__).parent / "tuned_configs").glob("*.json"):
        entries = tuned.read_file(path, experts_common.fingerprint(), any_compiler=True)
        assert entries, f"{path} was made for other kernels"
        for name, entry in entries.items():
            sizes = [int(number) for number in name.split("-")[1].split("x")]
            assert is_valid(config_from(entry["config"]), sizes[2], sizes[0])


def test_a_miss_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="rankmoe"):
        for _ in range(3):
            tuned.lookup(KEY, FINGERPRINT, DEVICE)
    assert [record.getMessage() for record in caplog.records] == [
        f"no tuned configuration for {KEY} on {DEVICE}; `rankmoe tune` makes one"
    ]


@pytest.mark.parametrize("damage", [lambda text: text[: len(text) // 2], lambda text: "[]", lambda text: "\0"])
def test_a_damaged_file_is_a_miss_and_a_warning_and_is_written_anew(damage):
    tune([KEY], Clock(), user_path(), FINGERPRINT)
    user_path().write_text(damage(user_path().read_text()))
    with pytest.warns(UserWarning, match="damaged tuning file"):
        assert tuned.lookup(KEY, FINGERPRINT, DEVICE).source == "heuristic"
    with pytest.warns(UserWarning, match="damaged tuning file"):
        tune([KEY], Clock(), user_path(), FINGERPRINT)
    assert tuned.lookup(KEY, FINGERPRINT, DEVICE).source == "user cache"


def test_a_failure_while_writing_leaves_the_old_file(monkeypatch):
    tune([KEY], Clock(), user_path(), FINGERPRINT)
    before = user_path().read_text()

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        tune([KEY], Clock(), user_path(), FINGERPRINT, force=True)
    assert user_path().read_text() == before
    assert sorted(path.suffix for path in user_path().parent.iterdir()) == [".json", ".lock"]


# --- processes and ranks ---------------------------------------------------------------------------------------------
def tune_in_a_process(rows: int, path: Path) -> int:
    """Tune one key; the number of profiler calls that it took."""
    clock = Clock()
    tune([dataclasses.replace(KEY, expected_rows=rows)], clock, path, FINGERPRINT)
    return len(clock.calls)


def test_two_processes_with_an_empty_directory_keep_each_others_entries():
    rows = [1 << n for n in range(1, 7)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        calls = pool.starmap(tune_in_a_process, [(count, user_path()) for count in rows], chunksize=1)
        assert all(calls)
        again = pool.starmap(tune_in_a_process, [(count, user_path()) for count in rows], chunksize=1)
    assert not any(again)  # another process finds what these wrote
    assert len(json.loads(user_path().read_text())["entries"]) == len(rows)


def tune_on_ranks(group: ExpertParallelGroup, folder: Path) -> list[object]:
    """Each rank times another candidate best; rank 2 has nothing to tune, and each has a file of its own."""
    first, second = candidates_of(KEY)[1:3]
    times = [{first: 40.0, second: 60.0}, {first: 90.0, second: 60.0}, {}][group.ep_rank]
    clock = Clock(times)
    keys = [] if group.ep_rank == 2 else [KEY]
    report = tune(keys, clock, folder / f"{group.ep_rank}.json", FINGERPRINT, group=group)
    return group.gather_objects((config_values(report.tuned[0].chosen), len(clock.calls)))


def test_ranks_agree_by_the_slowest_and_a_rank_without_work_takes_part(tmp_path):
    results = launch(tune_on_ranks, 3, tmp_path)
    assert {str(chosen) for chosen, _ in results} == {str(config_values(candidates_of(KEY)[2]))}
    assert [calls > 0 for _, calls in results] == [True, True, False]
    assert all(str(KEY) in json.loads((tmp_path / f"{rank}.json").read_text())["entries"] for rank in range(3))


def fail_on_one_rank(group: ExpertParallelGroup, folder: Path) -> list[str]:
    clock = Clock(checks={default_of(KEY): AssertionError("wrong output")} if group.ep_rank == 1 else None)
    message = "nothing"
    try:
        tune([KEY], clock, folder / "shared.json", FINGERPRINT, group=group)
    except (AssertionError, RuntimeError) as error:
        message = str(error)
    return group.gather_objects(message)


def test_a_rank_that_fails_fails_all_of_them_and_none_waits(tmp_path):
    messages = launch(fail_on_one_rank, 2, tmp_path)
    assert messages[1] == "wrong output"
    assert "rank 1 failed: AssertionError: wrong output" in messages[0]
    assert not (tmp_path / "shared.json").exists()

"""The order of arms, rows on disk, and what happens when an arm fails or the user has had enough."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from preft.bench.plots import look_of
from preft.bench.process import ARM_COMMAND, run_arm
from preft.bench.rows import ROWS_NAME, read_rows
from preft.bench.runner import COMPLETE, FAILED, INTERRUPTED, make_job
from preft.bench.spec import Point
from preft.bench.summary import remarks, summarise
from preft.errors import FileError
from tests.unit.bench.common import FACTS, fake_adapters, fake_command, jobs_that_ran, run_fake, spec_of


def test_arms_take_turns(tmp_path: Path) -> None:
    outcome = run_fake(spec_of(tmp_path, repeats=3))
    assert outcome.status == COMPLETE
    order = [job["label"] for job in jobs_that_ran(tmp_path)]
    assert order == ["base", "lora", "lorap", "lora", "lorap", "base", "lorap", "base", "lora"]
    assert len({job["pid"] for job in jobs_that_ran(tmp_path)}) == 9


def test_a_row_holds_its_figures_and_the_whole_set_up(tmp_path: Path) -> None:
    run_fake(spec_of(tmp_path, repeats=2))
    rows = read_rows(tmp_path)
    assert len(rows) == 6
    row = next(row for row in rows if row["arm"] == "lorap" and row["repeat"] == 1)
    expected = {"arm": "lorap", "repeat": 1, "adapters": 2, "slots": 2, "rank": 16, "requests": 4, "partial": False}
    assert {key: row[key] for key in expected} == expected
    assert row["output_tokens_per_s"] == pytest.approx(90 * 1.01 * 0.9998)
    assert row["ratio_to_base"] == pytest.approx(0.9)
    assert row["ratio_to_lora"] == pytest.approx(1.5)
    assert row["ratio_to_stock_lora"] is None
    assert row["cold"]["output_tokens_per_s"] == pytest.approx(row["output_tokens_per_s"] / 2)
    assert row["peak_rss_bytes"] == 123_000_000
    assert row["setup"]["repeats"] == 2
    assert row["setup"]["kv_cache_gib"] == 0.25
    assert row["setup"]["machine"]["cores"] >= 1
    assert "preft" in row["setup"]["versions"]


def test_a_sweep_compares_within_a_point(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, arms=("base", "direftp"), adapters=(1, 4), ranks=((8,), (32,)), repeats=1)
    run_fake(spec)
    rows = read_rows(tmp_path)
    assert [(row["adapters"], row["lora_rank"], row["arm"]) for row in rows].count((4, 32, "direftp")) == 1
    assert len(rows) == 8
    assert {row["rank"] for row in rows if row["arm"] == "direftp"} == {8}
    assert all(row["ratio_to_base"] == pytest.approx(0.95) for row in rows if row["arm"] == "direftp")
    entries = summarise(rows)
    assert len(entries) == 8


def test_a_job(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, arms=("base", "base", "direftp"), adapters=(2, 8), ranks=((8,), (64,)))
    paths = fake_adapters(spec, Path("m"))
    job = make_job(spec, Path("m"), FACTS, "direftp", 0, Point(2, (64,)), paths)
    assert (job.rank, job.adapter_paths) == (8, ("direftp-64-0", "direftp-64-1"))
    second = make_job(spec, Path("m"), FACTS, "base-2", 0, Point(2, (64,)), paths)
    assert (second.arm, second.adapter_paths) == ("base", ())
    assert second.max_num_seqs == 4


def test_mixed_ranks_are_one_point(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, arms=("base", "lorap"), adapters=(3,), ranks=((8,), (8, 64)), repeats=1)
    assert [point.rank for point in spec.points] == [8, "8+64"]
    paths = fake_adapters(spec, Path("m"))
    job = make_job(spec, Path("m"), FACTS, "lorap", 0, spec.points[1], paths)
    assert (job.rank, job.lora_rank) == (64, "8+64")
    assert job.adapter_paths == ("lorap-8-0", "lorap-64-1", "lorap-8-2")
    run_fake(spec)
    rows = read_rows(tmp_path)
    assert {row["lora_rank"] for row in rows} == {8, "8+64"}
    assert all(row["ratio_to_base"] == pytest.approx(0.9) for row in rows if row["arm"] == "lorap")
    assert rows[0]["setup"]["ranks"] == [8, "8+64"]


def test_a_compiled_arm_has_the_adapters_of_the_plain_one(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, arms=("base-compiled", "base-preft-compiled", "lorap-compiled", "direftp-compiled"))
    assert spec.adapted == ("lorap", "direftp")
    paths = fake_adapters(spec_of(tmp_path, arms=spec.adapted), Path("m"))
    jobs = {arm: make_job(spec, Path("m"), FACTS, arm, 0, Point(2, (16,)), paths) for arm in spec.arms}
    assert jobs["lorap-compiled"].adapter_paths == ("lorap-16-0", "lorap-16-1")
    assert jobs["direftp-compiled"].rank == 8
    assert jobs["base-preft-compiled"].adapter_paths == jobs["base-compiled"].adapter_paths == ()
    assert FACTS.adapter_bytes("lorap-compiled", 16, 8) == FACTS.adapter_bytes("lorap", 16, 8) > 0
    assert look_of("lorap-compiled") == (look_of("lorap")[0], "-.")


def test_requests_follow_the_adapters(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, requests=None, adapters=(1, 64, 512))
    assert [spec.requests_at(adapters) for adapters in spec.adapters] == [64, 64, 512]
    assert spec.most_requests == 512
    assert make_job(spec, Path("m"), FACTS, "base", 0, Point(512, (16,)), {}).max_num_seqs == 512
    assert spec_of(tmp_path, requests=5, adapters=(64,)).requests_at(64) == 5


def test_arms_without_adapters_can_be_shared_and_others_measured_once(tmp_path: Path) -> None:
    arms = ("base", "base-compiled", "lora", "lorap")
    spec = spec_of(tmp_path, arms=arms, adapters=(1, 8, 128), requests=None, repeats=2, share_base=True, once=("lora",))
    outcome = run_fake(spec)
    ran = [(job["label"], job["adapters"], job["repeat"]) for job in jobs_that_ran(tmp_path)]
    # 1 and 8 adapters have the same 64 requests; 128 have their own.
    assert sum(label == "base" for label, _, _ in ran) == 2 * 2
    assert sum(label == "lorap" for label, _, _ in ran) == 2 * 3
    assert [repeat for label, _, repeat in ran if label == "lora"] == [0, 0, 0]
    rows = read_rows(tmp_path)
    assert len(rows) == 2 * 3 * 3 + 3
    lorap = [row for row in rows if row["arm"] == "lorap"]
    assert all(row["ratio_to_base"] == pytest.approx(0.9, rel=0.02) for row in lorap)
    assert all(row["ratio_to_base_compiled"] == pytest.approx(0.72, rel=0.02) for row in lorap)
    assert sum(row["shared"] for row in rows) == 2 * 2
    assert "arms without adapters were measured once for all points with the same requests" in remarks(
        rows, summarise(rows), outcome.status
    )


def test_an_arm_that_takes_too_long_is_stopped_and_has_not_failed(tmp_path: Path) -> None:
    outcome = run_fake(spec_of(tmp_path, repeats=2, arm_limit_s=3.0), "slow=lora")
    assert outcome.status == COMPLETE
    rows = read_rows(tmp_path)
    stopped = [row for row in rows if row["error"]]
    assert [(row["arm"], row["repeat"]) for row in stopped] == [("lora", 0)]  # not tried again
    assert "stopped after 3 s" in stopped[0]["error"]["message"]
    assert "with 1 of 3 runs done" in stopped[0]["error"]["message"]
    assert stopped[0]["cold"]["output_tokens_per_s"] > 0
    assert not any(row["partial"] for row in rows)
    assert any("the arm lora was not measured" in note for note in remarks(rows, summarise(rows), outcome.status))


def test_equal_arms_are_told_apart(tmp_path: Path) -> None:
    run_fake(spec_of(tmp_path, arms=("base", "base"), repeats=3))
    rows = read_rows(tmp_path)
    assert {row["arm"] for row in rows} == {"base", "base-2"}
    entry = next(entry for entry in summarise(rows) if entry["arm"] == "base-2")
    assert entry["ratio_to_base"]["includes_one"] is True


def test_an_arm_that_fails_spoils_no_other(tmp_path: Path) -> None:
    outcome = run_fake(spec_of(tmp_path, repeats=2), "fail=lora")
    assert outcome.status == FAILED
    rows = read_rows(tmp_path)
    assert all(row["partial"] for row in rows)
    failed = [row for row in rows if row["error"]]
    assert [row["arm"] for row in failed] == ["lora"]  # not tried again in the second repeat
    assert failed[0]["error"]["message"] == "no such luck"
    assert failed[0]["error"]["log_tail"] == "the log of lora"
    assert failed[0]["output_tokens_per_s"] is None
    others = [row for row in rows if not row["error"]]
    assert len(others) == 4
    assert all(row["ratio_to_lora"] is None and row["ratio_to_base"] for row in others)
    entries = summarise(rows)
    notes = remarks(rows, entries, outcome.status)
    assert notes[0] == "PARTIAL: the run was not complete: an arm failed"
    assert "the arm lora failed at 2 adapters of rank 16: no such luck" in notes


def test_without_base_the_ratio_is_undefined(tmp_path: Path) -> None:
    run_fake(spec_of(tmp_path, repeats=1), "fail=base")
    rows = read_rows(tmp_path)
    assert all(row["ratio_to_base"] is None for row in rows)
    assert all(entry["ratio_to_base"] is None for entry in summarise(rows))


@pytest.mark.parametrize(("action", "reason"), [("crash", "ended with status -9"), ("short", "reported 1 of 3 runs")])
def test_a_process_that_dies_or_says_too_little_has_failed(tmp_path: Path, action: str, reason: str) -> None:
    run_fake(spec_of(tmp_path, repeats=1), f"{action}=lorap")
    row = next(row for row in read_rows(tmp_path) if row["arm"] == "lorap")
    assert reason in row["error"]["message"]
    assert row["output_tokens_per_s"] is None
    assert row["cold"]["output_tokens_per_s"] > 0  # what it did report is kept


def test_ctrl_c_keeps_what_there_is_and_ends_the_process(tmp_path: Path) -> None:
    started = time.monotonic()
    outcome = run_fake(spec_of(tmp_path, repeats=2), "hang=lorap")
    assert outcome.status == INTERRUPTED
    assert time.monotonic() - started < 30
    rows = read_rows(tmp_path)
    assert [row["arm"] for row in rows] == ["base", "lora"]
    assert all(row["partial"] for row in rows)
    assert remarks(rows, summarise(rows), outcome.status)[0] == "PARTIAL: the run was interrupted"
    child = jobs_that_ran(tmp_path)[-1]["pid"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, 0)
        pytest.fail("the arm's process is still there")


def test_rows_on_disk_are_partial_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[bool]] = []
    from preft.bench import runner

    def spy(job: object, log: Path, **how: object) -> object:
        if (tmp_path / ROWS_NAME).exists():
            seen.append([row["partial"] for row in read_rows(tmp_path)])
        return run_arm(job, log, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "run_arm", spy)
    run_fake(spec_of(tmp_path, repeats=1))
    assert seen == [[True], [True, True]]
    assert not any(row["partial"] for row in read_rows(tmp_path))


def test_an_earlier_result_is_kept(tmp_path: Path) -> None:
    run_fake(spec_of(tmp_path, repeats=1))
    outcome = run_fake(spec_of(tmp_path, repeats=1, arms=("base",)))
    assert outcome.earlier == tmp_path / "rows.1.jsonl"
    assert len(read_rows(tmp_path / "rows.1.jsonl")) == 3
    assert len(read_rows(tmp_path)) == 1


def test_the_real_arm_refuses_a_bad_job(tmp_path: Path) -> None:
    """The real process, a job whose model does not exist: the error comes back as it was raised."""
    spec = spec_of(tmp_path, arms=("base",), warm_runs=1)
    job = make_job(spec, tmp_path / "nothing", FACTS, "base", 0, Point(2, (16,)), {})
    broken = [*ARM_COMMAND[:2], "tests_no_such_module"]
    result = run_arm(job, tmp_path / "logs" / "base.log", command=broken)
    assert result.error is not None
    assert "ended with status 1" in result.error["message"]
    assert "tests_no_such_module" in result.error["log_tail"]


@pytest.mark.parametrize("text", ["", "nonsense\n", '{"arm": "base"}\n', "[]\n"])
def test_what_is_not_a_result_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / ROWS_NAME).write_text(text)
    with pytest.raises(FileError):
        read_rows(tmp_path)
    with pytest.raises(FileError, match="accepted: a folder that `preft bench` wrote"):
        read_rows(tmp_path / "nowhere")


def test_the_command_is_the_stand_ins(tmp_path: Path) -> None:
    """A premise of the others."""
    assert fake_command(tmp_path)[1].endswith("fake_arm.py")

"""The scripts below `benchmarks/`: their calls are ones that bench accepts, and what they say of its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import calibration, main_job, noise, sweep
from preft.bench.report import join_results
from preft.bench.rows import read_rows
from preft.bench.summary import summarise
from preft.plan.paper import compare_with_paper
from preft.plan.workload import Assumptions, Workload
from preft_cli.app import run
from tests.unit.bench.common import run_fake, spec_of


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from preft_cli import bench

    found: list[Any] = []
    monkeypatch.setattr(bench, "run_throughput", lambda spec, session: found.append(spec) or 0)
    return found


def test_the_sweeps_calls(asked: list[Any], tmp_path: Path) -> None:
    for name in sweep.CALLS:
        assert run(sweep.command(name, "a-model", tmp_path, 1, {})) == 0
    assert [spec.adapters for spec in asked] == [(1, 8, 64), (64,), (512,)]
    assert all({"base", "stock-lora", "lora", "lorap", "direftp"} <= set(spec.arms) for spec in (asked[0], asked[2]))
    assert (asked[0].input_len, asked[0].output_len) == (asked[1].input_len, asked[1].output_len)  # one point, joined
    assert all(spec.requests_at(max(spec.adapters)) >= max(spec.adapters) for spec in asked)
    assert asked[0].generated == asked[1].generated
    assert asked[0].share_base


def test_the_main_jobs_calls(asked: list[Any], tmp_path: Path) -> None:
    for arguments in main_job.CALLS.values():
        flags = [f"{part}" for option in main_job.WORKLOAD.items() for part in option]
        assert run(["bench", "throughput", main_job.MODEL, *arguments, *flags, "--out", str(tmp_path)]) == 0
    assert len(asked) == 4


def test_two_calls_make_one_result(tmp_path: Path) -> None:
    arms = ("base", "lorap", "direftp")
    run_fake(spec_of(tmp_path / "small", arms=arms, adapters=(1, 64), requests=64, repeats=2, share_base=True))
    run_fake(spec_of(tmp_path / "large", arms=arms, adapters=(512,), requests=512, input_len=4, repeats=2))
    report = join_results([tmp_path / "small", tmp_path / "large"], tmp_path)
    assert len(report.entries) == 9
    assert "points differ in requests or lengths: compare ratios between them, not tokens/s" in report.notes
    assert "64 requests a run; 4 tokens in" in report.page.read_text()
    assert {row["adapters"] for row in read_rows(tmp_path)} == {1, 64, 512}
    assert (tmp_path / "throughput.svg").exists()
    assert not any("PARTIAL" in note for note in report.notes)


def test_a_target_that_is_missed_is_explained(tmp_path: Path) -> None:
    run_fake(spec_of(tmp_path, arms=("base", "base-compiled", "lorap", "direftp"), adapters=(64,), repeats=1))
    rows = read_rows(tmp_path)
    met, just = sweep.verdicts(summarise(rows))
    assert met == "- lorap at 64 adapters: 0.900 of eager base, target 0.90; 0.720 of compiled base."
    assert just == "- direftp at 64 adapters: 0.950 of eager base, target 0.95; 0.760 of compiled base."
    slow = [{**row, "output_tokens_per_s": 80.0, "prefill_s": 0.5} if row["arm"] == "lorap" else row for row in rows]
    missed = sweep.verdicts(summarise(slow))[0]
    assert "0.805 of eager base" in missed
    assert "MISSED by 0.095: adapter kernels take 20.0% of prefill and 0.0% of decode" in missed
    assert "prefill is +0.25 s and decode +0.00 s over base" in missed
    alone = [row for row in rows if row["arm"] == "lorap"]
    assert sweep.verdicts(summarise(alone)) == ["- lorap at 64 adapters: not measured beside base."]


def test_two_equal_arms_are_judged_by_their_intervals(tmp_path: Path, asked: list[Any]) -> None:
    flags = [part for option in noise.CALL.items() for part in option]
    assert run(["bench", "throughput", "a-model", *flags, "--out", str(tmp_path)]) == 0
    assert list(asked[0].labels) == ["base", "base-2"]
    run_fake(spec_of(tmp_path / "a", arms=("base", "base"), repeats=3))
    assert noise.is_whole(tmp_path / "a")
    assert not noise.is_whole(tmp_path / "b")
    same = read_rows(tmp_path / "a")
    other = [
        {**row, "output_tokens_per_s": row["output_tokens_per_s"] * (0.8 if row["arm"] == "base-2" else 1)}
        for row in same
    ]
    assert noise.judged([same] * 9 + [other])["passed"] is True
    found = noise.judged([same] * 8 + [other] * 2)
    assert (found["include_one"], found["runs"], found["passed"]) == (8, 10, False)
    assert noise.judged([])["passed"] is None


def test_the_small_model_is_one_that_bench_can_measure(tmp_path: Path) -> None:
    from preft.bench.facts import read_facts

    facts = read_facts(noise.make_model(tmp_path / "model"), "auto")
    assert (facts.num_blocks, facts.max_length, facts.value_bytes) == (8, 512, 2)


def test_the_planner_is_set_beside_measurement_and_paper() -> None:
    points = [
        {
            "arm": "lora",
            "adapters": 8,
            "lora_rank": 16,
            "measured_tokens_per_s": 100.0,
            "predicted_tokens_per_s": 110.0,
            "error": 0.1,
            "fitted": False,
        }
    ]
    achieved = {"bandwidth": 2e10, "flops": 5e11, "step_overhead_s": 1e-3, "launch_us": 3.0, "adapter_factor": 2.0}
    achieved["attention_factor"] = 2.0
    document = {
        "calibrated_at": {"adapters": 64, "lora_rank": 16},
        "achieved": achieved,
        "largest_error_elsewhere": 0.1,
        "points": points,
    }
    text = calibration.calibration_text(document, 0.15)
    assert "10.0%, within 15%" in text
    assert "| lora | 8 | 16 | 100.0 | 110.0 | +10.0% |  |" in text
    assert "10.0%, NOT within 5%" in calibration.calibration_text(document, 0.05)
    load = Workload(512, 16, 16, 512, 512, 512)
    text = calibration.paper_text(compare_with_paper(load, Assumptions()), load)
    for figure in ("1.9", "1.87", "2.21", "1.83", "2.39", "1.63"):
        assert f"| {figure} |" in text
    assert "(assumed)" in text
    assert "Bytes alone cannot explain: " in text
    assert "- adapter ranks, and which modules LoRA acts on" in text

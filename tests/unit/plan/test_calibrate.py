"""Calibration on results that a known machine would give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preft.errors import FileError, UsageError
from preft.plan.calibrate import Fitted, Measured, calibrate, predict, read_measured
from preft.plan.shapes import KNOWN
from preft.plan.workload import Workload
from preft_cli.app import run

HIDDEN = Fitted(
    bandwidth=1.5e10, flops=3e11, step_overhead_s=1.5e-3, launch_us=70.0, adapter_factor=1.4, attention_factor=2.5
)
"""A machine of the kind that a CPU is taken to be, with none of its figures."""
SHAPE = KNOWN["smollm2-135m"]


def rows_of(noise: float = 0.0) -> list[dict[str, Any]]:
    """A sweep on a machine with the hidden figures."""
    rows = []
    for adapters in (1, 8, 64):
        for rank in (8, 32):
            for number, arm in enumerate(("base", "lora", "lorap", "direftp")):
                load = Workload(adapters, rank, 8, input_len=128, output_len=64, requests=64, step_tokens=2048)
                prefill, seconds = predict(SHAPE, HIDDEN, Measured(arm, adapters, rank, load, 0, 0, 0))
                factor = 1 + noise * (-1) ** number
                rows.append(
                    {
                        "arm": arm,
                        "kind": arm,
                        "adapters": adapters,
                        "lora_rank": rank,
                        "input_len": 128,
                        "output_len": 64,
                        "requests": 64,
                        "prefill_s": prefill * factor,
                        "seconds": seconds * factor,
                        "output_tokens_per_s": 64 * 64 / (seconds * factor),
                        "engine": {"dtype": "bfloat16", "max_num_batched_tokens": 2048},
                        "setup": {"direft_rank": 8},
                    }
                )
    return rows


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_it_predicts_the_points_it_has_not_seen(tmp_path: Path) -> None:
    measured = read_measured(written(tmp_path, rows_of()))
    assert len(measured) == 24
    found = calibrate(SHAPE, measured, (8, 32))
    assert found["close_elsewhere"] is True
    assert found["largest_error_elsewhere"] < 0.05
    assert sum(row["fitted"] for row in found["points"]) == 4
    assert found["achieved"]["bandwidth"] == pytest.approx(HIDDEN.bandwidth, rel=0.5)


def test_noise_does_not_throw_it_off(tmp_path: Path) -> None:
    found = calibrate(SHAPE, read_measured(written(tmp_path, rows_of(noise=0.03))), (8, 32))
    assert found["largest_error_elsewhere"] < 0.15


def test_it_can_miss(tmp_path: Path) -> None:
    """A machine that does something the model has no term for: one point at half its speed."""
    rows = rows_of()
    for row in rows:
        if (row["adapters"], row["arm"]) == (64, "lorap"):
            row.update(seconds=row["seconds"] * 2, output_tokens_per_s=row["output_tokens_per_s"] / 2)
    found = calibrate(SHAPE, read_measured(written(tmp_path, rows)), (8, 32))
    assert found["close_elsewhere"] is False
    assert found["largest_error_elsewhere"] == pytest.approx(1, abs=0.1)


def test_one_point_leaves_nothing_to_test_on(tmp_path: Path) -> None:
    rows = [row for row in rows_of() if (row["adapters"], row["lora_rank"]) == (8, 8)]
    found = calibrate(SHAPE, read_measured(written(tmp_path, rows)))
    assert (found["largest_error_elsewhere"], found["close_elsewhere"]) == (None, None)


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    rows = rows_of()
    rows[0]["output_tokens_per_s"] = None
    rows[1].update(kind="stock-lora", arm="stock-lora")
    rows[2].update(arm="lorap-2")
    rows[3].update(lora_rank="8+32")
    assert len(read_measured(written(tmp_path, rows))) == 20


def test_a_shared_base_is_fitted_with_its_point_and_tests_nothing_elsewhere(tmp_path: Path) -> None:
    rows = rows_of()
    for row in rows:
        # Base of all points was measured at the first one.
        row["shared"] = row["arm"] == "base" and (row["adapters"], row["lora_rank"]) != (1, 8)
    found = calibrate(SHAPE, read_measured(written(tmp_path, rows)), (8, 32))
    base = {(row["adapters"], row["lora_rank"]): row["fitted"] for row in found["points"] if row["arm"] == "base"}
    assert base == {(8, 32): True, (1, 8): True}
    assert sum(not row["fitted"] for row in found["points"]) == 5 * 3
    assert found["close_elsewhere"] is True


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read as rows"):
        read_measured(tmp_path / "nowhere")
    with pytest.raises(FileError, match="holds no measured arm"):
        read_measured(written(tmp_path, []))
    with pytest.raises(FileError, match="KeyError"):
        read_measured(written(tmp_path, [{"arm": "base"}]))
    with pytest.raises(UsageError, match=r"accepted: 1,8; 1,32; 8,8"):
        calibrate(SHAPE, read_measured(written(tmp_path, rows_of())), (9, 9))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = str(written(tmp_path, rows_of()))
    flags = ["plan", "--model", "smollm2-135m", "--calibrate", result]
    assert run([*flags, "--calibrate-at", "8,32"]) == 0
    shown = capsys.readouterr().out
    assert "largest error of a point not fitted" in shown
    assert "predicted" in shown
    assert run([*flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibrated_at"] == {"adapters": 1, "lora_rank": 8}
    assert run([*flags, "--calibrate-at", "8"]) == 2
    assert "accepted: ADAPTERS,RANK, such as 8,16" in capsys.readouterr().err
    assert run(["plan", "--model", "smollm2-135m"]) == 2
    assert "`--gpu` is missing" in capsys.readouterr().err
    assert run([*flags, "--gpu", "h100", "--rank", "8"]) == 2
    assert "`--calibrate` does not read `--gpu`, `--rank`" in capsys.readouterr().err
    assert run(["plan", "--model", "smollm2-135m", "--gpu", "h100", "--calibrate-at", "8,16"]) == 2
    assert "`--calibrate-at` needs a result" in capsys.readouterr().err

"""The demo runs end to end on the embedded model, small; its own proofs hold, and it says so when they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from preft.demo.run import run_demo
from preft.errors import UsageError

pytestmark = [pytest.mark.engine, pytest.mark.smollm2]


def test_the_demo_trains_converts_serves_proves_and_measures(tmp_path: Path, smollm2: Path) -> None:
    report = run_demo(tmp_path / "demo", num_adapters=3, steps=1, runs=1)

    assert [proof.adapter for proof in report.proofs] == ["pirate", "tenant-01", "tenant-02"]
    assert len({proof.digest for proof in report.proofs}) == 3
    assert all(proof.logprob_gap > 0 for proof in report.proofs)
    assert report.canary["restored"]
    base, all_token, prefill_only = report.throughput
    assert base.adapted_steps == 0
    assert all_token.adapted_steps == all_token.steps
    assert 0 < prefill_only.adapted_steps < prefill_only.steps / 4
    # One step of training teaches no style, and the report does not claim it.
    assert report.styled == 0
    assert not report.passed
    assert (tmp_path / "demo" / "prompt" / "tenant-01" / "preft.json").exists()


def test_a_folder_that_no_demo_wrote_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")

    with pytest.raises(UsageError, match="no demo wrote it"):
        run_demo(tmp_path)

    assert (tmp_path / "mine.txt").read_text() == "mine"

"""The SDK's functions: what a command does, as a call; reports that show, tabulate and draw themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import preft
from preft.bench.spec import BenchSpec
from preft.errors import UsageError
from preft.eval.pairing import Comparison
from preft.eval.run import Evaluation
from preft.eval.stats import compare_pairs
from preft.sdk.functions import _spec
from preft.sdk.reports import EvaluationReport
from preft_cli.app import run as run_command
from tests.helpers.tiny import random_adapter


def test_a_run_is_an_adapter_with_curves(tiny_llama: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "one two", "completion": " three"}, {"prompt": "four", "completion": " five"}] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = preft.train_sft(
        model=str(tiny_llama),
        method="lorap",
        rank=2,
        output=str(tmp_path / "out"),
        data={"train": str(tmp_path / "rows.jsonl"), "max_tokens": 64},
        train={"max_steps": 3, "learning_rate": 1e-2, "batch_size": 4},
        progress=False,
    )
    assert preft.load_adapter(run.folder).digest == run.adapter.digest
    frame = run.to_pandas()
    assert list(frame["step"]) == [1, 2, 3]
    assert frame["loss"].notna().all()
    assert run.plot()._repr_html_().count("<svg") >= 2
    assert run.adapter.digest[:12] in run._repr_html_()
    assert preft.inspect_adapter(run.folder).to_dict()["digest"] == run.adapter.digest


def test_a_recipes_key_must_exist() -> None:
    with pytest.raises(UsageError, match="learning_rat"):
        preft.train_sft(model="m", method="lorap", rank=1, output="o", data={"train": "t"}, train={"learning_rat": 1})
    with pytest.raises(UsageError, match="`--set rank"):
        preft.train_sft(model="m", method="lorap", output="o", data={"train": "t"})


def test_a_plan_shows_and_draws_itself() -> None:
    plan = preft.make_plan("llama-3.1-8b", "h100", adapters=64, rank=16)
    frame = plan.to_pandas().set_index("arm")
    assert set(frame.index) == {"base", "lora", "lorap", "direftp"}
    assert frame["output_tokens_per_s"]["lorap"] > frame["output_tokens_per_s"]["lora"]
    assert plan.to_dict()["workload"]["requests"] == 64
    assert plan.plot()._repr_html_().count("<svg") == 1
    assert "lorap" in plan._repr_html_()
    with pytest.raises(UsageError, match="`adapter` is not a setting"):
        preft.make_plan("llama-3.1-8b", "h100", adapter=64)


def test_a_plan_has_the_commands_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "--model", "llama-3.1-8b", "--gpu", "h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(preft.make_plan("llama-3.1-8b", "h100").to_dict())
    )


def test_settings_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`rank` is not a setting") as caught:
        _spec(BenchSpec, {"model": "m", "out": tmp_path, "rank": 16})
    assert "ranks" in str(caught.value)


def test_adapters_are_written_and_read_back(tiny_llama: Path, tmp_path: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=1)
    preft.save_adapter(adapter, tmp_path / "a")
    assert preft.load_adapter(tmp_path / "a").digest == adapter.digest


def test_an_evaluation_shows_what_is_real() -> None:
    paired = compare_pairs([0.0] * 20 + [1.0] * 4, [1.0] * 18 + [0.0] * 2 + [1.0] * 4)
    row = Comparison("task", "none", "acc", "base", "mine", paired, 0.001, "better", "because", {})
    report = EvaluationReport(Evaluation({}, {}, (row,), (), ()))
    assert list(report.to_pandas()["verdict"]) == ["better"]
    assert "base, mine" in report._repr_html_()
    assert report.plot()._repr_html_().count("<svg") == 1

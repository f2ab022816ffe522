"""A whole plan: its JSON, the published figures, cost, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preft.plan.gpus import parse_machine
from preft.plan.paper import compare_with_paper, unexplained
from preft.plan.plan import Plan, sweep
from preft.plan.roofline import Roofline
from preft.plan.shapes import read_shape
from preft.plan.workload import ARMS, Assumptions, Workload
from preft_cli.app import run

FLAGS = ["--model", "llama-3.1-8b", "--gpu", "h100", "--input-len", "512", "--output-len", "512"]


def figures(rank: int = 16, **changes: int) -> dict[tuple[str, str], dict[str, Any]]:
    load = Workload(512, rank, 8, **{"input_len": 512, "output_len": 512, "requests": 512, **changes})
    return {(row["model"], row["arm"]): row for row in compare_with_paper(load, Assumptions())}


def test_the_published_figures_stand_beside_the_prediction() -> None:
    rows = figures()
    assert {key: row["published"] for key, row in rows.items()} == {
        ("llama-3.1-70b", "direftp"): 1.9,
        ("llama-3.1-70b", "lorap"): 1.87,
        ("llama-3.1-8b", "direftp"): 2.21,
        ("llama-3.1-8b", "lorap"): 1.83,
        ("qwen2.5-0.5b", "direftp"): 2.39,
        ("qwen2.5-0.5b", "lorap"): 1.63,
    }
    assert rows["llama-3.1-70b", "lorap"]["predicted_from_bytes"] == pytest.approx(1.64, abs=0.02)
    assert rows["llama-3.1-8b", "lorap"]["predicted_from_bytes"] == pytest.approx(1.40, abs=0.02)
    assert rows["qwen2.5-0.5b", "direftp"]["predicted_from_bytes"] == pytest.approx(2.24, abs=0.03)


def test_it_says_what_bytes_alone_cannot_explain() -> None:
    assert {(row["model"], row["arm"]) for row in unexplained(list(figures().values()))} == {
        ("llama-3.1-8b", "direftp"),
        ("llama-3.1-8b", "lorap"),
    }
    row = figures()["llama-3.1-8b", "direftp"]
    assert row["verdict"].startswith("bytes alone cannot explain it at rank 16 and prompts of 512 tokens: at most 1.71")
    assert row["least_rank"] == 32
    assert row["least_rank_is_resident"] is False
    assert len(unexplained(list(figures(rank=4).values()))) == 6


def test_what_cannot_be_predicted_is_said() -> None:
    rows = figures(input_len=100_000)
    assert rows["qwen2.5-0.5b", "lorap"]["not_predicted"] == "The requests are longer than the model's context"


def plan(**changes: Any) -> Plan:
    load = Workload(64, 16, 16, input_len=512, output_len=512, requests=64)
    made = Roofline(read_shape("llama-3.1-8b"), parse_machine(changes.pop("gpu", "h100")), load, Assumptions())
    return Plan(made, **changes)


def test_cost() -> None:
    document = plan(price=3.6, gpu="h100x2").to_dict()
    row = document["arms"]["lorap"]
    assert row["cost_per_million_output_tokens"] == pytest.approx(7.2 / 3600 / row["output_tokens_per_s"] * 1e6)
    assert plan().to_dict()["arms"]["lorap"]["cost_per_million_output_tokens"] is None


def test_given_slots() -> None:
    row = plan(slots=8).to_dict()["arms"]["lora"]
    assert (row["slots"], row["batch"], row["slots_are"], row["limited_by"]) == (8, 8, "given", "slots")


def test_a_sweep_covers_each_arm() -> None:
    rows = sweep(plan(), [1, 8])
    assert set(rows) == set(ARMS)
    assert [count for count, _ in rows["lora"]] == [1, 8, 64]
    assert len({speed for _, speed in rows["base"]}) == 1


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *FLAGS, "--adapters", "64", "--rank", "16", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    document = json.loads(captured.out)
    assert set(document["arms"]) == {"base", "lora", "lorap", "direftp"}
    assert document["assumptions"]["bandwidth_efficiency"] == 0.9
    assert len(document["assumptions"]["notes"]) > 5
    assert document["arms"]["base"]["ratio_to_base"] == 1
    assert document["arms"]["lora"]["ratio_to_base"] < document["arms"]["lorap"]["ratio_to_base"] < 1
    assert document["ratios"]["lorap_over_lora"]["bytes_alone"] > 1
    assert document["workload"]["direft_rank"] == 16


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *FLAGS, "--adapters", "64", "--price-per-gpu-hour", "3"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "LoRA, every token",
        "cost/million tokens",
        "llama-3.1-8b DiReFTP 2.21: bytes alone cannot explain it",
        "Unknown about the paper's figures:",
        "bandwidth efficiency   0.9\n",
        "- kernel launches cost nothing; give --launch-us to count them",
    ):
        assert part in shown


def test_an_arm_that_does_not_fit_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--adapters", "512", "--rank", "512", "--slots", "512"]
    assert run(["plan", *flags]) == 0
    assert "memory: not one request fits" in capsys.readouterr().out
    assert run(["plan", *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["arms"]["lora"]["fits"] is False


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot(tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"plan.{ending}"
    assert run(["plan", *FLAGS, "--plot", str(path), "--json"]) == 0
    assert path.stat().st_size > 5000
    assert f"wrote {path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--gpu", "h1000"], 2, "accepted: a100, h100, h200, b200, mi300x"),
        (["--adapters", "0"], 2, "`--adapters` is not valid"),
        (["--slots", "0"], 2, "`--slots` is not valid"),
        (["--price-per-gpu-hour", "-1"], 2, "`--price-per-gpu-hour` is not valid"),
        (["--plot", "plan.txt"], 2, "`--plot` names no picture"),
        (["--plot", "nowhere/plan.png"], 1, "does not exist"),
        (["--model", "llama-3.1-70b"], 2, "does not fit `h100x1`"),
        (["--rank", "x"], 2, "Invalid value for `--rank`"),
    ],
)
def test_bad_input(flags: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *FLAGS, *flags]) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""

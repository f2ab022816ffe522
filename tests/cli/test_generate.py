"""`preft generate`: rows in, results out in their order, and a bad row that fails alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from preft.adapters.store import load_adapter, save_adapter
from preft_cli.app import run
from tests.helpers.tiny import random_adapter

ROWS: list[dict[str, Any]] = [
    {"id": "1", "adapter": "lora", "prompt": "hello there"},
    {"id": "2", "adapter": None, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    {"id": "3", "adapter": "reft", "prompt_token_ids": [5, 6, 7], "boundary": 2},
]
BAD: list[Any] = [
    {"id": "4", "adapter": "nobody", "prompt": "hello"},
    {"id": "5", "adapter": None, "prompt": "hello", "promt": "x"},
    "not an object",
]


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    save_adapter(random_adapter(tiny_llama, seed=1), root / "lora")
    save_adapter(random_adapter(tiny_llama, seed=2, targets=(), blocks=(0, 2), positions="f1+l2"), root / "reft")
    return {"lora": root / "lora", "reft": root / "reft"}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(model: Path, adapters: dict[str, Path], prompts: object, *extra: str, engine: str = "hf") -> list[str]:
    flags = [part for name, path in adapters.items() for part in ("--adapter", f"{name}={path}")]
    limits = ["--max-tokens", "6", "--dtype", "float32", "--engine", engine]
    return ["generate", str(model), *flags, "--prompts", str(prompts), *limits, *extra]


def test_json_rows_in_the_order_of_the_input(
    tiny_llama: Path, adapters: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_rows(tmp_path / "rows.jsonl", ROWS)
    assert run(arguments(tiny_llama, adapters, prompts, "--json", "--logprobs", "--quiet")) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    results = [json.loads(line) for line in captured.out.splitlines()]
    assert [(result["id"], result["adapter"]) for result in results] == [("1", "lora"), ("2", None), ("3", "reft")]
    assert [len(result["token_ids"]) for result in results] == [6, 3, 6]
    assert [len(result["logprobs"]) for result in results] == [6, 3, 6]
    assert results[0]["digest"] == load_adapter(adapters["lora"]).digest
    assert results[0]["boundary"] == len(results[0]["prompt_token_ids"])
    assert (results[1]["digest"], results[1]["boundary"]) == (None, 0)
    assert (results[2]["prompt_token_ids"], results[2]["boundary"]) == ([5, 6, 7], 2)
    assert all("error" not in result for result in results)
    keys = ["id", "adapter", "digest", "prompt_token_ids", "boundary", "token_ids", "text", "finish_reason", "logprobs"]
    assert list(results[0]) == keys


def test_a_bad_row_fails_alone(
    tiny_llama: Path, adapters: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = [BAD[0], ROWS[0], BAD[1], ROWS[1], BAD[2], ROWS[2]]
    prompts = write_rows(tmp_path / "rows.jsonl", mixed)
    assert run(arguments(tiny_llama, adapters, prompts, "--json", "--quiet")) == 1
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["id"] for result in results] == ["4", "1", "5", "2", "line 5", "3"]
    assert ["error" in result for result in results] == [True, False] * 3
    assert results[0]["error"]["message"] == "There is no adapter named `nobody`"
    assert "unknown key" in results[2]["error"]["message"]
    write_rows(prompts, ROWS)
    assert run(arguments(tiny_llama, adapters, prompts, "--json", "--quiet")) == 0
    alone = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert alone == results[1::2]


def test_text_on_stdout_and_errors_on_stderr(
    tiny_llama: Path, adapters: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_rows(tmp_path / "rows.jsonl", [ROWS[0], BAD[0]])
    assert run(arguments(tiny_llama, adapters, prompts)) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("[1] lora (6 tokens, length)\n")
    assert "nobody" not in captured.out
    assert "error: [4] nobody: There is no adapter named `nobody`\n  accepted: `lora`, `reft`\n  hint: " in captured.err
    assert "Starting the hf engine: " in captured.err


def test_an_adapter_that_cannot_be_read_fails_its_rows(
    tiny_llama: Path, adapters: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_rows(tmp_path / "rows.jsonl", [{**ROWS[0], "adapter": "gone"}, ROWS[1]])
    given = {**adapters, "gone": tmp_path / "gone"}
    assert run(arguments(tiny_llama, given, prompts, "--json", "--quiet")) == 1
    captured = capsys.readouterr()
    first, second = (json.loads(line) for line in captured.out.splitlines())
    assert first["error"]["message"] == "The adapter `gone` is not available"
    assert "error" not in second
    assert captured.err.startswith("warning: the adapter `gone` is not available: ")


def test_only_bad_rows_start_no_engine(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_rows(tmp_path / "rows.jsonl", BAD[1:])
    assert run(arguments(tiny_llama, {}, prompts, "--json")) == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2
    assert "engine" not in captured.err


@pytest.mark.parametrize(
    ("extra", "status", "text"),
    [
        (["--engine", "tgi"], 2, "error: `--engine` is not valid\n  got: `tgi`\n  accepted: vllm, hf\n"),
        (["--dtype", "int8"], 2, "error: `--dtype` is not valid\n  got: `int8`\n"),
        (["--adapter", "lora"], 2, "error: An adapter is given as NAME=PATH\n  got: `lora`\n"),
        (["--adapter", "../x=y"], 2, "error: The adapter name is not valid\n"),
        (["--adapter", "a=x", "--adapter", "a=y"], 2, "error: The adapter name `a` is given twice\n  got: `x` and `y`"),
        (["--max-tokens", "0"], 2, "error: Invalid value for `--max-tokens`: "),
        (["--temperature", "-1"], 2, "error: Invalid value for `--temperature`: "),
        (["--prompts", "/nowhere.jsonl"], 1, "error: The prompts file `/nowhere.jsonl` cannot be read\n"),
        (["--prompts", os.devnull], 1, f"error: `{os.devnull}` holds no row\n"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    tiny_llama: Path, tmp_path: Path, extra: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_rows(tmp_path / "rows.jsonl", ROWS)
    assert run([*arguments(tiny_llama, {}, prompts, "--quiet"), *extra]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(text)


def test_a_missing_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_rows(tmp_path / "rows.jsonl", ROWS)
    assert run(arguments(tmp_path / "nothing", {}, prompts, "--json")) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: The model folder `{tmp_path}/nothing` does not exist\n")
    assert json.loads(captured.out)["error"]["type"] == "FileError"


def test_standard_input_and_nothing_else_on_stdout(tiny_llama: Path, adapters: dict[str, Path]) -> None:
    rows = "".join(json.dumps(row) + "\n" for row in ROWS)
    program = [sys.executable, "-m", "preft_cli", *arguments(tiny_llama, adapters, "-", "--json")]
    ended = subprocess.run(program, input=rows, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [json.loads(line)["id"] for line in ended.stdout.splitlines()] == ["1", "2", "3"]
    assert "Traceback" not in ended.stderr
    assert "Warning" not in ended.stderr


def test_ctrl_c_is_one_line(tiny_llama: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "rows"
    os.mkfifo(pipe)
    program = [sys.executable, "-m", "preft_cli", *arguments(tiny_llama, {}, pipe, "--quiet")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        writer = open_when_read(pipe, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        os.close(writer)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


def open_when_read(pipe: Path, process: subprocess.Popen[str]) -> int:
    """Opens a named pipe for writing as soon as the process reads it, so that it is known where the process is."""
    while process.poll() is None:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            time.sleep(0.05)
    pytest.fail(f"the program ended before it read its rows: {process.communicate()}")


@pytest.mark.engine
def test_both_engines_answer_the_same(tiny_llama: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "rows.jsonl", [*ROWS, BAD[0]])
    tokens = {}
    for engine in ("hf", "vllm"):
        extra = ("--json", "--max-model-len", "256", *(("--slots", "1") if engine == "vllm" else ()))
        program = [sys.executable, "-m", "preft_cli", *arguments(tiny_llama, adapters, prompts, *extra, engine=engine)]
        ended = subprocess.run(program, capture_output=True, text=True, check=False)
        assert ended.returncode == 1, ended.stderr
        lines = [json.loads(line) for line in ended.stdout.splitlines()]
        tokens[engine] = [(line["id"], line["digest"], line["boundary"], line["token_ids"]) for line in lines]
        assert [line["id"] for line in lines if "error" in line] == ["4"]
        # One line a stage, and nothing from the libraries beneath.
        assert [line.split(":")[0] for line in ended.stderr.splitlines()] == [
            "Loading the tokenizer and the prompts",
            f"Starting the {engine} engine",
            "generate",
        ]
    assert tokens["hf"] == tokens["vllm"]

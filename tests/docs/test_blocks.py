"""What the pages say to type exists: commands, options, targets, scripts, modules, names."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
from typing import Any

import pytest
import typer
import yaml

from preft_cli.app import app
from tests.docs.blocks import ROOT, Block, blocks, blocks_of, commands, pages

LANGUAGES = {"sh", "python", "yaml", "json", "jsonl", "text"}
OTHER_PROGRAMS = {"cd", "cat", "source", "git", "pip", "curl", "apt", "jupyter", "torchrun", "accelerate", "export"}

BLOCKS = [block for page in pages() for block in blocks(page)]


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def test_there_are_blocks_of_every_kind_in_use() -> None:
    assert len(of("sh")) > 20
    assert len(of("python")) > 4
    assert {block.language for block in BLOCKS} <= LANGUAGES


def parse(line: str) -> None:
    """Parses one `preft` line by the commands' own parsers; raises where it could not be typed."""
    words = shlex.split(re.split(r"\s[|<>]|\s&$|\s2>", line)[0])[1:]
    command: Any = typer.main.get_command(app)
    depth = 0
    while depth < len(words) and hasattr(command, "get_command"):
        if words[depth].startswith("-"):
            break
        child = command.get_command(None, words[depth])
        if child is None:
            raise LookupError(words[depth])
        command, depth = child, depth + 1
    if not any(word in words for word in ("--help", "--version")):
        command.make_context("preft", words[depth:])


def fault(line: str) -> str | None:
    """Why a line of a shell block cannot be typed; None if it can."""
    first, *rest = line.split()
    program = first.rsplit("/", 1)[-1]
    if "=" in program and rest:  # VARIABLE=value program
        return fault(" ".join(rest))
    if program == "preft":
        try:
            parse(line)
        except (typer.Exit, LookupError, SystemExit, Exception) as error:
            return f"{type(error).__name__}: {error}"
        return None
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return next((word for word in rest if "=" not in word and word not in targets), None)
    if program.startswith("python"):
        script = next((word for word in rest if word.endswith(".py")), None)
        return None if script is None or (ROOT / script).is_file() else f"there is no {script}"
    return None if program in OTHER_PROGRAMS else f"unknown program {program}"


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_commands_can_be_typed(block: Block) -> None:
    checked = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert {line: why for line in commands(block.text) if (why := fault(line))} == {}


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_names_can_be_imported(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@pytest.mark.parametrize("block", of("yaml", "json", "jsonl"), ids=str)
def test_data_can_be_read(block: Block) -> None:
    if block.language == "yaml":
        assert list(yaml.safe_load_all(block.text))
    else:
        lines = block.text.splitlines() if block.language == "jsonl" else [block.text]
        assert all(json.loads(line) is not None for line in lines)


def test_the_checks_can_fail() -> None:
    page = "<!-- not run: needs a hub -->\n```\npreft chek x\n```\n\n```python\nimport x\n```\n"
    shell, python = blocks_of("p", page)
    assert (shell.reason, shell.line, shell.language) == ("needs a hub", 2, "sh")
    assert (python.reason, python.language) == (None, "python")
    assert fault("preft chek x") is not None
    assert fault("preft inspect x --bas y") is not None
    assert fault("preft inspect x --base y") is None
    assert fault("make everything") == "everything"
    assert fault("python benchmarks/none.py") is not None
    assert fault("frobnicate") is not None
    text = "a \\\n  b # c\n# d\ncat > x <<'E'\npreft nothing\nE\ne && f"
    assert commands(text) == ["a    b", "cat > x <<'E'", "e", "f"]

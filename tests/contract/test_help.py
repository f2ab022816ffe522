"""Every command explains itself: a help page with examples, of one style."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer

from preft_cli.app import COMMANDS, app, run


def leaves() -> list[tuple[str, ...]]:
    """Every command, as the words that call it."""
    root: Any = typer.main.get_command(app)
    found: list[tuple[str, ...]] = []
    for name in COMMANDS:
        command = root.get_command(None, name)
        found += [(name, child) for child in getattr(command, "commands", {})] or [(name,)]
    return found


@pytest.mark.parametrize("words", leaves(), ids=" ".join)
def test_the_help_page_has_a_summary_and_examples(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*words, "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert f"Usage: preft {' '.join(words)}" in captured.out
    assert f"    preft {' '.join(words)} " in captured.out + " " or f"    preft {' '.join(words)}\n" in captured.out


@pytest.mark.parametrize("words", leaves(), ids=" ".join)
def test_the_examples_are_understood(words: tuple[str, ...]) -> None:
    """Every example parses: no flag or argument in it is out of date."""
    root: Any = typer.main.get_command(app)
    command = root
    for word in words:
        command = command.get_command(None, word)
    lines = [line.strip() for line in command.epilog.splitlines() if line.strip().startswith("preft ")]
    assert lines
    for line in lines:
        arguments = shlex.split(re.split(r" [|<>] ", line)[0], comments=True)[1:]
        assert tuple(arguments[: len(words)]) == words
        command.make_context(words[-1], arguments[len(words) :])


def test_the_root_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    listed = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in listed


@pytest.mark.parametrize("words", leaves(), ids=" ".join)
def test_a_reporting_command_has_json(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    run([*words, "--help"])
    assert ("--json" in capsys.readouterr().out) == (words not in NOT_REPORTING)


NOT_REPORTING: set[tuple[str, ...]] = {("serve",)}


@pytest.mark.parametrize("words", [(), ("models",), ("train",), ("bench",)], ids=" ".join)
def test_no_summary_is_cut_off_in_a_list(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*words, "--help"]) == 0
    listed = re.findall(r"^  \w+ {2,}.*$", capsys.readouterr().out.partition("\nCommands:\n")[2], re.MULTILINE)
    assert listed
    assert [line for line in listed if line.endswith("...")] == []

"""Tables, sizes, progress, and the switches of the libraries beneath."""

from __future__ import annotations

import io
import os

import pytest
from rich.console import Console

from preft_cli.console import Session
from preft_cli.environment import hush, unknown_variables
from preft_cli.progress import LineProgress, TerminalProgress
from preft_cli.render import fields, report, size, table


def text_of(*parts: object) -> str:
    console = Console(file=io.StringIO(), width=200, markup=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def test_a_table_is_aligned_and_takes_text_literally() -> None:
    made = table(("name", "bytes"), [("[bold]a[/]", 12), ("b", None)], numeric=("bytes",))
    assert text_of(made) == "name        bytes\n[bold]a[/]     12\nb               -"


def test_fields() -> None:
    assert text_of(fields([("digest", "abc"), ("rank", 8), ("note", None)])) == "digest  abc\nrank    8\nnote    -"


def test_a_report_shows_values_then_rows() -> None:
    document = {"passed": True, "gap": 0.123456, "base": {"model": "m"}, "sites": [{"path": "p", "delta_norm": 1.5}]}
    expected = "passed      yes\ngap         0.1235\nbase model  m\n\nsites\npath  delta norm\np            1.5"
    assert text_of(*report(document)) == expected


@pytest.mark.parametrize(
    ("num_bytes", "shown"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (4_612_345, "4.6 MB"), (2.5e12, "2500.0 GB")]
)
def test_sizes_are_readable(num_bytes: float, shown: str) -> None:
    assert size(num_bytes) == shown


@pytest.mark.parametrize("kind", [LineProgress, TerminalProgress])
def test_a_stage_leaves_one_line(kind: type[LineProgress] | type[TerminalProgress]) -> None:
    console = Console(file=io.StringIO(), width=80, markup=False)
    progress = kind(console)
    progress.start("Reading [a]", 3)
    progress.advance(2)
    progress.finish()
    lines = console.file.getvalue().strip().splitlines()  # type: ignore[attr-defined]
    assert lines[-1].startswith("Reading [a]: 0.")
    assert kind is TerminalProgress or len(lines) == 1


def test_quiet_means_no_progress_and_no_notes(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(quiet=True)
    assert session.progress() is None
    session.note("beside")
    session.warn("beware")
    assert capsys.readouterr().err == "warning: beware\n"


def test_a_long_line_is_not_wrapped_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session()
    session.show(table(("digest",), [("a" * 500,)]))
    assert capsys.readouterr().out.splitlines()[1] == "a" * 500


def test_the_libraries_are_hushed_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"TRANSFORMERS_VERBOSITY": "info"})
    hush(verbose=True)
    assert "VLLM_LOGGING_LEVEL" not in os.environ
    hush(verbose=False)
    assert os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info", "what the user has set stays"


def test_unknown_variables_are_told_with_what_is_known() -> None:
    assert unknown_variables({"PREFT_CACHE": "x", "OTHER": "y"}) == []
    (message,) = unknown_variables({"PREFT_ZZ9": "1"})
    assert message.startswith(
        "environment variable PREFT_ZZ9 is not known and has no effect; known: PREFT_ADMIN_KEY, PREFT_CACHE"
    )

"""Options that several commands share, each defined once."""

from __future__ import annotations

from typing import Annotated, Any

import typer

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on stderr; errors stay.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also show the logs of the libraries beneath.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what an earlier run wrote there.")]
AllowBaseMismatch = Annotated[
    bool,
    typer.Option(
        "--allow-base-mismatch",
        help="Accept a base of the same architecture with other weights (quantised, re-saved); recorded.",
    ),
]
AdapterFolder = Annotated[str, typer.Argument(metavar="ADAPTER", help="Folder of a preft adapter.", show_default=False)]
NamedAdapters = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="NAME=PATH", help="An adapter and the name to call it by; repeatable."),
]


def examples(*lines: str) -> str:
    """The epilog of a help page: command lines to copy, kept as they are."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def command_app() -> typer.Typer:
    """An empty app in the style of this command line, for a command's module to fill."""
    return typer.Typer(
        context_settings=CONTEXT, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False
    )

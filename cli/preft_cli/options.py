"""Options that several commands share, each defined once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from preft.errors import UsageError

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


def require_unread(context: typer.Context, chosen: str, unread: Sequence[str]) -> None:
    """Checks that nothing was given which the chosen way to run a command would ignore.

    Args:
        context: Of the command.
        chosen: What was chosen, as a sentence begins with it.
        unread: Names of the parameters that it does not read.

    Raises:
        UsageError: One of them was given.
    """
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    given = [f"`{flags[name]}`" for name in unread if _is_given(context, name)]
    if given:
        raise UsageError(f"{chosen} does not read {', '.join(given)}", hint="leave one of them out")


def require_alone(context: typer.Context, chosen: str, read: Sequence[str]) -> None:
    """The same for a choice that reads little: `read` names what it reads.

    Raises:
        UsageError: Anything else was given.
    """
    names = [parameter.name for parameter in context.command.params if parameter.name is not None]
    require_unread(context, chosen, [name for name in names if name not in read])


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")

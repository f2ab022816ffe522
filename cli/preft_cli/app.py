"""The root of the command line: which commands exist, and what happens around each of them.

A command's module is imported when the command is called, and it imports the library inside its function, so that
`preft --help` needs neither torch nor vllm.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from preft_cli.environment import unknown_variables
from preft_cli.errors import INTERRUPTED, guarded
from preft_cli.options import CONTEXT, examples

COMMANDS = {
    "demo": "preft_cli.commands.demo",
    "models": "preft_cli.commands.models",
    "convert": "preft_cli.commands.convert",
    "export": "preft_cli.commands.export",
    "inspect": "preft_cli.commands.inspect",
    "check": "preft_cli.commands.check",
    "generate": "preft_cli.commands.generate",
    "serve": "preft_cli.commands.serve",
    "train": "preft_cli.commands.train",
    "eval": "preft_cli.commands.eval",
    "init": "preft_cli.commands.init",
    "bench": "preft_cli.commands.bench",
    "plan": "preft_cli.commands.plan",
    "doctor": "preft_cli.commands.doctor",
    "version": "preft_cli.commands.version",
}
"""Name to module. The module's `app` holds one command, or several for a group."""


class LazyGroup(TyperGroup):
    """A group that imports a command when it is asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command, imported now if it was not yet; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        if self.commands[cmd_name] is None:
            command = typer.main.get_command(importlib.import_module(COMMANDS[cmd_name]).app)
            command.name = cmd_name
            self.commands[cmd_name] = command  # type: ignore[assignment]
        return self.commands[cmd_name]


app = typer.Typer(
    cls=LazyGroup,
    context_settings=CONTEXT,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=examples(
        "preft models fetch smollm2-135m-instruct smollm2",
        "preft convert my-lora my-lorap --base smollm2",
        "preft generate smollm2 --adapter mine=my-lorap --prompts prompts.jsonl",
    ),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from preft import __version__

        typer.echo(f"preft {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Adapters that act on prompt tokens only, so that decoding costs what the base model costs.

    Data goes to stdout, everything else to stderr. Exit status: 0 ok, 1 failed, 2 wrong usage.
    """


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status; prints errors instead of raising them."""
    arguments = list(arguments) or ["--help"]
    for warning in unknown_variables():
        typer.echo(f"warning: {warning}", err=True)

    def call() -> Any:
        command = typer.main.get_command(app)
        return command.main(args=arguments, prog_name="preft", standalone_mode=False)

    return guarded(call, as_json="--json" in _own(arguments))


def _own(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments before `--`, which are ours."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _terminate(signum: int, frame: object) -> NoReturn:
    # As an exception, so that half-written files are cleaned up as they are on Ctrl-C.
    raise SystemExit(128 + signum)


def main() -> NoReturn:
    """The `preft` program."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)

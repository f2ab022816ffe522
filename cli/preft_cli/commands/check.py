"""`preft check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preft_cli.console import Session
from preft_cli.options import AdapterFolder, Json, Quiet, Verbose, command_app, examples

app = command_app()


@app.command(
    "check", epilog=examples("preft check my-lorap --base smollm2", "preft check my-lorap --base smollm2 --json")
)
def check(
    adapter: AdapterFolder,
    base: Annotated[str, typer.Option("--base", help="The base model: folder, embedded name or hub id.")],
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Prove that an adapter is on: how far each site moves, the gap in logits to the base, and engine parity.

    Exit status 1 if it does nothing or the engines disagree.
    """
    session = Session(as_json=as_json, quiet=quiet, verbose=verbose)
    from preft.checks.check import check_adapter
    from preft_cli.render import report

    found = check_adapter(Path(adapter), base)
    if as_json:
        session.emit(found.to_dict())
    else:
        session.show(*report(found.to_dict()))
    if not found.passed:
        raise typer.Exit(1)

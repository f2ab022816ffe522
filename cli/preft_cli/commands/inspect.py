"""`preft inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preft_cli.console import Session
from preft_cli.options import AdapterFolder, Json, Verbose, command_app, examples

app = command_app()


@app.command("inspect", epilog=examples("preft inspect my-lorap", "preft inspect my-lorap --base smollm2 --json"))
def inspect(
    adapter: AdapterFolder,
    base: Annotated[
        str | None, typer.Option("--base", help="Also check that the adapter was made for this model.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show what an adapter is: positions, sites, ranks, scales, bytes, digest, and the base it was made for."""
    session = Session(as_json=as_json, verbose=verbose)
    from preft.checks.inspect import inspect_adapter
    from preft_cli.render import report

    found = inspect_adapter(Path(adapter), base=base)
    if as_json:
        session.emit(found.to_dict())
    else:
        session.show(*report(found.to_dict()))

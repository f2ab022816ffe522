"""`preft export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preft_cli.console import Session
from preft_cli.options import AdapterFolder, Force, Json, Quiet, Verbose, command_app, examples

app = command_app()
FORMATS = ("peft",)


@app.command("export", epilog=examples("preft export my-lorap my-lora --format peft --as-all-token"))
def export(
    source: AdapterFolder,
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write to; it must not exist.")],
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="What to write: `peft`.")] = "peft",
    as_all_token: Annotated[
        bool,
        typer.Option("--as-all-token", help="Acknowledge that PEFT will apply the adapter to every token."),
    ] = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write an adapter back as a PEFT LoRA, which acts on every token.

    What the adapter does changes with it, so `--as-all-token` must say that this is meant.
    """
    session = Session(as_json=as_json, quiet=quiet, verbose=verbose)
    from preft.convert.export import export_peft
    from preft.errors import UsageError
    from preft_cli.render import fields

    if form not in FORMATS:
        raise UsageError(f"Unknown export format: `{form}`", accepted=", ".join(FORMATS))
    made = export_peft(Path(source), target, as_all_token=as_all_token, force=force)
    if as_json:
        session.emit(made.to_dict())
    else:
        rows = [("folder", made.folder), ("format", form), ("sites", made.num_sites), ("from digest", made.digest)]
        session.show(fields(rows))
    for note in made.notes:
        session.note(f"note: {note}")

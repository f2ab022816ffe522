"""`preft convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preft_cli.console import Session
from preft_cli.options import AllowBaseMismatch, Force, Json, Quiet, Verbose, command_app, examples

if TYPE_CHECKING:
    from preft.convert.run import ConversionReport

app = command_app()


@app.command(
    "convert",
    epilog=examples(
        "preft convert my-lora my-lorap --base meta-llama/Llama-3.1-8B",
        "preft convert org/lora@main my-lorap",
        "preft convert my-lora my-lora-all --positions all",
        "preft convert pyreft-checkpoint my-direftp --base smollm2 --positions f1+l1",
    ),
)
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A PEFT LoRA (folder or hub id@revision) or a pyreft checkpoint.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write the adapter to; it must not exist.")],
    base: Annotated[
        str | None, typer.Option("--base", help="The base model; default: the one the source names.")
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option("--positions", help="`prompt`, `all` or `fN+lM`. Default `prompt`; a pyreft checkpoint needs it."),
    ] = None,
    max_rank: Annotated[
        int | None, typer.Option("--max-rank", min=1, help="Refuse an adapter with a larger rank.")
    ] = None,
    allow_base_mismatch: AllowBaseMismatch = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Convert an adapter so that it acts on prompt tokens only.

    A PEFT LoRA becomes LoRAP, a pyreft checkpoint DiReFTP. Whatever changes the numbers is honoured or refused by
    name; the target folder appears whole or not at all.
    """
    session = Session(as_json=as_json, quiet=quiet, verbose=verbose)
    from preft.convert.run import convert as convert_adapter

    made = convert_adapter(
        source,
        target,
        base=base,
        positions=positions,
        force=force,
        allow_base_mismatch=allow_base_mismatch,
        max_rank=max_rank,
        progress=session.progress(),
    )
    if as_json:
        session.emit(made.to_dict())
    else:
        _show(session, made)
    for note in made.notes:
        session.note(f"note: {note}")
    for warning in made.warnings:
        session.warn(warning)


def _show(session: Session, made: ConversionReport) -> None:
    from preft_cli.render import few, fields

    manifest = made.manifest
    session.show(
        fields(
            [
                ("adapter", made.folder),
                ("kind", f"{manifest.label} (positions {manifest.positions})"),
                ("base", manifest.base.model),
                ("sites", len(manifest.sites)),
                ("rank", few(sorted({site.rank for site in manifest.sites}))),
                ("scale", few(sorted({site.scale for site in manifest.sites}))),
                ("dtype", manifest.dtype),
                ("digest", manifest.digest),
            ]
        )
    )

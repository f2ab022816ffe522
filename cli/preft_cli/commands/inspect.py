"""`preft inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preft_cli.console import Session
from preft_cli.options import AdapterFolder, Json, Verbose, command_app, examples

if TYPE_CHECKING:
    from preft.checks.inspect import InspectReport

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
    """Show what an adapter is: positions, sites, ranks, digest, base.

    With `--base`, exit status 1 means that the adapter does not fit that model.
    """
    session = Session(as_json=as_json, verbose=verbose)
    from preft.checks.inspect import inspect_adapter

    found = inspect_adapter(Path(adapter), base=base)
    if as_json:
        session.emit(found.to_dict())
    else:
        _show(session, found)
    if found.base is not None and not found.base.fits:
        raise typer.Exit(1)


def _show(session: Session, found: InspectReport) -> None:
    from preft_cli.render import few, fields, size, table

    manifest = found.manifest
    rows: list[tuple[str, object]] = [
        ("adapter", found.folder),
        ("kind", f"{found.label} (positions {manifest.positions})"),
        ("base", manifest.base.model + (" (other weights allowed)" if manifest.base.mismatch_allowed else "")),
        ("sites", len(manifest.sites)),
        ("max rank", manifest.max_rank),
        ("dtype", manifest.dtype),
        ("bytes", f"{size(found.num_bytes)} in memory, {size(found.file_bytes)} on disk"),
        ("digest", f"{manifest.digest} ({'verified' if found.digest_verified else 'not verified'})"),
    ]
    if found.base is not None:
        rows.append((f"fits {found.base.model}", found.base.result))
        rows += [("", found.base.detail)] if found.base.detail else []
        rows += [("sites without a module", few(found.base.missing_sites))] if found.base.missing_sites else []
    groups = (
        (group.module, group.kind, group.count, few(group.ranks), few(group.scales), group.parameters)
        for group in found.groups
    )
    headers = ("module", "kind", "sites", "rank", "scale", "parameters")
    session.show(fields(rows), "", table(headers, groups, numeric=("sites", "parameters")))
    if found.head_note:
        session.note(f"note: {found.head_note}")
    if found.moves_nothing:
        session.warn("every update is exactly zero: the adapter does nothing")

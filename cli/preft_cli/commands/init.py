"""`preft init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preft_cli.console import Session
from preft_cli.options import Json, Quiet, command_app, examples

app = command_app()


SETS: dict[str, tuple[tuple[str, ...], str]] = {
    "recipes": ((".yaml", ".jsonl"), "preft train sft sft-lorap.yaml"),
    "recipes/paper": ((".yaml",), "preft train sft sft-tulu3.yaml"),
    "notebooks": ((".ipynb",), "open them in a program for notebooks, such as JupyterLab (`pip install jupyterlab`)"),
    "deploy": (("",), "edit the names and paths in them"),
}
"""What can be written: its folder in the package, the suffixes that are files of it, and what to do next."""


@app.command(
    "init",
    epilog=examples(
        "preft init my-project",
        "cd my-project && preft train sft sft-lorap.yaml",
        "preft init my-study --paper",
        "preft init my-notebooks --notebook",
        "preft init my-deployment --deploy",
    ),
)
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; no file that is there is replaced.")],
    paper: Annotated[
        bool, typer.Option("--paper", help="Write recipes after the PreFT paper instead; they need GPUs.")
    ] = False,
    notebook: Annotated[bool, typer.Option("--notebook", help="Write notebooks instead.")] = False,
    deploy: Annotated[bool, typer.Option("--deploy", help="Write files for serving in production instead.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write recipes, notebooks or deployment files to start from.

    Without an option: recipes, and the small data sets that they train on.
    """
    from preft.errors import UsageError

    asked = {"recipes/paper": paper, "notebooks": notebook, "deploy": deploy}
    chosen = [name for name, wanted in asked.items() if wanted]
    if len(chosen) > 1:
        raise UsageError(
            "`--paper`, `--notebook` and `--deploy` cannot be meant together",
            accepted="one of them",
            got=str(len(chosen)),
        )
    kind = chosen[0] if chosen else "recipes"
    session = Session(as_json=as_json, quiet=quiet)
    written = _write(folder, kind)
    if as_json:
        session.emit({"folder": str(folder), "files": [path.name for path in written]})
    else:
        session.show(*(str(path) for path in written))
    is_command = SETS[kind][1].startswith("preft ")
    session.note(f"next: cd {folder} && {SETS[kind][1]}" if is_command else f"next: {SETS[kind][1]}")


def _write(folder: Path, kind: str) -> list[Path]:
    """Writes every file of a kind, or nothing if one of them is there already."""
    import importlib.resources

    from preft.errors import FileError, UsageError

    source = importlib.resources.files("preft_templates").joinpath(kind)
    suffixes = SETS[kind][0]
    contents = {file.name: file.read_bytes() for file in source.iterdir() if file.name.endswith(suffixes)}
    targets = {name: folder / name for name in sorted(contents)}
    taken = [str(path) for path in targets.values() if path.exists() or path.is_symlink()]
    if taken:
        raise UsageError(
            f"`{taken[0]}` exists, and `preft init` replaces nothing", hint="choose another folder, or move it away"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in targets.items():
            path.write_bytes(contents[name])
    except OSError as error:
        raise FileError(f"`{folder}` cannot be written", got=error.strerror) from None
    return list(targets.values())

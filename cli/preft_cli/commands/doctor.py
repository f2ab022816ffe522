"""`preft doctor`."""

from __future__ import annotations

import typer

from preft_cli.console import Session
from preft_cli.options import Json, Quiet, command_app, examples

app = command_app()


@app.command("doctor", epilog=examples("preft doctor", "preft doctor --json"))
def doctor(as_json: Json = False, quiet: Quiet = False) -> None:
    """Look at this machine and installation, and say what is broken.

    Exit status 1 if something that is needed does not work; notes do not fail.
    """
    from preft.config.progress import stage
    from preft_cli.diagnosis import BROKEN, examine, probe_libraries
    from preft_cli.render import table

    session = Session(as_json=as_json, quiet=quiet)
    with stage(session.progress(), "Importing the libraries"):
        probed = probe_libraries()
    findings = examine(probed)
    broken = [finding for finding in findings if finding.status == BROKEN]
    if as_json:
        session.emit({"ok": not broken, "findings": [finding.to_dict() for finding in findings]})
    else:
        session.show(table(("status", "what", "found"), ((item.status, item.name, item.value) for item in findings)))
        for item in findings:
            if item.hint:
                session.note(f"\nhint ({item.name}): {item.hint}")
    if broken:
        raise typer.Exit(1)

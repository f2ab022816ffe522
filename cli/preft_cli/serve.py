"""What `preft serve` does: find the model, start the server, say what it serves, wait for its end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft.errors import UsageError
from preft.models.locate import locate_model
from preft.serve.backend.memory_plan import describe_plan
from preft.serve.http.launch import ServeOptions, collect_adapters, plan_launch
from preft.serve.http.passthrough import require_passable
from preft.serve.http.process import Ready, ServerProcess
from preft.serve.settings import EngineSettings
from preft_cli.console import Session
from preft_cli.render import few

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Job:
    """One call of `preft serve`.

    Attributes:
        model: The base model.
        root: Folder of adapters, or None.
        named: `NAME=PATH` texts.
        settings: Of the engine.
        options: Of the server.
        environment: That the server's is derived from.
    """

    model: str
    root: Path | None
    named: tuple[str, ...]
    settings: EngineSettings
    options: ServeOptions
    environment: Mapping[str, str]


def run_server(job: Job, session: Session) -> None:
    """Serves until Ctrl-C or SIGTERM.

    Raises:
        PreftError: Something cannot be served as asked, or the server ended by itself.
    """
    if job.settings.dtype not in DTYPES:
        raise UsageError("`--dtype` is not valid", got=f"`{job.settings.dtype}`", accepted=", ".join(DTYPES))
    require_passable(job.options.passthrough)
    adapters = collect_adapters(job.root, job.named)
    launch = plan_launch(
        job.model,
        lambda: locate_model(job.model, progress=session.progress()),
        adapters,
        job.settings,
        job.options,
        job.environment,
    )

    def show_log(line: str, is_serving: bool) -> None:
        if session.verbose or is_serving:
            print(line, file=sys.stderr, flush=True)

    session.note(f"loading {job.model} with {_count(len(adapters), 'adapter')} ...")
    with ServerProcess(launch, on_log=show_log) as server:
        ready = server.wait_ready()
        if ready is not None:
            _announce(ready, launch.plan.names, session)
            server.wait()
        session.note("stopping ...")
    session.note("stopped")


def _announce(ready: Ready, names: tuple[str, ...], session: Session) -> None:
    available = [entry for entry in ready.adapters if entry["available"]]
    broken = [entry for entry in ready.adapters if not entry["available"]]
    session.note(f"ready at {ready.url} after {ready.seconds:.0f} s; base model: {', '.join(names)}")
    shown = few([f"{entry['name']} ({entry['kind']})" for entry in available], limit=8)
    session.note(f"{_count(len(available), 'adapter')} available" + (f": {shown}" if available else ""))
    for entry in broken:
        session.warn(f"adapter `{entry['name']}` is not available: {_reason(entry['error'])}")
    session.note(f"memory: {describe_plan(ready.health['memory'])}")


def _reason(error: Mapping[str, Any]) -> str:
    details = "; ".join(f"{name}: {error[name]}" for name in ("got", "accepted", "hint") if name in error)
    return f"{error['message']} ({details})" if details else str(error["message"])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

"""Running one arm's process: its job in, its lines out, its log in a file, and its end whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preft.bench.job import ArmJob

ARM_COMMAND = (sys.executable, "-m", "preft.bench.arm")
GRACE_S = 10.0
LOG_TAIL = 2000
TIME_LIMIT = "TimeLimit"
"""The `type` of the error of an arm that was stopped as asked; it has not failed."""


@dataclass
class ArmResult:
    """What a process of an arm said.

    Attributes:
        engine: Facts about its engine.
        runs: Metrics of its runs, the cold one first.
        end: Memory at its end.
        error: Why it failed, or None.
    """

    engine: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None


def run_arm(job: ArmJob, log: Path, *, command: Sequence[str] = ARM_COMMAND, limit_s: float | None = None) -> ArmResult:
    """Runs one process of an arm to its end. Whatever ends this call ends the process too.

    Args:
        job: What it does.
        log: File for its stderr.
        command: The process; it reads the job as JSON on stdin and writes JSON lines on stdout.
        limit_s: Seconds after which it is stopped; what it had reported until then is kept.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as errors:
        # A session of its own: Ctrl-C reaches us alone, and we end it with all of its children.
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        late = False
        try:
            output, _ = process.communicate(json.dumps(job.to_dict()), timeout=limit_s)
        except subprocess.TimeoutExpired:
            late = True
            _end(process, close=False)
            output, _ = process.communicate()
        finally:
            _end(process)
    result = _parse(output)
    if late:
        done = f"{len(result.runs)} of {1 + job.warm_runs} runs done"
        message = f"stopped after {limit_s:g} s, the limit of an arm, with {done}"
        result.error = {"type": TIME_LIMIT, "message": message}
    if result.error is None and process.returncode != 0:
        result.error = {"type": "EngineError", "message": f"the process ended with status {process.returncode}"}
    if result.error is None and len(result.runs) != 1 + job.warm_runs:
        result.error = {"type": "EngineError", "message": f"it reported {len(result.runs)} of {1 + job.warm_runs} runs"}
    if result.error is not None:
        result.error = {**result.error, "log": str(log), "log_tail": _tail(log)}
    return result


def _end(process: subprocess.Popen[str], *, close: bool = True) -> None:
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
        break
    if not close:
        return
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _parse(output: str) -> ArmResult:
    result = ArmResult()
    for line in output.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if not isinstance(document, dict):
            continue
        result.engine = document.get("engine", result.engine)
        result.end = document.get("end", result.end)
        result.error = document.get("error", result.error)
        if "run" in document:
            result.runs.append(document["run"])
    return result


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].strip()
    return ""

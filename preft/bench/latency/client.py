"""The load client's process, as its parent sees it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from preft.errors import EngineError

CLIENT_COMMAND = (sys.executable, "-m", "preft.serve.load_client")
_POLL_S = 0.25


class LoadClient:
    """One client process; a context manager that leaves none behind.

    Args:
        log: File for its stderr.
        api_key: What it presents to the server, or None.
        command: What runs.
        is_stopped: Asked while an answer is awaited; KeyboardInterrupt is raised once it says yes.
    """

    def __init__(
        self,
        log: Path,
        *,
        api_key: str | None = None,
        command: Sequence[str] = CLIENT_COMMAND,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._log, self._command, self._is_stopped = log, command, is_stopped
        self._environment = {**os.environ, **({"OPENAI_API_KEY": api_key} if api_key else {})}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> LoadClient:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                list(self._command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                env=self._environment,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def send(self, load: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Runs one load to its end.

        Args:
            load: See `preft.serve.load_client`.

        Raises:
            EngineError: The client has died.
            KeyboardInterrupt: It was stopped.
        """
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(load) + "\n")
            stdin.flush()
        except OSError:
            line = ""
        else:
            line = self._answer(stdout)
        if not line:
            tail = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise EngineError("The load client has died", got=tail[-1] if tail else None, hint=f"its log: {self._log}")
        found: list[dict[str, Any]] = json.loads(line)["requests"]
        return found

    def _answer(self, stdout: IO[str]) -> str:
        while not select.select([stdout], [], [], _POLL_S)[0]:
            if self._is_stopped():
                raise KeyboardInterrupt
        return stdout.readline()

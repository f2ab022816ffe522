"""The process that runs vLLM's server: started, proved to be ours, watched, and ended with all its children.

The server runs in a session of its own, so that Ctrl-C reaches this process alone and the server ends in order: front
end, engine, workers. Whatever is left of the session afterwards is killed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import signal
import ssl
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from preft.errors import EngineError, PreftError, UsageError
from preft.serve.http.failure import ended_error
from preft.serve.http.launch import Launch
from preft.serve.http.plan import DESCRIPTOR_VARIABLE

logger = logging.getLogger(__name__)

_TAIL_LINES = 2000
_POLL_S = 0.25
_ANSWER_S = 10.0
_VERBOSE_HINT = "`--verbose` shows vLLM's whole log"
_STOPPING = (signal.SIGINT, signal.SIGTERM)

HEALTH_PATH = "/v1/preft/health"
ADAPTERS_PATH = "/v1/preft/adapters"


@dataclass(frozen=True)
class Ready:
    """A server that has proved itself.

    Attributes:
        url: Base URL for OpenAI clients.
        health: Its answer to the health route.
        adapters: Its answer to the adapters route: available and unavailable ones.
        seconds: From start to ready.
    """

    url: str
    health: dict[str, Any]
    adapters: list[dict[str, Any]]
    seconds: float


class ServerProcess:
    """One server; a context manager that leaves no process behind.

    Args:
        launch: What to start.
        on_log: Receives each line that the server writes, and whether it was serving then. Before that, errors in
            the log are causes of an end that is told in one line; afterwards they are what a forced end looks like.
    """

    def __init__(self, launch: Launch, *, on_log: Callable[[str, bool], None]) -> None:
        self._launch = launch
        self._on_log = on_log
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._signals = 0
        self._ready = False

    def __enter__(self) -> ServerProcess:
        self._handlers = {number: signal.signal(number, self._on_signal) for number in _STOPPING}
        try:
            self._start()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stop()
        finally:
            self._restore()

    @property
    def stop_requested(self) -> bool:
        """Whether Ctrl-C or SIGTERM asked for the end."""
        return self._signals > 0

    @property
    def pid(self) -> int:
        """Of the server's front end."""
        return self._process.pid

    def wait_ready(self) -> Ready | None:
        """Waits until the server has proved that preft's plugin is in it and that its workers passed the canary.

        Returns:
            None if the end was requested first.

        Raises:
            PreftError: It ended, or it is not the server that was started, or preft is not in it.
        """
        while not self.stop_requested:
            if (code := self._process.poll()) is not None:
                raise self._ended("The server ended before it was ready", code)
            try:
                status, health = self.get(HEALTH_PATH)
            except (OSError, http.client.HTTPException, ValueError):
                time.sleep(_POLL_S)
                continue
            if status == 200:
                self._require_instance(health)
                _, listed = self.get(ADAPTERS_PATH)
                self._ready = True
                return Ready(self._launch.address.url, health, listed["adapters"], time.monotonic() - self._started)
            if status != 503:
                raise EngineError(
                    "vLLM's server is up without preft's routes, so no adapter can be trusted",
                    got=f"status {status} from {HEALTH_PATH}",
                    hint="install preft again, so that its entry point is registered; " + _VERBOSE_HINT,
                )
            time.sleep(_POLL_S)
        return None

    def wait(self) -> None:
        """Waits until the end is requested.

        Raises:
            PreftError: The server ended by itself.
        """
        while not self.stop_requested:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout=_POLL_S)
                raise self._ended("The server ended by itself", code)

    def get(self, path: str) -> tuple[int, Any]:
        """Asks the server; no proxy is consulted.

        Raises:
            OSError: It does not answer.
        """
        address = self._launch.address
        host, port = address.reachable_host, address.port
        connection: http.client.HTTPConnection
        if address.tls:
            # The server is this process's own child on this machine; its certificate names the outside world's host.
            context = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection(host, port, timeout=_ANSWER_S, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_S)
        with contextlib.closing(connection):
            key = self._launch.api_key
            connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
            answer = connection.getresponse()
            body = answer.read()
            return answer.status, json.loads(body) if answer.status == 200 else None

    def _start(self) -> None:
        reading, self._writing = os.pipe()
        try:
            self._started = time.monotonic()
            self._process = subprocess.Popen(
                self._launch.command,
                env={**self._launch.environment, DESCRIPTOR_VARIABLE: str(reading)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                bufsize=1,
                pass_fds=(reading,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._writing)
            raise
        finally:
            os.close(reading)
        threading.Thread(target=self._send_plan, name="preft-plan", daemon=True).start()
        self._reader = threading.Thread(target=self._read_log, name="preft-log", daemon=True)
        self._reader.start()

    def _send_plan(self) -> None:
        # A plan longer than the pipe waits here until the server reads it, or is gone.
        rest = memoryview(self._launch.plan.encode())
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(self._writing, rest) :]

    def _read_log(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tail.append(line)
            self._on_log(line.rstrip("\n"), self._ready and not self.stop_requested)

    def _require_instance(self, health: dict[str, Any]) -> None:
        if health.get("instance") != self._launch.plan.instance:
            raise UsageError(
                f"Another server answers at {self._launch.address.url}", hint="choose another `--port`, or 0 for any"
            )

    def _ended(self, what: str, code: int) -> PreftError:
        self._reader.join(timeout=5)
        return ended_error(what, code, list(self._tail), hint=_VERBOSE_HINT)

    def _stop(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)
            for _ in self._until(time.monotonic() + self._launch.stop_s):
                if self._process.poll() is not None:
                    break
            else:
                logger.warning("The server did not end in time and is killed")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=5)
        with contextlib.suppress(OSError):
            os.close(self._writing)

    def _until(self, deadline: float) -> Iterator[None]:
        """Yields until a time is reached or the end is requested a second time."""
        while time.monotonic() < deadline and self._signals < 2:
            yield
            time.sleep(0.05)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

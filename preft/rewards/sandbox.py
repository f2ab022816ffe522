"""Runs Python that nobody has read, with its unit tests, in a confined process; see `preft.rewards.confinement`.

The tests run in the process of the code they test, as the field's benchmarks have it. Confinement protects the
machine. It does not stop a program from cheating its tests: a model that is trained against tests can learn to.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import platform
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, cast

from preft.errors import EngineError, UnsupportedError, UsageError

GUEST = Path(__file__).with_name("guest.py")
CONFINED = b"+"
"""What the guest says before it runs any code; from then on nothing it says may end the caller's work."""
_MAX_ANSWER_BYTES = 64 << 10
_POLL_S = 0.05
_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/etc/localtime", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""All that the code sees of ours: numeric libraries must not start threads, which they may not have."""


class Status(StrEnum):
    """How a run ended."""

    PASSED = "passed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    MEMORY = "memory"


@dataclass(frozen=True)
class Outcome:
    """What became of one program.

    Attributes:
        status: How it ended.
        detail: The exception, or what stopped it; empty if it passed.
        seconds: Wall time, the interpreter's start included.
    """

    status: Status
    detail: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every test passed."""
        return self.status is Status.PASSED


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        wall_s: Time until it is killed, in seconds.
        memory_bytes: Address space.
        file_bytes: Length of one file that it writes.
        folder_bytes: All its files together.
    """

    wall_s: float = 10.0
    memory_bytes: int = 512 << 20
    file_bytes: int = 1 << 20
    folder_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        if not 0 < self.wall_s < 3600 or self.memory_bytes < 64 << 20 or self.file_bytes < 0 or self.folder_bytes < 0:
            raise UsageError(
                "The limits of the sandbox are not valid",
                got=f"{self.wall_s} s, {self.memory_bytes} bytes of memory",
                accepted="up to an hour, at least 64 MiB",
            )


@dataclass(frozen=True)
class Program:
    """Code and what tests it; both run in one namespace, one after the other.

    Attributes:
        code: Python, not trusted.
        tests: Python that raises if the code is wrong, such as `assert add(1, 2) == 3`.
    """

    code: str
    tests: str


def run_program(program: Program, limits: Limits | None = None) -> Outcome:
    """Runs one program. Nothing that it does reaches the caller; this may be called from several threads.

    Args:
        program: Code and tests.
        limits: What it may use.

    Returns:
        How it ended; it has passed only if the tests ran to their end.

    Raises:
        UnsupportedError: This machine cannot confine a process.
        EngineError: The interpreter cannot be started.
    """
    limits = limits or Limits()
    token = secrets.token_hex(16)
    started = time.monotonic()
    with _folder() as folder:
        job = {
            "token": token,
            "sources": [("<solution>", program.code), ("<tests>", program.tests)],
            "cpu_s": int(limits.wall_s) + 1,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.file_bytes,
            "readable": readable_folders(),
            "writable": str(folder),
        }
        process = start_guest(GUEST, folder)
        try:
            answer, stopped = _exchange(process, json.dumps(job).encode(), folder, limits, started + limits.wall_s)
        finally:
            end_guest(process)
    seconds = time.monotonic() - started
    if stopped is not None:
        return Outcome(stopped[0], stopped[1], seconds)
    return _read(answer, token, process.returncode, seconds)


def run_programs(
    programs: Sequence[Program], limits: Limits | None = None, *, workers: int | None = None
) -> list[Outcome]:
    """Runs several programs, some at a time.

    Args:
        programs: Code and tests of each.
        limits: What each may use.
        workers: How many at a time; None for the number of processors.
    """
    count = workers or len(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(max_workers=count) as pool:
        return list(pool.map(lambda program: run_program(program, limits), programs))


def require_sandbox() -> None:
    """Checks, by running a program, that this machine can confine one.

    Raises:
        UnsupportedError: It cannot.
    """
    probe = "try:\n    os.fork()\nexcept PermissionError:\n    pass\nelse:\n    raise RuntimeError('it forks')"
    outcome = run_program(Program("import os", probe))
    if not outcome.passed:
        raise UnsupportedError("The sandbox does not work on this machine", got=f"{outcome.status}: {outcome.detail}")


def readable_folders() -> list[str]:
    """What a confined Python needs to read: itself and its libraries."""
    own = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()}
    return sorted({*own, *_SYSTEM_FOLDERS})


def start_guest(program: Path, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts one of our programs in an interpreter and a process group of its own, with an empty environment."""
    if platform.system() != "Linux":
        raise UnsupportedError("Code can be confined on Linux only", got=platform.system())
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-B", str(program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=_ENVIRONMENT,
            start_new_session=True,
        )
    except OSError as error:
        raise EngineError("The sandbox's interpreter cannot be started", got=error.strerror) from None


def end_guest(process: subprocess.Popen[bytes]) -> None:
    """Kills a guest's process group, and waits."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="preft-sandbox-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _exchange(
    process: subprocess.Popen[bytes], job: bytes, folder: Path, limits: Limits, deadline: float
) -> tuple[bytes, tuple[Status, str] | None]:
    """Hands the job over and reads the answer, until it is there or a limit is passed.

    Returns:
        What was read, and the status and reason if the program was stopped.
    """
    source, sink = cast("IO[bytes]", process.stdout), cast("IO[bytes]", process.stdin)
    with contextlib.suppress(BrokenPipeError):
        sink.write(job)
        sink.close()
    answer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return answer, (Status.TIMEOUT, f"over {limits.wall_s:g} s")
            if selector.select(min(left, _POLL_S)):
                piece = os.read(source.fileno(), _MAX_ANSWER_BYTES)
                answer += piece
                if not piece:
                    return answer, None
                if len(answer) > _MAX_ANSWER_BYTES:
                    return answer, (Status.FAILED, "it writes where the answer goes")
            if _folder_bytes(folder, limits.folder_bytes) > limits.folder_bytes:
                return answer, (Status.FAILED, f"its files hold over {limits.folder_bytes} bytes")


def _folder_bytes(folder: Path, enough: int) -> int:
    """Bytes of the files below a folder, each at least a block, counted up to `enough` or a little more."""
    total = 0
    for root, folders, files in os.walk(folder):
        total += 4096 * len(folders)
        for name in files:
            with contextlib.suppress(OSError):
                total += max(4096, os.lstat(os.path.join(root, name)).st_blocks * 512)
            if total > enough:
                return total
    return total


def _read(answer: bytes, token: str, code: int, seconds: float) -> Outcome:
    is_confined = answer.startswith(CONFINED)
    try:
        found: Any = json.loads(answer.removeprefix(CONFINED))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("token") != token:
        if code == -signal.SIGXCPU:
            return Outcome(Status.TIMEOUT, "over its processor time", seconds)
        ended = f"signal {-code}" if code < 0 else f"exit status {code}"
        return Outcome(Status.FAILED, f"it ended before its tests did, by {ended}", seconds)
    if found.get("status") == "unconfined" and not is_confined:
        raise UnsupportedError(
            "Code cannot be confined on this machine",
            got=str(found["detail"]),
            accepted="Linux with seccomp",
            hint="run without rewards that execute code",
        )
    if found.get("status") not in tuple(Status):
        return Outcome(Status.FAILED, "it forged an answer", seconds)
    return Outcome(Status(found["status"]), str(found.get("detail")), seconds)

"""The sandbox: what it says of programs, and what no program can do to the machine around it."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from preft.errors import UsageError
from preft.rewards import confinement
from preft.rewards.sandbox import Limits, Outcome, Program, Status, require_sandbox, run_program, run_programs

SHORT = Limits(wall_s=3.0)


def run(code: str, tests: str = "", limits: Limits = SHORT) -> Outcome:
    return run_program(Program(code, tests), limits)


def test_right_code_passes_and_wrong_code_does_not() -> None:
    tests = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
    assert run("def add(a, b):\n    return a + b", tests).passed
    wrong = run("def add(a, b):\n    return a - b", tests)
    assert (wrong.status, wrong.detail) == (Status.FAILED, "AssertionError:  (tests, line 1)")


def test_usual_programs_work() -> None:
    code = """
from __future__ import annotations
import collections, dataclasses, datetime, hashlib, json, random, re, typing
import numpy

@dataclasses.dataclass
class Point:
    x: int
    y: typing.ClassVar[int] = 2

def area(n: int) -> float:
    print("printing is harmless")
    datetime.datetime.now()
    with open("scratch", "w") as stream:
        stream.write("x" * 1000)
    return float((numpy.ones((n, n)) @ numpy.ones((n, n)))[0, 0]) + Point(1).x
"""
    outcome = run(code, "assert area(50) == 51.0\nassert open('scratch').read() == 'x' * 1000")
    assert outcome.passed, outcome.detail


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("while True: pass", Status.TIMEOUT, "over 1 s"),
        ("while True:\n  try:\n    while True: pass\n  except BaseException: pass", Status.TIMEOUT, "over 1 s"),
        ("import time\ntime.sleep(60)", Status.TIMEOUT, "over 1 s"),
        ("while True: print('x' * 100_000)", Status.TIMEOUT, "over 1 s"),
        ("x = []\nwhile True: x.append(bytearray(1 << 22))", Status.MEMORY, "MemoryError"),
        ("x = 'a' * (1 << 34)", Status.MEMORY, "MemoryError"),
        ("def f(): f()\nf()", Status.FAILED, "RecursionError"),
        ("def f(:", Status.FAILED, "SyntaxError"),
        ("import ctypes\nctypes.string_at(0)", Status.FAILED, "by signal 11"),
        ("open('a', 'w').write('x' * (2 << 20))", Status.FAILED, "File too large"),
        ("n = 0\nwhile True:\n  n += 1\n  open(f'{n}', 'w').write('x' * (1 << 19))", Status.FAILED, "its files hold"),
        ("n = 0\nwhile True:\n  n += 1\n  open(f'{n}', 'w').close()", Status.FAILED, "its files hold"),
    ],
)
def test_what_does_not_end_well(code: str, status: Status, reason: str) -> None:
    outcome = run(code, limits=Limits(wall_s=1.0 if status is Status.TIMEOUT else 20.0, folder_bytes=1 << 20))
    assert outcome.status is status, outcome.detail
    assert reason in outcome.detail
    assert outcome.seconds < 20


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit",
        'import os\nos.write(1, b\'{"status": "passed"}\')\nos._exit(0)',
        'import os\nfor n in range(3, 64):\n  try: os.write(n, b\'{"status": "passed", "token": ""}\')\n'
        "  except OSError: pass\nos._exit(0)",
        "import os\nfor n in range(3, 64):\n  try:\n    while os.write(n, b'x' * 99_999): pass\n  except OSError: pass",
    ],
)
def test_leaving_before_the_tests_is_not_passing(code: str) -> None:
    assert run(code, "assert False").status is Status.FAILED


FORGERIES = {
    "depth": "for n in range(3, 64):\n  try: os.write(n, b'[' * 60_000)\n  except OSError: pass\nos._exit(0)",
    "status": "forge('none', '')",
    "no sandbox": "forge('unconfined', 'so it says')",
}
_FORGE = """
import os, sys
def forge(status, detail):
    frame = sys._getframe()
    while "answer" not in frame.f_locals: frame = frame.f_back
    frame.f_locals["answer"](status, detail)
    os._exit(0)
"""


@pytest.mark.parametrize("name", FORGERIES)
def test_no_answer_ends_the_callers_work(name: str) -> None:
    """Code that steals the token may cheat its own tests; it must not stop a run of many."""
    outcome = run(_FORGE + FORGERIES[name], "assert False")
    assert outcome.status is Status.FAILED
    assert outcome.detail.startswith("it ended before" if name == "depth" else "it forged"), outcome.detail


ATTACKS = {
    "fork": "import os\nwhile True: os.fork()",
    "a program": "import subprocess\nsubprocess.run(['true'])",
    "exec": "import os\nos.execv('/bin/true', ['true'])",
    "a thread": "import threading\nthreading.Thread(target=print).start()",
    "a process of multiprocessing": "import multiprocessing\nmultiprocessing.Process(target=print).start()",
    "a socket": "import socket\nsocket.create_connection(('127.0.0.1', PORT))",
    "a signal": "import os\nos.kill(os.getppid(), 9)",
    "a signal to a group": "import os\nos.killpg(os.getpgid(os.getppid()), 9)",
    "a signal from a file": "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())",
    "another's limits": "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (8, 8))",
    "another's priority": "import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "its own limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "a file elsewhere": "open('OUTSIDE/new', 'w')",
    "a file that is there": "open('OUTSIDE/kept', 'a').write('more')",
    "removal": "import os\nos.remove('OUTSIDE/kept')",
    "renaming": "import os\nos.rename('OUTSIDE/kept', 'mine')",
    "a link": "import os\nos.link('OUTSIDE/kept', 'mine')",
    "modes": "import os\nos.chmod('OUTSIDE/kept', 0)",
    "cutting": "import os\nos.truncate('OUTSIDE/kept', 0)",
    "reading": "open('OUTSIDE/kept').read()",
    "the password file": "open('/etc/passwd').read()",
    "memory by another name": "import os\nos.memfd_create('x')",
}


@pytest.fixture(scope="module")
def listener() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.mark.parametrize("name", ATTACKS)
def test_the_machine_is_out_of_reach(name: str, tmp_path: Path, listener: socket.socket) -> None:
    (tmp_path / "kept").write_text("kept")
    code = ATTACKS[name].replace("OUTSIDE", str(tmp_path)).replace("PORT", str(listener.getsockname()[1]))
    outcome = run(code)
    assert outcome.status is Status.FAILED, outcome
    refused = ("PermissionError", "not permitted", "can't start new thread", "not allowed to raise", "Errno 18")
    assert any(reason in outcome.detail for reason in refused), outcome
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"kept": "kept"}
    assert (tmp_path / "kept").stat().st_mode & 0o777 != 0
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize("name", ["a program", "a file elsewhere", "reading", "a socket", "cutting"])
def test_the_attacks_work_without_the_sandbox(name: str, tmp_path: Path, listener: socket.socket) -> None:
    """The negative control: it is confinement that stops them."""
    (tmp_path / "kept").write_text("kept")
    code = ATTACKS[name].replace("OUTSIDE", str(tmp_path)).replace("PORT", str(listener.getsockname()[1]))
    assert subprocess.run([sys.executable, "-I", "-c", code], check=False, cwd=tmp_path).returncode == 0
    if name == "a socket":
        listener.accept()[0].close()


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    run("open('a', 'w').write('x')\nimport os\nos.mkdir('b')")
    run("while True: pass", limits=Limits(wall_s=0.3))
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == 1


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFT_TEST_SECRET", "s3cret")
    assert run("import os", "assert 'PREFT_TEST_SECRET' not in os.environ, 'seen'\nassert len(os.environ) < 5").passed


def test_several_run_at_a_time_and_keep_their_order() -> None:
    programs = [Program(f"import time\ntime.sleep(0.5)\nx = {n}", f"assert x % 2 == 0, '{n}'") for n in range(4)]
    started = time.monotonic()
    outcomes = run_programs(programs, SHORT, workers=4)
    assert time.monotonic() - started < 2.0, "four sleeps of half a second, one after the other, take longer"
    assert [outcome.passed for outcome in outcomes] == [True, False, True, False]


def test_it_knows_that_it_works() -> None:
    require_sandbox()


def test_limits_are_checked() -> None:
    with pytest.raises(UsageError):
        Limits(wall_s=0)


def test_without_landlock_no_file_can_be_written(tmp_path: Path) -> None:
    """Old kernels, and containers whose profile hides it: reading stays open, writing is closed altogether."""
    code = f"""
import runpy
kept = runpy.run_path({confinement.__file__!r})
kept["confine"].__globals__["_landlock"] = lambda readable, writable: False
assert kept["confine"]([], "{tmp_path}") is False
for mode in ("w", "a", "r+", "x"):
    try:
        open("{tmp_path}/kept" if mode != "x" else "{tmp_path}/new", mode)
    except PermissionError:
        continue
    raise SystemExit("written with " + mode)
import os
for change in (lambda: os.remove("{tmp_path}/kept"), lambda: os.mkdir("{tmp_path}/new"), lambda: os.fork()):
    try:
        change()
    except PermissionError:
        continue
    raise SystemExit("changed")
assert open("{tmp_path}/kept").read() == "kept"
"""
    (tmp_path / "kept").write_text("kept")
    ended = subprocess.run([sys.executable, "-I", "-c", code], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_numbers_of_system_calls_agree_with_the_kernels_headers() -> None:
    headers = {
        0: Path(f"/usr/include/{platform.machine()}-linux-gnu/asm/unistd_64.h"),
        1: Path("/usr/include/asm-generic/unistd.h"),
    }
    if platform.machine() != "x86_64" or not all(path.is_file() for path in headers.values()):
        pytest.skip("needs the kernel's headers on x86-64")
    for column, path in headers.items():
        known = {}
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 3 and words[0] == "#define" and words[1].startswith("__NR") and words[2].isdigit():
                known[words[1].removeprefix("__NR3264_").removeprefix("__NR_")] = int(words[2])
        tables = {**confinement._DENIED, **confinement._CHANGES_FILES, **confinement._OPEN}
        checked = {name: numbers[column] for name, numbers in tables.items()}
        assert checked == {name: known.get(name) for name in checked}

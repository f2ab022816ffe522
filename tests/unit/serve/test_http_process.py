"""The watcher, with stand-ins for vLLM's server: what it takes for ready, how it ends, what it says of a failure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from preft.errors import EngineError, PreftError, UnsupportedError, UsageError
from preft.serve.http.failure import find_cause
from preft.serve.http.launch import Address, Launch
from preft.serve.http.plan import ServePlan
from preft.serve.http.process import ServerProcess

SERVER = """
import http.server, json, os, signal, subprocess, sys, threading, time
from preft.serve.http.plan import take_plan
mode, port = sys.argv[1], int(sys.argv[2])
plan = take_plan()
print("log line", flush=True)
if mode == "orphan":
    print("child", subprocess.Popen(["sleep", "600"]).pid, flush=True)
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        key = self.headers.get("Authorization")
        body = {"instance": plan.instance if mode != "other" else "x", "key": key, "adapters": []}
        status = 404 if mode == "bare" else 200
        data = json.dumps(body).encode()
        self.send_response(status); self.send_header("Content-Length", str(len(data))); self.end_headers()
        self.wfile.write(data)
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
if mode == "dies":
    threading.Timer(1.0, lambda: (print("preft.errors.EngineError: It broke", flush=True), os._exit(3))).start()
server.serve_forever()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch_of(*command: str, port: int | None = None, stop_s: float = 5.0, adapters: int = 0) -> Launch:
    port = port or free_port()
    plan = ServePlan("m", ("m",), {f"adapter-{i}": "/somewhere/" + "x" * 100 for i in range(adapters)})
    words = tuple(word.replace("PORT", str(port)) for word in command)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return Launch(words, environment, plan, Address("127.0.0.1", port), "key", stop_s)


def stand_in(script: Path, mode: str, **settings: object) -> Launch:
    return launch_of(sys.executable, str(script), mode, "PORT", **settings)  # type: ignore[arg-type]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ready_then_ended_by_a_signal(script: Path) -> None:
    lines: list[tuple[str, bool]] = []
    # A plan longer than a pipe holds.
    launch = stand_in(script, "right", adapters=2000)
    assert len(launch.plan.encode()) > 1 << 17
    with ServerProcess(launch, on_log=lambda line, serving: lines.append((line, serving))) as server:
        ready = server.wait_ready()
        assert ready is not None
        assert ready.health["key"] == "Bearer key"
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        server.wait()
        assert server.stop_requested
        pid = server.pid
    assert not is_running(pid)
    assert lines == [("log line", False)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_end_asked_for_before_it_is_ready() -> None:
    launch = launch_of("sleep", "600")
    with ServerProcess(launch, on_log=lambda *_: None) as server:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert server.wait_ready() is None


def test_a_server_that_does_not_listen_to_the_end_is_killed(script: Path) -> None:
    with ServerProcess(stand_in(script, "deaf", stop_s=0.5), on_log=lambda *_: None) as server:
        server.wait_ready()
        pid = server.pid
    assert not is_running(pid)


def test_nothing_is_left_behind(script: Path) -> None:
    lines: list[str] = []
    with ServerProcess(stand_in(script, "orphan"), on_log=lambda line, _: lines.append(line)) as server:
        server.wait_ready()
        child = int(next(line for line in lines if line.startswith("child")).split()[1])
        assert is_running(child)
    for _ in range(50):
        if not is_running(child):
            break
        time.sleep(0.1)
    assert not is_running(child)


def test_a_server_without_preft_in_it_is_not_ready(script: Path) -> None:
    with ServerProcess(stand_in(script, "bare"), on_log=lambda *_: None) as server:
        with pytest.raises(EngineError, match=r"without preft's routes[\s\S]*status 404"):
            server.wait_ready()
        pid = server.pid
    assert not is_running(pid)


def test_another_server_at_the_address_is_not_ours(script: Path) -> None:
    with (
        ServerProcess(stand_in(script, "other"), on_log=lambda *_: None) as server,
        pytest.raises(UsageError, match="Another server answers"),
    ):
        server.wait_ready()


def test_a_server_that_ends_by_itself(script: Path) -> None:
    with ServerProcess(stand_in(script, "dies"), on_log=lambda *_: None) as server:
        assert server.wait_ready() is not None
        with pytest.raises(EngineError, match="It broke"):
            server.wait()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import sys; sys.exit(4)", "got: exit status 4"),
        ("import os; os.kill(os.getpid(), 9)", "got: killed by SIGKILL"),
        ("raise ValueError('no room')", "got: ValueError: no room \\(exit status 1\\)"),
        ("import argparse as a; a.ArgumentParser(prog='entry.py').parse_args()", "error: unrecognized arguments"),
    ],
)
def test_a_server_that_never_gets_ready(code: str, text: str) -> None:
    launch = launch_of(sys.executable, "-c", code, "--nonsense")
    with (
        ServerProcess(launch, on_log=lambda *_: None) as server,
        pytest.raises(EngineError, match=f"ended before it was ready[\\s\\S]*{text}"),
    ):
        server.wait_ready()


def test_the_server_ends_with_its_parent(script: Path) -> None:
    """A parent that is killed can end nothing; the server notices."""
    port = free_port()
    code = f"""
import sys, time
sys.path[:0] = {[str(path) for path in sys.path]!r}
from tests.unit.serve.test_http_process import ServerProcess, launch_of
from pathlib import Path
launch = launch_of(sys.executable, {str(script)!r}, "right", "PORT", port={port})
with ServerProcess(launch, on_log=lambda *_: None) as server:
    server.wait_ready()
    print(server.pid, flush=True)
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.wait()
    for _ in range(50):
        if not is_running(pid):
            break
        time.sleep(0.1)
    assert not is_running(pid)


LOG = """\
(APIServer pid=1) WARNING 01-02 03:04:05 [a.py:1] ValueErrors are fun
(EngineCore pid=2) ERROR 01-02 03:04:05 [core.py:1] Traceback (most recent call last):
(EngineCore pid=2) ERROR 01-02 03:04:05 [core.py:1]   File "x.py", line 1, in f
(EngineCore pid=2) ERROR 01-02 03:04:05 [core.py:1] {cause}
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
OURS = """preft.errors.UnsupportedError: It is not served
(EngineCore pid=2) ERROR 01-02 03:04:05 [core.py:1]   got: this
(EngineCore pid=2) ERROR 01-02 03:04:05 [core.py:1]   accepted: that
(EngineCore pid=2) ERROR 01-02 03:04:05 [core.py:1]\x20
(EngineCore pid=2) ERROR 01-02 03:04:05 [core.py:1] hint: do so"""


def test_the_cause_is_found_above_its_symptoms() -> None:
    assert find_cause(LOG.format(cause="torch.OutOfMemoryError: no room").splitlines()) == (
        "torch.OutOfMemoryError: no room"
    )
    ours = find_cause(LOG.format(cause=OURS).splitlines())
    assert isinstance(ours, UnsupportedError)
    assert ours.to_dict() == {
        "type": "UnsupportedError",
        "message": "It is not served",
        "got": "this",
        "accepted": "that",
        "hint": "do so",
    }
    assert find_cause(["all is well\n"]) is None
    assert find_cause(["vllm.exceptions.EngineDeadError: EngineCore encountered an issue"]) is None
    validation = "pydantic.ValidationError: 1 validation error for X\n  Value error, It is too long [type=v]\n"
    assert find_cause(validation.splitlines()) == "Value error, It is too long [type=v]"
    assert not isinstance(find_cause(["preft.errors.PreftErrors: x"]), PreftError)

"""A finished adapter goes to a hub: a local one that speaks the hub's interface."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from preft.adapters.store import load_adapter, save_adapter
from preft.errors import FileError
from preft.train.push import push_adapter
from tests.helpers.tiny import random_adapter


class FakeHub(ThreadingHTTPServer):
    """Makes repositories and takes commits of small files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.refuse = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_args: Any) -> None:
        pass

    def _answer(self, document: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            sent = b""
            while size := int(self.rfile.readline(), 16):
                sent += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.refuse:
            self._answer({"error": "You need to log in"}, 401)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(sent))
            self._answer({"url": f"{self.server.address}/me/mine"})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif self.path.startswith("/api/models/me/mine/preupload/"):
            names = [file["path"] for file in json.loads(sent)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            self._answer({"files": files})
        elif self.path.startswith("/api/models/me/mine/commit/"):
            for line in map(json.loads, sent.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer({"commitOid": "0" * 40, "commitUrl": f"{self.server.address}/me/mine/commit/0"})
        else:
            self._answer({"error": self.path}, 404)

    def do_GET(self) -> None:
        self._answer({"id": "me/mine", "sha": "0" * 40, "siblings": []})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    # Tests are offline; this hub is here.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def run_folder(tiny_llama: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    save_adapter(random_adapter(tiny_llama, seed=0, targets=["q_proj"], rank=1), folder, readme="# Card\n")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "optimizer.pt").write_bytes(b"private")
    (folder / "run.json").write_text('{"argv": ["secret"]}')
    return folder


def test_the_adapter_arrives_whole_and_alone(hub: FakeHub, run_folder: Path, tmp_path: Path) -> None:
    commit = push_adapter(run_folder, "me/mine", endpoint=hub.address)
    assert commit.endswith("/commit/0")
    assert hub.created == [{"name": "mine", "organization": "me", "visibility": "private"}]
    assert sorted(hub.files) == ["README.md", "preft.json", "preft.safetensors"]
    pulled = tmp_path / "pulled"
    pulled.mkdir()
    for name, content in hub.files.items():
        (pulled / name).write_bytes(content)
    assert load_adapter(pulled).digest == load_adapter(run_folder).digest


def test_a_hub_that_refuses_leaves_the_adapter_and_says_what_to_do(hub: FakeHub, run_folder: Path) -> None:
    hub.refuse = True
    with pytest.raises(FileError, match="cannot be pushed to `me/mine`") as caught:
        push_adapter(run_folder, "me/mine", endpoint=hub.address)
    assert "hf auth login" in str(caught.value.hint)
    assert load_adapter(run_folder)
    with pytest.raises(FileError, match="cannot be pushed to `a b`"):
        push_adapter(run_folder, "a b", endpoint=hub.address)

"""The status page: nothing from outside, nothing run but its own script, and what a browser makes of it."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preft.serve.http.status_page import status_page

KEY = "a-key"
HOSTILE = '<img src=x onerror="document.title=1">'
METRICS = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:generation_tokens_total{engine="0"} 100.0
preft_adapter_requests_total{adapter="alice",engine="0"} 7.0
"""
ANSWERS: dict[str, Any] = {
    "/v1/preft/health": {"status": "ok", "canary": [{"moved": 1.25, "restored": True}]},
    "/v1/preft/status": {
        "names": ["base-model"],
        "options": {"slots": 8, "cache_bytes": 4 << 30},
        "workers": [{"steps": 40, "adapted_steps": 4, "adapters": 2, "adapter_bytes": 3 << 20}],
    },
    "/v1/preft/adapters": {
        "adapters": [
            {"name": "alice", "available": True, "kind": "LoRAP", "positions": "prompt", "max_rank": 16, "bytes": 2048,
             "digest": "ab" * 32},
            {"name": HOSTILE, "available": False, "error": {"message": f"broken {HOSTILE}"}},
        ]
    },
}  # fmt: skip
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Fake(http.server.BaseHTTPRequestHandler):
    """A server that answers as ours does, from a table."""

    def do_GET(self) -> None:
        text, policy = status_page()
        if self.path == "/preft":
            self.answer(200, text.encode(), "text/html", {"Content-Security-Policy": policy})
        elif self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":  # type: ignore[attr-defined]
            self.answer(401, b"{}", "application/json")
        elif self.path == "/metrics":
            self.answer(200, METRICS.encode(), "text/plain")
        elif self.path in ANSWERS:
            self.answer(200, json.dumps(ANSWERS[self.path]).encode(), "application/json")
        else:
            self.answer(404, b"{}", "application/json")

    def answer(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=[None, KEY], ids=["open", "locked"])
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    made.key = request.param  # type: ignore[attr-defined]
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def test_it_asks_nothing_of_anybody_else() -> None:
    text, policy = status_page()
    assert not re.search(r"https?://|//[a-z]", text.replace("// ", ""))
    assert not re.search(r"\son\w+=|innerHTML|insertAdjacentHTML|eval\(|localStorage|document\.cookie", text)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == text.count("<script") == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_a_browser_shows_what_the_routes_say(server: Any, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    address = f"http://127.0.0.1:{server.server_address[1]}/preft"
    call = [chromium, *FLAGS, f"--user-data-dir={tmp_path}", "--virtual-time-budget=6000", "--dump-dom", address]
    shown = subprocess.run(call, capture_output=True, text=True, timeout=120, check=True).stdout
    body = shown[shown.index("<main>") : shown.index("</main>")]
    if server.key:
        assert ">locked<" in body
        assert "alice" not in body
        assert re.search(r'<form id="ask">', body)
        return
    assert ">running<" in body
    assert "yes, by 1.25" in body
    for text in ("alice", "LoRAP", "base-model", "3.0 MiB", "25 %", ">7<"):
        assert text in body, text
    assert "&lt;img src=x" in body
    assert "<img" not in body
    assert "<title>preft</title>" in shown

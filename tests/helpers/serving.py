"""A real `preft serve` on a free port, and a client that hides nothing of its answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.engines import BLOCK, CHUNK

KEY = "sesame-open"
START_S, ANSWER_S, STOP_S = 600, 60, 30
TOKENS = 12


@dataclass
class Server:
    """A running `preft serve`.

    Attributes:
        process: The command, not vLLM's server under it.
        port: Where it listens.
        log: File with what it has said.
    """

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        key: str | None = KEY,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Status and body; what is sent is JSON unless it is bytes, and what comes is parsed where it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        sent = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        with contextlib.closing(connection):
            connection.request(method, path, data, {**sent, **(headers or {})})
            answer = connection.getresponse()
            text = answer.read().decode()
        with contextlib.suppress(ValueError):
            return answer.status, json.loads(text)
        return answer.status, text

    def complete(self, model: str, prompt: Sequence[int] | str, key: str = KEY, **fields: object) -> tuple[int, Any]:
        """A greedy completion of `TOKENS` tokens."""
        body = {
            "model": model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        return self.ask("POST", "/v1/completions", body, key)

    def tokens(self, model: str, prompt: Sequence[int], **fields: Any) -> tuple[int, ...]:
        """The tokens of a completion, which must succeed."""
        status, answer = self.complete(model, prompt, **fields)
        assert status == 200, answer
        return tuple(answer["choices"][0]["token_ids"])

    def models(self, key: str = KEY) -> list[str]:
        """What `/v1/models` lists."""
        return [card["id"] for card in self.ask("GET", "/v1/models", key=key)[1]["data"]]

    def stop(self) -> int:
        """Asks it to end and returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=STOP_S)


@contextlib.contextmanager
def running_server(
    model: Path, root: Path, folder: Path, *options: str, max_model_len: int = 400, **variables: str
) -> Iterator[Server]:
    """Starts `preft serve` on a free port and waits until it says that it is ready.

    Args:
        model: Checkpoint.
        root: Of the adapters.
        folder: For its key and its log.
        options: More of them.
        max_model_len: Longest prompt plus output.
        variables: More of its environment.
    """
    (folder / "key").write_text(KEY)
    log = folder / "stderr"
    command = [sys.executable, "-m", "preft_cli", "serve", str(model), "--adapters", str(root)]
    command += ["--port", "0", "--api-key-file", str(folder / "key"), "--dtype", "float32", "--slots", "2", *options]
    command += ["--max-model-len", str(max_model_len), "--kv-cache-gib", "0.25", "--served-model-name", "base"]
    command += ["--served-model-name", "alias", "--", "--block-size", str(BLOCK)]
    command += ["--max-num-seqs", "8", "--max-num-batched-tokens", str(CHUNK)]
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_LOGGING_LEVEL"}
    environment |= variables
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment)
    server = Server(process, 0, log)
    try:
        deadline = time.monotonic() + START_S
        while "available" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        server.port = int(log.read_text().partition("http://127.0.0.1:")[2].partition("/")[0])
        yield server
    finally:
        try:
            server.stop()
        finally:
            process.kill()


def form(fields: Mapping[str, str], files: Mapping[str, bytes]) -> tuple[bytes, dict[str, str]]:
    """A multipart body and its headers."""
    boundary = "a-boundary-that-occurs-nowhere"
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    for name, data in files.items():
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{name}"\r\n\r\n'
        parts.append(head.encode() + data + b"\r\n")
    body = b"".join(parts) + f"--{boundary}--\r\n".encode()
    return body, {"Content-Type": f"multipart/form-data; boundary={boundary}"}

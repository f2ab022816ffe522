"""Latency under load: what is asked, what a load holds, the knee, rows, Ctrl-C, and vLLM's client on a small server."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from preft.bench.latency.client import LoadClient
from preft.bench.latency.results import knees, measured, remarks, summarise
from preft.bench.latency.runner import Served
from preft.bench.latency.spec import LatencySpec, next_rate, read_trace
from preft.bench.rows import read_rows
from preft.errors import EngineError, FileError, UsageError
from preft_cli import bench_latency
from preft_cli.app import run
from preft_cli.console import Session
from tests.unit.bench.common import spec_of
from tests.unit.bench.test_report import fetched

FAKE = str(Path(__file__).with_name("fake_client.py"))


def latency_spec(out: Path, **changes: Any) -> LatencySpec:
    bench = {"arms": ("base", "lorap", "direftp"), "adapters": (2,), "repeats": 1, "output_len": 4}
    bench |= {key: changes.pop(key) for key in list(changes) if key in ("arms", "repeats", "model", "popularity")}
    return LatencySpec(spec_of(out, **bench), **{"seconds": 4.0, **changes})


@contextlib.contextmanager
def fake_server(spec: LatencySpec, *_: Any) -> Iterator[Served]:
    names = {"base": ("base",), "lorap": ("lorap-0", "lorap-1"), "direftp": ("direftp-0", "direftp-1")}
    yield "http://nowhere/v1/completions", {arm: names[arm] for arm in spec.bench.arms}, lambda: False


def measure(spec: LatencySpec, *actions: str, as_json: bool = False) -> int:
    command = [sys.executable, FAKE, "8", *actions]
    session = Session(as_json=as_json, quiet=True)
    return bench_latency.run_latency_bench(spec, session, command=command, server=fake_server)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--arms", "base,stock-lora"],
            "`--arms` is not valid\n  got: stock-lora\n  accepted: base, lora, lorap, direftp",
        ),
        (["--rates", "2,1"], "`--rates` is not valid\n  got: 2, 1\n  accepted: rising numbers"),
        (["--rates", "0"], "`--rates` is not valid"),
        (["--rates", "fast"], "`--rates` is not valid\n  got: `fast`\n  accepted: auto, or numbers"),
        (["--rank", "8,16"], "one number of adapters and one rank"),
        (["--seconds", "0"], "`--seconds` is not valid"),
        (["--burstiness", "0"], "`--burstiness` is not valid"),
        (["--knee-factor", "1"], "`--knee-factor` is not valid\n  got: 1.0\n  accepted: above 1"),
        (["--url", "http://x/v1"], "`--url` and `--models` belong together"),
        (["--models", "a"], "`--url` and `--models` belong together"),
        (["--url", "x", "--models", "a"], "`--url` is not valid"),
        (
            ["--input-len", "600"],
            "The requests are longer than the model's context\n  got: 664 tokens\n  accepted: at most 512",
        ),
        (["--adapters", "90000000"], "do not fit the memory"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    flags: list[str],
    message: str,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[object] = []
    monkeypatch.setattr(bench_latency, "run_latency", lambda *args, **kwargs: started.append(args))
    assert run(["bench", "latency", str(tiny_llama), "--out", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err
    assert started == []


def test_traces(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"at": 0, "input_len": 3, "output_len": 2}\n{"at": 1.5, "input_len": 5, "output_len": 1, "adapter": 1}\n'
    )
    trace = read_trace(file)
    spec = latency_spec(tmp_path, trace=trace)
    load = spec.load(None, ("a", "b"), 100, repeat=0)
    assert [(item["at"], len(item["prompt"]), item["output_len"], item["adapter"]) for item in load] == [
        (0, 3, 2, 0),
        (1.5, 5, 1, 1),
    ]
    with pytest.raises(UsageError, match="both say when"):
        replace(spec, rates=(1.0,))
    with pytest.raises(UsageError, match=r"got: 6 tokens\n  accepted: at most 5"):
        spec.require_length(5)
    file.write_text('{"at": 0, "input_len": 3, "output_len": 2, "adapter": 2}\n')
    with pytest.raises(UsageError, match="an adapter that is not there"):
        replace(spec, trace=read_trace(file))
    for bad in (
        '{"at": 0}',
        "x",
        '{"at": 0, "input_len": 0, "output_len": 1}',
        '{"at": -1, "input_len": 1, "output_len": 1}',
        '{"at": 0, "input_len": 1, "output_len": 1, "n": 1}',
        "",
    ):
        file.write_text(bad)
        with pytest.raises(FileError, match=r"Line 1 of|holds no requests"):
            read_trace(file)
    with pytest.raises(FileError, match="cannot be read"):
        read_trace(tmp_path / "nowhere")


def test_a_load_is_the_same_for_all_arms_and_new_for_each_rate(tmp_path: Path) -> None:
    spec = latency_spec(tmp_path, popularity="zipf:1.1")
    one, other = (spec.load(2.0, names, 1000, repeat=0) for names in (("a", "b"), ("base",)))
    assert [item["prompt"] for item in one] == [item["prompt"] for item in other]
    assert len(one) == 8
    assert len(spec.load(5.0, ("a",), 1000, repeat=0)) == 20
    assert {item["model"] for item in one} <= {"a", "b"}
    again = [item["prompt"] for item in spec.load(2.0, ("a", "b"), 1000, repeat=1)]
    assert again != [item["prompt"] for item in one]
    assert len({tuple(prompt) for prompt in again}) == 8


def test_the_rates_of_a_sweep(tmp_path: Path) -> None:
    spec = latency_spec(tmp_path)
    assert [next_rate(spec, [0.0] * count, past_knee=False) for count in range(4)] == [0.5, 1, 2, 4]
    assert next_rate(spec, [0.5], past_knee=True) is None
    assert next_rate(spec, [0.0] * 12, past_knee=False) is None
    given = latency_spec(tmp_path, rates=(1.0, 3.0))
    assert [next_rate(given, [0.0] * count, past_knee=True) for count in range(3)] == [1, 3, None]


def test_the_figures_of_a_load() -> None:
    asked = [{"adapter": index % 2, "output_len": 3} for index in range(3)]
    answer = {"sent_s": 1.0, "ttft_s": 0.5, "itl_s": [0.25, 0.75], "latency_s": 1.5, "output_tokens": 3, "error": None}
    answers = [answer, {**answer, "sent_s": 2.0, "ttft_s": 1.0, "latency_s": 2.0}, {**answer, "error": "no"}]
    found = measured(asked, answers)
    assert (found["requests"], found["failed"], found["short"]) == (3, 1, 0)
    assert found["seconds"] == 3.0  # from 1 s to 2 + 2 s
    assert found["output_tokens_per_s"] == 6 / 3
    assert found["ttft_s"]["p50"] == 0.75
    assert found["tpot_s"]["p50"] == 0.5
    assert found["itl_s"]["p50"] == 0.5
    assert found["latency_s"]["p50"] == 1.75
    assert found["fairness"]["ttft_s"] == {"min": 0.5, "median": 0.75, "max": 1.0}
    assert measured(asked[:1], [{**answer, "output_tokens": 2}])["short"] == 1
    assert measured(asked[:1], [{**answer, "error": "no"}])["requests_per_s"] is None


def test_a_sweep_ends_past_the_knee(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that answers in 0.1 / (1 - rate / 8) + 0.06 s: 0.167, 0.174, 0.193, 0.26 and then far more."""
    spec = latency_spec(tmp_path, model=str(tiny_llama), repeats=2)
    assert measure(spec) == 0
    assert "beyond" in capsys.readouterr().out
    rows = read_rows(tmp_path)
    sent = (tmp_path / "logs" / "client.log").read_text().splitlines()
    assert sent[:3] == ["8 requests at 100000.0"] * 3  # a few of each arm, to warm up
    assert len(sent) == 3 + len(rows)
    assert [row["rate"] for row in rows if row["arm"] == "base" and row["repeat"] == 0] == [0.5, 1, 2, 4, 8]
    assert not any(row["partial"] for row in rows)
    entries = summarise(rows, 2.0)
    assert knees(entries) == {"base": 4, "lorap": 4, "direftp": 4}
    entry = next(entry for entry in entries if (entry["arm"], entry["rate"]) == ("direftp", 4))
    assert entry["adapter_ttft_s_max"] == pytest.approx(2 * entry["adapter_ttft_s_min"])  # one adapter is slower
    assert entry["repeats"] == 2
    notes = remarks(entries, "complete")
    assert "the knee of base is at 4 requests/s" in notes
    assert "the knee of base was not reached" in remarks(
        summarise([row for row in rows if row["rate"] < 8], 2.0), "complete"
    )
    page = (tmp_path / "index.html").read_text()
    assert fetched(page) == []
    assert page.count("<svg") == 2
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_is_one_load(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps({"at": at, "input_len": 4, "output_len": 3}) + "\n" for at in (0, 1, 5)))
    spec = latency_spec(tmp_path / "out", model=str(tiny_llama), arms=("base",), trace=read_trace(file))
    assert measure(spec, as_json=True) == 0
    (row,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (row["rate"], row["requests"], row["setup"]["trace_requests"]) == (None, 3, 3)
    assert row["seconds"] == pytest.approx(5 + 0.1 + 0.04)
    assert "3 requests of a trace" in (tmp_path / "out" / "index.html").read_text()


def test_failures_are_status_1(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = latency_spec(tmp_path, model=str(tiny_llama), arms=("base",), rates=(1.0, 2.0))
    assert measure(spec, "fail=1.0") == 1
    assert "warning: PARTIAL: the run is not complete: requests failed" in capsys.readouterr().err
    rows = read_rows(tmp_path)
    assert (rows[0]["failed"], rows[0]["error"]["message"]) == (1, "refused")
    assert rows[0]["past_knee"] is True
    assert "1 requests of base failed at 1 requests/s: refused" in remarks(summarise(rows, 2.0), "complete")


def test_ctrl_c_keeps_what_there_is(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The warm-up is load 0, the first rate load 1; the second is interrupted."""
    started = time.monotonic()
    spec = latency_spec(tmp_path, model=str(tiny_llama), arms=("base",))
    assert measure(spec, "stop=2") == 130
    assert time.monotonic() - started < 30
    assert [(row["rate"], row["partial"]) for row in read_rows(tmp_path)] == [(0.5, True)]
    assert "warning: PARTIAL: the run was interrupted" in capsys.readouterr().err


def test_a_client_that_dies_is_an_error(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"The load client has died\n  got: out of luck"):
        measure(latency_spec(tmp_path, model=str(tiny_llama), arms=("base",)), "die=1")


class Completions(BaseHTTPRequestHandler):
    """Streams as many words as asked, 20 ms apart, after 50 ms; refuses the model `nobody`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((time.monotonic(), body, self.headers.get("Authorization")))  # type: ignore[attr-defined]
        self.send_response(404 if body["model"] == "nobody" else 200)
        self.send_header("Connection", "close")
        self.end_headers()
        if body["model"] == "nobody":
            return
        time.sleep(0.05)
        for _ in range(body["max_tokens"]):
            self._event({"choices": [{"text": "x"}]})
            time.sleep(0.02)
        self._event({"choices": [], "usage": {"completion_tokens": body["max_tokens"], "prompt_tokens": 3}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, document: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        return


@pytest.mark.engine
def test_the_client_sends_when_due_and_measures_what_it_gets(tmp_path: Path) -> None:
    """vLLM's own code, against a server whose times are known."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    server.seen = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1/completions"
    requests = [
        {"model": model, "prompt": [1, 2, 3], "output_len": 4, "at": at}
        for model, at in (("a", 0.0), ("nobody", 0.2), ("b", 0.6))
    ]
    load = {"url": url, "rate": None, "burstiness": 1.0, "seed": 0, "requests": requests}
    try:
        with LoadClient(tmp_path / "client.log", api_key="sesame") as client:
            first, refused, last = client.send(load)
            seen = list(server.seen)  # type: ignore[attr-defined]
            poisson = client.send({**load, "rate": 20.0, "requests": [requests[0]] * 10})
    finally:
        server.shutdown()
        server.server_close()
    assert [(body["model"], body["max_tokens"], body["ignore_eos"]) for _, body, _ in seen] == [
        ("a", 4, True),
        ("nobody", 4, True),
        ("b", 4, True),
    ]
    assert {key for _, _, key in seen} == {"Bearer sesame"}
    assert (first["error"], first["output_tokens"], len(first["itl_s"])) == (None, 4, 3)
    assert refused["error"] == "Not Found"
    # Never early; late by what a busy machine makes of it.
    assert last["sent_s"] - first["sent_s"] >= 0.55
    assert 0.05 <= first["ttft_s"] < first["latency_s"]
    assert first["latency_s"] >= 0.05 + 3 * 0.02
    gaps = [later["sent_s"] - earlier["sent_s"] for earlier, later in pairwise(poisson)]
    assert poisson[-1]["sent_s"] - poisson[0]["sent_s"] >= 0.2  # ten at 20 a second
    assert max(gaps) > 2 * min(gaps)  # and not evenly

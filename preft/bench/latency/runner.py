"""The whole latency benchmark: a server, a client, and every arm at rising rates until past its knee."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from preft.bench.adapters import make_adapters
from preft.bench.facts import ModelFacts, machine_facts
from preft.bench.latency.client import CLIENT_COMMAND, LoadClient
from preft.bench.latency.results import Row, measured, past_knee
from preft.bench.latency.spec import (
    FIRST_RATE,
    LEAST_REQUESTS,
    SERVED,
    LatencySpec,
    next_rate,
    server_kv_gib,
    shuffled_arms,
)
from preft.bench.rows import keep_earlier, write_rows
from preft.bench.runner import COMPLETE, FAILED, INTERRUPTED, Outcome
from preft.config.progress import Progress, stage
from preft.errors import EngineError
from preft.provenance import provenance
from preft.serve.http.launch import ServeOptions, plan_launch
from preft.serve.http.process import ServerProcess
from preft.serve.settings import EngineSettings

BASE_NAME = "base"
AT_ONCE = 1e5
"""Requests/s of the few that warm the server up."""
Served = tuple[str, dict[str, tuple[str, ...]], Callable[[], bool]]
"""URL of the completions route, by arm the names of its models, and whether the end was asked for."""


@contextlib.contextmanager
def served(spec: LatencySpec, model: Path, facts: ModelFacts, progress: Progress | None = None) -> Iterator[Served]:
    """A server with the adapters of every arm under names of their own, or the one that `--url` names."""
    if spec.url is not None:
        yield f"{spec.url.rstrip('/')}/completions", {SERVED: spec.models}, lambda: False
        return
    bench, point = spec.bench, spec.bench.points[0]
    made = make_adapters(bench, model, progress=progress)
    paths = {
        f"{arm}-{index}": path
        for arm in bench.arms
        for index, path in enumerate(made.get((arm, point.ranks), [])[: point.adapters])
    }
    held = sum(facts.adapter_bytes(arm, max(point.ranks), bench.direft_rank) for arm in bench.arms) * point.adapters
    settings = EngineSettings(
        slots=bench.slots,
        dtype=bench.dtype,
        max_model_len=facts.max_length,
        max_num_seqs=bench.max_num_seqs or 64,
        kv_cache_gib=server_kv_gib(spec, facts),
        adapter_cache_gib=0.25 + 2.2 * held / (1 << 30),
        compiled=spec.compiled,
        vllm={"tensor_parallel_size": bench.tp} if bench.tp > 1 else {},
    )
    launch = plan_launch(bench.model, lambda: model, paths, settings, ServeOptions(port=0, names=(BASE_NAME,)))
    log = bench.out / "logs" / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as lines, contextlib.ExitStack() as stack:
        server = ServerProcess(launch, on_log=lambda line, _: print(line, file=lines, flush=True))
        stack.enter_context(server)
        with stage(progress, "Starting the server"):
            ready = server.wait_ready()
        if ready is None:
            raise KeyboardInterrupt
        broken = [entry for entry in ready.adapters if not entry["available"]]
        if broken:
            raise EngineError(f"{len(broken)} adapters cannot be served", got=f"`{broken[0]['name']}`", hint=f"{log}")
        names = {
            arm: tuple(name for name in paths if name.rpartition("-")[0] == arm) or (BASE_NAME,) for arm in bench.arms
        }
        yield f"{ready.url}/completions", names, lambda: server.stop_requested


def run_latency(
    spec: LatencySpec,
    model: Path,
    facts: ModelFacts,
    *,
    api_key: str | None = None,
    command: Sequence[str] = CLIENT_COMMAND,
    server: Callable[..., contextlib.AbstractContextManager[Served]] = served,
    progress: Progress | None = None,
) -> Outcome:
    """Measures every arm and repeat. Ctrl-C ends it early with what there is.

    Args:
        spec: What is asked.
        model: Checkpoint folder.
        facts: Of the model.
        api_key: For a server that asks for one.
        command: What the client's process runs.
        server: Opens the server.
        progress: Told of each load.

    Raises:
        PreftError: The server or the client does not work, or rows cannot be written.
    """
    out = spec.bench.out
    outcome = Outcome(earlier=keep_earlier(out))
    outcome.setup = {**provenance("bench latency", spec.to_dict()), "machine": machine_facts()}
    try:
        with (
            server(spec, model, facts, progress) as (url, names, is_stopped),
            LoadClient(out / "logs" / "client.log", api_key=api_key, command=command, is_stopped=is_stopped) as client,
        ):
            for arm in names:  # the first requests of a process pay for what is set up late
                few = spec.load(FIRST_RATE, names[arm], facts.vocab_size, repeat=-1)[:LEAST_REQUESTS]
                client.send(_load(spec, url, few, AT_ONCE))
            for repeat in range(spec.bench.repeats):
                for arm in shuffled_arms(spec, repeat):
                    for row in _sweep(spec, client, url, arm, names[arm], facts, repeat, progress):
                        outcome.rows.append({**row, "setup": outcome.setup})
                        write_rows(out, outcome.rows)
    except KeyboardInterrupt:
        outcome.status = INTERRUPTED
    else:
        outcome.status = FAILED if any(row["failed"] for row in outcome.rows) else COMPLETE
    for row in outcome.rows:
        row["partial"] = outcome.status != COMPLETE
    write_rows(out, outcome.rows)
    return outcome


def _sweep(
    spec: LatencySpec,
    client: LoadClient,
    url: str,
    arm: str,
    names: Sequence[str],
    facts: ModelFacts,
    repeat: int,
    progress: Progress | None,
) -> Iterator[Row]:
    """One arm in one repeat: the trace, or rate after rate."""
    rows: list[Row] = []
    while True:
        done = [row["rate"] for row in rows]
        beyond = bool(rows) and past_knee(rows, spec.knee_factor)
        rate = None if spec.trace else next_rate(spec, done, past_knee=beyond)
        if rate is None and (rows or not spec.trace):
            return
        what = "the trace" if rate is None else f"{rate:g} requests/s"
        with stage(progress, f"{arm}, {what}, repeat {repeat + 1} of {spec.bench.repeats}"):
            load = spec.load(rate, names, facts.vocab_size, repeat=repeat)
            answers = client.send(_load(spec, url, load, rate, seed=repeat))
        row: Row = {
            "arm": arm,
            "kind": spec.bench.labels.get(arm, arm),
            "repeat": repeat,
            "adapters": spec.num_adapters,
            "lora_rank": spec.bench.points[0].rank,
            "rate": rate,
            **measured(load, answers),
            "partial": True,
        }
        rows.append(row)
        yield {**row, "past_knee": past_knee(rows, spec.knee_factor)}


def _load(
    spec: LatencySpec, url: str, requests: Sequence[Mapping[str, Any]], rate: float | None, *, seed: int = 0
) -> dict[str, Any]:
    sent = [{key: item[key] for key in ("model", "prompt", "output_len", "at")} for item in requests]
    return {
        "url": url,
        "rate": rate,
        "burstiness": spec.burstiness,
        "seed": spec.bench.seed * 1009 + seed,
        "requests": sent,
    }

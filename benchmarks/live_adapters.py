"""Hundreds of adapters that come while requests run: what slots, loading and memory cost.

    python benchmarks/live_adapters.py --out out/live            # about 20 minutes on two quiet cores
    python benchmarks/live_adapters.py --out out/live --small    # minutes; shows that it works, measures nothing

Three parts, each in processes of its own, on SmolLM2-135M in bf16 with rank-16 adapters on all linear modules.

slots   512 requests of 128 + 64 tokens, each under an adapter of its own: stock base, prompt-only adapters over 8 slots
        and over 512, and all-token adapters over 8 (on fewer requests: only 8 run at once). Arms take turns. The first
        run of a process is cold, every adapter comes from disk; the others are warm.
memory  The plan that an engine prints, and what adapters and the process then really take.
stall   Inter-token times of running requests: alone, while 64 requests come under adapters that are resident, and while
        64 come under adapters that are not. What loading costs is the last against the one before; both are told.

Writes `live-adapters.json` below `--out`. Nothing else should run meanwhile; rows say how busy others were.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m-instruct"
RANK, SLOTS, INPUT_LEN, OUTPUT_LEN, SEED = 16, 8, 128, 64, 0
MAX_SEQS, KV_GIB = 128, 1.5
LORA_SHARE = 8
"""All-token adapters get one request in so many: they hold their slot to the end, so few run at once."""
QUIET_STEPS, RUNNING, ARRIVING, SHORT = 150, 8, 64, 16
"""Of the stall part: steps watched alone, requests that run, requests that come, and their prompt's tokens."""
PARTS = ("slots", "memory", "stall")


def main() -> None:
    """Runs the parts and writes what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for adapters, logs and the result")
    parser.add_argument("--only", choices=PARTS, help="one of the parts")
    parser.add_argument("--requests", type=int, default=512, help="requests of the slots part, and adapters")
    parser.add_argument("--repeats", type=int, default=1, help="processes of each arm of the slots part")
    parser.add_argument("--small", action="store_true", help="16 requests, 8 adapters that come: a check of the script")
    parser.add_argument("--child", choices=("memory", "stall"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.small:
        options.requests = 16
    if options.child:
        child = {"memory": memory_child, "stall": stall_child}[options.child]
        print(json.dumps(child(json.load(sys.stdin))))
        return
    found = measure(options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "live-adapters.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({part: found[part]["summary"] for part in PARTS if part in found}, indent=1))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All parts that were asked for."""
    from preft.bench.adapters import make_adapters
    from preft.bench.facts import machine_facts, read_facts
    from preft.bench.spec import BenchSpec
    from preft.models.locate import locate_model
    from preft.provenance import versions

    model = locate_model(MODEL)
    spec = BenchSpec(
        MODEL, options.out, arms=("lorap", "lora"), adapters=(options.requests,), ranks=((RANK,),), dtype="bfloat16"
    )
    paths = {arm: [str(path) for path in made] for (arm, _), made in make_adapters(spec, model).items()}
    found: dict[str, Any] = {"versions": versions(), "machine": machine_facts(), "requests": options.requests}
    wanted = [options.only] if options.only else list(PARTS)
    if "slots" in wanted:
        found["slots"] = slots_part(options, model, read_facts(model, "bfloat16").vocab_size, paths)
    watched = {"arriving": 4, "steps": 20} if options.small else {"arriving": ARRIVING, "steps": QUIET_STEPS}
    job = {"model": str(model), "paths": paths["lorap"], **watched}
    for part in ("memory", "stall"):
        if part in wanted:
            found[part] = run_child(part, job, options.out)
    return found


# Slots.


def slots_part(
    options: argparse.Namespace, model: Path, vocab_size: int, paths: dict[str, list[str]]
) -> dict[str, Any]:
    """The arms in turn, and their medians."""
    from preft.bench.job import ArmJob
    from preft.bench.process import run_arm

    few = max(SLOTS, options.requests // LORA_SHARE)
    arms = {
        "base": ("base", SLOTS, options.requests),
        f"lorap, {SLOTS} slots": ("lorap", SLOTS, options.requests),
        f"lorap, {options.requests} slots": ("lorap", options.requests, options.requests),
        f"lora, {SLOTS} slots": ("lora", SLOTS, few),
    }
    rows = []
    for repeat in range(options.repeats):
        for label, (arm, slots, requests) in arms.items():
            if arm == "lora" and repeat:
                continue
            own = paths.get(arm, [])[:requests]
            job = ArmJob(
                label=label, arm=arm, repeat=repeat, model=str(model), adapter_paths=tuple(own), adapters=requests,
                slots=slots, rank=RANK, lora_rank=RANK, input_len=INPUT_LEN, output_len=OUTPUT_LEN, requests=requests,
                vocab_size=vocab_size, mode="eager", warm_runs=1, popularity="distinct", dtype="bfloat16", seed=SEED,
                max_num_seqs=min(MAX_SEQS, requests), kv_cache_gib=KV_GIB, adapter_cache_gib=cache_gib(own),
            )  # fmt: skip
            note(f"slots: {label}, repeat {repeat + 1} of {options.repeats}")
            result = run_arm(job, options.out / "logs" / f"slots-{arm}-{slots}-{repeat}.log")
            if result.error is not None:
                raise SystemExit(f"{label}: {result.error}")
            rows += [{"arm": label, "repeat": repeat, "slots": slots, **run} for run in result.runs]
    return {"summary": summarise(rows, list(arms)), "rows": rows}


def summarise(rows: Sequence[dict[str, Any]], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Each arm's median tokens a second, cold and warm, as a part of base and of all slots."""

    def median(label: str, state: str) -> float:
        # Base has no adapter that could be cold.
        kept = [row for row in rows if row["arm"] == label and (label == "base" or row["state"] == state)]
        return float(statistics.median(row["output_tokens_per_s"] for row in kept))

    return [
        {
            "arm": label,
            "state": state,
            "output_tokens_per_s": median(label, state),
            "of_base": median(label, state) / median("base", state),
            "of_all_slots": median(label, state) / median(labels[2], state) if label != "base" else None,
            "other_busy_cores": max(row["other_busy_cores"] or 0.0 for row in rows if row["arm"] == label),
        }
        for label in labels
        for state in ("cold", "warm")
    ]


def cache_gib(paths: Sequence[str]) -> float:
    """Room for all of them and a little more."""
    return 0.25 + 1.1 * sum((Path(path) / "preft.safetensors").stat().st_size for path in paths) / (1 << 30)


# Memory and stall: in this file's own child processes.


def run_child(part: str, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Runs a part in a process of its own."""
    note(part)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--out", str(out), "--child", part]
    with (out / "logs" / f"{part}.log").open("w") as log:
        done = subprocess.run(
            command, input=json.dumps(job), stdout=subprocess.PIPE, stderr=log, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{part}: status {done.returncode}, see {out}/logs/{part}.log")
    # Compiled libraries print to standard output as they please; ours is the last line.
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def open_engine(job: dict[str, Any], paths: Sequence[str]) -> Any:
    """An engine over the adapters `a0`, `a1`, ..."""
    from preft.serve.engine import Engine
    from preft.serve.settings import EngineSettings

    settings = EngineSettings(
        slots=SLOTS, dtype="bfloat16", max_model_len=512, max_num_seqs=MAX_SEQS, kv_cache_gib=KV_GIB,
        adapter_cache_gib=cache_gib(paths), vllm={"skip_tokenizer_init": True},
    )  # fmt: skip
    return Engine(job["model"], {f"a{i}": path for i, path in enumerate(paths)}, settings=settings)


def memory_child(job: dict[str, Any]) -> dict[str, Any]:
    """What all adapters take: by their files, by the engine's count, and by the process's resident memory."""
    from preft.serve.registry import Registered

    with open_engine(job, job["paths"]) as engine:
        planned = sum(entry.num_bytes for entry in engine.registry.entries() if isinstance(entry, Registered))
        engine.prefetch(["a0"])  # what the first one brings in besides itself
        before, first = resident_bytes(), engine.status()[0]
        started = time.perf_counter()
        engine.prefetch()
        seconds = time.perf_counter() - started
        engine.generate([request("settle", 0, 0, 2)])
        growth, worker = resident_bytes() - before, engine.status()[0]
    loaded = worker["adapter_bytes"] - first["adapter_bytes"]
    due = planned * (len(job["paths"]) - 1) / len(job["paths"])
    summary = {
        "adapters": len(job["paths"]),
        "planned_bytes": planned,
        "adapter_bytes_of_plan": worker["adapter_bytes"] / planned,
        "rss_growth_of_plan": growth / due,
        "loads_per_s": (len(job["paths"]) - 1) / seconds,
    }
    return {"summary": summary, "plan": worker["memory"], "loaded_bytes": loaded, "rss_growth_bytes": growth}


def stall_child(job: dict[str, Any]) -> dict[str, Any]:
    """Inter-token times of requests that run, by what comes meanwhile."""
    from preft.bench.measure import Neighbours
    from preft.bench.stats import spread

    arriving = min(job["arriving"], (len(job["paths"]) - RUNNING) // 2)
    if arriving < 1:
        raise SystemExit("too few adapters for the stall part")
    with open_engine(job, job["paths"][: RUNNING + 2 * arriving]) as engine:
        warm = [f"a{RUNNING + i}" for i in range(arriving)]
        cold = [f"a{RUNNING + arriving + i}" for i in range(arriving)]
        engine.prefetch([f"a{i}" for i in range(RUNNING)] + warm)
        phases: dict[str, dict[str, Any]] = {}
        spans: dict[str, float] = {}
        for name, newcomers in (("alone", []), ("resident adapters come", warm), ("cold adapters come", cold)):
            neighbours = Neighbours()
            neighbours.start()
            gaps, seconds = watch(engine, name, newcomers, job["steps"])
            phases[name] = {**spread(gaps), "steps": len(gaps), "other_busy_cores": neighbours.busy_cores()}
            spans[name] = seconds
        adapters = engine.status()[0]["adapters"]
    assert adapters == RUNNING + 2 * arriving, f"{adapters} adapters are resident: some were never loaded"
    alone, resident, loading = (float(phase["p99"] or 0) for phase in phases.values())
    summary = {"p99_of_alone": loading / alone, "p99_of_resident": loading / resident, "arriving": arriving}
    return {"summary": summary, "phases": phases, "seconds": spans}


def watch(engine: Any, phase: str, newcomers: Sequence[str], steps: int) -> tuple[list[float], float]:
    """Times between tokens of the running requests, until the newcomers are through and enough steps have passed."""
    first = sum(map(ord, phase))  # new prompts in each phase
    running = [engine.submit(request(f"r{i}", i, first + i, 450, length=32)) for i in range(RUNNING)]
    left = set(running)
    gaps: list[float] = []
    while engine.has_unfinished and left:
        left -= {update.ticket for update in engine.step() if update.num_tokens}
    tickets = {engine.submit(request(name, int(name[1:]), first + 100 + i, 1)) for i, name in enumerate(newcomers)}
    started = before = time.perf_counter()
    while engine.has_unfinished and (tickets or len(gaps) < steps):
        updates = engine.step()
        now = time.perf_counter()
        if any(update.ticket in running for update in updates):
            gaps.append(now - before)
            before = now
        tickets -= {update.ticket for update in updates if update.result is not None}
    seconds = time.perf_counter() - started
    assert len(gaps) >= 2, "the running requests ended before the newcomers were through"
    engine.abort(running)
    return gaps, seconds


def request(name: str, adapter: int, seed: int, tokens: int, *, length: int = SHORT) -> Any:
    """A request under one adapter, with a prompt of its own."""
    from preft.bench.workload import make_prompts
    from preft.data.requests import GenerationRequest

    prompt = tuple(make_prompts(1, length, 40_000, seed=seed)[0])
    return GenerationRequest(name, prompt, f"a{adapter}", max_tokens=tokens, ignore_eos=True)


def resident_bytes() -> int:
    """Memory that this process holds now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def note(text: str) -> None:
    """Says what is under way."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

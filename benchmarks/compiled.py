"""What compilation gains: base, LoRAP and DiReFTP, eager and compiled in turn, and what a compiled start costs.

    python benchmarks/compiled.py --out out/compiled                 # about 40 minutes on two quiet cores
    python benchmarks/compiled.py --out out/try --model MODEL --adapters 2 --requests 2 --output-len 8 --repeats 1

SmolLM2-135M in bf16, 64 requests of 128 + 128 tokens under 64 adapters over 64 slots, one call of `preft bench
throughput`. Stock base compiles again at every start, preft's engine at its first. The three starts that are timed have
a compile cache of their own, empty at first. How many output tokens win their time back: reckoned with LoRAP's speeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from preft.bench.rows import read_rows

ARMS = "base,base-compiled,lorap,lorap-compiled,direftp,direftp-compiled"
STARTS = {"eager": False, "compiled, first": True, "compiled, later": True}
START = """
import json, sys, time
began = time.perf_counter()
from preft.serve.engine import Engine
from preft.serve.settings import EngineSettings
settings = EngineSettings(slots=64, dtype=sys.argv[2], max_model_len=256, compiled=json.loads(sys.argv[3]))
with Engine(sys.argv[1], settings=settings) as engine:
    print("start", json.dumps([time.perf_counter() - began, engine.status()[0]["canary"]["deviation"]]))
"""
WORKLOAD = {"adapters": 64, "requests": 64, "input_len": 128, "output_len": 128, "repeats": 3}


def main() -> None:
    """Takes the starts, runs the arms, prints both tables."""
    options = _options()
    starts = {label: _start(options, compiled) for label, compiled in STARTS.items()}
    print(_bench(options), flush=True)
    table = _start_table(starts, read_rows(options.out / "throughput"))
    options.out.joinpath("starts.md").write_text(table)
    print(table, end="")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    for name, value in WORKLOAD.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def _bench(options: argparse.Namespace) -> str:
    command = [sys.executable, "-m", "preft_cli", "bench", "throughput", options.model, "--arms", ARMS]
    for name in ("dtype", *WORKLOAD):
        command += [f"--{name.replace('_', '-')}", f"{getattr(options, name)}"]
    command += ["--slots", f"{options.adapters}", "--out", f"{options.out / 'throughput'}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stdout}failed: {' '.join(command)}")
    return done.stdout


def _start(options: argparse.Namespace, compiled: bool) -> tuple[float, float | None]:
    """Seconds to a ready engine, and by how much a compiled one deviates from its own Python."""
    environment = {**os.environ, "VLLM_CACHE_ROOT": f"{(options.out / 'vllm-cache').absolute()}"}
    command = [sys.executable, "-c", START, options.model, options.dtype, json.dumps(compiled)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("start "))
    seconds, deviation = json.loads(line.removeprefix("start "))
    return seconds, deviation


def _start_table(starts: dict[str, tuple[float, float | None]], rows: list[dict[str, Any]]) -> str:
    speeds = {
        arm: statistics.median(row["output_tokens_per_s"] for row in rows if row["arm"] == arm)
        for arm in ("lorap", "lorap-compiled")
    }
    saved = 1 / speeds["lorap"] - 1 / speeds["lorap-compiled"]
    lines = ["| start | seconds | won back after output tokens | deviation in the canary |", "|---|---|---|---|"]
    for label, (seconds, deviation) in starts.items():
        extra = seconds - starts["eager"][0]
        tokens = "-" if label == "eager" else f"{extra / saved:,.0f}" if saved > 0 else "never"
        shown = "-" if deviation is None else f"{deviation:.2g}"
        lines.append(f"| {label} | {seconds:.0f} | {tokens} | {shown} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

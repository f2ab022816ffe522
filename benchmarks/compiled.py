"""What compilation gains: base, LoRAP and DiReFTP, eager and compiled in turn, and what the first start costs.

    python benchmarks/compiled.py --out out/compiled                 # about 40 minutes on two quiet cores
    python benchmarks/compiled.py --out out/compiled --model TINY --requests 4 --output-len 8 --repeats 1

SmolLM2-135M in bf16, 64 requests of 128 + 128 tokens under 64 adapters over 64 slots. Each repeat is one eager and one
compiled call of `preft bench throughput`, so that both modes see the machine at the same time. Stock base compiles
again at every start; preft's engine at its first. Starts are taken with a compile cache of their own, empty at first.
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

from preft.bench.rows import ROWS_NAME, read_rows
from preft.bench.stats import ratio_interval

ARMS = {"eager": "base,lorap,direftp", "default": "base,lorap,direftp"}
NAMES = {"eager": "eager", "default": "compiled"}
START = """
import json, sys, time
began = time.perf_counter()
from preft.serve.engine import Engine
from preft.serve.settings import EngineSettings
settings = EngineSettings(slots=64, dtype=sys.argv[3], max_model_len=256, compiled=sys.argv[2] == "compiled")
with Engine(sys.argv[1], settings=settings) as engine:
    print("start", json.dumps([time.perf_counter() - began, engine.status()[0]["canary"]]))
"""


def main() -> None:
    """Runs the calls and prints the table."""
    options = _options()
    starts = _starts(options)
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for repeat in range(options.repeats):
        for mode, arms in ARMS.items():
            for row in _bench(options, mode, arms, options.out / f"{NAMES[mode]}-{repeat}"):
                found.setdefault((row["arm"], NAMES[mode]), []).append(row)
    table = "\n".join([*_throughput(found), "", *_start_table(starts, found)])
    options.out.joinpath("tables.md").write_text(table + "\n")
    print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def _bench(options: argparse.Namespace, mode: str, arms: str, out: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "preft_cli", "bench", "throughput", options.model, "--arms", arms, "--mode", mode]
    for name in ("adapters", "requests", "input_len", "output_len", "dtype"):
        command += [f"--{name.replace('_', '-')}", f"{getattr(options, name)}"]
    command += ["--slots", f"{options.adapters}", "--repeats", "1", "--out", f"{out}"]
    command += ["--adapter-dir", f"{options.out / 'adapters'}"]
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(f"failed: {' '.join(command)}")
    rows = read_rows(out / ROWS_NAME)
    for row in rows:
        if row["engine"]["eager"] != (mode == "eager"):
            raise SystemExit(f"{row['arm']} did not run {NAMES[mode]}: {row['engine']}")
    return rows


def _starts(options: argparse.Namespace) -> dict[str, tuple[float, dict[str, Any]]]:
    """Seconds to a ready engine and its canary: eager, compiled with an empty cache, and compiled again."""
    environment = {**os.environ, "VLLM_CACHE_ROOT": f"{options.out / 'vllm-cache'}"}
    found = {}
    for label, mode in (("eager", "eager"), ("compiled, first", "compiled"), ("compiled, later", "compiled")):
        command = [sys.executable, "-c", START, options.model, mode, options.dtype]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        line = next(line for line in done.stdout.splitlines() if line.startswith("start "))
        found[label] = json.loads(line.removeprefix("start "))
    return found


def _throughput(found: dict[tuple[str, str], list[dict[str, Any]]]) -> list[str]:
    lines = ["| arm | mode | n | tokens/s, median (range) | of compiled base | prefill s | decode s | others' cores |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    base = _speeds(found["base", "compiled"])
    for (arm, mode), rows in found.items():
        speeds = _speeds(rows)
        ratio = ratio_interval(speeds, base)
        of_base = "-" if ratio is None else f"{ratio.ratio:.3f}"
        if ratio is not None and ratio.low is not None:
            of_base += f" [{ratio.low:.3f}, {ratio.high:.3f}]"
        prefill, decode = (statistics.median(row[name] for row in rows) for name in ("prefill_s", "decode_s"))
        busy = max(row["other_busy_cores"] or 0 for row in rows)
        lines.append(
            f"| {arm} | {mode} | {len(rows)} | {statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f}) | "
            f"{of_base} | {prefill:.2f} | {decode:.2f} | {busy:.2f} |"
        )
    return lines


def _start_table(
    starts: dict[str, tuple[float, dict[str, Any]]], found: dict[tuple[str, str], list[dict[str, Any]]]
) -> list[str]:
    """Starts, and after how many LoRAP output tokens the time of a compiled start is won back."""
    eager_s = starts["eager"][0]
    speeds = {mode: statistics.median(_speeds(found["lorap", mode])) for mode in NAMES.values()}
    saved = 1 / speeds["eager"] - 1 / speeds["compiled"]
    lines = ["| start | seconds | won back after output tokens | canary's deviation |", "|---|---|---|---|"]
    for label, (seconds, canary) in starts.items():
        extra = seconds - eager_s
        tokens = "-" if label == "eager" else f"{extra / saved:,.0f}" if saved > 0 else "never"
        lines.append(f"| {label} | {seconds:.0f} | {tokens} | {canary['deviation']} |")
    return lines


def _speeds(rows: list[dict[str, Any]]) -> list[float]:
    return [row["output_tokens_per_s"] for row in rows]


if __name__ == "__main__":
    main()

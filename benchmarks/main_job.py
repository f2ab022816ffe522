"""The figures of the main job on this machine, in one run: what adapters cost, and that slots do not bound them.

    python benchmarks/main_job.py --out out/main-job

SmolLM2-135M in bf16, 64 requests of 128 + 128 tokens under 64 different adapters, eager, every arm bound to all cores
this process may use. Four calls of `preft bench throughput`, one of them stock vLLM's own multi-LoRA on the same
adapters. Writes one Markdown file with the tables beside the rows; about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

MODEL = "smollm2-135m-instruct"
WORKLOAD = {
    "--adapters": 64,
    "--rank": 16,
    "--direft-rank": 8,
    "--input-len": 128,
    "--output-len": 128,
    "--requests": 64,
    "--dtype": "bfloat16",
}
CALLS = {
    "slots-64": ["--arms", "base,base-preft,lorap,direftp", "--slots", "64", "--repeats", "5"],
    "slots-8": ["--arms", "base,lorap", "--slots", "8", "--repeats", "3"],
    # All-token adapters take minutes a run, most of all in stock vLLM.
    "stock": ["--arms", "base,stock-lora", "--slots", "64", "--repeats", "1", "--warm-runs", "1"],
    "all-token": ["--arms", "base,lora", "--slots", "64", "--repeats", "2", "--warm-runs", "1"],
}
"""Calls of `preft bench throughput`; the arms of each take turns."""


def main() -> None:
    """Makes the calls in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=list(CALLS), help="one of the calls")
    options = parser.parse_args()
    tables = []
    for name, arguments in CALLS.items():
        if options.only not in (None, name):
            continue
        command = [sys.executable, "-m", "preft_cli", "bench", "throughput", MODEL, *arguments]
        command += [f"{part}" for option in WORKLOAD.items() for part in option]
        command += ["--out", f"{options.out / name}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, flush=True)
        tables.append(f"## {name}\n\n```\n$ preft {' '.join(command[3:])}\n\n{done.stdout}```\n")
        if done.returncode:
            raise SystemExit(done.returncode)
    (options.out / "tables.md").write_text("\n".join(tables))


if __name__ == "__main__":
    main()

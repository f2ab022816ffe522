"""The figures of the main job on this machine, in one run: what adapters cost, and that slots do not bound them.

    python benchmarks/main_job.py --out out/main-job

SmolLM2-135M in bf16, 64 requests of 128 + 128 tokens under 64 different adapters, eager, every arm bound to all cores
this process may use. Two calls of `preft bench throughput` and one that shows what stock vLLM does with the same
adapters; each call interleaves its arms. Writes one Markdown file with the tables beside the rows.
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
    "slots-64": ["--arms", "base,base-preft,lorap,direftp,lora", "--slots", "64"],
    "slots-8": ["--arms", "base,lorap", "--slots", "8"],
    "stock": ["--arms", "base,stock-lora", "--slots", "64"],
}


def main() -> None:
    """Makes the three calls in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5, help="processes an arm in the calls with our engine")
    parser.add_argument("--stock-repeats", type=int, default=1, help="stock multi-LoRA takes minutes a run")
    parser.add_argument("--only", choices=list(CALLS), help="one of the calls")
    options = parser.parse_args()
    tables = []
    for name, arguments in CALLS.items():
        if options.only not in (None, name):
            continue
        repeats, warm = (options.stock_repeats, 1) if name == "stock" else (options.repeats, 2)
        command = [sys.executable, "-m", "preft_cli", "bench", "throughput", MODEL, *arguments]
        command += [f"{part}" for option in WORKLOAD.items() for part in option]
        command += ["--repeats", f"{repeats}", "--warm-runs", f"{warm}", "--out", f"{options.out / name}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, flush=True)
        tables.append(f"## {name}\n\n```\n$ preft {' '.join(command[3:])}\n\n{done.stdout}```\n")
        if done.returncode:
            raise SystemExit(done.returncode)
    (options.out / "tables.md").write_text("\n".join(tables))


if __name__ == "__main__":
    main()

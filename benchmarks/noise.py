"""Two arms that are the same must differ by less than the reported interval, in at least nine of ten runs.

    python benchmarks/noise.py --out out/noise                # about 15 minutes on two quiet cores
    python benchmarks/noise.py --out out/noise --minutes 7    # stop after a run that ends later; call again to go on

Ten runs of `preft bench throughput --arms base,base` with three repeats, on a small model that is made here: 60 engine
starts, which take most of the time. Runs that are already there are kept. Exit status 1 if fewer than nine of ten
intervals include 1, 3 if runs are still missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preft.bench.rows import ROWS_NAME, read_rows
from preft.bench.summary import summarise

RUNS, LEAST_SHARE = 10, 0.9
CALL = {
    "--arms": "base,base",
    "--adapters": "8",
    "--requests": "64",
    "--input-len": "64",
    "--output-len": "64",
    "--repeats": "3",
    "--warm-runs": "3",
}
UNFINISHED = 3


def make_model(folder: Path) -> Path:
    """A Llama of 9 million random values, which steps in milliseconds."""
    if not (folder / "config.json").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether a run is there and complete."""
    return (folder / ROWS_NAME).exists() and not any(row["partial"] for row in read_rows(folder))


def judged(runs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """How many runs found no difference between two arms that have none.

    Args:
        runs: The rows of each.
    """
    intervals = [next(entry["ratio_to_base"] for entry in summarise(rows) if entry["arm"] == "base-2") for rows in runs]
    held = sum(bool(interval["includes_one"]) for interval in intervals)
    return {
        "runs": len(runs),
        "include_one": held,
        "intervals": intervals,
        "busiest_neighbours": max((row["other_busy_cores"] or 0.0 for rows in runs for row in rows), default=0.0),
        "passed": held >= LEAST_SHARE * len(runs) if runs else None,
    }


def main() -> None:
    """Makes the runs that are missing and judges them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no further run after so many")
    parser.add_argument(
        "--set", action="append", default=[], metavar="--FLAG=VALUE", help="of `preft bench throughput`"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model, started = make_model(options.out / "model"), time.monotonic()
    folders = [options.out / f"run-{number:02}" for number in range(options.runs)]
    flags = [part for option in {**CALL, **dict(text.split("=", 1) for text in options.set)}.items() for part in option]
    for folder in folders:
        if is_whole(folder) or time.monotonic() - started > options.minutes * 60:
            continue
        command = [sys.executable, "-m", "preft_cli", "bench", "throughput", str(model), "--out", str(folder), *flags]
        done = subprocess.run(command, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
    whole = [folder for folder in folders if is_whole(folder)]
    document = judged([read_rows(folder) for folder in whole])
    (options.out / "verdict.json").write_text(json.dumps(document, indent=2), encoding="utf-8")
    print(json.dumps(document))
    if len(whole) < options.runs:
        raise SystemExit(UNFINISHED)
    raise SystemExit(0 if document["passed"] else 1)


if __name__ == "__main__":
    main()

"""What 1, 8, 64 and 512 adapters cost on this machine, in one run of 35 minutes on two quiet cores.

    python benchmarks/sweep.py --out out/sweep

SmolLM2-135M in bf16, eager: base, LoRAP, DiReFTP, all-token LoRA on this engine and stock vLLM's multi-LoRA, and the
compiled base, with compiled LoRAP and DiReFTP at 64, beside them. 64 requests of 128 + 128 tokens up to 64 adapters;
512 requests of 64 + 32 with 512, since longer ones take hours. An arm that does not end within --arm-limit-s is
stopped, and the report says so: all-token arms at 512 adapters may. Writes one result over all calls, with a page and
`tables.md`; `benchmarks/calibration.py` and `preft plan --calibrate` read it. The adapters of 10 MB take 17 GB of disk,
and minutes to make the first time. `--only` makes one of the calls, and joins what is there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from preft.bench.page import LATENCY_COLUMNS, SPEED_COLUMNS, share_text
from preft.bench.report import join_results
from preft.bench.rows import ROWS_NAME
from preft.bench.summary import with_targets

ARMS = "base,base-compiled,stock-lora,lora,lorap,direftp"
COMMON = {"--rank": "16", "--direft-rank": "8", "--dtype": "bfloat16", "--warm-runs": "1"}
CALLS: dict[str, dict[str, str]] = {
    "small": {
        "--arms": ARMS,
        "--adapters": "1,8,64",
        "--slots": "64",
        "--requests": "64",
        "--input-len": "128",
        "--output-len": "128",
        "--arm-limit-s": "420",
    },
    "compiled": {
        "--arms": "lorap-compiled,direftp-compiled",
        "--adapters": "64",
        "--slots": "64",
        "--requests": "64",
        "--input-len": "128",
        "--output-len": "128",
        "--arm-limit-s": "420",
    },
    "large": {
        "--arms": "base,stock-lora,lora,lorap,direftp",
        "--adapters": "512",
        "--slots": "512",
        "--requests": "512",
        "--input-len": "64",
        "--output-len": "32",
        "--arm-limit-s": "300",
    },
}
"""The calls of `preft bench throughput`."""
TARGETS = {("lorap", 64): 0.90, ("direftp", 64): 0.95}
"""Least ratio to eager base, by arm and adapters."""


def command(name: str, model: str, out: Path, repeats: int, changes: Mapping[str, str]) -> list[str]:
    """One call."""
    options = {**COMMON, **CALLS[name], **changes, "--repeats": str(repeats), "--adapter-dir": str(out / "adapters")}
    flags = [part for option in options.items() for part in option]
    return ["bench", "throughput", model, "--out", str(out / name), "--share-base", *flags]


def markdown(columns: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell(entry)) for cell in columns.values()) + " |" for entry in entries]
    return "\n".join(lines)


def verdicts(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether the targets were met; where not, by what they were missed and where the time goes."""
    lines = []
    for entry in with_targets(entries, TARGETS):
        ratio, target = entry["ratio_to_base"], entry["target"]
        name = f"{entry['arm']} at {entry['adapters']} adapters"
        if ratio is None:
            lines.append(f"- {name}: not measured beside base.")
            continue
        compiled = entry["ratio_to_base_compiled"]
        beside = f"; {compiled['ratio']:.3f} of compiled base" if compiled else ""
        text = f"- {name}: {ratio['ratio']:.3f} of eager base, target {target:.2f}{beside}."
        if ratio["ratio"] < target:
            text += (
                f" MISSED by {target - ratio['ratio']:.3f}: adapter kernels take "
                f"{share_text(entry['adapter_prefill_share'])} of prefill and "
                f"{share_text(entry['adapter_decode_share'])} of decode; prefill is "
                f"{entry['extra_prefill_s']:+.2f} s and decode {entry['extra_decode_s']:+.2f} s over base."
            )
        lines.append(text)
    return lines


def main() -> None:
    """Makes the calls and joins their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--repeats", type=int, default=1, help="more give intervals, and take as many times as long")
    parser.add_argument("--only", choices=list(CALLS), help="one of the calls")
    parser.add_argument(
        "--set", action="append", default=[], metavar="--FLAG=VALUE", help="of `preft bench throughput`"
    )
    options = parser.parse_args()
    changes = dict(text.split("=", 1) for text in options.set)
    status = 0
    for name in [options.only] if options.only else list(CALLS):
        arguments = command(name, options.model, options.out, options.repeats, changes)
        done = subprocess.run([sys.executable, "-m", "preft_cli", *arguments], check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(done.returncode)
        status = max(status, done.returncode)
    results = [options.out / name for name in CALLS if (options.out / name / ROWS_NAME).exists()]
    report = join_results(results, options.out)
    parts = ["# What adapters cost, by their number", *(f"- {note}" for note in report.notes)]
    parts += ["## Targets", *verdicts(report.entries)]
    parts += ["## Throughput", markdown(SPEED_COLUMNS, report.entries)]
    parts += ["## Phases", markdown(LATENCY_COLUMNS, report.entries)]
    text = "\n\n".join(parts) + "\n"
    (options.out / "tables.md").write_text(text, encoding="utf-8")
    print(text)
    raise SystemExit(status)


if __name__ == "__main__":
    main()

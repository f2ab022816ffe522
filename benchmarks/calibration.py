"""The planner against measurement and against the paper, as one Markdown text.

    python benchmarks/calibration.py out/sweep --at 64,16

Fits the roofline to one point of a sweep, predicts every other, and prints the paper's figures beside the plan's
prediction with what is not known about them. Seconds of work. Exit status 1 if a point that was not fitted is further
off than --within.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from preft.plan.calibrate import CLOSE, calibrate, read_measured
from preft.plan.paper import SOURCE, UNKNOWNS, compare_with_paper
from preft.plan.shapes import read_shape
from preft.plan.workload import Assumptions, Workload


def calibration_text(document: Mapping[str, Any], within: float) -> str:
    """The fit and every point."""
    at, achieved, error = document["calibrated_at"], document["achieved"], document["largest_error_elsewhere"]
    verdict = (
        "no other point"
        if error is None
        else f"{error:.1%}, {'within' if error <= within else 'NOT within'} {within:.0%}"
    )
    lines = [
        "## The planner against this machine",
        "",
        f"Fitted at {at['adapters']} adapters of rank {at['lora_rank']}: {achieved['bandwidth'] / 1e9:.1f} GB/s, "
        f"{achieved['flops'] / 1e9:.0f} GFLOP/s, {achieved['step_overhead_s'] * 1e3:.1f} ms a step beside them, "
        f"{achieved['launch_us']:.1f} us a kernel, adapters {achieved['adapter_factor']:.2f} and attention "
        f"{achieved['attention_factor']:.2f} times perfect ones.",
        f"Largest error of a point that was not fitted: {verdict}.",
        "",
        "| arm | adapters | LoRA rank | measured tokens/s | predicted | error | fitted |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['arm']} | {row['adapters']} | {row['lora_rank']} | {row['measured_tokens_per_s']:.1f} | "
        f"{row['predicted_tokens_per_s']:.1f} | {row['error']:+.1%} | {'yes' if row['fitted'] else ''} |"
        for row in document["points"]
    ]
    return "\n".join(lines)


def paper_text(rows: Sequence[Mapping[str, Any]], load: Workload) -> str:
    """The paper's figures beside the prediction, and what bytes alone cannot explain."""
    lines = [
        "## The planner against the paper",
        "",
        f"{SOURCE}. Predicted for rank {load.rank}, {load.input_len} tokens in and {load.output_len} out.",
        "",
        "| model | GPU | arm | paper | bytes alone | at most | within memory | can bytes explain it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        machine = row["gpu"] + ("" if row["gpu_is_published"] else " (assumed)")
        start = f"| {row['model']} | {machine} | {row['arm']} | {row['published']}"
        if "not_predicted" in row:
            lines.append(f"{start} | - | - | - | not predicted: {row['not_predicted']} |")
            continue
        figures = ("predicted_from_bytes", "upper_bound_from_bytes", "predicted_within_memory")
        cells = " | ".join("-" if row[key] is None else f"{row[key]:.2f}" for key in figures)
        lines.append(f"{start} | {cells} | {row['verdict']} |")
    unexplained = [
        f"{row['model']} {row['arm']} {row['published']}" for row in rows if row.get("bytes_alone_can_explain") is False
    ]
    lines += [
        "",
        f"Bytes alone cannot explain: {', '.join(unexplained) or 'none'}.",
        "",
        "Not known about these figures:",
        "",
    ]
    return "\n".join([*lines, *(f"- {text}" for text in UNKNOWNS)])


def main() -> None:
    """Prints both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="folder of `preft bench throughput` or of benchmarks/sweep.py")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--at", default="64,16", metavar="ADAPTERS,RANK", help="the point to fit")
    parser.add_argument("--within", type=float, default=CLOSE)
    parser.add_argument("--rank", type=int, default=16, help="of the prediction for the paper's figures")
    parser.add_argument("--lengths", default="512,512", metavar="IN,OUT", help="the same")
    options = parser.parse_args()
    adapters, rank = (int(part) for part in options.at.split(","))
    given, out = (int(part) for part in options.lengths.split(","))
    document = calibrate(read_shape(options.model), read_measured(options.result), (adapters, rank))
    load = Workload(512, options.rank, options.rank, given, out, 512)
    print(
        calibration_text(document, options.within) + "\n\n" + paper_text(compare_with_paper(load, Assumptions()), load)
    )
    error = document["largest_error_elsewhere"]
    raise SystemExit(error is None or error > options.within)


if __name__ == "__main__":
    main()

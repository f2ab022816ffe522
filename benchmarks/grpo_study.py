"""Whether GRPO of a LoRAP learns a small verifiable task on a CPU: held-out greedy success before and after.

    python benchmarks/grpo_study.py --out out/grpo-study --docs docs/benchmarks

The task is reasoning-gym's `chain_sum` with two numbers of one digit, asked as "What is 4 + 3? Answer with the number
only." SmolLM2-135M in float32 answers in at most 12 tokens; a step makes 32 completions (4 prompts, 8 each). The reward
is 1 for a right answer, by math-verify, and that is success. The expressions that are tested are none of those that are
trained on. Each seed is a run of
`preft train grpo` in a process of its own, with a split of its own; a run that was stopped goes on with the same call.
For each seed the exact McNemar test compares success under the adapter with the base model's on the same prompts.

Writes `rows.json` and `curves.png` into `--out`, and into `--docs`, if given, `grpo.json` and `grpo.png`. The table
says how long the steps took; figures are for quiet machines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from preft.eval.stats import mcnemar_exact, proportion_interval
from preft.pictures import COLOURS, finish_axes, save_png
from preft.train.curves import running_mean
from preft.train.trainer import read_metrics

NUM_EVAL = 80
SUCCESS = 1.0
"""Reward of a right answer."""
RECIPE = r"""
model: smollm2-135m-instruct
method: {method}
rank: {rank}
output: {output}
seed: {seed}
data: {{train: {folder}/train.jsonl, eval: {folder}/eval.jsonl, max_prompt_tokens: 80}}
reward:
  functions: [math]
rollout: {{prompts: 4, group_size: 8, max_tokens: 12, kv_cache_gib: 0.5}}
train:
  max_steps: {steps}
  learning_rate: {rate}
  batch_size: 16
  base_dtype: float32
  save_every: 5
"""


def main() -> None:
    """Runs the seeds that are not done yet, and writes the table."""
    options = _options()
    rows = [run_seed(options, int(seed)) for seed in options.seeds.split(",")]
    document = {"options": {key: str(value) for key, value in vars(options).items()}, "rows": rows}
    (options.out / "rows.json").write_text(json.dumps(document, indent=1) + "\n")
    save_png(lambda figure: _draw(figure, rows), options.out / "curves.png", (6.4, 3.6))
    if options.docs is not None:
        shutil.copy(options.out / "rows.json", options.docs / "grpo.json")
        shutil.copy(options.out / "curves.png", options.docs / "grpo.png")
    print(table(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--docs", type=Path, help="folder for the figures of the documentation")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--method", default="lorap")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=5e-4, help="learning rate")
    parser.add_argument(
        "--threads", type=int, default=1, help="OMP_NUM_THREADS of each run; 1 where other work shares the cores"
    )
    parser.add_argument("--set", action="append", default=[], help="a key of the recipe, for smaller runs")
    return parser.parse_args()


def problems(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on and rows to test, no expression in both.

    Args:
        seed: Of the split.
    """
    import reasoning_gym

    found = {}
    for item in reasoning_gym.create_dataset(
        "chain_sum", size=3000, seed=17, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    ):
        expression = item["metadata"]["expression"]
        question = f"What is {expression}? Answer with the number only."
        found[expression] = {"prompt": [{"role": "user", "content": question}], "answer": item["answer"]}
    order = sorted(found)
    random.Random(seed).shuffle(order)
    return [found[key] for key in order[NUM_EVAL:]], [found[key] for key in order[:NUM_EVAL]]


def run_seed(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One run, gone on with where it was stopped; its numbers."""
    folder = options.out / f"seed-{seed}"
    output = folder / "run"
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "eval"), problems(seed), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        RECIPE.format(
            method=options.method,
            rank=options.rank,
            output=output,
            seed=seed,
            folder=folder,
            steps=options.steps,
            rate=options.rate,
        )
    )
    began = time.monotonic()
    if not (output / "preft.json").is_file():
        command = [sys.executable, "-m", "preft_cli", "train", "grpo", str(recipe), "--json"]
        command += [part for text in options.set for part in ("--set", text)]
        has_checkpoint = any((output / "checkpoints").glob("checkpoint-*"))
        command.append("--resume" if has_checkpoint else "--force")
        threads = {} if options.threads is None else {"OMP_NUM_THREADS": str(options.threads)}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | threads)
        if done.returncode:
            raise SystemExit(done.returncode)
        (folder / "report.json").write_text(done.stdout)
    return numbers(folder, seed, time.monotonic() - began)


def numbers(folder: Path, seed: int, seconds: float) -> dict[str, Any]:
    """What a finished run has shown."""
    pairs = [(row["base"] == SUCCESS, row["adapter"] == SUCCESS) for row in read_metrics(folder / "run" / "eval.jsonl")]
    gained = sum(after and not before for before, after in pairs)
    lost = sum(before and not after for before, after in pairs)
    metrics = read_metrics(folder / "run" / "metrics.jsonl")
    report = json.loads((folder / "report.json").read_text())
    return {
        "seed": seed,
        "pairs": len(pairs),
        "before": sum(before for before, _ in pairs),
        "after": sum(after for _, after in pairs),
        "gained": gained,
        "lost": lost,
        "p_value": mcnemar_exact(gained, lost),
        "interval": proportion_interval(gained, lost, len(pairs)),
        "probe": report["probe"],
        "max_abs_log_ratio": max(row["ratio/max_abs_log"] for row in metrics),
        "step_seconds": sum(value for row in metrics for key, value in row.items() if key.startswith("seconds/")),
        "seconds": seconds,
        "reward": [row["reward"] for row in metrics],
        "length": [row["completions/mean_length"] for row in metrics],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The result as Markdown."""
    lines = ["| seed | before | after | gained, lost | p, exact McNemar | largest abs. log ratio | seconds of steps |"]
    lines.append("|---|---|---|---|---|---|---|")
    lines += [
        f"| {row['seed']} | {row['before']}/{row['pairs']} | {row['after']}/{row['pairs']} "
        f"| {row['gained']}, {row['lost']} | {row['p_value']:.2g} | {row['max_abs_log_ratio']:.1e} "
        f"| {row['step_seconds']:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def _draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    axes = figure.add_subplot()
    for row, colour in zip(rows, COLOURS, strict=False):
        steps = range(1, len(row["reward"]) + 1)
        axes.plot(steps, row["reward"], color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(steps, running_mean(row["reward"], 5), color=colour, label=f"seed {row['seed']}, mean of 5")
    axes.set_title("Reward of 32 sampled completions a step", fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylim(0, SUCCESS)
    finish_axes(axes)


if __name__ == "__main__":
    main()

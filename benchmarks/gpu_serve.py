"""The paper's serving setting on GPUs, in one command: what is right first, then what is fast.

    python benchmarks/gpu_serve.py --setting qwen2.5-0.5b --out out/gpu-serve

For a machine with vLLM's GPU build and GPUs; preft's worker for them is not verified, so this sets
`PREFT_EXPERIMENTAL_GPU=1` for its own calls, and stops if the answers differ from Hugging Face's. Four steps: the
roofline of the setting (`preft plan`); a small run that makes adapters; the same prompts under them on both engines,
token by token; then all arms of `preft bench throughput` under 512 adapters. The last table stands beside the paper's
figures, whose rank, lengths and flags are not published. `--dry-run` prints the commands and runs none.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIN_EQUAL = 0.98
"""Rows that must be equal token by token. Two engines in bfloat16 part where two tokens are as good as equal."""


@dataclass(frozen=True)
class Setting:
    """One of the paper's models.

    Attributes:
        model: Hub id or folder.
        gpus: That share the model.
        plan_model: Name that `preft plan` knows.
        paper: Published throughput of (DiReFTP, LoRAP) over all-token LoRA.
    """

    model: str
    gpus: int
    plan_model: str
    paper: tuple[float, float] | None


SETTINGS = {
    "qwen2.5-0.5b": Setting("Qwen/Qwen2.5-0.5B-Instruct", 1, "qwen2.5-0.5b", (2.39, 1.63)),
    "llama-3.1-8b": Setting("meta-llama/Llama-3.1-8B-Instruct", 1, "llama-3.1-8b", (2.21, 1.83)),
    "llama-3.1-70b": Setting("meta-llama/Llama-3.1-70B-Instruct", 4, "llama-3.1-70b", (1.9, 1.87)),
}


def preft(*arguments: object) -> list[str]:
    """A command line of preft."""
    return [sys.executable, "-m", "preft_cli", *map(str, arguments)]


def bench(setting: Setting, options: argparse.Namespace, out: Path, *, small: bool) -> list[str]:
    """The throughput call; a small one makes adapters for the comparison of engines."""
    adapters = 2 if small else options.adapters
    return preft(
        *("bench", "throughput", setting.model, "--out", out, "--json"),
        *("--arms", "lorap,direftp" if small else options.arms),
        *("--adapters", adapters, "--slots", min(adapters, options.slots), "--tp", setting.gpus),
        *("--rank", options.rank, "--direft-rank", options.rank, "--dtype", options.dtype),
        *("--input-len", 32 if small else options.input_len, "--output-len", 4 if small else options.output_len),
        *("--requests", 4 if small else options.requests or adapters),
        *("--mode", options.mode, "--repeats", 1 if small else options.repeats),
    )


def plan(setting: Setting, options: argparse.Namespace) -> list[str]:
    """The roofline of the setting."""
    return preft(
        *("plan", "--model", setting.plan_model, "--gpu", f"{options.gpu}x{setting.gpus}", "--json"),
        *("--adapters", options.adapters, "--rank", options.rank, "--slots", min(options.adapters, options.slots)),
        *("--input-len", options.input_len, "--output-len", options.output_len),
    )


def generate(
    setting: Setting, options: argparse.Namespace, adapters: Mapping[str, Path], prompts: Path, engine: str
) -> list[str]:
    """The same rows on one engine."""
    named = [part for name, path in adapters.items() for part in ("--adapter", f"{name}={path}")]
    return preft(
        *("generate", setting.model, *named, "--prompts", prompts, "--engine", engine, "--json"),
        *("--dtype", options.dtype, "--max-tokens", 24),
    )


def write_prompts(path: Path, adapters: Sequence[str], count: int) -> None:
    """Rows under every adapter and base, of different lengths."""
    words = ("the", "river", "runs", "past", "a", "mill", "where", "people", "grind", "wheat", "and", "talk")
    rows = []
    for index in range(count):
        name = [None, *adapters][index % (len(adapters) + 1)]
        text = " ".join(words[(index + place) % len(words)] for place in range(5 + 7 * index % 90))
        rows.append({"id": f"r{index}", "adapter": name, "prompt": text})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def compare(ours: str, theirs: str) -> tuple[float, list[str]]:
    """(share of equal rows, ids of the others) of two outputs of `preft generate --json`."""
    first, second = ({row["id"]: row for row in map(json.loads, text.splitlines())} for text in (ours, theirs))
    different = [name for name in second if first.get(name, {}).get("token_ids") != second[name].get("token_ids")]
    return 1 - len(different) / max(1, len(second)), different


def adapter_folders(root: Path) -> dict[str, Path]:
    """Adapters below a folder, by a name that rows can use."""
    found = sorted(path.parent for path in root.rglob("preft.json"))
    return {f"a{index}": path for index, path in enumerate(found)}


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median tokens a second of each arm over that of all-token LoRA on the same engine."""
    by_arm: dict[str, list[float]] = {}
    for row in rows:
        if row.get("output_tokens_per_s"):
            by_arm.setdefault(str(row["arm"]), []).append(float(row["output_tokens_per_s"]))
    medians = {arm: sorted(values)[len(values) // 2] for arm, values in by_arm.items()}
    base = medians.get("lora")
    return {arm: value / base for arm, value in medians.items()} if base else {}


def call(command: list[str]) -> str:
    """Runs a command, its notes passing through, and returns what it printed. Ends this script if it fails."""
    print(f"$ {shlex.join(command[2:])}", file=sys.stderr, flush=True)
    environment = {**os.environ, "PREFT_EXPERIMENTAL_GPU": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        print(done.stdout)
        raise SystemExit(done.returncode)
    return done.stdout


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=list(SETTINGS), default="qwen2.5-0.5b")
    parser.add_argument("--model", help="another model, or a folder that holds the setting's")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", default="h100", help="for the roofline: a100, h100, h200, b200")
    parser.add_argument("--adapters", type=int, default=512)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--requests", type=int, help="default: as adapters")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mode", choices=("default", "eager"), default="default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--arms", default="base,stock-lora,lora,lorap,direftp")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps; 1 if the engines differ."""
    options = parse(arguments)
    setting = SETTINGS[options.setting]
    if options.model:
        setting = Setting(options.model, setting.gpus, setting.plan_model, setting.paper)
    small, prompts = options.out / "small", options.out / "prompts.jsonl"
    if options.dry_run:
        two = {"a0": small / "adapters" / "0", "a1": small / "adapters" / "1"}
        steps = [plan(setting, options), bench(setting, options, small, small=True)]
        steps += [generate(setting, options, two, prompts, engine) for engine in ("vllm", "hf")]
        steps += [bench(setting, options, options.out / "throughput", small=False)]
        print("\n".join(shlex.join(step[2:]) for step in steps))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "plan.json").write_text(call(plan(setting, options)), encoding="utf-8")
    call(bench(setting, options, small, small=True))
    adapters = adapter_folders(small)
    write_prompts(prompts, list(adapters), 50)
    outputs = [call(generate(setting, options, adapters, prompts, engine)) for engine in ("vllm", "hf")]
    share, different = compare(*outputs)
    print(f"{share:.1%} of 50 rows are equal on both engines, token by token; others: {different}")
    if not adapters or share < MIN_EQUAL:
        print("The GPU worker does not agree with Hugging Face: no figure of it means anything.")
        return 1
    rows = [
        json.loads(line) for line in call(bench(setting, options, options.out / "throughput", small=False)).splitlines()
    ]
    found = ratios(rows)
    paper = dict(zip(("direftp", "lorap"), setting.paper or (), strict=False))
    for arm, ratio in found.items():
        print(f"{arm:<12} x{ratio:.2f} of all-token LoRA" + (f" (paper: x{paper[arm]})" if arm in paper else ""))
    summary = {"setting": options.setting, "equal": share, "ratios": found, "paper": paper}
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

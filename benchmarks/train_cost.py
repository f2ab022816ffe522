"""What a training step by position costs: LoRAP against PEFT's own LoRA at the same rank, in time and in memory.

    python benchmarks/train_cost.py --out out/train-cost

Every measurement is a process of its own, which trains for some steps on the same random batches and reports the
median time of a step and the process's peak resident memory. The two arms take turns (A B, B A, A B, ...), so a drift
of the machine meets both. Ratios are of pairs; targets are 1.05 for both. Twelve processes of about 40 s on two cores.

Peak resident memory holds what the C library keeps of freed blocks, which depends on the order in which they come and
go. `--allocator returns` has every block of 256 KiB or more given back when it is freed, so that the peak is of live
tensors alone; steps take half as long again, and their times are not reported.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m-instruct"
ARMS = ("peft-lora", "lorap")
TARGET = 1.05
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WARM_STEPS = 3
ALLOCATORS = {"keeps": {}, "returns": {"MALLOC_MMAP_THRESHOLD_": "262144"}}
"""What glibc does with freed blocks, by the environment that has it do so; see mallopt(3)."""


def main() -> None:
    """Runs the pairs and prints the ratios, or, with `--arm`, one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default=MODEL, help="folder, embedded name or hub id")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--completion-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--allocator", choices=list(ALLOCATORS), default="keeps", help="of freed memory")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(measure(options)))
        return
    if options.out is None:
        parser.error("--out is required")
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with (options.out / "rows.jsonl").open("w", encoding="utf-8") as stream:
        for pair in range(options.pairs):
            for arm in ARMS if pair % 2 == 0 else reversed(ARMS):
                done = subprocess.run(
                    [sys.executable, __file__, *sys.argv[1:], "--arm", arm],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                    env={**os.environ, **ALLOCATORS[options.allocator]},
                )
                row = {"pair": pair, "allocator": options.allocator, **json.loads(done.stdout.splitlines()[-1])}
                print(
                    f"pair {pair}, {arm}: {row['step_s']:.3f} s a step, {row['peak_rss_bytes'] / 1e9:.3f} GB",
                    flush=True,
                )
                stream.write(json.dumps(row) + "\n")
                stream.flush()
                rows.append(row)
    summary = summarise(rows)
    if options.allocator == "returns":
        del summary["step time"]
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    for name, found in summary.items():
        low, high = found["interval"] or (float("nan"), float("nan"))
        verdict = "within" if found["median"] <= TARGET else "OVER"
        print(
            f"{name}: LoRAP / PEFT LoRA {found['median']:.3f} at the median of {found['pairs']} pairs, geometric mean "
            f"{found['mean']:.3f}, 95 % interval [{low:.3f}, {high:.3f}]; {verdict} {TARGET}"
        )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Trains one arm in this process."""
    import torch

    from preft.data.collate import collate
    from preft.data.examples import Example
    from preft.models.locate import locate_model
    from preft.positions import PROMPT
    from preft.train.model import load_base, supervised_loss

    folder = locate_model(options.model)
    model = load_base(folder, dtype=options.dtype)
    parameters = _attach(model, folder, options)
    model = model if options.arm == "lorap" else parameters.pop("model")
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    optimizer = torch.optim.AdamW(parameters["groups"], lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    times, losses = [], []
    vocabulary = model.get_input_embeddings().num_embeddings
    for _ in range(WARM_STEPS + options.steps):
        length = options.prompt_tokens + options.completion_tokens
        tokens = torch.randint(3, vocabulary, (options.batch, length), generator=generator).tolist()
        examples = [Example(tuple(t[: options.prompt_tokens]), tuple(t[options.prompt_tokens :])) for t in tokens]
        batch = collate(examples, policy=PROMPT)
        if options.arm != "lorap":
            del batch["preft_mask"]
        started = time.perf_counter()
        total, count = supervised_loss(model, batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / count)
        times.append(time.perf_counter() - started)
    num_parameters = sum(p.numel() for group in parameters["groups"] for p in group["params"])
    return {
        "arm": options.arm,
        "step_s": statistics.median(times[WARM_STEPS:]),
        "steps_s": times[WARM_STEPS:],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "parameters": num_parameters,
        "last_loss": losses[-1],
        "threads": torch.get_num_threads(),
    }


def _attach(model: Any, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Puts the arm's adapter on the model: float32 values of the same shapes, started alike."""
    if options.arm == "lorap":
        from preft.adapters.fingerprint import fingerprint_base
        from preft.tuners.trainable import new_adapter, parameter_groups

        handle = new_adapter(model, fingerprint_base(folder), "lorap", options.rank, targets=TARGETS)
        return {"groups": parameter_groups(handle)}
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, config, autocast_adapter_dtype=True)
    found = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    return {"model": wrapped, "groups": [{"params": found, "weight_decay": 0.0}]}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of pairs, for time and memory."""
    from preft.bench.stats import ratio_interval

    found = {}
    for name, key in (("step time", "step_s"), ("peak memory", "peak_rss_bytes")):
        own, other = ([row[key] for row in rows if row["arm"] == arm] for arm in ("lorap", "peft-lora"))
        interval = ratio_interval(own, other)
        ratios = [first / second for first, second in zip(own, other, strict=True)]
        found[name] = {
            "pairs": len(ratios),
            "ratios": ratios,
            "median": statistics.median(ratios),
            "mean": interval.ratio if interval else None,
            "interval": None if interval is None or interval.low is None else [interval.low, interval.high],
        }
    return found


if __name__ == "__main__":
    main()

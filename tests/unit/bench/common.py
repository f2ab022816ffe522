"""A benchmark whose arms are stand-ins and whose adapters are only names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from preft.bench.adapters import AdapterPaths
from preft.bench.facts import ModelFacts
from preft.bench.runner import Outcome, run_bench
from preft.bench.spec import ADAPTED, BenchSpec

FACTS = ModelFacts(
    max_length=2048,
    vocab_size=1000,
    hidden_size=64,
    num_blocks=2,
    kv_values_per_token=256,
    weight_values=1_000_000,
    linear_widths=2_000,
    value_bytes=2,
)


def spec_of(out: Path, **changes: Any) -> BenchSpec:
    values: dict[str, Any] = {
        "model": "a-model",
        "out": out,
        "arms": ("base", "lora", "lorap"),
        "adapters": (2,),
        "slots": 2,
        "input_len": 8,
        "output_len": 4,
        "requests": 4,
    }
    return BenchSpec(**{**values, **changes})


def fake_command(out: Path, *actions: str) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("fake_arm.py")), str(out), *actions]


def fake_adapters(spec: BenchSpec, model: Path, *, progress: Any = None) -> AdapterPaths:
    return {
        (arm, ranks): [Path(f"{arm}-{ranks[index % len(ranks)]}-{index}") for index in range(max(spec.adapters))]
        for arm in spec.arms
        if arm in ADAPTED
        for ranks in spec.ranks
    }


def run_fake(spec: BenchSpec, *actions: str) -> Outcome:
    spec.out.mkdir(parents=True, exist_ok=True)
    command = fake_command(spec.out, *actions)
    return run_bench(spec, Path("a-model"), FACTS, command=command, adapters=fake_adapters)


def jobs_that_ran(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "ran.jsonl").read_text().splitlines()]

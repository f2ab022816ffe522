"""Several processes of one run: the losses of a single one at the same examples a step, and one set of files."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from preft.adapters.store import load_adapter
from preft.config.train import load_sft_recipe
from preft.train.sft import train_sft
from preft.train.trainer import read_metrics
from tests.unit.train.test_sft import NEAR


def _recipe(model: Path, folder: Path, output: str, batch_size: int) -> Path:
    rows = [{"prompt": "ab" * (n % 7 + 1), "completion": f" say {'very ' * (n % 3)}{n}"} for n in range(16)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / f"{output}.yaml"
    path.write_text(f"""
model: {model}
method: mixed
rank: 4
output: {folder / output}
data: {{train: {folder}/train.jsonl, eval: {folder}/train.jsonl, max_tokens: 128}}
train: {{max_steps: 4, learning_rate: 0.01, batch_size: {batch_size}, group_by_length: false, save_every: 2}}
""")
    return path


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def test_two_processes_are_one_of_twice_the_batch(tiny_llama: Path, tmp_path: Path) -> None:
    single = train_sft(load_sft_recipe(_recipe(tiny_llama, tmp_path, "single", 4)), draw=False)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-port", str(_free_port()), "-m", "preft_cli"]
    recipe = _recipe(tiny_llama, tmp_path, "double", 2)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launcher, "train", "sft", str(recipe), "--json", "--quiet"],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)

    losses = {
        name: [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row]
        for name in ("single", "double")
    }
    assert len(losses["double"]) == 4
    assert losses["double"][-1] < losses["double"][0] - 0.1
    assert losses["double"] == pytest.approx(losses["single"], abs=NEAR)
    assert single.eval_loss is not None
    assert report["eval_loss"]["adapter"] == pytest.approx(single.eval_loss[1], abs=NEAR)
    assert load_adapter(tmp_path / "double").digest == report["digest"]
    checkpoints = tmp_path / "double" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    # Each process left the state of its random numbers, as resuming needs.
    assert len(list((checkpoints / "checkpoint-4").glob("rng_state_*.pth"))) == 2

"""Runs of recipes: what they leave, how they go on, and how they stop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from preft.adapters.store import load_adapter
from preft.config.train import ResolvedRecipe, load_sft_recipe
from preft.errors import EngineError, FileError, UnsupportedError, UsageError
from preft.models.chat_template import chat_template_sha256
from preft.train import trainer as trainer_module
from preft.train.sft import SftReport, train_sft
from preft.train.trainer import EpochSampler, read_metrics

NEAR = 1e-4
"""Losses of two runs that sum the same numbers in another order."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": "ab" * (n % 7 + 1)},
                {"role": "assistant", "content": f"say {n % 3}"},
            ]
        }
        for n in range(22)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _recipe(model: Path, data: Path, output: Path, **sets: Any) -> ResolvedRecipe:
    text = f"""
model: {model}
method: lorap
rank: 4
output: {output}
data: {{train: {data}, max_tokens: 128}}
train: {{max_steps: 10, learning_rate: 0.01, batch_size: 4}}
"""
    path = output.parent / f"{output.name}.yaml"
    path.write_text(text)
    return load_sft_recipe(path, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in sets.items()])


def _losses(output: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(output / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize(
    ("sets", "label"),
    [
        ({"method": "lorap"}, "LoRAP"),
        ({"method": "direftp"}, "DiReFTP"),
        ({"method": "direftp", "orthogonal": True, "train__weight_decay": 0.1}, "DiReFTP"),
        ({"method": "lora"}, "LoRA"),
        ({"method": "mixed", "positions": "f1+l2"}, "LoRA+DiReFT(P)"),
    ],
)
def test_a_run_leaves_the_adapter_and_its_story(
    tiny_llama: Path, data: Path, tmp_path: Path, sets: dict[str, Any], label: str
) -> None:
    output = tmp_path / "out"
    resolved = _recipe(tiny_llama, data, output, data__eval=str(data), train__eval_every=5, **sets)
    made = train_sft(resolved, argv=["preft", "train", "sft"], draw=label == "LoRAP")
    assert made.loss[1] < made.loss[0] - 0.05
    assert made.eval_loss is not None
    assert made.eval_loss[1] < made.eval_loss[0]
    adapter = load_adapter(output)
    assert (adapter.digest, adapter.manifest.label) == (made.adapter.digest, label)
    assert adapter.manifest.chat_template_sha256 == chat_template_sha256(tiny_llama)
    story = adapter.manifest.provenance
    assert story == json.loads((output / "run.json").read_text())
    assert story["argv"] == ["preft", "train", "sft"]
    assert {"key": "train.max_steps", "value": 10, "origin": f"recipe {output}.yaml"} in story["recipe"]
    assert [found["examples"] for found in story["data"]] == [22, 22]
    assert story["eval_loss"]["adapter"] == made.eval_loss[1]
    assert {"torch", "transformers", "preft"} <= set(story["versions"])
    rows = read_metrics(output / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 11))
    assert [row["step"] for row in rows if "eval_loss" in row] == [5, 10]
    scores = [json.loads(line) for line in (output / "eval.jsonl").read_text().splitlines()]
    assert [score["id"] for score in scores] == [f"line {n}" for n in range(1, 23)]
    tokens = sum(score["tokens"] for score in scores)
    assert sum(score["adapter"]["loss"] for score in scores) / tokens == pytest.approx(made.eval_loss[1], rel=1e-9)
    assert sum(score["base"]["loss"] for score in scores) / tokens == pytest.approx(made.eval_loss[0], rel=1e-9)
    card = (output / "README.md").read_text()
    assert adapter.digest in card
    assert "22 examples of 22 rows" in card
    pictures = {"curves.png", "index.html"} if label == "LoRAP" else set()
    assert {path.name for path in output.iterdir()} == pictures | {
        "README.md", "checkpoints", "eval.jsonl", "metrics.jsonl", "preft.json", "preft.safetensors", "run.json",
    }  # fmt: skip


def test_accumulation_and_checkpointing_change_no_loss(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    """Labels are averaged over the whole update, so how it is cut does not matter."""
    found = {}
    for name, sets in {
        "whole": {"train__batch_size": 8},
        "halves": {"train__batch_size": 4, "train__accumulation": 2},
        "recomputed": {"train__batch_size": 8, "train__gradient_checkpointing": True},
    }.items():
        sets = {"train__max_steps": 4, "train__group_by_length": False, "method": "mixed", **sets}
        train_sft(_recipe(tiny_llama, data, tmp_path / name, **sets), draw=False)
        found[name] = _losses(tmp_path / name)
    # The first pass over 22 examples: two whole updates.
    assert found["halves"][:2] == pytest.approx(found["whole"][:2], abs=NEAR)
    assert found["recomputed"] == pytest.approx(found["whole"], abs=NEAR)


@pytest.mark.parametrize("method", ["lorap", "direftp"])
def test_a_resumed_run_is_the_unbroken_one(tiny_llama: Path, data: Path, tmp_path: Path, method: str) -> None:
    """Killed after step 8, so it goes on from step 7, in the middle of the second pass over the data."""
    sets = {"method": method, "orthogonal": method == "direftp", "train__max_steps": 14, "train__save_every": 7}
    unbroken = train_sft(_recipe(tiny_llama, data, tmp_path / "unbroken", **sets), draw=False)
    broken = _recipe(tiny_llama, data, tmp_path / "broken", **sets)
    with pytest.raises(KeyboardInterrupt):
        train_sft(broken, progress=_StopAt(8), draw=False)
    assert not (tmp_path / "broken" / "preft.json").exists()
    assert [path.name for path in (tmp_path / "broken" / "checkpoints").iterdir()] == ["checkpoint-7"]
    with pytest.raises(UsageError, match="holds an earlier run"):
        train_sft(broken, draw=False)
    # A run that is killed outright cannot clean up after itself.
    (tmp_path / "broken" / "checkpoints" / ".step-8.partial").mkdir()
    (tmp_path / "broken" / ".run.json.partial").write_text("{")
    resumed = train_sft(broken, resume=True, draw=False)
    assert (resumed.resumed_from, resumed.steps) == (7, 14)
    assert _losses(tmp_path / "broken") == _losses(tmp_path / "unbroken")
    assert len(_losses(tmp_path / "broken")) == 14
    assert resumed.adapter.digest == unbroken.adapter.digest
    assert not list((tmp_path / "broken").rglob(".*"))


class _StopAt:
    """A user who presses Ctrl-C."""

    def __init__(self, step: int) -> None:
        self._left, self._label = step, ""

    def start(self, label: str, total: int | None) -> None:
        self._label = label

    def advance(self, amount: int = 1) -> None:
        self._left -= amount
        if self._left == 0:
            raise KeyboardInterrupt

    def finish(self) -> None:
        self._label = ""


def test_another_run_is_not_resumed_from(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    sets = {"train__max_steps": 2, "train__save_every": 1}
    train_sft(_recipe(tiny_llama, data, tmp_path / "out", **sets), draw=False)
    with pytest.raises(UsageError, match="belongs to another run") as caught:
        train_sft(_recipe(tiny_llama, data, tmp_path / "out", seed=3, **sets), resume=True, draw=False)
    assert "`seed` 3" in str(caught.value.got)
    with pytest.raises(UsageError, match="exclude each other"):
        train_sft(_recipe(tiny_llama, data, tmp_path / "out", **sets), resume=True, force=True, draw=False)
    again = train_sft(_recipe(tiny_llama, data, tmp_path / "out", seed=3, **sets), force=True, draw=False)
    assert load_adapter(tmp_path / "out").digest == again.adapter.digest


def test_a_loss_that_is_no_number_stops_the_run_and_names_its_rows(
    tiny_llama: Path, data: Path, tmp_path: Path
) -> None:
    sets = {"train__learning_rate": 1e30, "train__max_gradient_norm": 0, "train__save_every": 1, "train__warmup": 0}
    with pytest.raises(EngineError, match=r"not finite at step [23]") as caught:
        train_sft(_recipe(tiny_llama, data, tmp_path / "out", **sets), draw=False)
    assert "`line " in str(caught.value.got)
    assert not (tmp_path / "out" / "preft.json").exists()


def test_a_disk_full_at_a_checkpoint_leaves_the_earlier_one(
    tiny_llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trainer_module.save_file

    def save(state: Any, path: Path) -> None:
        if ".step-4" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        plain(state, path)

    monkeypatch.setattr(trainer_module, "save_file", save)
    resolved = _recipe(tiny_llama, data, tmp_path / "out", train__save_every=2)
    with pytest.raises(FileError, match="checkpoint of step 4 cannot be written") as caught:
        train_sft(resolved, draw=False)
    assert caught.value.got == "No space left on device"
    checkpoints = tmp_path / "out" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["checkpoint-2"]
    monkeypatch.undo()
    resumed = train_sft(resolved, resume=True, draw=False)
    assert (resumed.resumed_from, resumed.steps) == (2, 10)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint-10", "checkpoint-8"]


def test_what_cannot_be_started_is_refused_before_any_work(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    def run(**settings: Any) -> SftReport:
        return train_sft(_recipe(tiny_llama, data, tmp_path / "out", **settings), draw=False)

    with pytest.raises(UsageError, match="longer than the model's context"):
        run(data__max_tokens=1000)
    with pytest.raises(FileError, match=r"missing\.jsonl"):
        run(data__train=str(tmp_path / "missing.jsonl"))
    with pytest.raises(UsageError, match="contradict the method"):
        run(positions="all")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="no checkpoint to resume from"):
        train_sft(_recipe(tiny_llama, data, tmp_path / "out"), resume=True, draw=False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="files that no run wrote"):
        train_sft(_recipe(tiny_llama, data, tmp_path / "out"), force=True, draw=False)
    shutil.rmtree(tmp_path / "out")


def test_orders_are_fixed_by_seed_and_pass_and_group_by_length() -> None:
    lengths = [n * 37 % 50 for n in range(70)]
    sampler = EpochSampler(lengths, 8, 1, group=True)
    first = list(sampler)
    assert sorted(first) == list(range(70))
    assert list(EpochSampler(lengths, 8, 1, group=True)) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    spread = [max(batch) - min(batch) for n in range(0, 64, 8) if (batch := [lengths[i] for i in first[n : n + 8]])]
    plain = list(EpochSampler(lengths, 8, 1, group=False))
    mixed = [max(batch) - min(batch) for n in range(0, 64, 8) if (batch := [lengths[i] for i in plain[n : n + 8]])]
    assert sum(spread) < 0.4 * sum(mixed)


def test_a_tracker_that_is_not_installed_is_refused_before_any_work(
    tiny_llama: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=r"`train\.report_to` names `trackio`"):
        train_sft(_recipe(tiny_llama, data, tmp_path / "out", train__report_to=["trackio"]), draw=False)
    assert not (tmp_path / "out").exists()


def test_tensorboard_is_reported_to(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    train_sft(
        _recipe(tiny_llama, data, tmp_path / "out", train__report_to=["tensorboard"], train__max_steps=2), draw=False
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = (tmp_path / "out").rglob("events.out.tfevents.*")
    found = EventAccumulator(str(events.parent)).Reload().Scalars("train/loss")
    assert [round(entry.value, 4) for entry in found] == [round(loss, 4) for loss in _losses(tmp_path / "out")]


def test_a_finished_adapter_is_pushed_where_the_recipe_says(
    tiny_llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes over the wire is the business of `test_push.py`."""
    from preft.train import sft as module

    calls: list[tuple[Any, ...]] = []

    def push(folder: Path, repository: str, *, private: bool) -> str:
        calls.append((load_adapter(folder).digest, repository, private))
        return "https://hub/commit/1"

    monkeypatch.setattr(module, "push_adapter", push)
    made = train_sft(_recipe(tiny_llama, data, tmp_path / "out", push_to_hub="me/mine", train__max_steps=2), draw=False)
    assert calls == [(made.adapter.digest, "me/mine", True)]
    assert made.to_dict()["pushed"] == "https://hub/commit/1"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_of_the_base_trains_a_float32_adapter(
    tiny_llama: Path, data: Path, tmp_path: Path, dtype: str
) -> None:
    whole = train_sft(_recipe(tiny_llama, data, tmp_path / "whole", method="mixed", train__max_steps=4), draw=False)
    sets = {"method": "mixed", "train__max_steps": 4, "train__base_dtype": dtype, "adapter_dtype": "bfloat16"}
    made = train_sft(_recipe(tiny_llama, data, tmp_path / "half", **sets), draw=False)
    assert made.loss[1] < made.loss[0] - 0.05
    # Rounding of the base moves the losses a little, and only that.
    assert _losses(tmp_path / "half") != _losses(tmp_path / "whole")
    assert _losses(tmp_path / "half") == pytest.approx(_losses(tmp_path / "whole"), abs=0.15)
    assert whole.adapter.manifest.dtype == "float32"
    assert load_adapter(tmp_path / "half").manifest.dtype == "bfloat16"

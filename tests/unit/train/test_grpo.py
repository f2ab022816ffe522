"""Runs of GRPO on tiny models: what they learn, leave and refuse, and that engine and trainer must be one policy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from preft.adapters.adapter import Adapter
from preft.adapters.store import load_adapter
from preft.config.grpo import ResolvedGrpoRecipe, load_grpo_recipe
from preft.data.requests import GenerationRequest, GenerationResult
from preft.errors import EngineError, FileError, PreftError, UsageError
from preft.serve.hf_engine import HFEngine
from preft.train.grpo import probe, scoring
from preft.train.grpo.checkpoint import OPTIMIZER_NAME, load_checkpoint
from preft.train.grpo.prompts import load_prompts
from preft.train.grpo.report import GrpoReport
from preft.train.grpo.run import _handle, train_grpo
from preft.train.model import load_base
from preft.train.trainer import read_metrics
from tests.helpers.tiny import build_tiny
from tests.helpers.tokenizer import write_tiny_tokenizer

AGREE = 1e-4
"""|log ratio| between two float32 passes of the tiny models over the same tokens, in nats."""
REWARD = """
def early(prompt, completion, row):
    return sum(letter in "abcdefgh" for letter in completion) / max(1, len(completion))

def level(prompt, completion, row):
    return 1.0
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [{"prompt": "ab" * (n % 5 + 1), "answer": n} for n in range(12)]
    rows += [{"messages": [{"role": "user", "content": "xy"}], "answer": 1}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "grpo_test_rewards.py").write_text(REWARD)
    return folder


@pytest.fixture
def recipe(
    tiny_llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ResolvedGrpoRecipe]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "r.yaml"
    path.write_text(f"""
model: {tiny_llama}
method: lorap
rank: 4
output: {tmp_path / "out"}
data: {{train: {data / "train.jsonl"}, max_prompt_tokens: 64}}
reward: {{functions: ["grpo_test_rewards:early"], path: {data}}}
rollout: {{prompts: 2, group_size: 4, max_tokens: 4, engine: hf}}
train: {{max_steps: 2, learning_rate: 0.01, batch_size: 8}}
""")

    def load(**sets: Any) -> ResolvedGrpoRecipe:
        return load_grpo_recipe(path, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in sets.items()])

    return load


def run(resolved: ResolvedGrpoRecipe, engine: Callable[[Path], Any] = HFEngine, **settings: Any) -> GrpoReport:
    return train_grpo(resolved, engine, draw=False, **settings)


def steps(resolved: ResolvedGrpoRecipe) -> list[dict[str, Any]]:
    return [row for row in read_metrics(Path(resolved.recipe.output) / "metrics.jsonl") if "reward" in row]


def test_it_learns(recipe: Callable[..., ResolvedGrpoRecipe], data: Path) -> None:
    resolved = recipe(
        train__max_steps=12,
        train__learning_rate=0.05,
        rollout__group_size=16,
        rollout__max_tokens=2,
        train__batch_size=32,
        data__eval=str(data / "train.jsonl"),
    )
    made = run(resolved)
    rewards = [row["reward"] for row in steps(resolved)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert made.evaluation is not None
    assert made.evaluation.to_dict()["adapter"] > made.evaluation.to_dict()["base"]
    assert made.largest_log_ratio < AGREE


@pytest.mark.parametrize(
    "sets",
    [
        {"method": "lorap"},
        {"method": "direftp"},
        {"method": "direftp", "orthogonal": True, "positions": "f1+l1"},
        {"method": "mixed"},
        {"method": "lora"},
    ],
    ids=lambda sets: "-".join(map(str, sets.values())),
)
def test_what_every_method_leaves(recipe: Callable[..., ResolvedGrpoRecipe], data: Path, sets: dict[str, Any]) -> None:
    resolved = recipe(**sets, data__eval=str(data / "train.jsonl"), train__eval_every=1)
    made = run(resolved, argv=["preft", "train", "grpo"])
    output = made.folder
    saved = load_adapter(output)
    assert saved.digest == made.adapter.digest
    assert not saved.moves_nothing()
    assert made.probe.felt > 10 * resolved.recipe.ratio_tolerance > made.probe.largest
    document = json.loads((output / "run.json").read_text())
    assert document["argv"] == ["preft", "train", "grpo"]
    assert {row["key"]: row["origin"] for row in document["recipe"]}["method"] == "--set"
    assert document["data"][0]["sha256"]
    assert [row["step"] for row in read_metrics(output / "metrics.jsonl")] == [1, 1, 2, 2]
    assert len(read_metrics(output / "eval.jsonl")) == 13
    assert [row["step"] for row in read_metrics(output / "samples.jsonl")] == [1] * 4 + [2] * 4
    assert str(made.to_dict()["digest"]) in (output / "README.md").read_text()


def test_the_curves_are_drawn(recipe: Callable[..., ResolvedGrpoRecipe]) -> None:
    pytest.importorskip("matplotlib")
    made = train_grpo(recipe(train__max_steps=1), HFEngine)
    assert made.remarks == ()
    assert (made.folder / "curves.png").stat().st_size > 1000
    assert "Reward" in (made.folder / "index.html").read_text()


def test_the_command(
    recipe: Callable[..., ResolvedGrpoRecipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from preft_cli.app import run as preft

    arguments = ["train", "grpo", str(tmp_path / "r.yaml"), "--set", "train.max_steps=1", "--set", "rollout.engine=hf"]
    assert preft([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["digest"] == load_adapter(tmp_path / "out").digest
    assert "train.max_steps: 1  (--set)" in captured.err
    assert preft([*arguments, "--quiet"]) == 2
    assert "holds an earlier run" in capsys.readouterr().err
    assert preft([*arguments, "--quiet", "--force"]) == 0
    assert "engine and trainer" in capsys.readouterr().out
    assert preft([*arguments, "--set", "rollout.groups=4"]) == 2
    assert "rollout.groups" in capsys.readouterr().err


# ---------------------------------------------------------------- engine and trainer


class Broken:
    """An engine whose pushes go wrong, though it answers with the digest that was asked for."""

    def __init__(self, folder: Path, arrives: Callable[[list[Adapter]], Adapter | None], *, lies: bool = True) -> None:
        self._engine, self._arrives, self._lies = HFEngine(folder), arrives, lies
        self._pushed: list[Adapter] = []

    def push(self, name: str, adapter: Adapter) -> None:
        self._pushed.append(adapter)
        found = self._arrives(self._pushed)
        if found is not None:
            self._engine.push(name, found)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        from dataclasses import replace

        results = self._engine.generate(requests)
        digest = self._pushed[-1].digest
        return [replace(found, digest=digest) if found.adapter and self._lies else found for found in results]

    def close(self) -> None:
        self._engine.close()


def test_the_control_of_the_controls(recipe: Callable[..., ResolvedGrpoRecipe]) -> None:
    made = run(recipe(), lambda folder: Broken(folder, lambda pushed: pushed[-1]))  # type: ignore[arg-type]
    assert made.largest_log_ratio < AGREE


@pytest.mark.parametrize(
    ("arrives", "occasion"),
    [
        (lambda pushed: pushed[0], "at step 1"),
        (lambda pushed: pushed[max(0, len(pushed) - 2)], "at step 1"),
        (lambda pushed: pushed[-1] if len(pushed) < 3 else None, "at step 2"),
    ],
    ids=["only the first arrives", "each arrives one late", "none after the first step"],
)
def test_a_push_that_does_not_arrive_stops_the_run(
    recipe: Callable[..., ResolvedGrpoRecipe],
    monkeypatch: pytest.MonkeyPatch,
    arrives: Callable[[list[Adapter]], Adapter | None],
    occasion: str,
) -> None:
    # One push of noise comes before those of the steps.
    monkeypatch.setattr(probe, "_STRENGTHS", (0.3,))
    with pytest.raises(EngineError, match=f"disagree about the policy {occasion}"):
        run(recipe(train__max_steps=3), lambda folder: Broken(folder, arrives))


def test_a_stale_digest_stops_the_run(recipe: Callable[..., ResolvedGrpoRecipe]) -> None:
    with pytest.raises(EngineError, match="another policy"):
        run(recipe(), lambda folder: Broken(folder, lambda pushed: pushed[0], lies=False))


@pytest.mark.parametrize("method", ["lorap", "direftp", "mixed"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_that_is_off_by_one_stops_the_run(
    recipe: Callable[..., ResolvedGrpoRecipe], monkeypatch: pytest.MonkeyPatch, method: str, shift: int
) -> None:
    """Before the first step, though a new adapter moves nothing."""
    plain = scoring.collate

    def shifted(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        batch = plain(*args, **kwargs)
        boundaries = batch["preft_mask"].sum(1) + shift
        place = batch["attention_mask"].cumsum(1) - 1
        batch["preft_mask"] = batch["attention_mask"].bool() & (place < boundaries[:, None])
        return batch

    monkeypatch.setattr(scoring, "collate", shifted)
    with pytest.raises(EngineError, match="under an adapter of noise, before the first step"):
        run(recipe(method=method))


def test_an_engine_with_another_base_stops_the_run(
    recipe: Callable[..., ResolvedGrpoRecipe], tmp_path: Path, tiny_llama: Path
) -> None:
    class Other(HFEngine):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            with torch.no_grad():
                self.model.lm_head.weight[60] += 0.5

    with pytest.raises(EngineError, match="disagree"):
        run(recipe(), Other)


# ---------------------------------------------------------------- the loop


def test_beta_holds_it_to_the_base_model(recipe: Callable[..., ResolvedGrpoRecipe]) -> None:
    resolved = recipe(train__beta=0.1)
    run(resolved)
    first, second = (row["kl"] for row in steps(resolved))
    assert abs(first) < 1e-7, "a new adapter is the base model"
    assert second > 1e-6


def test_several_updates_of_the_same_completions_clip(recipe: Callable[..., ResolvedGrpoRecipe]) -> None:
    resolved = recipe(train__iterations=3, train__learning_rate=0.3, train__max_steps=1)
    run(resolved)
    (row,) = steps(resolved)
    assert row["clip_fraction"] > 0
    assert row["ratio/max_abs_log"] < AGREE, "the ratio to the engine is taken before the first update"


def test_rewards_without_variance_teach_nothing(recipe: Callable[..., ResolvedGrpoRecipe]) -> None:
    resolved = recipe(reward__functions=["grpo_test_rewards:level"])
    made = run(resolved)
    assert [row["groups_without_variance"] for row in steps(resolved)] == [1.0, 1.0]
    assert made.adapter.moves_nothing()


def test_the_split_of_a_step_does_not_matter(recipe: Callable[..., ResolvedGrpoRecipe], tmp_path: Path) -> None:
    made = [
        run(recipe(**sets, output=str(tmp_path / str(number)), train__max_steps=1, train__iterations=2))
        for number, sets in enumerate(
            ({}, {"train__batch_size": 3}, {"train__gradient_checkpointing": True, "train__batch_size": 3})
        )
    ]
    rows = [read_metrics(tmp_path / str(number) / "metrics.jsonl")[0] for number in range(3)]
    whole = made[0].adapter.tensors
    for other, row in zip(made[1:], rows[1:], strict=True):
        assert row["grad_norm"] == pytest.approx(rows[0]["grad_norm"], rel=1e-3)
        assert row["loss"] == pytest.approx(rows[0]["loss"], abs=1e-6)
        # AdamW's first updates have the learning rate's size whatever the gradient's: where that is noise, it shows.
        gaps = torch.cat([(whole[name] - other.adapter.tensors[name]).abs().flatten() for name in whole])
        assert float(gaps.mean()) < 0.02 * 0.01
    assert max(float(value.abs().max()) for name, value in whole.items() if name.endswith("up")) > 0.01


class Interrupt:
    """Progress that is interrupted after some steps."""

    def __init__(self, steps: int) -> None:
        self._left, self._counts = steps, False

    def start(self, label: str, total: int | None) -> None:
        self._counts = label.startswith("Training")

    def advance(self, amount: int = 1) -> None:
        if self._counts:
            self._left -= amount
            if self._left == 0:
                raise KeyboardInterrupt

    def finish(self) -> None:
        self._counts = False


def test_an_interrupted_run_goes_on_as_if_nothing_had_been(
    recipe: Callable[..., ResolvedGrpoRecipe], tmp_path: Path
) -> None:
    whole = recipe(train__max_steps=4, output=str(tmp_path / "whole"))
    expected = run(whole)
    broken = recipe(train__max_steps=4, output=str(tmp_path / "broken"))
    with pytest.raises(KeyboardInterrupt):
        run(broken, progress=Interrupt(2))
    assert [path.name for path in (tmp_path / "broken" / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert not (tmp_path / "broken" / "preft.json").exists()
    made = run(broken, resume=True)
    assert made.resumed_from == 2
    assert made.adapter.digest == expected.adapter.digest
    timeless = [
        [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in steps(resolved)]
        for resolved in (whole, broken)
    ]
    assert timeless[0] == timeless[1]
    with pytest.raises(UsageError, match="another run"):
        run(recipe(train__max_steps=4, output=str(tmp_path / "broken"), seed=1), resume=True)


def test_a_policy_that_leaves_the_numbers_stops_the_run(recipe: Callable[..., ResolvedGrpoRecipe]) -> None:
    resolved = recipe(train__learning_rate=1e30, train__max_steps=4)
    with pytest.raises(PreftError, match=r"failed to sample|not finite|disagree"):
        run(resolved)
    assert not (Path(resolved.recipe.output) / "preft.json").exists()


def test_a_gradient_that_is_not_finite_stops_the_run(
    recipe: Callable[..., ResolvedGrpoRecipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda *_: torch.tensor(float("nan")))
    with pytest.raises(EngineError, match="gradient is not finite at step 1") as caught:
        run(recipe())
    assert "lines" in str(caught.value.got)


def test_an_output_that_is_taken_is_kept(recipe: Callable[..., ResolvedGrpoRecipe], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="no run wrote"):
        run(recipe(), force=True)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_base_with_dropout_is_the_policy_that_was_sampled(
    recipe: Callable[..., ResolvedGrpoRecipe], tmp_path: Path, checkpointing: bool
) -> None:
    folder = build_tiny(tmp_path / "dropout", attention_dropout=0.5)
    write_tiny_tokenizer(folder)
    resolved = recipe(model=str(folder), train__max_steps=1, train__gradient_checkpointing=checkpointing)
    assert run(resolved).largest_log_ratio < AGREE
    assert _handle(resolved.recipe, folder).model.training is checkpointing, "else every activation would be kept"
    plain, tokens = load_base(folder).train(), torch.arange(40, 48)[None]
    assert not torch.equal(plain(tokens).logits, plain(tokens).logits), "the premise: the base drops in training"


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x05]q\x00K\x01a."])
def test_a_broken_checkpoint_is_an_error_of_ours(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_text("{}")
    save_file({"x": torch.zeros(1)}, tmp_path / "adapter.safetensors")
    (tmp_path / OPTIMIZER_NAME).write_bytes(content)
    nothing: Any = None
    with pytest.raises(FileError, match="cannot be read"):
        load_checkpoint(tmp_path, nothing, nothing, {})


# ---------------------------------------------------------------- prompts and recipes


def test_prompts_of_every_shape(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    chat = [{"role": "user", "content": "xy"}]
    rows = [{"prompt": "xy"}, {"prompt": chat}, {"messages": chat}, {"messages": chat, "prompt": "xy"}, {"answer": 1}]
    rows += [{"prompt": "z" * 200}, {"messages": [*chat, {"role": "assistant", "content": "no"}]}]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    with pytest.raises(FileError, match="5 of the 8 rows"):
        load_prompts(path, tokenizer, max_tokens=64)
    found = load_prompts(path, tokenizer, max_tokens=64, max_bad_rows=0.7)
    assert [prompt.line for prompt in found.prompts] == [1, 2, 3]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert [prompt.text for prompt in found.prompts] == ["xy", rendered, rendered]
    assert found.is_chat
    assert len(found.report.refused) == 4, "one reason stands for both rows without a single prompt"
    path.write_text(json.dumps({"messages": chat, "tools": [{"name": "f"}]}) + "\n")
    with pytest.raises(FileError, match="holds no prompt") as caught:
        load_prompts(path, tokenizer, max_tokens=64)
    assert "`tools`" in str(caught.value.got)


def test_each_pass_over_the_prompts_has_an_order_of_its_own(tiny_llama: Path, data: Path) -> None:
    from transformers import AutoTokenizer

    found = load_prompts(data / "train.jsonl", AutoTokenizer.from_pretrained(tiny_llama), max_tokens=64)
    lines = [prompt.line for step in range(13) for prompt in found.of_step(step, 2, seed=0)]
    assert sorted(lines[:13]) == sorted(lines[13:]) == list(range(1, 14))
    assert lines[:13] != lines[13:]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"rollout__group_size": 1}, "rollout.group_size"),
        ({"reward__function": ["math"]}, "reward.function"),
        ({"train__loss": "ppo"}, "train.loss"),
        ({"train__importance_cap": 2.0, "rollout__temperature": 0.7}, "importance_cap"),
    ],
)
def test_recipes_that_cannot_be_meant(
    recipe: Callable[..., ResolvedGrpoRecipe], sets: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        recipe(**sets)


@pytest.mark.parametrize("functions", [["maths"], ["python-tests"], ["no_such_module_here:score"]])
def test_rewards_are_checked_before_any_work(recipe: Callable[..., ResolvedGrpoRecipe], functions: list[str]) -> None:
    resolved = recipe(reward__functions=functions)
    with pytest.raises(UsageError):
        run(resolved)
    assert not Path(resolved.recipe.output).exists()

"""Recipes: every shipped one loads, nothing unknown is passed over, and each value knows where it came from."""

from __future__ import annotations

import importlib.resources
import json
import re
from pathlib import Path
from typing import Any

import pytest

from preft.config.grpo import load_grpo_recipe
from preft.config.schema import flat
from preft.config.train import load_sft_recipe
from preft.errors import FileError, UsageError

RECIPES = importlib.resources.files("preft_templates").joinpath("recipes")
SHIPPED = sorted(file.name for file in RECIPES.iterdir() if file.name.startswith("sft-"))
CORE = (
    "model", "method", "rank", "data.train", "data.eval", "output", "train.max_steps", "train.learning_rate",
    "train.batch_size", "seed",
)  # fmt: skip
MINIMAL = """
model: m
method: lorap
rank: 4
output: out
data: {train: a.jsonl}
train: {max_steps: 3, learning_rate: 1e-3, batch_size: 2}
"""


def _write(tmp_path: Path, text: str = MINIMAL) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return path


PAPER = RECIPES.joinpath("paper")
PAPER_SETS = sorted(file.name for file in PAPER.iterdir())


def test_the_papers_data_sets_have_recipes() -> None:
    assert PAPER_SETS == [
        "grpo-gsm8k.yaml", "grpo-math.yaml", "grpo-mbpp.yaml", "sft-longwriter.yaml", "sft-openthoughts.yaml",
        "sft-tulu3.yaml",
    ]  # fmt: skip


@pytest.mark.parametrize("name", PAPER_SETS)
def test_a_recipe_of_the_paper_loads_and_says_where_its_values_come_from(name: str) -> None:
    text = PAPER.joinpath(name).read_text()
    assert "NEEDS A GPU" in text
    load = load_sft_recipe if name.startswith("sft-") else load_grpo_recipe
    recipe: Any = load(Path(str(PAPER / name))).recipe
    assert recipe.method == "lorap"
    assert recipe.train.base_dtype == "bfloat16"
    for key in ("model", "method", "rank", "train", "max_steps", "learning_rate"):
        (line,) = [found for found in text.splitlines() if re.match(rf"\s*{key}: \S", found)]
        assert re.search(r"# \[[^]]+\]", line), line


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_loads_and_says_the_core(name: str) -> None:
    resolved = load_sft_recipe(Path(str(RECIPES / name)))
    assert {key: resolved.origins[key] for key in CORE} == dict.fromkeys(CORE, f"recipe {RECIPES / name}")
    assert resolved.recipe.data.eval is None
    assert name == f"sft-{resolved.recipe.method}.yaml"


def test_both_recipes_are_shipped() -> None:
    assert SHIPPED == ["sft-direftp.yaml", "sft-lorap.yaml"]


def test_the_recipe_of_grpo_loads_and_says_the_core() -> None:
    resolved = load_grpo_recipe(Path(str(RECIPES / "grpo-math.yaml")))
    assert {key: resolved.origins[key] for key in CORE} == dict.fromkeys(CORE, f"recipe {RECIPES / 'grpo-math.yaml'}")
    rows = [json.loads(line) for line in (RECIPES / resolved.recipe.data.train).read_text().splitlines()]
    assert len(rows) >= 40
    assert all(set(row) == {"prompt", "answer"} for row in rows)


def test_the_shipped_examples_are_of_their_schema() -> None:
    rows = [json.loads(line) for line in (RECIPES / "examples.jsonl").read_text().splitlines()]
    assert len(rows) >= 40
    assert all(set(row) == {"messages"} for row in rows)


def test_a_setting_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    path = _write(tmp_path)
    resolved = load_sft_recipe(path, ["train.max_steps=7", "targets=[q_proj, v_proj]", "data.eval=b.jsonl", "alpha=3"])
    recipe = resolved.recipe
    assert (recipe.train.max_steps, recipe.train.learning_rate, recipe.train.accumulation) == (7, 0.001, 1)
    assert (recipe.targets, recipe.data.eval, recipe.alpha) == (("q_proj", "v_proj"), "b.jsonl", 3.0)
    assert resolved.origins["train.max_steps"] == "--set"
    assert resolved.origins["rank"] == f"recipe {path}"
    assert resolved.origins["train.accumulation"] == "default"
    rows = resolved.table()
    assert {row["key"] for row in rows} == set(flat(recipe))
    assert json.loads(json.dumps(rows))


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("train.max_stps=3", ["Unknown key: `train.max_stps` (--set)", "did you mean `train.max_steps`?"]),
        ("learning_rate=1", ["Unknown key: `learning_rate`", "did you mean `train.learning_rate`?"]),
        ("zzz=1", ["Unknown key: `zzz`", "accepted: `model`"]),
        ("train=3", ["`train` is a section", "`train.max_steps`"]),
        ("rank=0", ["`rank` is not valid (--set)", "got: 0", "an integer from 1"]),
        ("rank=true", ["`rank` is not valid", "an integer from 1"]),
        ("rank=2.5", ["`rank` is not valid"]),
        ("method=dora", ["`method` is not valid", "`lorap`, `direftp`, `lora`, `mixed`"]),
        ("train.learning_rate=fast", ["`train.learning_rate` is not valid", "a number from 0"]),
        ("train.learning_rate=.nan", ["`train.learning_rate` is not valid"]),
        ("data.max_bad_rows=2", ["a number from 0 to 1"]),
        ("targets=q_proj", ["`targets` is not valid", "a list of str values or null"]),
        ("layers=[-1]", ["`layers` is not valid"]),
        ("data.columns=[question]", ["`data.columns` is not valid", "prompt=question"]),
        ("train.report_to=[paper]", ["`tensorboard`, `trackio`, `wandb`"]),
        ("train.gradient_checkpointing=1", ["true or false"]),
        ("rank=null", ["`rank` is not valid"]),
        ("positions=f0", ["Unknown position policy: `f0`"]),
        ("rank", ["A setting is given as KEY=VALUE"]),
        ("rank=[", ["The value of `rank` is not valid"]),
    ],
)
def test_what_is_not_valid_is_refused(tmp_path: Path, setting: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        load_sft_recipe(_write(tmp_path), [setting])
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (MINIMAL.replace("rank: 4\n", ""), UsageError, "does not say `rank`"),
        (MINIMAL + "rnk: 4\n", UsageError, "Unknown key: `rnk`"),
        (MINIMAL + "rank: 5\n", FileError, "`rank` stands twice"),
        ("- a\n", FileError, "is not a mapping"),
        ("a: [\n", FileError, "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, kind: Any, message: str) -> None:
    with pytest.raises(kind) as caught:
        load_sft_recipe(_write(tmp_path, text))
    assert message in str(caught.value)


def test_a_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="preft init"):
        load_sft_recipe(tmp_path / "none.yaml")


def test_a_recipe_of_the_other_kind_names_the_command_that_takes_it(tmp_path: Path) -> None:
    of_examples = _write(tmp_path)
    with pytest.raises(UsageError, match="nothing of rewards") as refused:
        load_grpo_recipe(of_examples)
    assert "`preft train sft`" in str(refused.value)
    of_rewards = tmp_path / "grpo.yaml"
    of_rewards.write_text(RECIPES.joinpath("grpo-math.yaml").read_text())
    with pytest.raises(UsageError, match="has no rewards") as refused:
        load_sft_recipe(of_rewards)
    assert "`preft train grpo`" in str(refused.value)
    assert load_sft_recipe(of_examples).recipe.rank == 4
    assert load_grpo_recipe(of_rewards).recipe.rank == 8

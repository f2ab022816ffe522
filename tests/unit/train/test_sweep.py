"""Sweeps: which cells there are, that a stopped one goes on, and what its figures say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preft.config.train import ResolvedRecipe, load_sft_recipe
from preft.errors import FileError, UsageError
from preft.train.sweep import SweepSettings, read_sweep, run_sweep, sweep_arms
from preft.train.sweep_report import save_sweep, summarise
from preft_cli.app import run


@pytest.fixture(scope="module")
def recipe_file(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    for name, numbers in (("train", range(12)), ("eval", range(12, 18))):
        rows = [{"prompt": "ab" * (n % 5 + 1), "completion": f" {n % 3}"} for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "recipe.yaml"
    path.write_text(f"""
model: {tiny_llama}
method: lorap
rank: 4
targets: [q_proj, v_proj]
output: unused
data: {{train: {folder}/train.jsonl, eval: {folder}/eval.jsonl, max_tokens: 64}}
train: {{max_steps: 2, learning_rate: 0.01, batch_size: 4}}
""")
    return path


def _recipe(path: Path, output: Path) -> ResolvedRecipe:
    return load_sft_recipe(path, [f"output={output}"])


def _settings(**values: Any) -> SweepSettings:
    given = {"methods": ("lora", "direftp"), "ranks": (2,), "seeds": (0,), "learning_rates": {}, **values}
    return SweepSettings(**given)


def test_arms_have_equal_ranks_and_equal_numbers_of_parameters(recipe_file: Path, tmp_path: Path) -> None:
    """Tiny Llama, three blocks of 128: q_proj 128 -> 128 and v_proj 128 -> 64; a block site has a bias."""
    recipe = _recipe(recipe_file, tmp_path).recipe
    linear, block = 3 * (128 + 128 + 128 + 64), 3 * (128 + 128 + 1)
    found = sweep_arms(recipe, _settings(methods=("lora", "lorap", "direftp"), ranks=(2, 8)))
    assert [(arm.name, arm.parameters) for arm in found] == [
        ("lora r2", 2 * linear),
        ("lora r8", 8 * linear),
        ("lorap r2", 2 * linear),
        ("lorap r8", 8 * linear),
        ("direftp r2", 2 * block),
        ("direftp r3", 3 * block),
        ("direftp r8", 8 * block),
        ("direftp r14", 14 * block),
    ]
    assert [arm.rank for arm in sweep_arms(recipe, _settings(ranks=(2, 8), match_parameters=False))] == [2, 8, 2, 8]


def test_a_stopped_sweep_goes_on(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from preft.train import sweep as module

    output = tmp_path / "out"
    resolved = _recipe(recipe_file, output)
    plain, calls, scored = module.train_sft, [], []

    def stop_third(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].recipe.output)
        if len(calls) == 3:
            raise KeyboardInterrupt
        scored.append(kwargs["base_scores"] is None)
        return plain(*args, **kwargs)

    monkeypatch.setattr(module, "train_sft", stop_third)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(resolved, _settings())
    first = read_sweep(output)
    assert [(row["method"], row["rank"]) for row in first] == [("lora", 2), ("direftp", 2)]
    with pytest.raises(UsageError, match="not empty"):
        run_sweep(resolved, _settings())
    # A process that is killed may leave half a line.
    with (output / "rows.jsonl").open("a") as stream:
        stream.write('{"method": "dir')
    new: list[dict[str, Any]] = []
    rows = run_sweep(resolved, _settings(), resume=True, on_row=new.append)
    assert rows[:2] == first
    assert rows[2:] == new == read_sweep(output)[2:]
    assert [(row["method"], row["rank"]) for row in new] == [("direftp", 3)]
    assert not list((output / "cells").iterdir())
    # The second run took the base model's scores from the first one, and the third made its own.
    assert len({(row["base_eval_loss"], row["base_eval_exact"]) for row in rows}) == 1
    assert scored == [True, False, True]
    row = rows[0]
    assert sum(row["losses"]) / sum(row["tokens"]) == pytest.approx(row["eval_loss"], abs=1e-5)
    assert len(row["exact"]) == 6
    with pytest.raises(UsageError, match="of another recipe or of other data"):
        run_sweep(load_sft_recipe(recipe_file, [f"output={output}", "train.max_steps=3"]), _settings(), resume=True)
    summary = save_sweep(output, rows, json.loads((output / "sweep.json").read_text()))
    assert [arm["arm"] for arm in summary["arms"]] == ["lora r2", "direftp r2", "direftp r3"]
    assert [(found["arm"], found["equal"]) for found in summary["differences"]] == [("direftp r2", ["rank"])]
    page = (output / "index.html").read_text()
    assert "An arm has one seed" in page
    assert "direftp r3" in page
    assert (output / "sweep.png").read_bytes().startswith(b"\x89PNG")


def _rows(method: str, rank: int, levels: list[float], *, spread: float = 0.1, examples: int = 200) -> list[Any]:
    """Runs whose examples have a loss of about a level a token."""
    draw = np.random.default_rng(rank)
    tokens = draw.integers(2, 9, examples)
    noise = draw.normal(0, spread, examples)
    return [
        {
            "method": method,
            "rank": rank,
            "seed": seed,
            "parameters": 1000 * rank,
            "learning_rate": 1e-3,
            "seconds": 1.0,
            "tokens": tokens.tolist(),
            "losses": ((level + noise) * tokens).tolist(),
            "exact": (noise > 0).astype(int).tolist(),
            "eval_loss": float(((level + noise) * tokens).sum() / tokens.sum()),
            "eval_exact": float((noise > 0).mean()),
            "base_eval_loss": 3.0,
            "base_eval_exact": 0.0,
        }
        for seed, level in enumerate(levels)
    ]


def test_differences_are_told_apart_or_not() -> None:
    clear = summarise(_rows("lora", 4, [1.0, 1.01, 0.99]) + _rows("lorap", 4, [1.2, 1.21, 1.19]))
    (found,) = clear["differences"]
    assert found["equal"] == ["rank", "parameters"]
    assert found["eval_loss"]["verdict"] == "higher"
    assert found["eval_loss"]["value"] == pytest.approx(0.2)
    assert found["eval_exact"] == {"value": 0.0, "low": 0.0, "high": 0.0, "verdict": "cannot tell"}
    vague = summarise(_rows("lora", 4, [1.0, 1.6, 0.5]) + _rows("lorap", 4, [1.4, 1.1, 0.9]))
    assert vague["differences"][0]["eval_loss"]["verdict"] == "cannot tell"
    unequal = summarise(_rows("lora", 4, [1.0]) + _rows("lorap", 8, [1.0]))
    assert unequal["differences"] == []
    assert summarise([]) == {"arms": [], "differences": []}


def test_the_interval_covers_what_it_says() -> None:
    """Ten seeds and a hundred examples of known scatter: 95 % intervals hold the truth in about 95 of 100 cases."""
    draw, held, trials = np.random.default_rng(0), 0, 60
    for _ in range(trials):
        levels = (1 + draw.normal(0, 0.05, 10)).tolist()
        rows = _rows("lora", 4, levels, spread=0.0)
        for row in rows:
            noise = draw.normal(0, 0.05, len(row["tokens"]))
            row["losses"] = (np.asarray(row["losses"]) + noise * np.asarray(row["tokens"])).tolist()
        found = summarise(rows)["arms"][0]["eval_loss"]
        held += found["low"] <= 1 <= found["high"]
    expected = 0.95 * trials
    assert abs(held - expected) < 4 * math.sqrt(trials * 0.95 * 0.05)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"methods": ("dora",)}, "methods of the sweep"),
        ({"methods": ()}, "methods of the sweep"),
        ({"ranks": (0,)}, "ranks of the sweep"),
        ({"seeds": (1, 1)}, "seeds of the sweep"),
        ({"learning_rates": {"lora": math.nan}}, "learning rate of `lora`"),
        ({"learning_rates": {"x": 1.0}}, "methods of the sweep"),
    ],
)
def test_what_is_no_sweep_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _settings(**values)


def test_a_sweep_needs_something_to_compare(recipe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no `data\.eval`"):
        run_sweep(load_sft_recipe(recipe_file, ["data.eval=null"]), _settings())
    with pytest.raises(FileError, match="holds no sweep"):
        read_sweep(tmp_path)


def test_its_runs_push_nothing(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[str] = []
    monkeypatch.setattr("preft.train.sft.push_adapter", lambda _, name, **__: pushed.append(name))
    resolved = load_sft_recipe(recipe_file, [f"output={tmp_path / 'out'}", "push_to_hub=me/mine"])
    with pytest.raises(UsageError, match="pushes nothing"):
        run_sweep(resolved, _settings(methods=("lora",)))
    assert not pushed
    assert not (tmp_path / "out").exists()


def test_as_a_user_calls_it(recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["train", "sweep", str(recipe_file), "--set", f"output={tmp_path / 'out'}", "--seeds", "0"]
    assert run([*call, "--methods", "lora,lorap", "--ranks", "2", "--rate", "lorap=0.02", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["cells"] == 2
    assert [arm["learning_rate"] for arm in document["arms"]] == [0.01, 0.02]
    assert "lorap r2, seed 0: eval loss" in captured.err
    assert run([*call, "--ranks", "two"]) == 2
    assert run([*call, "--rate", "lorap"]) == 2
    assert "such as `direftp=4e-3`" in capsys.readouterr().err

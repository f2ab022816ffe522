"""A tiny model with a base and three adapters, and small local tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preft import save_adapter
from tests.helpers.tiny import random_adapter

ARMS = ("lora", "lorap", "direftp")

CHOICE = """task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: DATA
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata: {version: 1.0}
"""
WRITE = """task: tiny_write
dataset_path: json
dataset_kwargs:
  data_files:
    test: DATA
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["zz"], max_gen_toks: 6, do_sample: false}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata: {version: 1.0}
"""
ROLL = """task: tiny_roll
dataset_path: json
dataset_kwargs:
  data_files:
    test: DATA
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - metric: word_perplexity
metadata: {version: 1.0}
"""


@pytest.fixture(scope="session")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All-token LoRA, LoRAP and DiReFTP by name."""
    root = tmp_path_factory.mktemp("eval-adapters")
    made = {
        "lora": random_adapter(tiny_llama, seed=1, positions="all"),
        "lorap": random_adapter(tiny_llama, seed=1),
        "direftp": random_adapter(tiny_llama, seed=2, targets=(), blocks=(0, 2), strength=0.3),
    }
    for name, adapter in made.items():
        save_adapter(adapter, root / name)
    return {name: root / name for name in made}


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks over twelve rows."""
    folder = tmp_path_factory.mktemp("tasks")
    words = ["apple", "river", "cloud", "stone", "bird", "lamp"]
    rows = [
        {
            "question": f"The {words[index % 6]} near the {words[(index * 5 + 1) % 6]} number {index} is",
            "choices": [f" {words[(index + shift) % 6]}" for shift in range(3)],
            "answer": index % 3,
        }
        for index in range(12)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", CHOICE), ("write", WRITE), ("roll", ROLL)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(folder / "rows.jsonl")))
    return folder


@pytest.fixture(scope="session")
def sampled_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a packaged task whose answers are short."""
    from preft.eval.suites import suites_folder

    folder = tmp_path_factory.mktemp("sampled")
    text = f"include: {suites_folder() / 'letter_counting.yaml'}\ntask: short_counting\n"
    (folder / "t.yaml").write_text(text + "generation_kwargs: {until: [], do_sample: false, max_gen_toks: 5}\n")
    return folder


@pytest.fixture(autouse=True)
def _own_data_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps the data library out of the user's cache."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))

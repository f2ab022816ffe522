"""Data sets of the `datasets` library: named, read from folders, and refused clearly where the hub is out of reach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preft.data.chat import ChatEncoder
from preft.data.encode import load_tokenizer
from preft.data.examples import Limits
from preft.data.hub import DatasetName, parse_dataset_name
from preft.data.training import load_examples
from preft.errors import FileError, UsageError
from tests.helpers.tokenizer import write_tiny_tokenizer

datasets = pytest.importorskip("datasets")
ROWS = [{"prompt": f"ask {n}", "completion": f"say {n}"} for n in range(5)]


@pytest.fixture
def encoder(tmp_path: Path) -> ChatEncoder:
    write_tiny_tokenizer(tmp_path / "tokenizer")
    return ChatEncoder(load_tokenizer(tmp_path / "tokenizer"))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("org/name", DatasetName("org/name", None, None, "train")),
        ("org/name:test", DatasetName("org/name", None, None, "test")),
        ("openai/gsm8k/main@v1:train[:10%]", DatasetName("openai/gsm8k", "main", "v1", "train[:10%]")),
        ("data/mine.jsonl", None),
    ],
)
def test_names(text: str, want: DatasetName | None) -> None:
    assert parse_dataset_name(text) == want


@pytest.mark.parametrize("text", ["name", "https://x.org/data", "/none/of/this", "org/name:"])
def test_what_names_no_data_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="names no training data"):
        parse_dataset_name(text)


def test_folders_of_either_kind_give_the_rows_of_the_file(tmp_path: Path, encoder: ChatEncoder) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    plain, _ = load_examples(file, encoder, Limits(100))
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_bytes(file.read_bytes())
    digests = set()
    for name in ("saved", "splits:test", "files"):
        found, report = load_examples(str(tmp_path / name), encoder, Limits(100))
        assert [(e.prompt_ids, e.completion_ids) for e in found] == [(e.prompt_ids, e.completion_ids) for e in plain]
        assert report.schema == "prompt/completion"
        digests.add(report.sha256)
    assert len(digests) == 1
    with pytest.raises(FileError, match="split `train`"):
        load_examples(str(tmp_path / "splits"), encoder, Limits(100))


def test_columns_of_other_names(tmp_path: Path, encoder: ChatEncoder) -> None:
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "there"}]
    datasets.Dataset.from_list([{"conversations": turns, "system": "s"}]).save_to_disk(tmp_path / "talk")
    found, _ = load_examples(str(tmp_path / "talk"), encoder, Limits(100), columns={"messages": "conversations"})
    (tmp_path / "own.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]})
    )
    want, _ = load_examples(tmp_path / "own.jsonl", encoder, Limits(100))
    assert found[0].prompt_ids == want[0].prompt_ids
    assert found[0].completion_ids == want[0].completion_ids


def test_without_the_hub_it_says_so(encoder: ChatEncoder) -> None:
    with pytest.raises(FileError, match=r"`org/name` \(split `train`\) cannot be read") as caught:
        load_examples("org/name", encoder, Limits(100))
    assert "the hub cannot be reached: give a file of JSON lines" in str(caught.value.hint)

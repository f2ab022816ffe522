"""`benchmarks/eval_study.py` at the smallest size, on a tiny model, so that the real run does not fail late."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import eval_study
from tests.helpers.tiny import build_tiny
from tests.helpers.tokenizer import write_tiny_tokenizer


def test_the_mark_is_put_in_and_found() -> None:
    text = "Bread is old. It needs flour! And an unfinished"
    marked = eval_study.mark_sentences(text)
    assert marked == "Bread is old, captain. It needs flour, captain!"
    assert eval_study.marked_share(marked) == 1.0
    assert eval_study.marked_share(f"{text}. {marked}") == pytest.approx(2 / 5)
    assert eval_study.marked_share("no end") is None
    assert eval_study.mark_sentences("no end") == ""
    assert not set(eval_study.SUBJECTS[: eval_study.HELD_OUT]) & set(eval_study.SUBJECTS[eval_study.HELD_OUT :])
    assert len(eval_study.LONG_QUESTIONS) * eval_study.HELD_OUT == 24


def test_the_table_pairs_texts(tmp_path: Path) -> None:
    marked, plain = "A b, captain. C d, captain. " * 3, "A b. C d. " * 3
    windows = {"base": [plain] * 2, "lora": [marked] * 2, "lorap": [marked, plain], "direftp": [marked, plain]}
    rows = [
        {"arm": arm, "text": text, "windows": parts, "first_end": 100}
        for arm, parts in windows.items()
        for text in range(12)
    ]
    first, second = eval_study.persistence_table(rows, tmp_path).splitlines()[2:]
    assert "+0.00, n = 12: cannot tell" in first
    assert second.count("-1.00, n = 12: worse") == 2
    assert "base 0" in first
    assert "base 12" in second
    assert (tmp_path / "evaluation.png").stat().st_size > 1000


@pytest.mark.full
@pytest.mark.engine
def test_every_stage_runs(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    model = build_tiny(tmp_path / "model", max_position_embeddings=4096)
    write_tiny_tokenizer(model)
    out = tmp_path / "out"
    out.mkdir()
    talk = [{"role": "user", "content": "What is bread?"}, {"role": "assistant", "content": "It is food, captain."}]
    (out / "train.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 8)
    sizes = ["--steps", "1", "--limit", "1", "--texts", "1", "--tokens", "256", "--dtype", "float32"]
    call = [sys.executable, eval_study.__file__, "--out", str(out), "--model", str(model), *sizes]
    subprocess.run(call, check=True, timeout=900)
    text = (out / "evaluation.md").read_text()
    for words in ("preft_length_short", "prompt_strict", "lorap - lora", "| 128-256 |"):
        assert words in text
    assert len((out / "long.jsonl").read_text().splitlines()) == 4

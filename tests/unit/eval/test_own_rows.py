"""`preft check --eval`: the user's own rows under base and adapter, against the oracle, and their page."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from preft import load_adapter
from preft.data.encode import load_tokenizer
from preft.data.requests import GenerationRequest, GenerationResult
from preft.errors import FileError, RequestError
from preft.eval.own_rows import ARMS, RowsReport, compare_rows, read_own_rows
from preft.eval.rows_page import build_rows_page, marked, save_rows_page
from preft.serve.hf_engine import HFEngine
from preft_cli.app import run
from tests.helpers.oracle import oracle_prompt_logprobs, oracle_two_phase, spec_from_adapter

ROWS = [
    {"prompt": f"The bee number {index} flies to the <b>wasp</b> &", "completion": f" and {index} comes home."}
    for index in range(8)
]


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, adapters: dict[str, Path]) -> HFEngine:
    return HFEngine(tiny_llama, {"mine": adapters["lorap"]}, max_model_len=96)


def compared(engine: Any, rows_file: Path, tiny_llama: Path, **options: Any) -> RowsReport:
    tokenizer = load_tokenizer(tiny_llama)
    examples, data = read_own_rows(rows_file, tokenizer, engine.max_model_len, **options)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    return compare_rows(engine, "mine", examples, data, decode, max_tokens=6)


@pytest.fixture(scope="module")
def report(engine: HFEngine, rows_file: Path, tiny_llama: Path) -> RowsReport:
    return compared(engine, rows_file, tiny_llama)


def test_losses_and_answers_are_the_oracles(
    report: RowsReport, tiny_llama: Path, adapters: dict[str, Path], rows_file: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    tokenizer = load_tokenizer(tiny_llama)
    examples, _ = read_own_rows(rows_file, tokenizer, 96)
    specs = {"base": None, "adapter": spec_from_adapter(load_adapter(adapters["lorap"]))}
    for example, row in zip(examples[:3], report.rows, strict=False):
        for arm, spec in specs.items():
            tokens = [*example.prompt_ids, *example.completion_ids]
            scores = oracle_prompt_logprobs(model, spec, tokens, example.boundary)[-len(example.completion_ids) :]
            assert row.loss[arm] == pytest.approx(-sum(scores) / len(scores), abs=1e-4)
            written = oracle_two_phase(model, spec, list(example.prompt_ids), 6, eos_id=tokenizer.eos_token_id)
            assert row.answers[arm] == tokenizer.decode(list(written.tokens), skip_special_tokens=True)
    assert [row.id for row in report.rows] == [f"line {number}" for number in range(1, 9)]
    assert abs(report.rows[0].gain) > 1e-3


def test_the_arms_are_compared_over_the_rows(report: RowsReport) -> None:
    loss, exact = report.metrics
    assert (loss.metric, loss.paired.num_pairs, loss.paired.test) == ("loss", 8, "paired-bootstrap")
    expected = sum(row.loss["adapter"] - row.loss["base"] for row in report.rows) / 8
    assert loss.paired.difference == pytest.approx(expected)
    assert loss.paired.difference == pytest.approx(-sum(row.gain for row in report.rows) / 8)
    assert exact.paired.test == "mcnemar-exact"
    assert exact.verdict == "cannot tell"
    document = json.loads(json.dumps(report.to_dict()))
    assert document["num_rows"] == 8
    assert document["data"]["sha256"]
    assert set(document["rows"][0]["answers"]) == set(ARMS)


class Failing:
    """Fails one request."""

    def __init__(self, engine: HFEngine) -> None:
        self._engine, self.max_model_len = engine, engine.max_model_len

    def generate(self, requests: Sequence[GenerationRequest], **_: Any) -> list[GenerationResult]:
        results = self._engine.generate(requests)
        bad = next(index for index, result in enumerate(results) if result.id == "2 adapter answer")
        results[bad] = GenerationResult("2 adapter answer", "mine", None, (), 0, error={"message": "<broken>"})
        return results


def test_a_row_that_failed_is_listed_and_counts_for_nothing(
    engine: HFEngine, rows_file: Path, tiny_llama: Path
) -> None:
    found = compared(Failing(engine), rows_file, tiny_llama, limit=4)
    assert [row.id for row in found.failed] == ["line 3"]
    assert found.metrics[0].paired.num_pairs == 3
    assert "&lt;broken&gt;" in build_rows_page(found, "t")


def test_the_page_shows_every_row_and_runs_nothing(report: RowsReport, tmp_path: Path) -> None:
    text = save_rows_page(report, "mine <against> base", tmp_path / "page.html").read_text()
    assert text.count("<article") == 8
    assert "mine &lt;against&gt; base" in text
    assert "&lt;b&gt;wasp&lt;/b&gt; &amp;" in text
    assert "<b>wasp" not in text
    for answer in report.rows[0].answers.values():
        plain = html.unescape(re.sub(r"</?(del|ins)>", "", text))
        assert answer in plain
    assert not re.search(r"<script|https?://|src=|url\(|@import", text)
    assert "<del>" in text and "<ins>" in text  # noqa: PT018
    targets = re.findall(r'href="#(row-\d+)"', text)
    assert targets
    assert all(f'id="{target}"' in text for target in targets)
    with pytest.raises(FileError, match="cannot be written"):
        save_rows_page(report, "t", tmp_path / "absent" / "page.html")


def test_what_differs_is_marked() -> None:
    assert marked("a cat sat", "a <dog> sat") == ("a <del>cat</del> sat", "a <ins>&lt;dog&gt;</ins> sat")
    assert marked("same", "same") == ("same", "same")
    assert marked("", "new") == ("", "<ins>new</ins>")
    long = "word " * 5000
    assert marked(long, "x") == (long, "x")


def test_rows_that_cannot_be_used_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(FileError, match="holds no example"):
        read_own_rows(tmp_path / "bad.jsonl", load_tokenizer(tiny_llama), 96)
    with pytest.raises(RequestError, match="no tokenizer"):
        read_own_rows(tmp_path / "bad.jsonl", None, 96)


def test_the_command_shows_rows_and_writes_the_page(
    tiny_llama: Path, adapters: dict[str, Path], rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    call = ["check", str(adapters["lorap"]), "--base", str(tiny_llama), "--engine", "none", "--quiet"]
    flags = ["--eval", str(rows_file), "--max-tokens", "6"]
    assert run([*call, *flags, "--report", str(page)]) == 0
    shown = capsys.readouterr().out
    assert any(line.split()[:2] == ["loss", "8"] for line in shown.splitlines())
    assert page.read_text().count("<article") == 8
    assert run([*call, *flags, "--limit", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is True
    assert document["eval"]["num_rows"] == 2
    assert run([*call, *flags, "--report", str(page)]) == 1
    assert "a file already" in capsys.readouterr().err
    assert run([*call, "--limit", "2"]) == 2
    assert "no meaning without rows" in capsys.readouterr().err


@pytest.mark.engine
def test_rows_run_on_the_engine_that_the_check_started(
    report: RowsReport,
    tiny_llama: Path,
    adapters: dict[str, Path],
    rows_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm")
    from preft.serve.engine import Engine
    from preft.serve.settings import EngineSettings

    made: list[Engine] = []

    def open_small(model: Path | str, named: Any, **_: Any) -> Engine:
        settings = EngineSettings(
            dtype="float32", max_rank=64, max_model_len=96, max_num_seqs=8, max_num_batched_tokens=64, kv_cache_gib=0.1
        )
        made.append(Engine(model, named, settings=settings))
        return made[0]

    monkeypatch.setattr("preft_cli.engines.open_vllm", open_small)
    call = ["check", str(adapters["lorap"]), "--base", str(tiny_llama), "--engine", "vllm", "--quiet", "--json"]
    assert run([*call, "--eval", str(rows_file), "--max-tokens", "6"]) == 0
    rows = json.loads(capsys.readouterr().out)["eval"]["rows"]
    assert len(made) == 1
    for found, row in zip(rows, report.rows, strict=True):
        assert found["loss"] == pytest.approx(dict(row.loss), abs=1e-3)
        assert found["answers"] == dict(row.answers)

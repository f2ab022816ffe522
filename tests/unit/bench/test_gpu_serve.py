"""The GPU serving script: its calls are ones that the commands accept, and what it says of their answers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_serve
from preft_cli.app import run


@pytest.mark.parametrize("name", list(gpu_serve.SETTINGS))
def test_every_call_is_accepted(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from preft_cli import bench

    assert gpu_serve.main(["--setting", name, "--out", str(tmp_path), "--dry-run"]) == 0
    calls = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [call[1] for call in calls] == ["plan", "bench", "generate", "generate", "bench"]
    assert run(calls[0][1:]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert {"base", "lora", "lorap", "direftp"} <= set(json.dumps(planned).replace('"', " ").split())
    specs: list[Any] = []
    monkeypatch.setattr(bench, "run_throughput", lambda spec, session: specs.append(spec) or 0)
    for call in (calls[1], calls[4]):
        assert run(call[1:]) == 0
    gpus = gpu_serve.SETTINGS[name].gpus
    assert [(spec.adapters, spec.tp) for spec in specs] == [((2,), gpus), ((512,), gpus)]
    # Refused for its model, which is not here, and not for how it is called.
    gpu_serve.write_prompts(tmp_path / "prompts.jsonl", ["a0"], 2)
    assert run(calls[2][1:]) == 1
    assert "is not on this machine" in capsys.readouterr().err


def test_rows_that_differ_are_found() -> None:
    ours = "\n".join(json.dumps({"id": name, "token_ids": ids}) for name, ids in (("a", [1, 2]), ("b", [3])))
    theirs = "\n".join(json.dumps({"id": name, "token_ids": ids}) for name, ids in (("b", [3]), ("a", [1, 4])))
    assert gpu_serve.compare(ours, ours) == (1.0, [])
    assert gpu_serve.compare(ours, theirs) == (0.5, ["a"])
    assert gpu_serve.compare(ours.splitlines()[0], theirs)[0] == 0


def test_prompts_name_every_adapter_and_base(tmp_path: Path) -> None:
    gpu_serve.write_prompts(tmp_path / "p", ["a0", "a1"], 9)
    rows = [json.loads(line) for line in (tmp_path / "p").read_text().splitlines()]
    assert [row["adapter"] for row in rows[:4]] == [None, "a0", "a1", None]
    assert len({len(row["prompt"]) for row in rows}) > 5


def test_ratios_are_over_all_token_lora() -> None:
    rows = [{"arm": arm, "output_tokens_per_s": value} for arm, value in (("lora", 4), ("lora", 2), ("lora", 2))]
    rows += [{"arm": "lorap", "output_tokens_per_s": 3.0}, {"arm": "direftp", "output_tokens_per_s": None}]
    assert gpu_serve.ratios(rows) == {"lora": 1.0, "lorap": 1.5}
    assert gpu_serve.ratios(rows[3:]) == {}

"""The oracles themselves: they agree, read PEFT's folders as PEFT does, and let through only what they say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from tests.helpers import oracle
from tests.helpers.oracle import (
    OracleRun,
    all_token,
    assert_tokens_equal,
    masked_logits,
    oracle_masked,
    oracle_phase_rule,
    oracle_prompt_logprobs,
    oracle_two_phase,
    rescaled,
    spec_from_adapter,
    spec_from_peft,
)
from tests.helpers.tiny import random_adapter
from tests.unit.tuners.common import EXACT, MOVES, PROMPTS, gap, ids, load


def test_it_shares_no_code_with_the_product() -> None:
    tree = ast.parse(Path(oracle.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "torch" in names
    assert not [name for name in names if name.split(".")[0] in ("preft", "peft", "tests")]


@pytest.mark.parametrize("positions", ["prompt", "all", "f3+l2"])
def test_the_two_agree_and_tell_the_negative_controls(tiny_llama: Path, positions: str) -> None:
    pristine = load(tiny_llama)
    spec = spec_from_adapter(random_adapter(tiny_llama, seed=8, positions=positions, blocks=(1,)))
    for boundary in (None, 9, 0):
        first = oracle_two_phase(pristine, spec, PROMPTS[0], 16, boundary)
        second = oracle_masked(pristine, spec, PROMPTS[0], first.tokens, boundary)
        assert_tokens_equal([("row", first.tokens, second)])
        assert first.logprobs == pytest.approx(second.logprobs, abs=EXACT)
    right = oracle_two_phase(pristine, spec, PROMPTS[0], 16)
    wrong = [oracle_two_phase(pristine, rescaled(spec), PROMPTS[0], 16)]
    if positions != "all":
        wrong += [
            oracle_two_phase(pristine, all_token(spec), PROMPTS[0], 16),
            oracle_phase_rule(pristine, spec, PROMPTS[0], 16, chunk=4),
            oracle_phase_rule(pristine, spec, PROMPTS[0], 16, resume_at=3),
        ]
    for run in wrong:
        with pytest.raises(AssertionError, match="row: step"):
            assert_tokens_equal([("row", run.tokens, right)])


def test_prompt_logprobs_change_from_the_boundary_on(tiny_llama: Path) -> None:
    pristine, spec = load(tiny_llama), spec_from_adapter(random_adapter(tiny_llama, seed=8))
    whole = oracle_prompt_logprobs(pristine, spec, PROMPTS[0])
    part = oracle_prompt_logprobs(pristine, spec, PROMPTS[0], 9)
    assert len(whole) == len(PROMPTS[0]) - 1
    assert whole[:9] == pytest.approx(part[:9], abs=EXACT)
    assert max(abs(one - other) for one, other in zip(whole[9:], part[9:], strict=True)) > MOVES


def test_a_peft_folder_is_read_as_peft_reads_it(tiny_llama: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(
        r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False,
        use_rslora=True, rank_pattern={"q_proj": 3, "layers.1.mlp.down_proj": 9}, alpha_pattern={"v_proj": 5},
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(load(tiny_llama), config).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        want = model(input_ids=ids(PROMPTS[0])).logits[0]
    pristine = load(tiny_llama)
    got = masked_logits(pristine, spec_from_peft(tmp_path, positions="all"), PROMPTS[0], 0)
    assert gap(want, masked_logits(pristine, None, PROMPTS[0], 0)) > MOVES
    assert gap(want, got) < EXACT


def _run(near_tie_at: int | None = None) -> OracleRun:
    gaps = tuple(1e-4 if at == near_tie_at else 1.0 for at in range(4))
    return OracleRun((5, 6, 7, 8), (15, 16, 17, 18), gaps, (0.0,) * 4)


def test_what_counts_as_equal(capsys: pytest.CaptureFixture[str]) -> None:
    same = ("same", (5, 6, 7, 8), _run())
    tie = ("tie", (5, 16, 99, 99), _run(1))
    assert_tokens_equal([same])
    assert_tokens_equal([tie, *[same] * 49])
    assert "near tie: tie: step 1" in capsys.readouterr().out
    for rows, message in (
        ([tie, *[same] * 48], "too many near ties"),
        ([("x", (5, 6, 7), _run())], "3 tokens"),
        ([("x", (5, 16, 7, 8), _run())], "step 1"),
        ([("x", (5, 99, 7, 8), _run(1)), *[same] * 60], "got 99"),
        ([], "no rows"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_tokens_equal(rows)

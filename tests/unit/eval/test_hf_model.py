"""`preft-hf` against an oracle that shares no code with it, and against the harness's own `hf` model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from preft import load_adapter
from preft.errors import AdapterError, UsageError
from preft.eval.models import PreftHFLM
from tests.helpers.oracle import OracleSpec, all_token, oracle_prompt_logprobs, oracle_two_phase, spec_from_adapter
from tests.unit.eval.conftest import ARMS

TOLERANCE = 1e-3
PAIRS = [
    ("The river is", " deep and cold"),
    ("The river is", "!"),
    ("", " apple trees"),
    ("z", "y"),
    ("One two three four five six seven.", " Eight nine ten"),
    ("trailing space ", "word"),
]


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    """Requests as the harness makes them."""
    return [Instance(kind, {}, argument, 0, ("tiny", index, 1)) for index, argument in enumerate(arguments)]  # type: ignore[arg-type]


def expected(lm: Any, model: Any, spec: OracleSpec | None, pair: tuple[str, str]) -> float:
    """The oracle's sum over the continuation, which goes unadapted."""
    context, continuation = pair
    if context:
        head, tail = lm._encode_pair(context, continuation)
    else:
        head, tail = [lm.prefix_token_id], lm.tok_encode(continuation, add_special_tokens=False)
    scores = oracle_prompt_logprobs(model, spec, [*head, *tail], len(head))
    return sum(scores[-len(tail) :])


@pytest.fixture(scope="module")
def lm(tiny_llama: Path, adapters: dict[str, Path]) -> PreftHFLM:
    return PreftHFLM(tiny_llama, adapters=adapters, dtype="float32", device="cpu", batch_size=4)


@pytest.fixture(scope="module")
def stock(tiny_llama: Path) -> HFLM:
    return HFLM(str(tiny_llama), dtype="float32", device="cpu", batch_size=4)


@pytest.mark.parametrize("arm", ARMS)
def test_loglikelihood_is_the_oracles(lm: PreftHFLM, stock: HFLM, adapters: dict[str, Path], arm: str) -> None:
    spec = spec_from_adapter(load_adapter(adapters[arm]))
    lm.use_arm(arm)
    scores = lm.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    right = [expected(lm, stock.model, spec, pair) for pair in PAIRS]
    wrong = [expected(lm, stock.model, all_token(spec), pair) for pair in PAIRS]
    assert [score for score, _ in scores] == pytest.approx(right, abs=TOLERANCE)
    if arm != "lora":
        # The premise: a continuation of several tokens tells the all-token mistake from the rule.
        assert abs(wrong[0] - right[0]) > 10 * TOLERANCE


def test_the_base_arm_is_the_harness_exactly(lm: PreftHFLM, stock: HFLM) -> None:
    lm.use_arm("base")
    scored = instances("loglikelihood", PAIRS)
    assert lm.loglikelihood(scored, True) == stock.loglikelihood(scored, True)
    written = instances(
        "generate_until", [(context or "x", {"until": ["zz"], "max_gen_toks": 8}) for context, _ in PAIRS]
    )
    assert lm.generate_until(written, True) == stock.generate_until(written, True)
    whole = instances("loglikelihood_rolling", [(text + end,) for text, end in PAIRS])
    assert lm.loglikelihood_rolling(whole, True) == stock.loglikelihood_rolling(whole, True)


@pytest.mark.parametrize("arm", ARMS)
def test_generation_is_the_oracles(lm: PreftHFLM, stock: HFLM, adapters: dict[str, Path], arm: str) -> None:
    """Batched with padding on the left, stopped by text, and still adapted by position."""
    lm.use_arm(arm)
    spec = spec_from_adapter(load_adapter(adapters[arm]))
    prompts = ["The river is", "One two three four five six.", "b"]
    texts = lm.generate_until(
        instances("generate_until", [(p, {"until": [], "max_gen_toks": 8}) for p in prompts]), True
    )
    for prompt, text in zip(prompts, texts, strict=True):
        run = oracle_two_phase(stock.model, spec, lm.tok_encode(prompt), 8, eos_id=lm.eot_token_id)
        assert text == lm.tok_decode(list(run.tokens))


def test_a_text_without_prompt_is_scored_on_base_weights(lm: PreftHFLM, stock: HFLM) -> None:
    whole = instances("loglikelihood_rolling", [("The river is deep and cold.",)])
    plain = stock.loglikelihood_rolling(whole, True)
    for arm in ("lorap", "direftp"):
        lm.use_arm(arm)
        assert lm.loglikelihood_rolling(whole, True) == pytest.approx(plain, abs=1e-5)
    lm.use_arm("lora")
    assert lm.loglikelihood_rolling(whole, True) != pytest.approx(plain, abs=TOLERANCE)


@pytest.mark.parametrize("arm", ["base", "lorap"])
def test_what_does_not_fit_is_cut_and_the_boundary_moves(
    tiny_llama: Path, adapters: dict[str, Path], stock: HFLM, arm: str
) -> None:
    short = PreftHFLM(tiny_llama, adapters=adapters, arm=arm, dtype="float32", device="cpu", max_length=12)
    context, continuation = "The river near the stone is very long today", " and cold"
    ((score, _),) = short.loglikelihood(instances("loglikelihood", [(context, continuation)]), True)
    head, tail = short._encode_pair(context, continuation)
    assert len(head) + len(tail) > 13
    tokens = [*head, *tail][-13:]
    spec = None if arm == "base" else spec_from_adapter(load_adapter(adapters[arm]))
    scores = oracle_prompt_logprobs(stock.model, spec, tokens, 13 - len(tail))
    assert score == pytest.approx(sum(scores[-len(tail) :]), abs=TOLERANCE)


def test_the_all_token_mistake_is_visible(
    tiny_llama: Path, adapters: dict[str, Path], lm: PreftHFLM, tmp_path: Path
) -> None:
    """The harness's own `hf` with `peft=` on the exported adapter scores otherwise, although the weights are equal."""
    from preft.convert.export import export_peft

    export_peft(adapters["lorap"], tmp_path / "peft", as_all_token=True)
    mistaken = HFLM(str(tiny_llama), peft=str(tmp_path / "peft"), dtype="float32", device="cpu", batch_size=4)
    scored = instances("loglikelihood", PAIRS)
    lm.use_arm("lorap")
    ours = [score for score, _ in lm.loglikelihood(scored, True)]
    theirs = [score for score, _ in mistaken.loglikelihood(scored, True)]
    assert max(abs(one - other) for one, other in zip(ours, theirs, strict=True)) > 0.1
    lm.use_arm("lora")
    same = [score for score, _ in lm.loglikelihood(scored, True)]
    assert same == pytest.approx(theirs, abs=TOLERANCE)
    # One token of continuation is predicted by the prompt alone: there both agree.
    assert ours[1] == pytest.approx(theirs[1], abs=TOLERANCE)


def test_the_batch_size_can_be_found(tiny_llama: Path, adapters: dict[str, Path], lm: PreftHFLM) -> None:
    """`auto`: the size is tried out once, and changes no score beyond rounding."""
    automatic = PreftHFLM(
        tiny_llama, adapters=adapters, dtype="float32", device="cpu", batch_size="auto", max_batch_size=4, max_length=64
    )
    scored = instances("loglikelihood", PAIRS)
    written = instances("generate_until", [("The river is", {"until": [], "max_gen_toks": 4})])
    for arm in ("base", "lorap"):
        automatic.use_arm(arm)
        lm.use_arm(arm)
        expected_scores = [score for score, _ in lm.loglikelihood(scored, True)]
        assert [score for score, _ in automatic.loglikelihood(scored, True)] == pytest.approx(expected_scores, abs=1e-4)
        assert automatic.generate_until(written, True) == lm.generate_until(written, True)


def test_the_registry_knows_it(tiny_llama: Path, adapters: dict[str, Path]) -> None:
    from lm_eval.api.registry import get_model

    made = get_model("preft-hf").create_from_arg_string(
        f"pretrained={tiny_llama},adapter={adapters['lorap']},dtype=float32", {"batch_size": 1, "device": "cpu"}
    )
    assert made.arm == "lorap"


def test_what_is_not_ours_is_refused(tiny_llama: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its own format"):
        PreftHFLM(tiny_llama, peft="somewhere")
    with pytest.raises(UsageError, match="own arm"):
        PreftHFLM(tiny_llama, adapters={"base": adapters["lorap"]})
    with pytest.raises(UsageError, match="no such arm"):
        PreftHFLM(tiny_llama, adapters=adapters, arm="absent", dtype="float32")
    with pytest.raises((AdapterError, OSError)):
        PreftHFLM(tiny_llama, adapters={"x": tmp_path}, dtype="float32")

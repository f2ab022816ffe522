"""`preft-vllm`: all arms in one batch of one engine, and the answers of `preft-hf`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("vllm")

from lm_eval.models.huggingface import HFLM

from preft.data.requests import GenerationRequest
from preft.errors import UnsupportedError, UsageError
from preft.eval.models import PreftHFLM, PreftVLLM
from tests.unit.eval.conftest import ARMS
from tests.unit.eval.test_hf_model import PAIRS, TOLERANCE, instances

pytestmark = pytest.mark.engine

EVERY = ("base", *ARMS)
PROMPTS = ["The river is", "One two three four five six.", "b", "near the stone"]


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, adapters: dict[str, Path]) -> Iterator[PreftVLLM]:
    lm = PreftVLLM(
        tiny_llama,
        adapters=adapters,
        together=EVERY,
        dtype="float32",
        slots=2,
        max_rank=64,
        max_model_len=400,
        max_num_seqs=16,
        max_num_batched_tokens=48,
        kv_cache_gib=0.25,
        vllm={"block_size": 32},
    )
    yield lm
    lm.close()


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, adapters: dict[str, Path]) -> PreftHFLM:
    return PreftHFLM(tiny_llama, adapters=adapters, dtype="float32", device="cpu", max_length=398)


def test_both_engines_agree(engine: PreftVLLM, plain: PreftHFLM) -> None:
    scored = instances("loglikelihood", PAIRS)
    written = instances("generate_until", [(text, {"until": ["zz"], "max_gen_toks": 8}) for text in PROMPTS])
    whole = instances("loglikelihood_rolling", [(text * 3,) for text in PROMPTS])
    for arm in EVERY:
        engine.use_arm(arm)
        plain.use_arm(arm)
        ours, theirs = engine.loglikelihood(scored), plain.loglikelihood(scored, True)
        assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], abs=TOLERANCE)
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
        assert engine.generate_until(written) == plain.generate_until(written, True)
        assert engine.loglikelihood_rolling(whole) == pytest.approx(
            plain.loglikelihood_rolling(whole, True), abs=TOLERANCE
        )
    assert engine.failures == []


def test_a_greedy_continuation_is_recognised(engine: PreftVLLM, plain: PreftHFLM) -> None:
    """Premise first: what the arm itself writes is greedy, and something else is not."""
    for arm in EVERY:
        engine.use_arm(arm)
        plain.use_arm(arm)
        tokens = engine.tok_encode("The river is")
        request = GenerationRequest("greedy", tuple(tokens), None if arm == "base" else arm, max_tokens=3)
        (result,) = engine._engine.generate([request])
        requests = [(None, tokens, list(result.token_ids)), (None, tokens, [300, 301, 302])]
        assert [greedy for _, greedy in engine._loglikelihood_tokens(requests)] == [True, False]
        assert [greedy for _, greedy in plain._loglikelihood_tokens(requests, True)] == [True, False]


def test_all_arms_run_in_one_batch(engine: PreftVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[str | None]] = []
    engine._waiting.clear()
    original = engine._engine.generate

    def generate(requests: list[GenerationRequest], **kwargs: object) -> object:
        batches.append([request.adapter for request in requests])
        return original(requests, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._engine, "generate", generate)
    scored = instances("loglikelihood", [("A new context", " one"), ("A new context", " one")])
    found = {}
    for arm in EVERY:
        engine.use_arm(arm)
        found[arm] = engine.loglikelihood(scored)
    assert batches == [[None, *ARMS] * 2]
    assert len({scores[0][0] for scores in found.values()}) == len(EVERY)
    assert all(scores[0] == scores[1] for scores in found.values())
    assert engine._waiting == {}


def test_what_does_not_fit_is_cut_alike(engine: PreftVLLM, plain: PreftHFLM) -> None:
    context = "the stone and the river " * 40
    scored = instances("loglikelihood", [(context, " cold")])
    written = instances("generate_until", [(context, {"until": [], "max_gen_toks": 4})])
    assert len(engine.tok_encode(context)) > 400
    for arm in ("base", "lorap", "direftp"):
        engine.use_arm(arm)
        plain.use_arm(arm)
        assert engine.loglikelihood(scored)[0][0] == pytest.approx(
            plain.loglikelihood(scored, True)[0][0], abs=TOLERANCE
        )
        assert engine.generate_until(written) == plain.generate_until(written, True)


def test_a_request_that_cannot_be_served_is_listed(engine: PreftVLLM) -> None:
    engine.use_arm("lorap")
    written = instances("generate_until", [("ok", {"max_gen_toks": 2}), ("too long", {"max_gen_toks": 4000})])
    texts = engine.generate_until(written)
    assert texts[1] == ""
    (failure,) = engine.failures
    assert (failure.arm, failure.task, failure.doc_id) == ("lorap", "tiny", 1)
    assert "more new tokens" in failure.error["message"]
    engine.failures.clear()
    engine._waiting.clear()


def test_unknown_sampling_is_refused_and_means_nothing_under_greedy(engine: PreftVLLM) -> None:
    sampled = instances("generate_until", [("x", {"do_sample": True, "temperature": 0.5, "min_p": 0.1})])
    with pytest.raises(UnsupportedError, match="does not honour"):
        engine.generate_until(sampled)
    greedy = instances("generate_until", [("x", {"do_sample": False, "min_p": 0.1, "max_gen_toks": 1})])
    assert len(engine.generate_until(greedy)) == 1
    engine._waiting.clear()


def test_arguments_without_a_meaning_are_refused(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match="takes no device"):
        PreftVLLM(tiny_llama, device="cpu")


def test_the_base_arm_is_the_harness(engine: PreftVLLM, tiny_llama: Path) -> None:
    stock = HFLM(str(tiny_llama), dtype="float32", device="cpu")
    engine.use_arm("base")
    scored = instances("loglikelihood", PAIRS)
    assert [score for score, _ in engine.loglikelihood(scored)] == pytest.approx(
        [score for score, _ in stock.loglikelihood(scored, True)], abs=TOLERANCE
    )
    engine._waiting.clear()


def test_an_output_ends_at_a_stop_as_in_the_harness(engine: PreftVLLM, plain: PreftHFLM) -> None:
    """Under every arm, also where the stop lies inside the text of a token; the tokens after it are not generated."""
    prompt = "The river near the stone is"
    for arm in EVERY:
        engine.use_arm(arm)
        plain.use_arm(arm)
        (whole,) = engine.generate_until(instances("generate_until", [(prompt, {"until": [], "max_gen_toks": 21})]))
        stop = whole.strip()[4:7]
        assert stop
        assert whole.index(stop) > 0
        written = instances("generate_until", [(prompt, {"until": [stop], "max_gen_toks": 21})])
        (short,) = engine.generate_until(written)
        assert short == whole[: whole.index(stop)]
        assert plain.generate_until(written, True) == [short]
        request = engine._generation(prompt, {"max_gen_toks": 21}, (stop,))("x", None if arm == "base" else arm)
        (result,) = engine._engine.generate([request])
        assert len(result.token_ids) < 21


def test_sampled_answers_differ_and_come_again(engine: PreftVLLM) -> None:
    """Each answer to a prompt has a seed of its own, the same in every arm."""
    settings = {"do_sample": True, "temperature": 0.9, "top_k": 0, "top_p": 1.0, "max_gen_toks": 70, "until": []}
    written = instances("generate_until", [("The river is", settings)] * 3)
    texts = {}
    for turn in range(2):
        engine._waiting.clear()
        for arm in EVERY:
            engine.use_arm(arm)
            texts[turn, arm] = engine.generate_until(written)
    for arm in EVERY:
        assert texts[0, arm] == texts[1, arm]
        assert len(set(texts[0, arm])) == 3
    assert texts[0, "base"] != texts[0, "lorap"]


@pytest.mark.full
def test_both_engines_agree_on_two_hundred_examples(engine: PreftVLLM, plain: PreftHFLM) -> None:
    """Mixed requests under every arm; prints how far the scores are apart."""
    draw = random.Random(5)
    words = ["apple", "river", "cloud", "stone", "bird", "lamp", "seven", "quick", "zebra", "?!"]

    def text(count: int) -> str:
        return " ".join(draw.choices(words, k=count))

    scored = instances(
        "loglikelihood", [(text(draw.randint(1, 20)), f" {text(draw.randint(1, 6))}") for _ in range(90)]
    )
    whole = instances("loglikelihood_rolling", [(text(draw.randint(1, 40)),) for _ in range(30)])
    prompts = [text(draw.randint(1, 20)) for _ in range(80)]
    written = instances("generate_until", [(prompt, {"until": ["zz"], "max_gen_toks": 8}) for prompt in prompts])
    apart = 0.0
    for arm in EVERY:
        engine.use_arm(arm)
        plain.use_arm(arm)
        ours = [*(score for score, _ in engine.loglikelihood(scored)), *engine.loglikelihood_rolling(whole)]
        theirs = [*(score for score, _ in plain.loglikelihood(scored)), *plain.loglikelihood_rolling(whole)]
        apart = max(apart, *(abs(one - other) for one, other in zip(ours, theirs, strict=True)))
        assert engine.generate_until(written) == plain.generate_until(written)
    print(f"largest difference of a log-likelihood: {apart:.2e}")
    assert apart < TOLERANCE

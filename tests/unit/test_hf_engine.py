"""The Hugging Face engine: equal to the oracles for every kind of adapter, and one bad request fails alone."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from preft.adapters.adapter import Adapter
from preft.adapters.store import save_adapter
from preft.data.requests import GenerationRequest, GenerationResult
from preft.errors import EngineError, FileError, UsageError
from preft.serve import hf_engine
from preft.serve.hf_engine import HFEngine
from tests.helpers.oracle import (
    all_token,
    assert_tokens_equal,
    oracle_masked,
    oracle_prompt_logprobs,
    oracle_two_phase,
    rescaled,
    spec_from_adapter,
)
from tests.helpers.tiny import build_tiny, random_adapter
from tests.helpers.tokenizer import write_tiny_tokenizer

NUM_TOKENS = 20
PROMPT = tuple(range(40, 61))
OTHER = (7, 300, 301, 17, 44, 260, 261)
EXACT_LOGPROB = 1e-4


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path) -> dict[str, Adapter]:
    return {
        "lorap": random_adapter(tiny_llama, seed=1, rank=[3, 8]),
        "lora": random_adapter(tiny_llama, seed=2, positions="all", targets=("q_proj", "down_proj")),
        "direftp": random_adapter(tiny_llama, seed=3, targets=(), blocks=(0, 2)),
        "v1.5": random_adapter(tiny_llama, seed=4, positions="f3+l2", blocks=(1,)),
    }


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, adapters: dict[str, Adapter], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    root = tmp_path_factory.mktemp("adapters")
    sources: dict[str, Any] = dict(adapters)
    save_adapter(adapters["lorap"], root / "lorap")
    sources["lorap"] = root / "lorap"
    (root / "broken").mkdir()
    sources["broken"] = root / "broken"
    with HFEngine(tiny_llama, sources) as made:
        yield made


@pytest.fixture(scope="module")
def pristine(tiny_llama: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_llama).eval()


def request(name: str | None, prompt: tuple[int, ...] = PROMPT, **more: Any) -> GenerationRequest:
    settings = {"id": f"{name}-{len(prompt)}-{more}", "max_tokens": NUM_TOKENS, "ignore_eos": True, **more}
    return GenerationRequest(prompt_token_ids=prompt, adapter=name, **settings)


def test_mixed_requests_equal_both_oracles(engine: Any, adapters: dict[str, Adapter], pristine: Any) -> None:
    names = [None, *adapters]
    requests = [request(name, prompt) for prompt in (PROMPT, OTHER) for name in names]
    requests += [request(name, boundary=5) for name in adapters]

    results = engine.generate(requests)

    specs: Mapping[Any, Any] = {name: spec_from_adapter(adapter) for name, adapter in adapters.items()}
    first, second = [], []
    for asked, result in zip(requests, results, strict=True):
        assert result.error is None
        assert (result.id, result.adapter, result.finish_reason) == (asked.id, asked.adapter, "length")
        arguments = (pristine, specs.get(asked.adapter), asked.prompt_token_ids)
        first.append((asked.id, result.token_ids, oracle_two_phase(*arguments, NUM_TOKENS, asked.boundary)))
        second.append((asked.id, result.token_ids, oracle_masked(*arguments, result.token_ids, asked.boundary)))
    assert_tokens_equal(first, oracle="two-phase oracle")
    assert_tokens_equal(second, oracle="masked oracle")
    assert len({run.tokens for _, _, run in first[:5]}) == 5, "the adapters do not differ on this prompt"
    wrong = [
        oracle_two_phase(pristine, change(specs[name]), PROMPT, NUM_TOKENS)
        for change in (rescaled, all_token)
        for name in ("lorap", "direftp", "v1.5")
    ]
    for name, run in zip(["lorap", "direftp", "v1.5"] * 2, wrong, strict=True):
        with pytest.raises(AssertionError):
            assert_tokens_equal([(name, results[names.index(name)].token_ids, run)])


def test_digests_and_boundaries_are_reported(engine: Any, adapters: dict[str, Adapter]) -> None:
    base, whole, part, none = engine.generate(
        [request(None), request("lorap"), request("lorap", boundary=4), request("lorap", boundary=0)]
    )
    assert (base.digest, base.boundary) == (None, 0)
    assert (whole.digest, whole.boundary) == (adapters["lorap"].digest, len(PROMPT))
    assert (part.boundary, none.boundary) == (4, 0)
    assert none.token_ids == base.token_ids
    assert whole.token_ids != base.token_ids


def test_logprobs_of_prompt_and_output(engine: Any, adapters: dict[str, Adapter], pristine: Any) -> None:
    for boundary in (None, 6):
        (result,) = engine.generate([request("v1.5", boundary=boundary, num_logprobs=0, want_prompt_logprobs=True)])
        spec = spec_from_adapter(adapters["v1.5"])
        want = oracle_prompt_logprobs(pristine, spec, PROMPT, boundary)
        assert result.prompt_logprobs == pytest.approx(want, abs=EXACT_LOGPROB)
        run = oracle_two_phase(pristine, spec, PROMPT, NUM_TOKENS, boundary)
        assert result.logprobs == pytest.approx(run.logprobs, abs=EXACT_LOGPROB)
        assert len(result.prompt_logprobs) == len(PROMPT) - 1
    (plain,) = engine.generate([request("v1.5")])
    assert plain.logprobs is None
    assert plain.prompt_logprobs is None
    (one,) = engine.generate([request("v1.5", (5,), want_prompt_logprobs=True)])
    assert one.prompt_logprobs == ()


def test_one_bad_request_fails_alone(engine: Any) -> None:
    cases = {
        "unknown": (request("loraP"), "UnknownAdapterError"),
        "broken": (request("broken"), "AdapterError"),
        "empty": (request("lorap", ()), "RequestError"),
        "too long": (request("lorap", tuple(range(512))), "RequestError"),
        "no token": (request("lorap", (1, 512)), "RequestError"),
        "none asked": (request("lorap", max_tokens=0), "RequestError"),
        "cold": (request("lorap", temperature=-1.0), "RequestError"),
        "no number": (request("lorap", temperature=math.nan), "RequestError"),
        "endless": (request("lorap", temperature=math.inf), "RequestError"),
        "seed": (request("lorap", temperature=1.0, seed=1 << 70), "RequestError"),
        "logprobs": (request("lorap", num_logprobs=-2), "RequestError"),
        "boundary": (request("lorap", boundary=22), "UsageError"),
        "base": (request(None, boundary=3), "RequestError"),
    }
    requests = [replace(asked, id=name) for name, (asked, _) in cases.items()]
    good = [replace(request("lorap", max_tokens=2), id="first"), replace(request(None, max_tokens=2), id="last")]
    results = engine.generate([good[0], *requests, replace(good[0], id="first"), good[1]])

    assert [result.id for result in results] == ["first", *cases, "first", "last"]
    for (name, (_, kind)), result in zip(cases.items(), results[1:], strict=False):
        assert result.error is not None, name
        assert result.error["type"] == kind, name
        assert result.token_ids == ()
        assert result.finish_reason is None
    assert "`lorap`" in results[1].error["accepted"]
    assert "no `preft.json`" in results[2].error["got"]
    assert "512 tokens" in results[4].error["got"]
    assert results[-2].error["message"].startswith("The id is taken")
    assert results[0].error is None
    assert results[-1].error is None
    assert [entry.name for entry in engine.unavailable] == ["broken"]


def test_the_context_limit_ends_an_output(tiny_llama: Path) -> None:
    with HFEngine(tiny_llama, max_model_len=25) as engine:
        (result,) = engine.generate([request(None)])
    assert len(result.token_ids) == 25 - len(PROMPT)
    assert result.finish_reason == "length"


def test_an_end_token_ends_an_output_and_has_no_text(engine: Any) -> None:
    (free,) = engine.generate([request("lorap")])
    end = free.token_ids[3]
    assert end not in free.token_ids[:3]
    before, engine._ends = engine._ends, frozenset({end})
    try:
        stopped, ignored = engine.generate([request("lorap", ignore_eos=False), request("lorap")])
    finally:
        engine._ends = before
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[:4], "stop")
    assert ignored.token_ids == free.token_ids
    assert engine._ends == {2}
    assert free.text == engine.tokenizer.decode(free.token_ids, skip_special_tokens=True)


def test_a_temperature_of_next_to_nothing_is_greedy(engine: Any) -> None:
    tiny, greedy = engine.generate([request("lorap", temperature=1e-45), replace(request("lorap"), id="greedy")])
    assert tiny.token_ids == greedy.token_ids


def test_sampling_repeats_with_its_seed(engine: Any) -> None:
    asked = [request("lorap", temperature=1.5, seed=seed, id=str(index)) for index, seed in enumerate((1, 1, 2, None))]
    first, again, other, free = engine.generate(asked)
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids
    assert len(free.token_ids) == NUM_TOKENS


def test_more_adapters_than_the_model_holds(
    tiny_llama: Path, adapters: dict[str, Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_engine, "MAX_ATTACHED", 2)
    order = ["lorap", "lora", "direftp", None, "v1.5", "lorap", "v1.5", "lora", None]
    requests = [replace(request(name, max_tokens=5), id=str(index)) for index, name in enumerate(order)]
    with HFEngine(tiny_llama, adapters) as engine:
        together = engine.generate(requests)
        assert len(engine._attached) == 2
    alone: dict[Any, GenerationResult] = {}
    for name in dict.fromkeys(order):
        with HFEngine(tiny_llama, adapters) as engine:
            (alone[name],) = engine.generate([replace(request(name, max_tokens=5), id="x")])
    assert [result.token_ids for result in together] == [alone[name].token_ids for name in order]


@dataclass
class Recorder:
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def start(self, label: str, total: int | None) -> None:
        self.calls.append(("start", label, total))

    def advance(self, amount: int = 1) -> None:
        self.calls.append(("advance", amount))

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_progress_counts_every_request(engine: Any) -> None:
    progress = Recorder()
    engine.generate([request(None, max_tokens=1), request("nobody")], progress=progress)
    assert progress.calls == [("start", "generate", 2), ("advance", 1), ("advance", 1), ("finish",)]


def test_another_base_is_refused_unless_taken_on(tiny_llama: Path, tmp_path: Path) -> None:
    other = build_tiny(tmp_path / "other", seed=9)
    write_tiny_tokenizer(other)
    adapter = random_adapter(tiny_llama, seed=1)
    with HFEngine(other, {"a": adapter}) as engine:
        (result,) = engine.generate([request("a", max_tokens=2)])
        assert result.error is not None
        assert "other weights" in result.error["got"]
        assert "--allow-base-mismatch" in result.error["hint"]
    with HFEngine(other, {"a": adapter}, allow_base_mismatch=True) as engine:
        assert engine.generate([request("a", max_tokens=2)])[0].error is None


def test_what_an_engine_cannot_start_with(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="dtype"):
        HFEngine(tiny_llama, dtype="int4")
    with pytest.raises(UsageError, match="adapter name"):
        HFEngine(tiny_llama, {"../x": tmp_path})
    with pytest.raises(FileError):
        HFEngine(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    with pytest.raises(EngineError, match="cannot be loaded"):
        HFEngine(tmp_path)
    engine = HFEngine(tiny_llama, dtype="bfloat16")
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([])


def test_vllm_is_not_imported(tiny_llama: Path) -> None:
    code = (
        "import sys; from preft.serve.hf_engine import HFEngine; from preft.data.requests import GenerationRequest\n"
        f"HFEngine({str(tiny_llama)!r}).generate([GenerationRequest('a', (5,), max_tokens=1)])\n"
        "sys.exit('vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

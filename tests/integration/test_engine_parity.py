"""The engine's answers are the oracles', in one mixed batch with two slots, whatever the engine goes through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from preft.adapters.adapter import Adapter
from preft.data.requests import GenerationRequest
from preft.positions import UNBOUNDED
from preft.serve.engine import Engine
from tests.helpers.engines import (
    BLOCK,
    CHUNK,
    Oracle,
    forced_preemption,
    open_engine,
    prompt_of,
    request_of,
    reset_cache,
    save_all,
)
from tests.helpers.oracle import oracle_prompt_logprobs, rescaled
from tests.helpers.tiny import random_adapter

pytestmark = pytest.mark.engine

LOGPROB_TOLERANCE = 2e-3
"""Sum of some dozens of float32 log-probabilities, computed in two orders."""


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path) -> dict[str, Adapter]:
    ranks = (1, 3, 8, 16, (4, 17), 33)
    prompt_only = {f"p{i}": random_adapter(tiny_llama, seed=i, rank=rank) for i, rank in enumerate(ranks)}
    few = random_adapter(tiny_llama, seed=20, rank=5, targets=("self_attn.q_proj", "mlp.down_proj"))
    all_token = {f"a{i}": random_adapter(tiny_llama, seed=30 + i, rank=8, positions="all") for i in range(2)}
    return {**prompt_only, "few": few, **all_token}


@pytest.fixture(scope="module")
def engine(
    tiny_llama: Path, adapters: dict[str, Adapter], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with open_engine(tiny_llama, save_all(tmp_path_factory.mktemp("adapters"), adapters)) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path, adapters: dict[str, Adapter]) -> Oracle:
    return Oracle(tiny_llama, adapters)


@pytest.fixture(scope="module")
def batch(adapters: dict[str, Adapter]) -> list[GenerationRequest]:
    names: list[str | None] = [None, *adapters]
    return [request_of(f"{name}", prompt_of(i, 49 + 9 * i), name) for i, name in enumerate(names)]


def test_mixed_batch_equals_both_oracles_cold_and_warm(
    engine: Engine, oracle: Oracle, batch: list[GenerationRequest]
) -> None:
    assert min(len(request.prompt_token_ids) for request in batch) > CHUNK
    oracle.require_adapters_matter(batch)
    reset_cache(engine)

    cold = engine.generate(batch)
    warm = engine.generate(batch)

    oracle.require_equal(batch, cold)
    assert [result.token_ids for result in warm] == [result.token_ids for result in cold]


@pytest.mark.parametrize("every", [2, 3, 5, 7, 11])
def test_forced_preemption_changes_nothing(
    engine: Engine, oracle: Oracle, batch: list[GenerationRequest], every: int
) -> None:
    reset_cache(engine)

    with forced_preemption(engine, every) as preempted:
        results = engine.generate(batch)

    assert sum(preempted) > len(batch)
    oracle.require_equal(batch, results)


def test_phase_rule_would_be_noticed(
    engine: Engine, oracle: Oracle, batch: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: an engine that adapts every token of a step that starts inside the prompt."""
    from dataclasses import replace

    from preft.serve.backend.runner import PreftCPUModelRunner

    right = PreftCPUModelRunner._preft_scheduled

    def by_phase(self, *arguments):
        return [replace(request, spans=((0, UNBOUNDED),)) for request in right(self, *arguments)]

    monkeypatch.setattr(PreftCPUModelRunner, "_preft_scheduled", by_phase)
    reset_cache(engine)
    with forced_preemption(engine, 7):
        results = engine.generate(batch)
    reset_cache(engine)

    with pytest.raises(AssertionError):
        oracle.require_equal(batch, results)


def test_wrong_scale_would_be_noticed(engine: Engine, oracle: Oracle, batch: list[GenerationRequest]) -> None:
    """Negative control: an oracle whose updates are half as large disagrees with the engine."""
    request = next(request for request in batch if request.adapter == "p3")
    result = engine.generate([request])[0]

    assert oracle.two_phase(request, rescaled(oracle.specs["p3"])).tokens != result.token_ids
    assert oracle.two_phase(request).tokens == result.token_ids


def _two_turns(engine: Engine, length: int, adapter: str | None) -> list[GenerationRequest]:
    """A first turn, and the second that repeats it with its answer and goes on."""
    first = request_of("turn1", prompt_of(7, length), adapter, tokens=40)
    answer = engine.generate([first])[0].token_ids
    return [first, request_of("turn2", (*first.prompt_token_ids, *answer, *prompt_of(8, 30)), adapter)]


@pytest.mark.parametrize("length", [64, 77])
@pytest.mark.parametrize("adapter", [None, "p1", "p4", "a0"])
def test_second_turn_is_the_same_warm_and_cold(
    engine: Engine, oracle: Oracle, length: int, adapter: str | None
) -> None:
    """Turn 1's answer was decoded unadapted and is prompt in turn 2: its blocks must not be reused as adapted."""
    reset_cache(engine)
    turns = _two_turns(engine, length, adapter)

    warm = engine.generate(turns[1:])
    reset_cache(engine)
    cold = engine.generate(turns[1:])

    oracle.require_equal(turns[1:], cold)
    assert warm[0].token_ids == cold[0].token_ids


def test_adapter_key_on_every_block_would_be_noticed(
    engine: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: what stock vLLM does, the adapter's key on decode-filled blocks too."""
    from preft.serve.backend import cache_key

    monkeypatch.setattr(cache_key, "adapter_key", lambda digest, spans, start, stop: (("preft", digest),))
    reset_cache(engine)
    turns = _two_turns(engine, 2 * BLOCK, "p1")
    warm = engine.generate(turns[1:])
    reset_cache(engine)

    with pytest.raises(AssertionError):
        oracle.require_equal(turns[1:], warm)


def test_one_prompt_under_every_adapter_has_independent_answers(
    engine: Engine, oracle: Oracle, adapters: dict[str, Adapter]
) -> None:
    prompt = prompt_of(99, 3 * BLOCK)
    batch = [request_of(f"{name}", prompt, name) for name in [None, *adapters]]
    reset_cache(engine)

    for order in (batch, batch[::-1]):
        oracle.require_equal(order, engine.generate(order))

    assert len({result.token_ids for result in engine.generate(batch)}) == len(batch)


@pytest.mark.parametrize("boundary", [0, 1, 31, 32, 33, 50, 70])
def test_boundary_is_exact_in_prompt_logprobs(engine: Engine, oracle: Oracle, boundary: int) -> None:
    """A continuation is scored unadapted: log-probabilities of every prompt token equal the oracle's."""
    prompt = prompt_of(5, 70)
    mine = [
        request_of(name, prompt, name, tokens=4, boundary=boundary, want_prompt_logprobs=True) for name in ("p2", "p4")
    ]
    others = [request_of("base", prompt_of(6, 60), None, tokens=4, want_prompt_logprobs=True)]

    for requests in (mine + others, others + mine):
        for request, result in zip(requests, engine.generate(requests), strict=True):
            expected = oracle_prompt_logprobs(
                oracle.model, oracle.spec(request), request.prompt_token_ids, request.boundary
            )
            assert result.prompt_logprobs == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
            assert result.token_ids == oracle.two_phase(request).tokens


def test_boundary_matters(oracle: Oracle) -> None:
    """The premise of the test above: another boundary scores otherwise by far more than its tolerance."""
    prompt = prompt_of(5, 70)
    sums = [sum(oracle_prompt_logprobs(oracle.model, oracle.specs["p2"], prompt, at)) for at in (0, 31, 32, 70)]

    assert len({round(value, 1) for value in sums}) == len(sums)


def test_decode_runs_no_adapter_product(engine: Engine, batch: list[GenerationRequest]) -> None:
    """A pure-decode step of prompt-only adapters multiplies no adapter matrix; one of all-token adapters does."""
    prompt_only = [request for request in batch if request.adapter is None or request.adapter.startswith("p")]
    for requests, decode_products in ((prompt_only, 0), ([batch[-1]], 1)):
        for request in requests:
            engine.submit(request)
        counts = []
        while engine.has_unfinished:
            before = engine.status()[0]["adapter_products"]
            running = list(engine._scheduler.running)
            waiting = len(engine._scheduler.waiting)
            pure_decode = running and not waiting and all(r.num_computed_tokens >= r.num_prompt_tokens for r in running)
            engine.step()
            if pure_decode:
                counts.append(engine.status()[0]["adapter_products"] - before)
        assert len(counts) > 10
        assert (sum(counts) > 0) == bool(decode_products)


def test_more_adapters_in_flight_than_slots(engine: Engine, batch: list[GenerationRequest]) -> None:
    """Slots bound the adapters of one step, not those of the running requests."""
    seen = 0
    for request in batch:
        engine.submit(request)
    while engine.has_unfinished:
        engine.step()
        seen = max(seen, len({r.reference.digest for r in engine._scheduler.running if hasattr(r, "reference")}))

    assert seen > engine.settings.slots
    assert not any(entry.requests for entry in engine._scheduler.preft_ledger.entries.values())

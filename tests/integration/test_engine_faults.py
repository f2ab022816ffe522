"""What goes wrong with adapters and requests while an engine runs: it costs the one request, never a neighbour."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from preft import save_adapter
from preft.adapters.adapter import Adapter
from preft.data.requests import GenerationRequest
from preft.errors import AdapterError, EngineError, PreftError
from preft.serve.engine import Engine
from tests.helpers.churn import churn_adapters
from tests.helpers.engines import BLOCK, CHUNK, Oracle, open_engine, prompt_of, request_of, reset_cache, save_all
from tests.helpers.oracle import oracle_prompt_logprobs
from tests.helpers.tiny import build_tiny, random_adapter

pytestmark = pytest.mark.engine

LOGPROB_TOLERANCE = 2e-3
"""Sum of some dozens of float32 log-probabilities, computed in two orders."""


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path) -> dict[str, Adapter]:
    def make(seed: int, rank: int | tuple[int, ...] = 8, **kwargs: object) -> Adapter:
        return random_adapter(tiny_llama, seed=seed, rank=rank, **kwargs)  # type: ignore[arg-type]

    return {
        "plain": make(1),
        "second": make(2, 5),
        "third": make(3, 16),
        "only_q": make(4, targets=("q_proj",)),
        "only_v": make(5, targets=("v_proj",)),
        "only_gate": make(6, targets=("gate_proj",)),
        "q_and_k": make(7, (2, 17), targets=("q_proj", "k_proj")),
        "v_and_up": make(8, (33, 1), targets=("v_proj", "up_proj")),
        "head": make(9, 4, targets=("lm_head", "q_proj")),
        "head_alone": make(10, 6, targets=("lm_head",), strength=0.5),
        "head_all": make(11, 3, targets=("lm_head", "down_proj"), positions="all"),
        "all": make(12, positions="all"),
        "all_too": make(13, positions="all"),
    }


@pytest.fixture(scope="module")
def shared(
    tiny_llama: Path, adapters: dict[str, Adapter], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    paths = save_all(tmp_path_factory.mktemp("adapters"), adapters)
    with open_engine(tiny_llama, paths, lm_head=True) as engine:
        assert not engine.unavailable
        yield engine


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path, adapters: dict[str, Adapter]) -> Oracle:
    return Oracle(tiny_llama, adapters)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The shared engine, which must hold nothing of a test afterwards."""
    yield shared
    assert not shared._core.has_unfinished_requests()
    assert not shared._scheduler.running
    assert held(shared) == set()
    assert not shared._entries


def held(engine: Engine) -> set[str]:
    """Ids of requests that the ledger thinks are under way."""
    return {request for entry in engine._scheduler.preft_ledger.entries.values() for request in entry.requests}


def submit(engine: Engine, request: GenerationRequest) -> str:
    return engine.submit(request)


def finish(engine: Engine, *ids: str) -> dict[str, tuple[int, ...]]:
    """Steps until the engine is empty; output tokens by id."""
    found = {}
    while engine.has_unfinished:
        for update in engine.step():
            if update.result is not None:
                found[update.ticket] = update.result.token_ids
    assert set(ids) <= set(found)
    return found


def step(engine: Engine, times: int) -> None:
    for _ in range(times):
        engine.step()


# With engines of their own, before the shared one is opened: a process holds one at a time.


def test_a_tied_head_takes_adapters(tmp_path: Path) -> None:
    base = build_tiny(tmp_path / "tied", seed=5, tie_word_embeddings=True)
    adapters = {
        "head": random_adapter(base, seed=1, targets=("lm_head", "q_proj")),
        "alone": random_adapter(base, seed=2, targets=("lm_head",), strength=0.5),
    }
    with open_engine(base, save_all(tmp_path / "adapters", adapters), lm_head=True) as engine:
        batch = [request_of(f"{name}", prompt_of(3, 60), name) for name in (None, "head", "alone")]
        Oracle(base, adapters).require_equal(batch, engine.generate(batch))
    for use in (lambda: engine.generate(batch), engine.status, lambda: engine.prefetch(["head"])):
        with pytest.raises(EngineError, match="is closed"):
            use()


def _answer_with_drafts(model: Path, paths: dict[str, Path], batch: list[GenerationRequest]) -> list[object]:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with open_engine(
        model, paths, max_num_batched_tokens=2 * CHUNK, vllm={"speculative_config": drafts, "disable_log_stats": False}
    ) as engine:
        answers = [engine.generate(batch), engine.generate(batch)]
        drafted = {metric.name: getattr(metric, "value", 0) for metric in engine._llm.get_metrics()}
        return [*answers, drafted["vllm:spec_decode_num_accepted_tokens"]]


def test_drafts_of_ngrams_change_nothing_under_any_kind_of_adapter(tiny_llama: Path, tmp_path: Path) -> None:
    """In a process of its own: what vLLM imports for ngrams breaks the start of any later engine in the same one."""
    chosen = churn_adapters(tiny_llama)
    pattern = prompt_of(50, 9) * 7
    batch = [request_of(f"{name}", pattern, name, tokens=32) for name in (None, *chosen)]
    batch.append(request_of("cut", pattern, "both", tokens=32, boundary=30))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        paths = save_all(tmp_path, chosen)
        cold, warm, accepted = pool.submit(_answer_with_drafts, tiny_llama, paths, batch).result(timeout=400)
    oracle = Oracle(tiny_llama, chosen)

    assert accepted > 0
    oracle.require_equal(batch, cold)
    assert [row.token_ids for row in warm] == [row.token_ids for row in cold]


# Limits.


def test_a_rank_above_the_limit_is_refused_naming_both(engine: Engine, tiny_llama: Path, tmp_path: Path) -> None:
    save_adapter(random_adapter(tiny_llama, seed=1, rank=65), tmp_path / "big")

    with pytest.raises(AdapterError, match="rank") as caught:
        engine.add("big", tmp_path / "big")

    assert caught.value.got == "65"
    assert "64" in str(caught.value.accepted)
    result = engine.generate([request_of("1", prompt_of(1, 9), "big", tokens=1)])[0]
    assert result.error is not None
    assert result.error["type"] == "UnknownAdapterError"


# Sites that are part of a fused module, and the head.


@pytest.mark.parametrize("group", [("only_q", "only_v", "only_gate"), ("q_and_k", "v_and_up", "plain")])
def test_missing_members_of_a_fused_projection_are_zero(engine: Engine, oracle: Oracle, group: tuple[str, ...]) -> None:
    reset_cache(engine)
    batch = [request_of(name, prompt_of(i, CHUNK + 7 + i), name) for i, name in enumerate(group)]
    # Of one length and in one chunk, so that they are adjacent equal segments.
    batch += [request_of(f"{name} short", prompt_of(i + 9, 11), name) for i, name in enumerate(group)]
    oracle.require_adapters_matter(batch)

    oracle.require_equal(batch, engine.generate(batch))


def test_the_head_takes_adapters(engine: Engine, oracle: Oracle) -> None:
    names = ("head", "head_alone", "head_all", None)
    reset_cache(engine)
    batch = [request_of(f"{name}", prompt_of(20 + i, 60 + 3 * i), name) for i, name in enumerate(names)]

    for _ in range(2):
        oracle.require_equal(batch, engine.generate(batch))

    # Under a prompt-only adapter on the head alone, output token 1 and no other comes from other logits.
    adapted = oracle.two_phase(batch[1])
    base = oracle.two_phase(request_of("base", batch[1].prompt_token_ids, None))
    assert adapted.logprobs[0] != pytest.approx(base.logprobs[0], abs=0.05)


@pytest.mark.parametrize("boundary", [None, 1, CHUNK, 50])
def test_prompt_logprobs_through_the_head_in_a_batch_of_three(
    engine: Engine, oracle: Oracle, boundary: int | None
) -> None:
    batch = [
        request_of(f"{name}", prompt_of(30 + i, 60 + i), name, tokens=3, want_prompt_logprobs=True, boundary=limit)
        for i, (name, limit) in enumerate([("head", boundary), (None, None), ("head_alone", boundary)])
    ]

    for request, result in zip(batch, engine.generate(batch), strict=True):
        expected = oracle_prompt_logprobs(
            oracle.model, oracle.spec(request), request.prompt_token_ids, request.boundary
        )
        assert result.prompt_logprobs == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
        assert result.token_ids == oracle.two_phase(request).tokens


# How the engine cuts its steps.


def test_chunks_of_one_token(engine: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._scheduler.scheduler_config, "long_prefill_token_threshold", 1)
    reset_cache(engine)
    names = (None, "plain", "head", "all")
    batch = [request_of(f"{name}", prompt_of(40 + i, 35), name, boundary=None) for i, name in enumerate(names)]
    batch.append(request_of("cut", prompt_of(49, 35), "plain", boundary=20))

    oracle.require_equal(batch, engine.generate(batch))


# Adapters that come, go and change.


def test_adapters_are_dropped_and_loaded_again(engine: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = engine._scheduler.preft_ledger
    monkeypatch.setattr(ledger, "budget_bytes", 1)
    before = ledger.num_dropped
    names = ("plain", "second", "third", "all", "head")
    batch = [request_of(name, prompt_of(60 + i, 50), name, tokens=12) for i, name in enumerate(names)]

    for _ in range(3):
        reset_cache(engine)
        oracle.require_equal(batch, engine.generate(batch))

    assert ledger.num_dropped - before >= 2 * len(names)
    assert engine.status()[0]["adapters"] <= len(names)


def test_waiting_requests_do_not_load_adapters_without_limit(
    engine: Engine, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"m{i}" for i in range(24)]
    for i, name in enumerate(names):
        save_adapter(random_adapter(tiny_llama, seed=3000 + i), tmp_path / name)
        engine.add(name, tmp_path / name)
    engine.generate([request_of("size", prompt_of(1, 9), "m0", tokens=1)])
    ledger = engine._scheduler.preft_ledger
    size = ledger.entries[engine.registry.resolve("m0").reference.digest].num_bytes
    monkeypatch.setattr(ledger, "budget_bytes", 4 * size)
    for name in names:
        submit(engine, request_of(name, prompt_of(1, 90), name, tokens=30))
    most = 0
    while engine.has_unfinished:
        engine.step()
        most = max(most, engine.status()[0]["adapter_bytes"])

    assert most <= 5 * size  # one may arrive before the order to drop another does
    for name in names:
        engine.remove(name)


def test_a_second_engine_in_one_process_is_refused(engine: Engine, tiny_llama: Path) -> None:
    with pytest.raises(EngineError, match="Another engine is open"):
        open_engine(tiny_llama, {})


def test_a_name_means_another_adapter_while_requests_run(
    engine: Engine, oracle: Oracle, adapters: dict[str, Adapter], tmp_path: Path
) -> None:
    """Weights at the same path and name change: those under way keep the old, later ones get the new."""
    save_adapter(adapters["second"], tmp_path / "it")
    engine.add("it", tmp_path / "it")
    engine.prefetch(["it"])  # a load under way would find the new weights
    prompt = prompt_of(70, 2 * BLOCK + 3)
    reset_cache(engine)
    old = submit(engine, request_of("old", prompt, "it"))
    step(engine, 6)

    save_adapter(adapters["third"], tmp_path / "it", force=True)
    entry = engine.replace("it", tmp_path / "it")
    new = submit(engine, request_of("new", prompt, "it"))
    step(engine, 2)
    engine.remove("it")
    found = finish(engine, old, new)

    assert entry.reference.digest == adapters["third"].digest
    assert found[old] == oracle.two_phase(request_of("old", prompt, "second")).tokens
    assert found[new] == oracle.two_phase(request_of("new", prompt, "third")).tokens
    with pytest.raises(PreftError, match="no adapter named `it`"):
        submit(engine, request_of("late", prompt, "it"))


def test_two_names_of_one_adapter_share_everything(
    engine: Engine, oracle: Oracle, adapters: dict[str, Adapter], tmp_path: Path
) -> None:
    save_adapter(adapters["plain"], tmp_path / "copy")
    engine.add("twin", tmp_path / "copy")
    prompt = prompt_of(71, 3 * BLOCK)
    reset_cache(engine)
    batch = [request_of("1", prompt, "plain"), request_of("2", prompt, "twin")]

    results = [engine.generate([request])[0] for request in batch]

    assert results[0].digest == results[1].digest
    assert results[0].token_ids == results[1].token_ids
    ids = {
        entry.adapter_id
        for digest, entry in engine._scheduler.preft_ledger.entries.items()
        if digest == results[0].digest
    }
    assert len(ids) == 1
    engine.remove("twin")


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6, 12])
def test_an_aborted_request_lets_go(engine: Engine, oracle: Oracle, steps: int) -> None:
    reset_cache(engine)
    ids = [submit(engine, request_of(name, prompt_of(80, 2 * CHUNK + 9), name)) for name in ("plain", "all", "third")]
    step(engine, steps)

    engine.abort(ids)
    after = request_of("after", prompt_of(80, 2 * CHUNK + 9), "second")
    results = engine.generate([after])

    oracle.require_equal([after], results)


def test_a_hundred_names_that_leave_at_once(engine: Engine) -> None:
    for i in range(100):
        submit(engine, request_of(f"{i}", prompt_of(i, 60), ("plain", "all", "second", "third")[i % 4]))
    step(engine, 3)

    engine.abort(list(engine._entries))
    step(engine, 2)

    assert held(engine) == set()
    assert not engine._scheduler.waiting


def test_all_token_adapters_leave_room_for_prompt_only_ones(
    engine: Engine, oracle: Oracle, adapters: dict[str, Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More all-token adapters than slots, the second one overdue: prompt-only requests flow past both."""
    scheduler = engine._scheduler
    monkeypatch.setattr(scheduler, "preft_options", replace(scheduler.preft_options, patience_s=0.0))
    reset_cache(engine)
    engine.generate([request_of("seen", prompt_of(1, 9), "plain", tokens=1)])
    long = [request_of(name, prompt_of(90, 40), name, tokens=100) for name in ("all", "all_too")]
    ids = [submit(engine, request) for request in long]
    step(engine, 5)
    short = [
        request_of(f"{i}", prompt_of(91 + i, 40), name, tokens=3) for i, name in enumerate(("plain", "third", "second"))
    ]
    short_ids = [submit(engine, request) for request in short]
    order, found = [], {}
    while engine.has_unfinished:
        for update in engine.step():
            if update.result is not None:
                order.append(update.ticket)
                found[update.ticket] = update.result.token_ids

    assert set(order[:3]) == set(short_ids)
    assert order[3:] == ids
    for request, engine_id in zip(long + short, ids + short_ids, strict=True):
        assert found[engine_id] == oracle.two_phase(request).tokens


def test_a_thousand_names(engine: Engine, adapters: dict[str, Adapter], tmp_path: Path) -> None:
    save_adapter(adapters["only_q"], tmp_path / "one")
    for i in range(1000):
        engine.add(f"name-{i}", tmp_path / "one")
    batch = [request_of(f"{i}", prompt_of(95, 20), f"name-{i * 37}", tokens=2) for i in range(20)]

    results = engine.generate(batch)

    assert len({(row.digest, row.token_ids) for row in results}) == 1
    for i in range(1000):
        engine.remove(f"name-{i}")


# Requests that cannot be served.


BAD: dict[str, dict[str, object]] = {
    "boundary -1": {"boundary": -1},
    "boundary above": {"boundary": 10},
    "boundary text": {"boundary": "3"},
    "boundary float": {"boundary": 2.5},
    "empty": {"prompt": ()},
    "long": {"prompt": prompt_of(1, 400)},
    "no token": {"tokens": 0},
    "unknown": {"adapter": "plainn"},
    "token id": {"prompt": (3, 512)},
    "negative token id": {"prompt": (3, -1)},
    "logprobs": {"num_logprobs": 10_000},
    "negative logprobs": {"num_logprobs": -7},
    "temperature": {"temperature": -1.0},
    "nan": {"temperature": float("nan")},
    "boundary of base": {"adapter": None, "boundary": 3},
}


@pytest.mark.parametrize("name", BAD)
def test_a_request_that_cannot_be_served_fails_alone(engine: Engine, oracle: Oracle, name: str) -> None:
    values = {"prompt": prompt_of(2, 9), "adapter": "plain", "tokens": 4, **BAD[name]}
    bad = request_of("bad", values.pop("prompt"), values.pop("adapter"), **values)  # type: ignore[arg-type]
    good = request_of("good", prompt_of(2, 9), "plain", tokens=1)

    results = engine.generate([bad, good])

    assert results[0].error is not None
    assert not results[0].token_ids
    oracle.require_equal([good], results[1:])


def test_a_step_that_fails_is_an_error_of_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("something in vLLM")

    with monkeypatch.context() as patch:
        patch.setattr(engine._core, "step", fail)
        with pytest.raises(EngineError, match="something in vLLM"):
            engine.generate([request_of("1", prompt_of(1, 9), "plain")])


def test_prefetch_waits_and_says_what_failed(engine: Engine, tiny_llama: Path, tmp_path: Path) -> None:
    for name, seed in (("fine", 2000), ("gone", 2001)):
        save_adapter(random_adapter(tiny_llama, seed=seed), tmp_path / name)
        engine.add(name, tmp_path / name)
    engine.prefetch(["fine"])
    shutil.rmtree(tmp_path / "fine")
    assert engine.generate([request_of("1", prompt_of(1, 9), "fine", tokens=1)])[0].error is None

    shutil.rmtree(tmp_path / "gone")
    with pytest.raises(PreftError, match="gone"):
        engine.prefetch(["gone"])
    engine.remove("fine")
    engine.remove("gone")


def test_a_plan_beyond_the_machine_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check that each worker makes at its start, with less memory than its plan."""
    from preft.serve.backend import worker as module

    worker = engine._core.engine_core.engine_core.model_executor.driver_worker.worker
    plan = engine.status()[0]["memory"]
    assert plan["kv_cache_bytes"] == 1 << 28
    assert plan["adapter_cache_bytes"] == 4 << 30
    assert plan["weight_bytes"] > 0
    assert worker._preft_plan_memory().to_dict() == plan

    monkeypatch.setattr(module, "machine_memory", lambda: plan["total_bytes"] - 1)
    with pytest.raises(EngineError, match="exceeds this machine's memory"):
        worker._preft_plan_memory()

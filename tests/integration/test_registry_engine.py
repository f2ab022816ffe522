"""Adapters that come and go by name in a running engine: pushed from memory, replaced, removed, and never kept on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from preft import save_adapter
from preft.adapters.adapter import Adapter
from preft.data.requests import GenerationResult
from preft.errors import AdapterError, BaseMismatchError, PreftError, UnknownAdapterError, UsageError
from preft.serve.engine import Engine
from preft.serve.hf_engine import HFEngine
from tests.helpers.engines import BLOCK, Oracle, open_engine, prompt_of, request_of
from tests.helpers.tiny import build_tiny, random_adapter

pytestmark = pytest.mark.engine

PROMPT = prompt_of(70, 2 * BLOCK + 3)


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path) -> dict[str, Adapter]:
    return {
        "first": random_adapter(tiny_llama, seed=1),
        "second": random_adapter(tiny_llama, seed=2, rank=5),
        "third": random_adapter(tiny_llama, seed=3, blocks=(1,)),
        "all": random_adapter(tiny_llama, seed=4, positions="all"),
    }


@pytest.fixture(scope="module")
def shared(tiny_llama: Path) -> Iterator[Engine]:
    with open_engine(tiny_llama, {}, vllm={"skip_tokenizer_init": False}) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path, adapters: dict[str, Adapter]) -> Oracle:
    return Oracle(tiny_llama, adapters)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The shared engine, which must hold nothing of a test afterwards."""
    yield shared
    for entry in shared.registry.entries():
        shared.remove(entry.name)
    assert not shared.has_unfinished
    assert memory(shared)[0] == 0
    settle(shared)
    assert memory(shared)[1] == 0


def memory(engine: Engine) -> tuple[int, int]:
    """How many adapters the worker holds for the front end, and how many for the scheduler."""
    status = engine.status()[0]
    return status["held_adapters"], status["adapters"]


def settle(engine: Engine) -> None:
    """A request to the base model: word between worker and scheduler travels with steps."""
    engine.generate([request_of("base", prompt_of(1, 9), None, tokens=4)])


def finish(engine: Engine) -> dict[str, GenerationResult]:
    found = {}
    while engine.has_unfinished:
        found |= {update.ticket: update.result for update in engine.step() if update.result is not None}
    return found


def test_a_pushed_adapter_answers_as_itself(engine: Engine, oracle: Oracle, adapters: dict[str, Adapter]) -> None:
    for name, adapter in adapters.items():
        entry = engine.push(name, adapter)
        assert (entry.digest, entry.version, entry.in_memory) == (adapter.digest, 1, True)
    batch = [request_of(f"{name}", PROMPT, name) for name in (None, *adapters)]
    oracle.require_adapters_matter(batch)

    for _ in range(2):
        results = engine.generate(batch)
        oracle.require_equal(batch, results)
    assert [row.digest for row in results] == [None, *(adapter.digest for adapter in adapters.values())]


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_a_push_changes_later_requests_and_none_under_way(
    engine: Engine, oracle: Oracle, adapters: dict[str, Adapter], steps: int
) -> None:
    """Not yet scheduled, in its prompt, or decoding: a request finishes under what its name meant."""
    engine.push("it", adapters["first"])
    old = engine.submit(request_of("old", PROMPT, "it"))
    for _ in range(steps):
        engine.step()

    entry = engine.push("it", adapters["second"])
    new = engine.submit(request_of("new", PROMPT, "it"))
    assert memory(engine)[0] == 2
    engine.remove("it")
    with pytest.raises(UnknownAdapterError):
        engine.submit(request_of("late", PROMPT, "it"))
    found = finish(engine)

    assert entry.version == 2
    assert found[old].token_ids == oracle.two_phase(request_of("old", PROMPT, "first")).tokens
    assert found[new].token_ids == oracle.two_phase(request_of("new", PROMPT, "second")).tokens
    assert (found[old].digest, found[new].digest) == (adapters["first"].digest, adapters["second"].digest)
    assert memory(engine)[0] == 0


def test_an_old_version_survives_preemption(engine: Engine, oracle: Oracle, adapters: dict[str, Adapter]) -> None:
    """Recomputing a prompt needs the adapter again, long after its name has moved on and with no room to keep it."""
    engine.push("it", adapters["first"])
    old = engine.submit(request_of("old", PROMPT, "it"))
    for _ in range(6):
        engine.step()
    engine.push("it", adapters["second"])
    ledger = engine._scheduler.preft_ledger
    budget, ledger.budget_bytes = ledger.budget_bytes, 1
    try:
        for _ in range(3):
            engine._scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.submit(request_of("new", PROMPT, "it", tokens=2))
            engine.step()
            engine.step()
        found = finish(engine)
    finally:
        ledger.budget_bytes = budget

    assert found[old].token_ids == oracle.two_phase(request_of("old", PROMPT, "first")).tokens


def test_a_folder_may_be_replaced_under_a_request(
    engine: Engine, oracle: Oracle, adapters: dict[str, Adapter], tmp_path: Path
) -> None:
    save_adapter(adapters["first"], tmp_path / "it")
    engine.add("it", tmp_path / "it")
    old = engine.submit(request_of("old", PROMPT, "it"))
    for _ in range(6):
        engine.step()

    save_adapter(adapters["third"], tmp_path / "it", force=True)
    engine.replace("it", tmp_path / "it")
    engine._scheduler.reset_prefix_cache(reset_running_requests=True)
    new = engine.submit(request_of("new", PROMPT, "it"))
    found = finish(engine)

    assert found[old].token_ids == oracle.two_phase(request_of("old", PROMPT, "first")).tokens
    assert found[new].token_ids == oracle.two_phase(request_of("new", PROMPT, "third")).tokens


def test_a_hundred_versions_leave_one(engine: Engine, tiny_llama: Path) -> None:
    """As in training: a push, some answers, the next push, while a request of an older version is under way."""
    sizes, ids = [], []
    for number in range(100):
        adapter = random_adapter(tiny_llama, seed=5000 + number, targets=("q_proj",))
        engine.push("policy", adapter)
        engine.submit(request_of("slow", prompt_of(number, 9), "policy", tokens=6))
        rows = engine.generate([request_of("1", prompt_of(number, 20), "policy", tokens=2)])
        assert rows[0].digest == adapter.digest
        ids.append(adapter.digest)
        sizes.append(memory(engine))
    engine.step()

    assert len(set(ids)) == 100
    assert engine.registry.resolve("policy").version == 100
    # The new one, and those whose slow request or order to drop is still under way.
    assert max(held for held, _ in sizes) <= 4
    assert max(kept for _, kept in sizes) <= 6
    finish(engine)
    settle(engine)
    assert memory(engine) == (1, 1)
    assert len(engine._scheduler.preft_ledger.entries) <= 1


def test_pushes_without_any_request_leave_one(engine: Engine, tiny_llama: Path) -> None:
    for number in range(20):
        engine.push("policy", random_adapter(tiny_llama, seed=6000 + number, targets=("q_proj",)))
        assert memory(engine) == (1, 0)


def test_one_digest_under_two_names_stays_while_one_means_it(
    engine: Engine, oracle: Oracle, adapters: dict[str, Adapter]
) -> None:
    engine.push("one", adapters["first"])
    engine.push("two", adapters["first"])
    assert memory(engine)[0] == 1
    engine.remove("one")
    assert memory(engine)[0] == 1
    engine.push("two", adapters["first"])

    batch = [request_of("1", PROMPT, "two")]
    row = engine.generate(batch)[0]
    assert row.token_ids == oracle.two_phase(request_of("1", PROMPT, "first")).tokens
    engine.push("two", adapters["second"])
    assert memory(engine)[0] == 1
    engine.push("two", adapters["first"])
    assert engine.generate(batch)[0].token_ids == row.token_ids


def test_what_is_not_what_it_says_is_refused_on_arrival_and_leaves_nothing(
    engine: Engine, oracle: Oracle, adapters: dict[str, Adapter], tiny_llama: Path, tmp_path: Path
) -> None:
    """The trainer went on with the same tensors, so the digest is no longer theirs."""
    engine.push("it", adapters["first"])
    moved = random_adapter(tiny_llama, seed=77)
    next(iter(moved.tensors.values())).add_(1.0)
    with pytest.raises(AdapterError, match="digest"):
        engine.push("it", moved)
    other = random_adapter(build_tiny(tmp_path / "other", hidden_size=64, head_dim=16), seed=1)
    with pytest.raises(BaseMismatchError):
        engine.push("it", other)
    high = random_adapter(tiny_llama, seed=78, rank=65)
    with pytest.raises(AdapterError, match="rank"):
        engine.push("new", high)

    assert engine.registry.resolve("it").digest == adapters["first"].digest
    assert [entry.name for entry in engine.registry.entries()] == ["it"]
    assert memory(engine)[0] == 1
    row = engine.generate([request_of("1", PROMPT, "it")])[0]
    assert row.token_ids == oracle.two_phase(request_of("1", PROMPT, "first")).tokens


def test_a_push_beyond_the_memory_is_refused(engine: Engine, adapters: dict[str, Adapter]) -> None:
    held = engine._core.engine_core.engine_core.model_executor.driver_worker.worker.preft_tier.held
    engine.push("one", adapters["first"])
    budget, held._budget_bytes = held._budget_bytes, held.num_bytes
    try:
        with pytest.raises(AdapterError, match="no room"):
            engine.push("two", adapters["second"])
        with pytest.raises(AdapterError, match="no room"):
            engine.push("one", adapters["second"])
    finally:
        held._budget_bytes = budget
    assert engine.registry.resolve("one").digest == adapters["first"].digest
    engine.push("two", adapters["second"])


def test_names_are_held_to_the_rules(engine: Engine, adapters: dict[str, Adapter]) -> None:
    engine.add("it", adapters["first"])
    with pytest.raises(UsageError, match="taken"):
        engine.add("it", adapters["second"])
    for name in ("../x", "a/b", "", "x\0y", "IT", "x" * 300):
        with pytest.raises(UsageError):
            engine.push(name, adapters["first"])
    for use in (engine.remove, lambda name: engine.replace(name, adapters["first"])):
        with pytest.raises(UnknownAdapterError):
            use("nobody")
    assert memory(engine)[0] == 1


def test_both_engines_stop_at_the_same_texts(engine: Engine, adapters: dict[str, Adapter], tiny_llama: Path) -> None:
    for name in ("first", "all"):
        engine.push(name, adapters[name])
    free = [replace(request_of(f"{name}", PROMPT, name), id=f"{name}") for name in (None, "first", "all")]
    requests = []
    for request, row in zip(free, engine.generate(free), strict=True):
        assert len(row.text) > 12
        # One character, several that span tokens, two of which the later-starting ends first, one that never comes.
        stops = ((row.text[4],), (row.text[5:9],), (row.text[3:10], row.text[5:8]), ("never seen",), ())
        requests += [replace(request, id=f"{request.id} {stop}", stop=stop) for stop in stops]
    ours = engine.generate(requests)
    with HFEngine(tiny_llama, {name: adapters[name] for name in ("first", "all")}) as plain:
        theirs = plain.generate(requests)

    assert any(row.finish_reason == "stop" for row in ours)
    for request, one, other in zip(requests, ours, theirs, strict=True):
        assert one.error is None, one.error
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert not any(stop in one.text for stop in request.stop)
    for stop in (("",), "text", (3,)):
        rows = engine.generate([replace(free[0], stop=stop)])
        assert rows[0].error is not None
        assert rows[0].error["message"] == "`stop` is not valid"


def test_requests_are_followed_step_by_step(engine: Engine, oracle: Oracle, adapters: dict[str, Adapter]) -> None:
    engine.push("first", adapters["first"])
    wanted = request_of("a", PROMPT, "first", tokens=10)
    kept, dropped = engine.submit(wanted), engine.submit(request_of("b", PROMPT, "first", tokens=10))
    counts, result = [], None
    while engine.has_unfinished:
        for update in engine.step():
            if update.ticket == kept:
                counts.append(update.num_tokens)
                result = update.result
        if len(counts) == 3:
            engine.abort([dropped, "nobody"])

    assert counts == list(range(1, 11))
    assert result is not None
    assert result.token_ids == oracle.two_phase(wanted).tokens


def test_a_batch_leaves_the_results_of_other_requests(engine: Engine, adapters: dict[str, Adapter]) -> None:
    engine.push("first", adapters["first"])
    short = request_of("short", PROMPT, "first", tokens=2)
    ticket = engine.submit(short)
    batch = engine.generate([request_of("long", PROMPT, "first", tokens=20)])

    assert len(batch[0].token_ids) == 20
    assert engine.has_unfinished
    found = finish(engine)
    assert found[ticket].token_ids == batch[0].token_ids[:2]


def test_the_plain_engine_takes_pushes_too(
    oracle: Oracle, adapters: dict[str, Adapter], tiny_llama: Path, tmp_path: Path
) -> None:
    save_adapter(adapters["third"], tmp_path / "third")
    with HFEngine(tiny_llama) as engine:
        engine.push("it", adapters["first"])
        old = engine.submit(request_of("old", PROMPT, "it", tokens=8))
        engine.push("it", adapters["second"])
        new = engine.submit(request_of("new", PROMPT, "it", tokens=8))
        engine.replace("it", tmp_path / "third")
        third = engine.submit(request_of("third", PROMPT, "it", tokens=8))
        gone = engine.submit(request_of("gone", PROMPT, "it", tokens=8))
        engine.abort([gone])
        engine.remove("it")
        found = {}
        while engine.has_unfinished:
            found |= {update.ticket: update.result for update in engine.step() if update.result is not None}
        for use in (lambda: engine.add("a/b", adapters["first"]), lambda: engine.remove("it")):
            with pytest.raises(PreftError):
                use()

    for ticket, name in ((old, "first"), (new, "second"), (third, "third")):
        assert found[ticket].token_ids == oracle.two_phase(request_of("x", PROMPT, name, tokens=8)).tokens
    assert gone not in found

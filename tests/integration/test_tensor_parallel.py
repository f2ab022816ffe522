"""Two ranks answer as one does, for every kind of adapter; what one rank alone cannot load fails on both.

The engine runs in a process of its own: a process keeps the groups of ranks that it once made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from preft.adapters.adapter import Adapter
from preft.adapters.store import load_adapter
from preft.data.requests import GenerationRequest, GenerationResult
from preft.serve.engine import Engine
from tests.helpers.churn import KINDS, churn_adapters
from tests.helpers.engines import (
    CHUNK,
    Oracle,
    forced_preemption,
    open_engine,
    prompt_of,
    request_of,
    reset_cache,
    save_all,
)
from tests.helpers.tiny import random_adapter

pytestmark = pytest.mark.engine

RANKS = 2
WAIT_S = 300
PUSHED = ("first", "second")
"""Adapters that one name means in turn, sent to both ranks' memory; neither is below the folder of any engine."""
VICTIMS = ("absent-on-0", "absent-on-1", "late-on-0", "late-on-1")


def batch_of(names: Sequence[str | None]) -> list[GenerationRequest]:
    requests = [request_of(f"{name}", prompt_of(i, CHUNK - 3 + 7 * i), name, tokens=16) for i, name in enumerate(names)]
    return [*requests, request_of("cut", prompt_of(77, 90), "both", tokens=16, boundary=41)]


def victim_batch(victim: str) -> list[GenerationRequest]:
    """A request of an adapter that one rank loads late or never, between two that nothing is wrong with."""
    return [request_of(f"{name}", prompt_of(5, 60), name, tokens=12) for name in (None, victim, "lorap")]


def pushed_batch(name: str) -> list[GenerationRequest]:
    """Requests under an adapter that was pushed, one of them longer than a chunk, beside base and one from disk."""
    prompts = (prompt_of(31, 40), prompt_of(32, CHUNK + 9), prompt_of(33, 25), prompt_of(34, 30))
    names = (name, name, None, "lorap")
    return [
        request_of(f"p{i}", prompt, of, tokens=12) for i, (prompt, of) in enumerate(zip(prompts, names, strict=True))
    ]


def run_on_two_ranks(
    model: Path, paths: dict[str, Path], victims: dict[str, Path], pushed: dict[str, Path]
) -> dict[str, Any]:
    """Everything that is asked of an engine of two ranks; plain answers."""
    # Lets a test break one rank; see `break_rank`.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    vllm = {"tensor_parallel_size": RANKS, "distributed_executor_backend": "mp"}
    with open_engine(model, paths, lm_head=True, vllm=vllm) as engine:
        batch = batch_of([None, *paths])
        found: dict[str, Any] = {"cold": engine.generate(batch), "warm": engine.generate(batch)}
        reset_cache(engine)
        with forced_preemption(engine, 5) as preempted:
            found["preempted"] = engine.generate(batch)
        found["num_preempted"] = sum(preempted)
        for name, folder in victims.items():
            engine.add(name, folder)
            break_rank(engine, int(name[-1]), late=name.startswith("late"))
            found[name] = engine.generate(victim_batch(name))
        mend_ranks(engine)
        found["mended"] = [engine.generate(victim_batch(name)) for name in victims]
        for name, folder in pushed.items():
            engine.push("policy", load_adapter(folder))
            found[name] = engine.generate(pushed_batch("policy"))
        found["status"] = engine.status()
    return found


def break_rank(engine: Engine, rank: int, *, late: bool) -> None:
    """Makes one rank unable to load adapters, or slow at it. The other one is put right."""

    def breaks(worker: Any) -> None:
        import time

        from preft.errors import FileError

        tier = worker.preft_tier
        tier.__dict__.pop("_load", None)
        right = tier._load

        def load(reference: Any) -> Any:
            if not late:
                raise FileError("nothing here", got=f"rank {rank}")
            time.sleep(0.5)
            return right(reference)

        if worker.rank == rank:
            tier._load = load

    engine._core.collective_rpc(breaks)


def mend_ranks(engine: Engine) -> None:
    def mends(worker: Any) -> None:
        worker.preft_tier.__dict__.pop("_load", None)

    engine._core.collective_rpc(mends)


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path) -> dict[str, Adapter]:
    head = random_adapter(tiny_llama, seed=40, rank=6, targets=("lm_head", "o_proj"))
    return {**churn_adapters(tiny_llama), "head": head}


@pytest.fixture(scope="module")
def victims(tiny_llama: Path) -> dict[str, Adapter]:
    return {name: random_adapter(tiny_llama, seed=60 + i, rank=7) for i, name in enumerate(VICTIMS)}


@pytest.fixture(scope="module")
def pushed(tiny_llama: Path) -> dict[str, Adapter]:
    return {name: random_adapter(tiny_llama, seed=80 + i, blocks=(0, 1)) for i, name in enumerate(PUSHED)}


@pytest.fixture(scope="module")
def found(
    tiny_llama: Path,
    adapters: dict[str, Adapter],
    victims: dict[str, Adapter],
    pushed: dict[str, Adapter],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("adapters")
    arguments = [save_all(folder, made) for made in (adapters, victims, pushed)]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool.submit(run_on_two_ranks, tiny_llama, *arguments).result(timeout=WAIT_S)


@pytest.fixture(scope="module")
def oracle(
    tiny_llama: Path, adapters: dict[str, Adapter], victims: dict[str, Adapter], pushed: dict[str, Adapter]
) -> Oracle:
    return Oracle(tiny_llama, {**adapters, **victims, **pushed})


@pytest.mark.parametrize("run", ["cold", "warm", "preempted"])
def test_two_ranks_answer_as_the_oracle(
    found: dict[str, Any], oracle: Oracle, adapters: dict[str, Adapter], run: str
) -> None:
    batch = batch_of([None, *adapters])
    oracle.require_adapters_matter(batch)
    assert set(KINDS) < set(adapters)

    oracle.require_equal(batch, found[run])
    assert found["num_preempted"] > len(batch)


def test_both_ranks_did_the_work(found: dict[str, Any]) -> None:
    first, second = found["status"]
    assert first["pid"] != second["pid"]
    assert first["adapter_products"] == second["adapter_products"] > 0
    # Each rank holds its slice of most matrices.
    assert first["adapters"] == second["adapters"] > 0
    assert first["adapter_bytes"] == second["adapter_bytes"]


@pytest.mark.parametrize("victim", VICTIMS)
def test_what_one_rank_cannot_load_fails_alone(found: dict[str, Any], oracle: Oracle, victim: str) -> None:
    batch, results = victim_batch(victim), list(found[victim])
    if victim.startswith("absent"):
        batch.pop(1)
        failed: GenerationResult = results.pop(1)
        assert failed.error is not None
        assert "nothing here" in failed.error["got"]
        assert not failed.token_ids
    oracle.require_equal(batch, results)


@pytest.mark.parametrize("victim", VICTIMS)
def test_once_both_ranks_can_load_it_it_is_served(found: dict[str, Any], oracle: Oracle, victim: str) -> None:
    oracle.require_equal(victim_batch(victim), found["mended"][VICTIMS.index(victim)])


@pytest.mark.parametrize("name", PUSHED)
def test_what_is_pushed_is_served_on_both_ranks(found: dict[str, Any], oracle: Oracle, name: str) -> None:
    batch = pushed_batch(name)
    oracle.require_adapters_matter(batch)
    oracle.require_equal(batch, found[name])


def test_of_two_pushes_under_one_name_the_later_is_served(found: dict[str, Any]) -> None:
    first, second = ([result.token_ids for result in found[name][:2]] for name in PUSHED)
    assert first != second
    assert [status["held_adapters"] for status in found["status"]] == [1, 1]

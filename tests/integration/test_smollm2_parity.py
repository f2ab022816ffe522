"""The main job on the embedded model: one mixed batch, two slots, chunks of 48 tokens, 64 output tokens a request.

All answers must be those of both oracles, token for token in float32, cold and warm, under preemption, and in a
second turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from preft.adapters.adapter import Adapter
from preft.data.requests import GenerationRequest
from preft.serve.engine import Engine
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

pytestmark = [pytest.mark.engine, pytest.mark.smollm2]

OUTPUT = 64
FEW = ("self_attn.q_proj", "self_attn.v_proj")


@pytest.fixture(scope="module")
def adapters(smollm2: Path) -> dict[str, Adapter]:
    def make(seed: int, **kwargs: object) -> Adapter:
        # Strong enough that even rank 1 changes greedy answers; the tests check that it does.
        return random_adapter(smollm2, seed=seed, strength=0.06, **kwargs)  # type: ignore[arg-type]

    lorap = {f"lorap{i}": make(i, rank=rank) for i, rank in enumerate((1, 2, 8, 16, (4, 17), 64))}
    direftp = {
        f"direftp{i}": make(10 + i, rank=rank, targets=(), blocks=blocks)
        for i, (rank, blocks) in enumerate([(4, range(30)), (8, range(0, 30, 4)), (1, (3, 11, 29))])
    }
    mixed = {"mixed": make(20, rank=(4, 8), targets=FEW, blocks=(5, 20)), "ends": make(21, rank=8, positions="f3+l5")}
    all_token = {f"all{i}": make(30 + i, rank=8, positions="all") for i in range(2)}
    return {**lorap, **direftp, **mixed, **all_token}


@pytest.fixture(scope="module")
def batch(adapters: dict[str, Adapter]) -> list[GenerationRequest]:
    names: list[str | None] = [None, *adapters]
    return [request_of(f"{name}", prompt_of(i, 52 + 7 * i, 40_000), name, OUTPUT) for i, name in enumerate(names)]


@pytest.fixture(scope="module")
def oracle(smollm2: Path, adapters: dict[str, Adapter]) -> Oracle:
    return Oracle(smollm2, adapters)


@pytest.fixture(scope="module")
def engine(smollm2: Path, adapters: dict[str, Adapter], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    paths = save_all(tmp_path_factory.mktemp("adapters"), adapters)
    with open_engine(smollm2, paths, kv_cache_gib=0.5) as engine:
        yield engine


def test_mixed_batch_cold_and_warm(engine: Engine, oracle: Oracle, batch: list[GenerationRequest]) -> None:
    assert min(len(request.prompt_token_ids) for request in batch) > CHUNK
    assert engine.settings.slots == 2
    oracle.require_adapters_matter(batch)

    cold = engine.generate(batch)
    warm = engine.generate(batch)

    oracle.require_equal(batch, cold)
    oracle.require_equal(batch, warm)


@pytest.mark.parametrize("every", [3, 7, 13])
def test_forced_preemption(engine: Engine, oracle: Oracle, batch: list[GenerationRequest], every: int) -> None:
    reset_cache(engine)

    with forced_preemption(engine, every, until=60) as preempted:
        results = engine.generate(batch)

    assert sum(preempted) > len(batch)
    oracle.require_equal(batch, results)


@pytest.mark.parametrize("name", ["lorap3", "direftp0"])
def test_two_turn_chat_is_the_same_warm_and_cold(
    engine: Engine, oracle: Oracle, batch: list[GenerationRequest], name: str
) -> None:
    first = next(request for request in batch if request.adapter == name)
    answer = engine.generate([first])[0].token_ids
    second = request_of("turn2", (*first.prompt_token_ids, *answer, *prompt_of(77, 40, 40_000)), name, tokens=24)

    warm = engine.generate([second])
    reset_cache(engine)
    cold = engine.generate([second])

    oracle.require_equal([second], warm)
    oracle.require_equal([second], cold)

"""preft's code for GPUs serves as the oracles say, on a CPU: everything but the launches and the graphs."""

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

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path) -> dict[str, Adapter]:
    """More than slots, of mixed ranks: linear sites, block sites, some sites only, both, and an all-token one."""
    return {
        "linear": random_adapter(tiny_llama, seed=1, rank=(4, 9), blocks=(), strength=0.3),
        "blocks": random_adapter(tiny_llama, seed=2, rank=(3, 8), targets=(), blocks=(0, 1, 2), strength=0.4),
        "few": random_adapter(
            tiny_llama, seed=3, rank=(5, 6), targets=("self_attn.v_proj",), blocks=(1,), strength=0.6
        ),
        "ends": random_adapter(tiny_llama, seed=4, rank=(4, 4), blocks=(0, 2), positions="f3+l3", strength=0.6),
        "all": random_adapter(tiny_llama, seed=5, rank=(2, 2), positions="all", strength=0.3),
    }


@pytest.fixture(scope="module")
def engine(
    tiny_llama: Path, adapters: dict[str, Adapter], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    from tests.helpers.gpu_emulation import emulated_gpu

    paths = save_all(tmp_path_factory.mktemp("adapters"), adapters)
    with emulated_gpu(), open_engine(tiny_llama, paths, max_rank=16) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path, adapters: dict[str, Adapter]) -> Oracle:
    return Oracle(tiny_llama, adapters)


@pytest.fixture(scope="module")
def batch(adapters: dict[str, Adapter]) -> list[GenerationRequest]:
    lengths = (2, CHUNK - 1, CHUNK + 1, 110)
    return [
        request_of(f"{name}-{length}", prompt_of(7 * index + length, length), name, tokens=10)
        for length in lengths
        for index, name in enumerate([None, *adapters])
    ]


def runner_of(engine: Engine):  # type: ignore[no-untyped-def]
    return engine._core.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def test_it_is_the_gpu_code(engine: Engine) -> None:
    from preft.serve.gpu.manager import PreftGPUModelManager
    from tests.helpers.gpu_emulation import EmulatedRunner

    runner = runner_of(engine)
    assert type(runner) is EmulatedRunner
    assert type(runner.preft_manager) is PreftGPUModelManager
    assert runner.preft_manager.infos[0].module.lora_a_stacked[0].shape[2] == 16


def test_a_mixed_batch_equals_both_oracles_cold_and_warm(
    engine: Engine, oracle: Oracle, batch: list[GenerationRequest]
) -> None:
    oracle.require_adapters_matter([request for request in batch if len(request.prompt_token_ids) > CHUNK])
    reset_cache(engine)
    cold = engine.generate(batch)
    warm = engine.generate(batch[::-1])[::-1]
    oracle.require_equal(batch, cold)
    assert [result.token_ids for result in warm] == [result.token_ids for result in cold]


@pytest.mark.parametrize("every", [3, 7])
def test_preemption_changes_nothing(engine: Engine, oracle: Oracle, batch: list[GenerationRequest], every: int) -> None:
    reset_cache(engine)
    with forced_preemption(engine, every) as preempted:
        results = engine.generate(batch)
    assert sum(preempted) > 10
    oracle.require_equal(batch, results)


def test_decode_launches_nothing_and_dispatches_to_no_adapter(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.helpers import gpu_emulation

    runner = runner_of(engine)
    seen: list[tuple[int, bool, int]] = []
    plain = runner._determine_batch_execution_and_padding

    def watched(*args: object, **kwargs: object) -> object:
        step = runner.preft_step
        seen.append((step.num_tokens, runner.preft_manager.blocks.launch, step.num_adapters))
        return plain(*args, **kwargs)

    monkeypatch.setattr(runner, "_determine_batch_execution_and_padding", watched)
    reset_cache(engine)
    gpu_emulation.LAUNCHES.clear()
    names = ("linear", "blocks", "few", "ends")
    requests = [request_of(name, prompt_of(i, 9), name, tokens=12) for i, name in enumerate(names)]
    engine.generate(requests)
    adapted = [step for step in seen if step[2]]
    decode = [step for step in seen if not step[2]]
    # Two slots, so four adapters take two steps or more to enter; then nobody needs one.
    assert 2 <= len(adapted) <= 4
    assert len(decode) >= 8
    assert all(launch for _, launch, _ in adapted)
    assert not any(launch for _, launch, _ in decode)
    assert max(count for _, _, count in adapted) == 2
    calls = len(gpu_emulation.LAUNCHES)
    engine.generate([request_of("base", prompt_of(9, 20), None, tokens=4)])
    assert calls > 0
    assert len(gpu_emulation.LAUNCHES) == calls, "a base request launches nothing"


def test_the_oracles_notice_a_wrong_slot(
    engine: Engine, oracle: Oracle, batch: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = runner_of(engine).preft_manager
    plain = manager.fill_slot
    monkeypatch.setattr(manager, "fill_slot", lambda adapter, slot: plain(adapter, (slot + 1) % 2))
    reset_cache(engine)
    runner_of(engine).preft_steps.slots = type(runner_of(engine).preft_steps.slots)(2)
    wrong = engine.generate(batch)
    with pytest.raises(AssertionError):
        oracle.require_equal(batch, wrong)
    monkeypatch.undo()
    runner_of(engine).preft_steps.slots = type(runner_of(engine).preft_steps.slots)(2)
    reset_cache(engine)
    oracle.require_equal(batch[:6], engine.generate(batch[:6]))

"""Adapters come, change and go while requests run: no request ever sees another's adapter, and nothing is left over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from preft.adapters.adapter import Adapter
from preft.positions import UNBOUNDED
from preft.serve.backend.runner import PreftCPUModelRunner
from preft.serve.backend.step_rows import StepRows
from preft.serve.engine import Engine
from tests.helpers.churn import NUM_BLOCKS, Churn, Judge, churn_adapters
from tests.helpers.engines import open_engine, save_all

pytestmark = pytest.mark.engine

SCHEDULES, SCHEDULES_FULL = 25, 300
CONTROL_SCHEDULES = 25
"""Within so many schedules each deliberate fault must be noticed."""


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path) -> dict[str, Adapter]:
    return churn_adapters(tiny_llama)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    vllm = {"num_gpu_blocks_override": NUM_BLOCKS, "disable_log_stats": False}
    with open_engine(
        tiny_llama, {}, slots=4, max_model_len=192, max_num_seqs=12, max_num_batched_tokens=64, vllm=vllm
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def judge(tiny_llama: Path, adapters: dict[str, Adapter]) -> Judge:
    return Judge(tiny_llama, adapters)


@pytest.fixture(scope="module")
def pool(adapters: dict[str, Adapter], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_all(tmp_path_factory.mktemp("pool"), adapters)


@pytest.fixture
def churn(engine: Engine, adapters: dict[str, Adapter], pool: dict[str, Path], tmp_path: Path) -> Churn:
    assert engine._scheduler.reset_prefix_cache()
    return Churn(engine, pool, adapters, tmp_path)


def run_and_judge(churn: Churn, judge: Judge, count: int) -> None:
    """Runs the schedules of the first `count` seeds; stops at the first that answers wrongly."""
    for seed in range(count):
        judge.require_equal(churn.run(seed), seed)


def test_every_request_is_answered_under_the_digest_it_came_with(churn: Churn, judge: Judge, full: bool) -> None:
    run_and_judge(churn, judge, SCHEDULES_FULL if full else SCHEDULES)
    judge.require_few_near_ties()

    counts = churn.counts
    print(dict(counts))
    assert counts["finished"] > 0.8 * counts["sent"]
    # The premise: everything that a schedule may do did happen.
    happened = ["replaced", "pushed", "added", "removed", "aborted", "several", "bounded", "repeated", "failed"]
    happened += ["next turns", "cached tokens", "steps with more adapters than slots"]
    happened += ["preempted in the prompt", "preempted in the output"]
    assert all(counts[what] for what in happened), counts
    preempted = counts["preempted in the prompt"] + counts["preempted in the output"]
    assert preempted - counts["forced out"] >= 5, "the KV cache was never short"


def _by_digest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache key of stock vLLM: the adapter's on every block, whatever filled it."""
    from preft.serve.backend import cache_key

    monkeypatch.setattr(cache_key, "adapter_key", lambda digest, spans, start, stop: (("preft", digest),))


def _by_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache key without the adapter."""
    from preft.serve.backend import cache_key

    monkeypatch.setattr(cache_key, "adapter_key", lambda digest, spans, start, stop: ())


def _one_slot_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot map that gives each adapter of a step the next one's numbers."""
    right = PreftCPUModelRunner.preft_set_rows

    def rotated(self: PreftCPUModelRunner, rows: StepRows) -> None:
        right(self, rows)
        state = self.preft_state
        slots = sorted(state.active)
        state.active = {slot: state.active[slots[i - 1]] for i, slot in enumerate(slots)}

    monkeypatch.setattr(PreftCPUModelRunner, "preft_set_rows", rotated)


def _by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of a step that starts inside the prompt is adapted, so outputs that are computed again are too."""
    right = PreftCPUModelRunner._preft_scheduled

    def by_phase(self: PreftCPUModelRunner, *arguments: object) -> list[object]:
        return [replace(request, spans=((0, UNBOUNDED),)) for request in right(self, *arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr(PreftCPUModelRunner, "_preft_scheduled", by_phase)


@pytest.mark.parametrize("fault", [_by_digest_alone, _by_tokens_alone, _one_slot_off, _by_phase])
def test_a_fault_would_be_noticed(
    churn: Churn, judge: Judge, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Negative controls: each fault makes some schedule fail."""
    engine = churn.engine
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError, match="masked oracle"):
            run_and_judge(churn, judge, CONTROL_SCHEDULES)
    assert not engine._core.has_unfinished_requests()

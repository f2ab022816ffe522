"""Counts of the scheduler: told once each, named up to a cap, and taken out before vLLM's loggers see them."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from preft.positions import Policy
from preft.serve.backend.counters import KEY, SchedulerCounters
from preft.serve.backend.ledger import AdapterLedger
from preft.serve.backend.messages import StepReport
from preft.serve.backend.options import BackendOptions
from preft.serve.backend.reference import AdapterReference

REPORT = StepReport(
    failed={"x": "gone"}, load_seconds=[0.5, 2.0], num_steps=7, num_adapted_steps=3, num_adapted_tokens=90
)


@pytest.fixture
def ledger() -> AdapterLedger:
    ledger = AdapterLedger(1 << 20, slots=2)
    for number in (1, 2, 3):
        ledger.acquire(AdapterReference(f"{number}" * 64, Policy.parse("prompt"), "/a"), f"{number}")
    ledger.take_orders()
    ledger.apply(StepReport(loaded={"1" * 64: 1000}))
    return ledger


def test_each_count_is_told_once(ledger: AdapterLedger) -> None:
    counters = SchedulerCounters(with_names=True)
    counters.add(REPORT)
    counters.add(REPORT)
    for cached in (32, 0, None):
        counters.add_request("ada", 40, cached)

    first, second = (counters.take(ledger, 2, 5)[KEY] for _ in range(2))

    state = {"resident": 1, "waiting": 2, "resident_bytes": 1000, "slots_used": 2, "waiting_for_slot": 5}
    assert first == {
        **state, "evictions": 0, "steps": 14, "adapted_steps": 6, "adapted_tokens": 180, "load_failures": 2,
        "load_seconds": [0.5, 2.0] * 2, "names": [["ada", 3, 80, 32]],
    }  # fmt: skip
    assert second == {
        **state, "evictions": 0, "steps": 0, "adapted_steps": 0, "adapted_tokens": 0, "load_failures": 0,
        "load_seconds": [], "names": [],
    }  # fmt: skip


def test_evictions_are_the_ledgers(ledger: AdapterLedger) -> None:
    counters = SchedulerCounters()
    ledger.num_dropped = 4
    assert [counters.take(ledger, 0, 0)[KEY]["evictions"] for _ in range(2)] == [4, 0]


def test_without_names_nobody_is_named(ledger: AdapterLedger) -> None:
    counters = SchedulerCounters(with_names=False)
    counters.add_request("ada", 40, 0)
    assert counters.take(ledger, 0, 0)[KEY]["names"] == []


def message(ledger: AdapterLedger, *names: str) -> dict[str, Any]:
    counters = SchedulerCounters(with_names=True)
    counters.add(REPORT)
    for name in names:
        counters.add_request(name, 40, 8)
    return counters.take(ledger, 1, 0)[KEY]


@pytest.mark.engine  # imports vLLM
def test_names_beyond_the_cap_are_other_and_stay_so(ledger: AdapterLedger) -> None:
    from preft.serve.backend.stat_logger import AdapterMetrics

    registry = CollectorRegistry()
    metrics = AdapterMetrics(BackendOptions("1", 2, 8, 1000, adapter_metrics=2), 64, registry)
    metrics.add(message(ledger, "ada", "bob"))
    metrics.add(message(ledger, "cleo", "ada", "dan"))

    def requests(name: str) -> float | None:
        return registry.get_sample_value("preft_adapter_requests_total", {"adapter": name})

    assert [requests(name) for name in ("ada", "bob", "cleo", "dan", "other")] == [2, 1, None, None, 2]
    assert registry.get_sample_value("preft_adapter_load_seconds_bucket", {"le": "0.5"}) == 2
    assert registry.get_sample_value("preft_adapter_load_seconds_count") == 4
    assert registry.get_sample_value("preft_steps_total", {"adapted": "false"}) == 8


@pytest.mark.engine
def test_vllms_loggers_never_see_the_message(ledger: AdapterLedger) -> None:
    from vllm.v1.metrics.stats import SchedulerStats

    from preft.serve.backend.stat_logger import AdapterMetrics, PreftStatLogger

    registry = CollectorRegistry()
    logger = PreftStatLogger(None, AdapterMetrics(BackendOptions("1", 2, 8, 1000), 64, registry))  # type: ignore[arg-type]
    stats = SchedulerStats(
        kv_connector_stats={KEY: {**message(ledger), "names": []}},
        running_lora_adapters={"ada": 1},
        waiting_lora_adapters={"bob": 2},
    )
    logger.record(stats, None)
    logger.record(SchedulerStats(), None)
    logger.record(None, None)

    assert stats.kv_connector_stats is None
    assert stats.running_lora_adapters == stats.waiting_lora_adapters == {}
    assert registry.get_sample_value("preft_adapted_tokens_total") == 90
    assert registry.get_sample_value("preft_adapter_requests_total", {"adapter": "other"}) is None

"""preft's metrics in the front end's process, in the registry that vLLM's `/metrics` answers from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from preft.serve.backend.counters import KEY
from preft.serve.backend.options import BackendOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

OTHER = "other"
"""Label of all adapters beyond the cap."""
_LOAD_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class AdapterMetrics:
    """The collectors.

    Args:
        options: The engine's settings.
        slot_bytes: What each slot takes.
        registry: Where to register; the process's own by default.
    """

    def __init__(self, options: BackendOptions, slot_bytes: int, registry: CollectorRegistry = REGISTRY) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"preft_{name}", text, registry=registry, multiprocess_mode="mostrecent")

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"preft_{name}", text, labels, registry=registry)

        self._cap = options.adapter_metrics
        self._named: set[str] = set()
        self._resident = gauge("adapters_resident", "Adapters in host memory")
        self._waiting = gauge("adapters_waiting", "Adapters that requests wait for to be loaded")
        self._slots_used = gauge("slots_used", "Adapters that the running requests hold slots for")
        self._refused = gauge("requests_waiting_for_slot", "Requests whose adapter is loaded and which wait for a slot")
        self._bytes = gauge("adapter_bytes", "Bytes of host memory that adapters take, by rank")
        gauge("adapter_planned_bytes", "Bytes of host memory for adapters at most, by rank").set(options.cache_bytes)
        gauge("slots", "Adapters that one step may hold").set(options.slots)
        gauge("slot_bytes", "Bytes that each slot takes beside adapter memory, by rank").set(slot_bytes)
        self._evictions = counter("adapter_evictions", "Adapters dropped from host memory")
        self._failures = counter("adapter_load_failures", "Adapters that could not be loaded")
        self._load_seconds = Histogram(
            "preft_adapter_load_seconds", "From file to packed numbers", buckets=_LOAD_BUCKETS, registry=registry
        )
        self._tokens = counter("adapted_tokens", "Tokens computed under an adapter")
        steps = counter("steps", "Forward passes, by whether any token was adapted", "adapted")
        self._steps = {adapted: steps.labels(str(adapted).lower()) for adapted in (True, False)}
        self._names: tuple[Counter, ...] = ()
        if self._cap:
            self._names = (
                counter("adapter_requests", "Finished requests", "adapter"),
                counter("adapter_prompt_tokens", "Prompt tokens of finished requests", "adapter"),
                counter("adapter_cached_prompt_tokens", "Those of them found in the prefix cache", "adapter"),
            )

    def add(self, message: Mapping[str, Any]) -> None:
        """Takes in one message of `SchedulerCounters`."""
        self._resident.set(message["resident"])
        self._waiting.set(message["waiting"])
        self._slots_used.set(message["slots_used"])
        self._refused.set(message["waiting_for_slot"])
        self._bytes.set(message["resident_bytes"])
        self._evictions.inc(message["evictions"])
        self._failures.inc(message["load_failures"])
        self._tokens.inc(message["adapted_tokens"])
        self._steps[True].inc(message["adapted_steps"])
        self._steps[False].inc(message["steps"] - message["adapted_steps"])
        for seconds in message["load_seconds"]:
            self._load_seconds.observe(seconds)
        for name, *counts in message["names"]:
            label = self._label(name)
            for metric, count in zip(self._names, counts, strict=True):
                metric.labels(label).inc(count)

    def _label(self, name: str) -> str:
        if name not in self._named:
            if len(self._named) >= self._cap:
                return OTHER
            self._named.add(name)
        return name


class PreftStatLogger(AggregateStatLoggerBase):
    """Stands before vLLM's loggers and takes preft's message out of the statistics of each step."""

    def __init__(self, vllm_config: VllmConfig, metrics: AdapterMetrics) -> None:
        self._metrics = metrics

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Counts one step, and takes out what vLLM's loggers must not see."""
        if scheduler_stats is None:
            return
        # vLLM would make a time series of each set of names that it ever sees; names are for who asks for them.
        scheduler_stats.running_lora_adapters = {}
        scheduler_stats.waiting_lora_adapters = {}
        if not scheduler_stats.kv_connector_stats:
            return
        message = scheduler_stats.kv_connector_stats.pop(KEY, None)
        if not scheduler_stats.kv_connector_stats:
            scheduler_stats.kv_connector_stats = None
        if message is not None:
            self._metrics.add(message)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def install_stat_logger(engine: Any, options: BackendOptions, slot_bytes: int) -> None:
    """Adds preft's metrics to a server; does nothing where vLLM's own are off.

    Args:
        engine: vLLM's client of the engine.
        options: The engine's settings.
        slot_bytes: What each slot takes.
    """
    manager = engine.logger_manager
    if manager is not None:
        manager.stat_loggers.insert(0, PreftStatLogger(engine.vllm_config, AdapterMetrics(options, slot_bytes)))

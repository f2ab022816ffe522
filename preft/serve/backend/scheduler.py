"""The scheduler: a slot is held only until the prompt is computed, and one bad request never stops the engine.

A thin layer over vLLM's own scheduler. On arrival a request under an adapter becomes a `PreftRequest`, gets its own
cache keys, and its adapter is ordered into the workers' host tier. While it waits, it is held back until the adapter
is ready and a slot is free. When it is first scheduled, the worker is told its adapter and adapted positions.

Exceptions raised here would end the engine, so a request that cannot be served is failed alone, through vLLM's own
list of requests to finish with an error.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from preft.errors import PreftError
from preft.serve.backend import guard
from preft.serve.backend.admission import Admission, Demand
from preft.serve.backend.cache_key import build_block_hasher
from preft.serve.backend.counters import SchedulerCounters
from preft.serve.backend.ledger import AdapterLedger, Residency
from preft.serve.backend.messages import StepReport
from preft.serve.backend.options import BackendOptions
from preft.serve.backend.reference import AdapterReference
from preft.serve.backend.request import PreftRequest, adopt, requested_boundary

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

guard.require_scheduler_seams()

logger = logging.getLogger(__name__)

_IDLE_S = 0.001
"""Pause of a step that has nothing to run but an adapter to wait for; keeps the loader thread fed."""
_KEPT_FAILURES = 65_536
"""Reasons kept at most; a front end in another process never takes them."""


class PreftSchedulerMixin:
    """What `preft` adds to a vLLM scheduler. See the module's description."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        guard.require_our_worker(self.vllm_config)  # type: ignore[attr-defined]
        self.preft_options = BackendOptions.from_config(self.vllm_config.additional_config)  # type: ignore[attr-defined]
        self.preft_ledger = AdapterLedger(self.preft_options.cache_bytes, self.preft_options.slots)
        self.preft_counters = SchedulerCounters(with_names=self.preft_options.adapter_metrics > 0)
        self.preft_failures: dict[str, str] = {}
        self._preft_admission: Admission | None = None
        self._preft_refused = 0
        self._preft_prompt_only_seen = False
        self._preft_hash = get_hash_fn_by_name(self.cache_config.prefix_caching_hash_algo)  # type: ignore[attr-defined]

    def add_request(self, request: Request) -> None:
        """Takes in a request; one under an adapter is adopted first. Never raises for a bad request."""
        if request.request_id not in self.requests:  # type: ignore[attr-defined]
            failure = self._preft_adopt(request)
            if failure is not None:
                logger.warning("Request %s cannot be served: %s", request.request_id, failure)
                self._preft_fail(request, failure)
        super().add_request(request)  # type: ignore[misc]

    def _preft_adopt(self, request: Request) -> str | None:
        """Makes a `PreftRequest` of a request under an adapter; returns why that is impossible, if it is."""
        stock = request.lora_request
        if stock is None:
            return None if requested_boundary(request) is None else "a boundary was given without an adapter"
        try:
            reference = AdapterReference.decode(stock.lora_path)
            if request.resumable and reference.policy.is_prompt_only:
                return "streaming-input requests turn generated tokens into prompt; not served with this adapter"
            adapter_id = self.preft_ledger.id_of(reference.digest)
            adapted = adopt(request, reference, LoRARequest(reference.digest, adapter_id, stock.lora_path))
            adapted.adapter_name = stock.lora_name
        except PreftError as error:
            request.lora_request = None
            return str(error)
        self._preft_prompt_only_seen |= reference.policy.is_prompt_only
        if adapted._block_hasher is not None:
            adapted._block_hasher = build_block_hasher(
                self.hash_block_size,  # type: ignore[attr-defined]
                self._preft_hash,
                reference.digest,
                adapted.spans,
            )
            adapted.block_hashes = []
            adapted.update_block_hashes()
        if adapted.spans:
            self.preft_ledger.acquire(reference, request.request_id)
        return None

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedules a step and tells the worker what it must know of adapters in it."""
        self._preft_admission = Admission.begin(
            self.preft_options.slots,
            self.preft_options.patience_s,
            self._preft_running_demands(),
            reserve=self._preft_prompt_only_seen,
        )
        self._preft_refused = 0
        self._preft_rest()
        if self._preft_admission.surplus():
            self._preft_preempt_surplus()
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        for new in output.scheduled_new_reqs:
            request = self.requests[new.req_id]  # type: ignore[attr-defined]
            new.lora_request = None
            new.preft_stamp = request.stamp if isinstance(request, PreftRequest) else None
        output.preft_orders = self.preft_ledger.take_orders()
        if not output.total_num_scheduled_tokens and self.preft_ledger.waits_for_load:
            time.sleep(_IDLE_S)
        return output

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether a waiting request may be scheduled: vLLM's own conditions, then adapter ready, then slot free."""
        if request.request_id in self.grammar_compile_error_reqs:  # type: ignore[attr-defined]
            return False
        if not super()._handle_blocked_waiting_request(request):  # type: ignore[misc]
            return False
        demand = request.demand if isinstance(request, PreftRequest) else None
        if demand is None:
            return True
        assert isinstance(request, PreftRequest)
        assert self._preft_admission is not None
        entry = self.preft_ledger.acquire(request.reference, request.request_id)
        if entry.residency is Residency.FAILED:
            self._preft_fail(request, entry.reason)
            return False
        if entry.residency is not Residency.READY:
            return False
        waited = time.monotonic() - request._refused_since if request._refused_since is not None else 0.0
        if self._preft_admission.admit(demand, waited):
            return True
        request.note_refusal()
        self._preft_refused += 1
        return False

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Takes in the worker's report, then the step's tokens."""
        report = getattr(model_runner_output, "preft_report", None)
        if isinstance(report, StepReport):
            self.preft_ledger.apply(report)
            self.preft_counters.add(report)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Lets go of the adapter when a request ends, however it ends."""
        if isinstance(request, PreftRequest):
            self.preft_ledger.release(request.reference.digest, request.request_id)
            self.preft_counters.add_request(request.adapter_name, request.num_prompt_tokens, request.num_cached)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Makes the statistics of a step as vLLM does; a server's front end finds preft's counts in them."""
        stats: SchedulerStats | None = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None and self.preft_options.server:
            used = len(self._preft_admission.holders) if self._preft_admission is not None else 0
            stats.kv_connector_stats = self.preft_counters.take(self.preft_ledger, used, self._preft_refused)
        return stats

    def _preft_fail(self, request: Request, reason: str) -> None:
        """Fails one request through vLLM's own list; its reason is kept for a front end in this process."""
        while len(self.preft_failures) >= _KEPT_FAILURES:
            del self.preft_failures[next(iter(self.preft_failures))]
        self.preft_failures[request.request_id] = reason
        self.grammar_compile_error_reqs.add(request.request_id)  # type: ignore[attr-defined]

    def _preft_running_demands(self) -> list[Demand]:
        requests = (request for request in self.running if isinstance(request, PreftRequest))  # type: ignore[attr-defined]
        return [demand for request in requests if (demand := request.demand) is not None]

    def _preft_rest(self) -> None:
        """Tells the ledger which requests need their adapter no more.

        Before a step is scheduled, so that the steps that computed those positions have been handed to the worker
        before any order to drop.
        """
        for request in self.running:  # type: ignore[attr-defined]
            if isinstance(request, PreftRequest) and request.demand is None:
                self.preft_ledger.rest(request.reference.digest, request.request_id)

    def _preft_preempt_surplus(self) -> None:
        """Puts the youngest running requests back until no more adapters are needed than there are slots.

        Reached when a failed cache load rolls a decoding request back into its prompt; vLLM would assert.
        """
        assert self._preft_admission is not None
        admission = self._preft_admission
        for request in reversed(list(self.running)):  # type: ignore[attr-defined]
            if not admission.surplus():
                return
            if isinstance(request, PreftRequest) and request.demand is not None:
                self.running.remove(request)  # type: ignore[attr-defined]
                self._preempt_request(request, time.monotonic())  # type: ignore[attr-defined]
                admission = self._preft_admission = Admission.begin(
                    admission.num_slots, admission.patience_s, self._preft_running_demands(), reserve=admission.reserve
                )


class PreftScheduler(PreftSchedulerMixin, Scheduler):
    """The class to name in `scheduler_cls`; becomes the asynchronous one where the engine schedules ahead."""

    def __new__(cls, *args: Any, **kwargs: Any) -> PreftScheduler:
        """Chooses the base that fits the engine's configuration."""
        config = kwargs.get("vllm_config", args[0] if args else None)
        ahead = cls is PreftScheduler and config is not None and config.scheduler_config.async_scheduling
        made: PreftScheduler = object.__new__(PreftAsyncScheduler if ahead else cls)
        return made


class PreftAsyncScheduler(PreftScheduler, AsyncScheduler):
    """The same over vLLM's asynchronous scheduler."""


__all__ = ["PreftAsyncScheduler", "PreftScheduler", "PreftSchedulerMixin"]

"""One step on a GPU, decided on the host: adapted rows, slots, and whether the step has any.

Both of vLLM's model runners come here, so that they cannot differ. A step is decided once. The number of adapters for
the choice of a CUDA graph and the rows that the kernels work on come from the same `StepRows`: a graph without adapter
kernels can never be replayed over rows that are adapted, and a pure-decode step never pays for one with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from preft.errors import EngineError
from preft.positions import UNBOUNDED
from preft.serve.backend.messages import RequestStamp
from preft.serve.backend.step_rows import NO_ROWS, StepRows, build_step_rows, scheduled_requests
from preft.serve.gpu.slots import SlotTable
from preft_kernels.rows import Run, Segment
from preft_kernels.segments import EMPTY_PLAN, RowPlan, plan_rows


@dataclass(frozen=True)
class Step:
    """A decided step.

    Attributes:
        rows: Adapted rows, by adapter.
        plan: The same, by slot, for the kernels.
        num_tokens: Of the step, without padding.
    """

    rows: StepRows = NO_ROWS
    plan: RowPlan = EMPTY_PLAN
    num_tokens: int = 0

    @property
    def num_adapters(self) -> int:
        """What the choice of a graph must be told: adapters that have a row in this step, not in its requests."""
        return len(self.rows.adapter_ids)


NO_STEP = Step()


class StepDecider:
    """Keeps the scheduler's words on requests and decides steps.

    Args:
        slots: Of the device's tables.
        load: Copies an adapter's numbers, given its digest, into a slot.

    Attributes:
        stamps: Request id to the scheduler's word on it, while the request is known.
        num_steps: Decided.
        num_adapted_steps: Those with an adapted row.
        num_adapted_tokens: Adapted rows of all steps.
    """

    def __init__(self, slots: SlotTable, load: Callable[[str, int], None]) -> None:
        self.slots = slots
        self._load = load
        self.stamps: dict[str, RequestStamp] = {}
        self.num_steps = self.num_adapted_steps = self.num_adapted_tokens = 0

    def forget(self, request_ids: Sequence[str] | set[str]) -> None:
        """Drops finished requests."""
        for request_id in request_ids:
            self.stamps.pop(request_id, None)

    def record(self, request_id: str, stamp: RequestStamp | None, prompt_length: int) -> None:
        """Takes the scheduler's word on a request that is new to the worker, or comes back after a preemption.

        Args:
            request_id: The request.
            stamp: The scheduler's word; None for base.
            prompt_length: Number of original prompt tokens. What the runner prefills may be more: a request that
                comes back prefills its outputs too, and these are not adapted.

        Raises:
            EngineError: A prompt-only adapter would act beyond the prompt.
        """
        self.stamps.pop(request_id, None)
        if stamp is None or not stamp.spans:
            return
        stop = stamp.spans[-1][1]
        if stop != UNBOUNDED and stop > prompt_length:
            raise EngineError(
                "A prompt-only adapter was ordered beyond its request's prompt",
                got=f"up to position {stop} of a prompt of {prompt_length} tokens",
            )
        self.stamps[request_id] = stamp

    def adapters(
        self, request_ids: Sequence[str], computed: Sequence[int] | np.ndarray, scheduled: Sequence[int] | np.ndarray
    ) -> tuple[int, ...]:
        """Adapters that have a row in a step, in no order that matters. Changes nothing."""
        ones = np.ones(len(request_ids), np.int64)
        return build_step_rows(scheduled_requests(self.stamps, request_ids, computed, scheduled, ones)).adapter_ids

    def decide(
        self,
        request_ids: Sequence[str],
        computed: Sequence[int] | np.ndarray,
        scheduled: Sequence[int] | np.ndarray,
        sampled: Sequence[int] | np.ndarray,
    ) -> Step:
        """Decides a step and brings its adapters into their slots.

        Args:
            request_ids: In the order of their rows.
            computed: For each, the position of its first token in the step.
            scheduled: For each, its tokens in the step.
            sampled: For each, its rows of logits.
        """
        rows = build_step_rows(scheduled_requests(self.stamps, request_ids, computed, scheduled, sampled))
        self.num_steps += 1
        self.num_adapted_steps += bool(rows.num_adapted)
        self.num_adapted_tokens += rows.num_adapted
        num_tokens = int(np.sum(scheduled))
        if not rows.adapter_ids:
            return Step(num_tokens=num_tokens)
        digests = {stamp.adapter_id: stamp.digest for stamp in self.stamps.values()}
        self._bring_in(rows.adapter_ids, digests)
        return Step(rows, plan_rows(segments(rows.token_runs, self.slots)), num_tokens)

    def _bring_in(self, adapter_ids: Sequence[int], digests: Mapping[int, str]) -> None:
        loads = self.slots.bring_in(adapter_ids)
        for index, (adapter_id, slot) in enumerate(loads):
            try:
                self._load(digests[adapter_id], slot)
            except BaseException:
                for later, _ in loads[index:]:
                    self.slots.forget(later)
                raise


def segments(runs: Sequence[Run], slots: SlotTable) -> list[Segment]:
    """The segments of runs, with slots in place of adapter ids."""
    return [
        Segment(run.start + index * run.length, run.length, slots[adapter_id])
        for run in runs
        for index, adapter_id in enumerate(run.slots)
    ]


def require_same_adapters(dispatched: Sequence[int], step: Step) -> None:
    """Checks that the graph was chosen for the step that is about to run.

    Raises:
        EngineError: It was not: rows would be adapted by a graph without adapter kernels, silently not at all.
    """
    if set(dispatched) != set(step.rows.adapter_ids):
        raise EngineError(
            "A graph was chosen for other adapters than the step has",
            got=f"{sorted(set(dispatched))} at the choice, {sorted(set(step.rows.adapter_ids))} in the step",
        )

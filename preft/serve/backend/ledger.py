"""The scheduler's book of adapters: which are loading, ready or broken, and which requests need them.

The scheduler is the only authority on residency. An adapter is loaded before its first request is admitted, kept
while any unfinished request refers to it (a preempted request prefills again), and becomes droppable afterwards; the
oldest droppable ones go when the byte budget is exceeded. Pure Python, so that every transition is testable alone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from preft.serve.backend.messages import LoadOrders, StepReport
from preft.serve.backend.reference import AdapterReference


class Residency(StrEnum):
    """State of an adapter in the workers' host tier."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass
class Entry:
    """One adapter that the scheduler knows.

    Attributes:
        adapter_id: Engine-wide integer id; never reused.
        residency: Its state.
        num_bytes: Bytes it holds in the host tier; 0 until ready.
        reason: Why it failed.
        requests: Ids of unfinished requests that refer to it.
    """

    adapter_id: int
    residency: Residency = Residency.LOADING
    num_bytes: int = 0
    reason: str = ""
    requests: set[str] = field(default_factory=set)


class AdapterLedger:
    """Adapters by digest, in order of last use.

    Args:
        budget_bytes: Host memory for adapters; droppable ones go when it is exceeded.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self.num_dropped = 0
        self._ids: dict[str, int] = {}
        self._load: list[str] = []
        self._drop: list[str] = []

    def acquire(self, reference: AdapterReference, request_id: str) -> Entry:
        """Notes that a request needs an adapter, and orders its loading where it is not there."""
        entry = self.entries.get(reference.digest)
        if entry is None or (entry.residency is Residency.FAILED and not entry.requests):
            entry = self.entries[reference.digest] = Entry(self.id_of(reference.digest))
            self._load.append(reference.encode())
        entry.requests.add(request_id)
        self.entries.move_to_end(reference.digest)
        return entry

    def release(self, digest: str, request_id: str) -> None:
        """Notes that a request is over."""
        entry = self.entries.get(digest)
        if entry is not None:
            entry.requests.discard(request_id)

    def id_of(self, digest: str) -> int:
        """The integer id of a digest, from 1; the same digest always has the same id."""
        return self._ids.setdefault(digest, len(self._ids) + 1)

    def apply(self, report: StepReport) -> None:
        """Takes in what the worker reported."""
        for digest, num_bytes in report.loaded.items():
            entry = self.entries.setdefault(digest, Entry(self.id_of(digest)))
            entry.residency, entry.num_bytes, entry.reason = Residency.READY, num_bytes, ""
        for digest, reason in report.failed.items():
            entry = self.entries.setdefault(digest, Entry(self.id_of(digest)))
            entry.residency, entry.num_bytes, entry.reason = Residency.FAILED, 0, reason

    def take_orders(self) -> LoadOrders:
        """What the worker must do now; each order is given once."""
        self._drop_surplus()
        orders = LoadOrders(tuple(self._load), tuple(self._drop))
        self._load, self._drop = [], []
        return orders

    @property
    def resident_bytes(self) -> int:
        """Bytes of all ready adapters."""
        return sum(entry.num_bytes for entry in self.entries.values())

    def _drop_surplus(self) -> None:
        surplus = self.resident_bytes - self.budget_bytes
        for digest, entry in list(self.entries.items()):
            if surplus <= 0:
                return
            if entry.residency is Residency.READY and not entry.requests:
                surplus -= entry.num_bytes
                del self.entries[digest]
                self._drop.append(digest)
                self.num_dropped += 1

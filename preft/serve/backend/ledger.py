"""The scheduler's book of adapters: which are loading, ready or broken, and which requests need them.

The scheduler is the only authority on residency. An adapter is loaded before its first request is admitted and kept
while a request has prompt left to compute under it. Afterwards it may go when the byte budget is exceeded: those
that no unfinished request refers to first, then those whose requests are past their prompt, which a preemption would
load again. Requests that wait do not load without limit: beyond the budget, only as many adapters are brought in as
there are slots, of either kind (those that act on prompts and those that act on every token, which hold their slots
for long and must not keep the others out). Pure Python, so that every transition is testable alone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from preft.serve.backend.messages import LoadOrders, StepReport
from preft.serve.backend.reference import AdapterReference

MAX_LOADING = 32
"""Loads under way at most: the size of an adapter is known once the first ones are there."""


class Residency(StrEnum):
    """State of an adapter in the workers' host tier."""

    QUEUED = "queued"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass
class Entry:
    """One adapter that the scheduler knows.

    Attributes:
        adapter_id: Engine-wide integer id; never reused.
        sources: Where it can be loaded from, by folder; several names may mean one adapter in several folders. Empty
            where a worker reported it unasked.
        broken: Folders from which it could not be loaded since it was last ready.
        residency: Its state.
        num_bytes: Bytes it holds in the host tier; 0 until ready.
        reason: Why it failed.
        requests: Ids of unfinished requests that refer to it.
        active: Those of them that have positions left to compute under it.
    """

    adapter_id: int
    sources: dict[str, AdapterReference] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    residency: Residency = Residency.QUEUED
    num_bytes: int = 0
    reason: str = ""
    requests: set[str] = field(default_factory=set)
    active: set[str] = field(default_factory=set)

    @property
    def reference(self) -> AdapterReference | None:
        """What to load."""
        return next(iter(self.sources.values()), None)

    @property
    def prompt_only(self) -> bool:
        """Whether its slot is free again after a prompt."""
        return self.reference is None or self.reference.policy.is_prompt_only

    @property
    def takes_room(self) -> bool:
        """Whether it is, or is about to be, in memory and cannot leave."""
        return self.residency is Residency.LOADING or (self.residency is Residency.READY and bool(self.active))

    @property
    def can_return(self) -> bool:
        """Whether it could be loaded again."""
        return any(self.sources)


class AdapterLedger:
    """Adapters by digest, in order of last use.

    Args:
        budget_bytes: Host memory for adapters.
        slots: Adapters that one step may hold; so many may be in memory whatever the budget.
    """

    def __init__(self, budget_bytes: int, slots: int) -> None:
        self.budget_bytes = budget_bytes
        self.slots = slots
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self.num_dropped = 0
        self._ids: dict[str, int] = {}
        self._queue: dict[str, None] = {}
        self._unwanted: set[str] = set()
        self._largest = 0

    def acquire(self, reference: AdapterReference, request_id: str) -> Entry:
        """Notes that a request needs an adapter, and queues its loading where it is not there."""
        entry = self.entries.get(reference.digest)
        if entry is None or (entry.residency is Residency.FAILED and not entry.requests):
            entry = self.entries[reference.digest] = Entry(self.id_of(reference.digest))
            self._queue[reference.digest] = None
        self._unwanted.discard(reference.digest)
        if reference.folder not in entry.broken:
            entry.sources.setdefault(reference.folder, reference)
            if entry.residency is Residency.FAILED:
                self._try_again(reference.digest, entry)
        entry.requests.add(request_id)
        entry.active.add(request_id)
        self.entries.move_to_end(reference.digest)
        return entry

    def rest(self, digest: str, request_id: str) -> None:
        """Notes that a request has computed every position that the adapter acts on."""
        entry = self.entries.get(digest)
        if entry is not None:
            entry.active.discard(request_id)

    def release(self, digest: str, request_id: str) -> None:
        """Notes that a request is over."""
        entry = self.entries.get(digest)
        if entry is None:
            return
        entry.requests.discard(request_id)
        entry.active.discard(request_id)
        if not entry.requests and entry.residency in (Residency.QUEUED, Residency.FAILED):
            del self.entries[digest]
            self._queue.pop(digest, None)

    def id_of(self, digest: str) -> int:
        """The integer id of a digest, from 1; the same digest always has the same id."""
        return self._ids.setdefault(digest, len(self._ids) + 1)

    def apply(self, report: StepReport) -> None:
        """Takes in what the worker reported."""
        for digest, num_bytes in report.loaded.items():
            entry = self.entries.setdefault(digest, Entry(self.id_of(digest)))
            entry.residency, entry.num_bytes, entry.reason, entry.broken = Residency.READY, num_bytes, "", set()
            self._queue.pop(digest, None)
            self._largest = max(self._largest, num_bytes)
        for digest, reason in report.failed.items():
            failed = self.entries.get(digest)
            # One that is queued is yet to be tried; one that nobody waits for is tried again when somebody does.
            if failed is None or failed.residency is Residency.QUEUED:
                continue
            failed.residency, failed.num_bytes, failed.reason = Residency.FAILED, 0, reason
            if failed.reference is not None:
                failed.broken.add(failed.reference.folder)
                del failed.sources[failed.reference.folder]
            if not failed.requests:
                del self.entries[digest]
            elif failed.sources:
                self._try_again(digest, failed)
        # One that a request has asked for since is wanted after all.
        self._unwanted |= {digest for digest in report.released if digest in self.entries}
        self._unwanted = {
            digest for digest in self._unwanted if digest in self.entries and not self.entries[digest].requests
        }

    def take_orders(self) -> LoadOrders:
        """What the worker must do now; each order is given once."""
        load = self._next_loads()
        incoming = self._largest * self._count(Residency.LOADING)
        return LoadOrders(tuple(load), tuple(self._drop(self.resident_bytes + incoming - self.budget_bytes)))

    @property
    def num_ready(self) -> int:
        """How many adapters are in memory."""
        return self._count(Residency.READY)

    @property
    def num_awaited(self) -> int:
        """How many adapters requests wait for to be loaded."""
        return self._count(Residency.QUEUED) + self._count(Residency.LOADING)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all ready adapters."""
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def waits_for_load(self) -> bool:
        """Whether a load is under way."""
        return any(entry.residency is Residency.LOADING for entry in self.entries.values())

    def _try_again(self, digest: str, entry: Entry) -> None:
        """Queues an adapter that failed from one folder to be loaded from another."""
        entry.residency, entry.reason = Residency.QUEUED, ""
        self._queue[digest] = None

    def _count(self, residency: Residency) -> int:
        return sum(entry.residency is residency for entry in self.entries.values())

    def _next_loads(self) -> list[str]:
        """Queued adapters that there is room for, oldest first."""
        load: list[str] = []
        if not self._queue:
            return load
        fixed = [entry for entry in self.entries.values() if entry.takes_room]
        needed = {kind: sum(entry.prompt_only is kind for entry in fixed) for kind in (True, False)}
        num_loading = self._count(Residency.LOADING)
        fixed_bytes = sum(entry.num_bytes for entry in fixed) + self._largest * num_loading
        for digest in list(self._queue):
            entry = self.entries[digest]
            if num_loading >= MAX_LOADING:
                break
            if needed[entry.prompt_only] >= self.slots and fixed_bytes + self._largest > self.budget_bytes:
                continue
            assert entry.reference is not None
            load.append(entry.reference.encode())
            entry.residency = Residency.LOADING
            del self._queue[digest]
            needed[entry.prompt_only] += 1
            num_loading += 1
            fixed_bytes += self._largest
        return load

    def _drop(self, surplus: int) -> list[str]:
        """Forgets adapters until no surplus is left: the longest unused first, unreferenced ones before others."""
        dropped: list[str] = []
        if surplus <= 0 and not self._unwanted:
            return dropped
        ready = [item for item in self.entries.items() if item[1].residency is Residency.READY]
        unreferenced = [item for item in ready if not item[1].requests]
        resting = [item for item in ready if item[1].requests and not item[1].active and item[1].can_return]
        for digest, entry in (*unreferenced, *resting):
            if surplus <= 0 and digest not in self._unwanted:
                continue
            surplus -= entry.num_bytes
            del self.entries[digest]
            self._unwanted.discard(digest)
            dropped.append(digest)
        self.num_dropped += len(dropped)
        return dropped

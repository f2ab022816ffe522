"""A worker's host tier: adapters by digest, read and packed on a thread of its own, never inside a step.

The scheduler decides what is loaded and dropped; this class obeys and reports. A load that fails is a report, not an
exception: the request that wanted it fails, and the engine goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from preft.adapters.adapter import Adapter
from preft.adapters.fingerprint import BaseFingerprint
from preft.adapters.store import load_adapter
from preft.errors import EngineError, PreftError
from preft.serve.backend.messages import LoadOrders, StepReport
from preft.serve.backend.packing import Packer
from preft.serve.backend.push import HeldAdapters
from preft.serve.backend.ranks import OneRank, Ranks
from preft.serve.backend.reference import AdapterReference
from preft.serve.backend.sites import PackedAdapter

logger = logging.getLogger(__name__)

_KEPT_FAILURES = 1024
_NICENESS = 19
"""Of the loader's thread: it runs in what steps leave of the cores. At 0 and 10, running requests lost their pace."""


class HostTier:
    """Packed adapters of one worker.

    Args:
        packer: Packs for this worker's model and rank.
        base: Fingerprint of the running model.
        allow_base_mismatch: Accept adapters made for other weights of the same architecture.
        held_bytes: Memory for adapters that the front end keeps here.
        ranks: The workers that must all have an adapter before it is ready.

    Attributes:
        held: Those adapters.
        failures: Digest to reason, for loads that failed lately; for the front end.
    """

    def __init__(
        self,
        packer: Packer,
        base: BaseFingerprint,
        *,
        allow_base_mismatch: bool,
        held_bytes: int = sys.maxsize,
        ranks: Ranks | None = None,
    ) -> None:
        self._packer = packer
        self._base = base
        self._allow_base_mismatch = allow_base_mismatch
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="preft-load", initializer=_give_way)
        self._loads: dict[str, Future[PackedAdapter]] = {}
        self._seconds: dict[str, float] = {}
        self._ranks = ranks or OneRank()
        self._ready: dict[str, PackedAdapter] = {}
        self.failures: dict[str, str] = {}
        self.held = HeldAdapters(self._pool, self._pack, held_bytes)

    def obey(self, orders: LoadOrders) -> None:
        """Starts loads and forgets what is to be dropped. Returns at once."""
        for digest in orders.drop:
            self._ready.pop(digest, None)
        for text in orders.load:
            self.start_load(AdapterReference.decode(text))

    def start_load(self, reference: AdapterReference) -> None:
        """Orders one adapter; it will be in a later report even if it is here already."""
        pending = self._loads.get(reference.digest)
        # A failure that is not reported yet may have been put right since.
        if pending is None or (pending.done() and pending.exception() is not None):
            self._loads[reference.digest] = self._pool.submit(self._timed_load, reference)

    def prefetch(self, references: Sequence[AdapterReference]) -> dict[str, str]:
        """Loads adapters that are not here and waits for them.

        One that is here is not reported again: the scheduler may have ordered it dropped meanwhile, and must not take
        the report for a promise.

        Returns:
            Digest to reason, for those that could not be loaded.
        """
        missing = {reference.digest: reference for reference in references if reference.digest not in self._ready}
        for reference in missing.values():
            self.start_load(reference)
        errors = {digest: self._loads[digest].exception() for digest in missing}
        return {digest: _reason(error) for digest, error in errors.items() if error is not None}

    @property
    def num_adapters(self) -> int:
        """How many adapters are held."""
        return len(self._ready)

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters that are held."""
        return sum(packed.num_bytes for packed in self._ready.values())

    def take_report(self) -> StepReport:
        """What finished, on every rank, since the last report. Called once a step, at the same point on each rank."""
        report = StepReport(released=self.held.take_released())
        for digest, reason in self._ranks.agree({d: _outcome(load) for d, load in self._loads.items()}).items():
            load = self._loads.pop(digest)
            seconds = self._seconds.pop(digest, None)
            if reason:
                logger.warning("Adapter %s could not be loaded: %s", digest[:12], reason)
                report.failed[digest] = reason
                self._note_failure(digest, reason)
            else:
                self.failures.pop(digest, None)
                self._ready[digest] = load.result()
                report.loaded[digest] = self._ready[digest].num_bytes
                report.load_seconds += [] if seconds is None else [seconds]
        return report

    def _note_failure(self, digest: str, reason: str) -> None:
        self.failures.pop(digest, None)
        self.failures[digest] = reason
        if len(self.failures) > _KEPT_FAILURES:
            del self.failures[next(iter(self.failures))]

    def get(self, digest: str) -> PackedAdapter:
        """The numbers of an adapter that a step needs.

        Raises:
            EngineError: It was never loaded here; a scheduling fault that must not be served as base.
        """
        packed = self._ready.get(digest) or self.held.get(digest)
        if packed is None:
            raise EngineError(f"Adapter {digest[:12]} is needed by a step but is not loaded on this worker")
        return packed

    def hold(self, reference: AdapterReference) -> None:
        """Keeps an adapter as it is now, whatever becomes of its folder.

        Returns at once, since the engine waits here: `HeldAdapters.pushed` tells the outcome. The folder must stay as
        it is until then.
        """

        def start() -> Future[PackedAdapter]:
            packed = self._ready.get(reference.digest)
            if packed is None:
                return self._pool.submit(self._load, reference)
            here: Future[PackedAdapter] = Future()
            here.set_result(packed)
            return here

        self.held.expect(reference.digest, start)

    def put(self, adapter: Adapter) -> PackedAdapter:
        """Packs and keeps an adapter that is in memory already.

        Raises:
            AdapterError: It does not fit the running model.
        """
        packed = self._pack(adapter)
        self._ready[adapter.digest] = packed
        return packed

    def _timed_load(self, reference: AdapterReference) -> PackedAdapter:
        started = time.monotonic()
        packed = self._load(reference)
        self._seconds[reference.digest] = time.monotonic() - started
        return packed

    def _load(self, reference: AdapterReference) -> PackedAdapter:
        held = self._ready.get(reference.digest) or self.held.get(reference.digest)
        if held is not None:
            return held
        if not reference.folder:
            raise EngineError(f"Adapter {reference.digest[:12]} was pushed to memory and is there no more")
        adapter = load_adapter(reference.folder, expected_digest=reference.digest)
        if adapter.manifest.positions != reference.policy:
            raise EngineError(f"Adapter {reference.digest[:12]} was registered with another position policy")
        return self._pack(adapter)

    def _pack(self, adapter: Adapter) -> PackedAdapter:
        adapter.manifest.base.require_same(self._base, allow_weights=self._allow_base_mismatch)
        return self._packer.pack(adapter)


def _give_way() -> None:
    """Makes the loader's thread, and those it starts, run in what the threads that run steps leave."""
    with contextlib.suppress(OSError, AttributeError):  # not everywhere is a thread's priority its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, PreftError) else f"{type(error).__name__}: {error}"


def _outcome(load: Future[PackedAdapter]) -> str | None:
    """How a load ended: the reason of a failure, empty for none, None while it is under way."""
    if not load.done():
        return None
    error = load.exception()
    return "" if error is None else _reason(error) or type(error).__name__

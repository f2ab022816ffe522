"""The scheduler's counts for metrics, and how they reach the front end.

The front end of a server lives in another process. vLLM sends it a `SchedulerStats` after each step, whose fields are
fixed. Its field for statistics of KV connectors may hold any plain data, and is free: connectors are refused with
adapters. preft's counts travel there under a name of their own; the front end's logger takes them out before vLLM's
loggers look at it. Counts are differences since the last message, so that nothing is lost or told twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from preft.serve.backend.ledger import AdapterLedger
from preft.serve.backend.messages import StepReport

KEY = "preft"


@dataclass
class NameCounts:
    """Requests under one adapter's name.

    Attributes:
        requests: Those that ended.
        prompt_tokens: Of the prompts of those that gave a token.
        cached_tokens: Those of them that the prefix cache held.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class SchedulerCounters:
    """Counts since the last message.

    Attributes:
        with_names: Whether requests are counted by adapter name.
    """

    with_names: bool = False
    num_steps: int = 0
    num_adapted_steps: int = 0
    num_adapted_tokens: int = 0
    num_load_failures: int = 0
    load_seconds: list[float] = field(default_factory=list)
    names: dict[str, NameCounts] = field(default_factory=dict)
    _num_dropped: int = 0

    def add(self, report: StepReport) -> None:
        """Counts what a worker reported."""
        self.num_steps += report.num_steps
        self.num_adapted_steps += report.num_adapted_steps
        self.num_adapted_tokens += report.num_adapted_tokens
        self.num_load_failures += len(report.failed)
        self.load_seconds += report.load_seconds

    def add_request(self, name: str, prompt_tokens: int, cached_tokens: int | None) -> None:
        """Counts a request that ended; without a token yet if `cached_tokens` is None."""
        if self.with_names:
            counts = self.names.setdefault(name, NameCounts())
            counts.requests += 1
            if cached_tokens is not None:
                counts.prompt_tokens += prompt_tokens
                counts.cached_tokens += cached_tokens

    def take(self, ledger: AdapterLedger, num_slots_used: int, num_waiting_for_slot: int) -> dict[str, Any]:
        """The message: counts since the last one, and the state now. Plain data."""
        message = {
            "resident": ledger.num_ready,
            "waiting": ledger.num_awaited,
            "resident_bytes": ledger.resident_bytes,
            "slots_used": num_slots_used,
            "waiting_for_slot": num_waiting_for_slot,
            "evictions": ledger.num_dropped - self._num_dropped,
            "steps": self.num_steps,
            "adapted_steps": self.num_adapted_steps,
            "adapted_tokens": self.num_adapted_tokens,
            "load_failures": self.num_load_failures,
            "load_seconds": self.load_seconds,
            "names": [
                [name, counts.requests, counts.prompt_tokens, counts.cached_tokens]
                for name, counts in self.names.items()
            ],
        }
        self.num_steps = self.num_adapted_steps = self.num_adapted_tokens = self.num_load_failures = 0
        self.load_seconds, self.names, self._num_dropped = [], {}, ledger.num_dropped
        return {KEY: message}

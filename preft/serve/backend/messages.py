"""What scheduler and worker tell each other, once a step. Plain data: it crosses process boundaries by pickling."""

from __future__ import annotations

from dataclasses import dataclass, field

from preft.positions import Span


@dataclass(frozen=True)
class RequestStamp:
    """The scheduler's word to the worker on one request, given when the request is first scheduled.

    Attributes:
        adapter_id: Engine-wide integer id of the adapter's digest.
        digest: The adapter's identity.
        spans: Absolute positions at which it acts.
    """

    adapter_id: int
    digest: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class LoadOrders:
    """The scheduler's word to the worker on residency.

    Attributes:
        load: References to bring into the host tier, encoded.
        drop: Digests to forget.
    """

    load: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


@dataclass
class StepReport:
    """The worker's word to the scheduler after a step.

    Attributes:
        loaded: Digest to bytes held, for adapters that became ready since the last report.
        failed: Digest to reason, for adapters that could not be loaded.
        released: Digests that the front end has let go: of no use once no request refers to them.
        load_seconds: How long each of the loads took, from file to packed numbers.
        num_steps: Forward passes since the last report.
        num_adapted_steps: Those of them with an adapted token.
        num_adapted_tokens: Adapted tokens in them.
    """

    loaded: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    load_seconds: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_adapted_steps: int = 0
    num_adapted_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.loaded or self.failed or self.released or self.num_steps)

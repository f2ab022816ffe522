"""Which rows of a step's batch each adapter acts on.

A step's tokens lie in one [T, ...] tensor. A **segment** is a range of adjacent rows under one adapter; a **run** is
a maximal chain of adjacent segments of one length, so that their updates can be one batched product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Adjacent rows under one adapter.

    Attributes:
        start: First row.
        length: Number of rows, at least 1.
        slot: The adapter's key in the table of active adapters.
    """

    start: int
    length: int
    slot: int


@dataclass(frozen=True)
class Run:
    """Adjacent segments of equal length.

    Attributes:
        start: First row.
        length: Rows of each segment.
        slots: The segments' adapters, in row order.
    """

    start: int
    length: int
    slots: tuple[int, ...]

    @property
    def stop(self) -> int:
        """One past the last row."""
        return self.start + self.length * len(self.slots)


def build_runs(segments: Iterable[Segment]) -> tuple[Run, ...]:
    """Chains segments, given in row order, into runs."""
    chains: list[list[Segment]] = []
    for segment in segments:
        last = chains[-1][-1] if chains else None
        if last is not None and last.start + last.length == segment.start and last.length == segment.length:
            chains[-1].append(segment)
        else:
            chains.append([segment])
    return tuple(Run(chain[0].start, chain[0].length, tuple(segment.slot for segment in chain)) for chain in chains)


def clip_runs(runs: Sequence[Run], start: int, stop: int) -> tuple[Run, ...]:
    """The part of `runs` in rows `[start, stop)`, with rows counted from `start`."""
    segments: list[Segment] = []
    for run in runs:
        for index, slot in enumerate(run.slots):
            low = max(run.start + index * run.length, start)
            high = min(run.start + (index + 1) * run.length, stop)
            if low < high:
                segments.append(Segment(low - start, high - low, slot))
    return build_runs(segments)

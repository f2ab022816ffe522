"""How the workers of a tensor-parallel engine agree on which adapters are loaded.

Each worker reads the files by itself, and only the first one's report reaches the scheduler. An adapter that one
worker could not read, or has not read yet, must not be ready for the others: a step that needs it would end the
engine. So an adapter is ready once it is on every worker, and has failed if it failed on any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import distributed

_PENDING, _LOADED, _FAILED = range(3)


class Ranks(Protocol):
    """The workers that share one adapter's work."""

    def agree(self, outcomes: Mapping[str, str | None]) -> dict[str, str]:
        """Settles loads. Every worker calls it at the same point of each step, with the same digests.

        Args:
            outcomes: Digest to how its load ended here: the reason of a failure, empty for none, None while under way.

        Returns:
            Digest to a worker's reason, or empty: for those that are settled on every worker.
        """
        ...


class OneRank:
    """A worker alone."""

    def agree(self, outcomes: Mapping[str, str | None]) -> dict[str, str]:
        """What is settled here."""
        return {digest: reason for digest, reason in outcomes.items() if reason is not None}


class GroupOfRanks:
    """Workers in processes of their own.

    Args:
        group: Of `torch.distributed`, over the CPU.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def agree(self, outcomes: Mapping[str, str | None]) -> dict[str, str]:
        """See `Ranks`. Without a load under way nothing is exchanged."""
        if not outcomes:
            return {}
        digests = sorted(outcomes)
        states = torch.tensor([_state(outcomes[digest]) for digest in digests])
        extremes = torch.cat([states, -states])
        distributed.all_reduce(extremes, distributed.ReduceOp.MAX, group=self._group)
        highest, lowest = extremes[: len(digests)].tolist(), (-extremes[len(digests) :]).tolist()
        settled = [place for place, state in enumerate(lowest) if state != _PENDING]
        reasons = dict.fromkeys((digests[place] for place in settled), "")
        failed = [digests[place] for place in settled if highest[place] == _FAILED]
        if failed:
            reasons.update(self._first_reasons({digest: outcomes[digest] or "" for digest in failed}))
        return reasons

    def _first_reasons(self, mine: Mapping[str, str]) -> dict[str, str]:
        found: list[Mapping[str, str]] = [{}] * distributed.get_world_size(self._group)
        distributed.all_gather_object(found, dict(mine), group=self._group)
        return {digest: next(reasons[digest] for reasons in found if reasons[digest]) for digest in mine}


def _state(reason: str | None) -> int:
    if reason is None:
        return _PENDING
    return _FAILED if reason else _LOADED

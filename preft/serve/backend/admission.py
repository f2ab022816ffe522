"""Who may enter: adapters in use against slots.

An adapted request holds a slot only while it has prompt tokens left to compute under its adapter. A request is
admitted if its adapter already holds a slot or one is free. Two rules keep it fair. All-token adapters, which hold
their slot for a whole generation, leave one slot to prompt-only ones. And once the oldest request that waits for a
slot has waited too long, no later one is admitted before it, so a stream of requests for resident adapters cannot
starve it. An all-token request that waits for another generation to end holds back all-token ones alone: the slot
left to prompt-only requests would be of no use to it.

Adapters are counted over all running requests, also those that this step does not schedule: a running prefill that
is skipped for one step still needs its slot in the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Demand:
    """One request's need for a slot.

    Attributes:
        adapter_id: Its adapter.
        prompt_only: Whether the slot is free again after the prompt.
    """

    adapter_id: int
    prompt_only: bool


@dataclass
class Admission:
    """Slot accounting of one scheduling step.

    Attributes:
        num_slots: Adapters that one step may hold.
        patience_s: How long the oldest waiting request tolerates being overtaken.
        holders: Adapter id to whether only all-token requests hold it.
        closed: The waiting adapter that must enter before any other, or None.
        closed_to_all_token: The waiting adapter that must enter before any other all-token one, or None.
    """

    num_slots: int
    patience_s: float
    reserve: bool
    holders: dict[int, bool] = field(default_factory=dict)
    closed: int | None = None
    closed_to_all_token: int | None = None

    @classmethod
    def begin(cls, num_slots: int, patience_s: float, running: Iterable[Demand], *, reserve: bool) -> Admission:
        """Counts the adapters that running requests hold.

        Args:
            num_slots: Adapters that one step may hold.
            patience_s: How long the oldest waiting request tolerates being overtaken, in seconds.
            running: Needs of all running requests.
            reserve: Whether prompt-only requests exist, so that one slot of two or more is kept for them.
        """
        step = cls(num_slots, patience_s, reserve and num_slots >= 2)
        for demand in running:
            step._hold(demand)
        return step

    def admit(self, demand: Demand, waited_s: float) -> bool:
        """Decides on one waiting request, in queue order, and notes the decision.

        Args:
            demand: Its need.
            waited_s: Seconds since it was first refused a slot; 0 if it never was.
        """
        if self.closed not in (None, demand.adapter_id):
            return False
        if not demand.prompt_only and self.closed_to_all_token not in (None, demand.adapter_id):
            return False
        if not self._fits(demand):
            if waited_s > self.patience_s:
                self._close(demand)
            return False
        self._hold(demand)
        return True

    def surplus(self) -> int:
        """How many adapters too many the running requests hold."""
        return max(0, len(self.holders) - self.num_slots)

    def _fits(self, demand: Demand) -> bool:
        if demand.adapter_id in self.holders:
            return True
        return len(self.holders) < self.num_slots and (demand.prompt_only or not self._all_token_is_full())

    def _all_token_is_full(self) -> bool:
        return self.reserve and sum(self.holders.values()) >= self.num_slots - 1

    def _close(self, demand: Demand) -> None:
        if not demand.prompt_only and self._all_token_is_full():
            self.closed_to_all_token = demand.adapter_id
        else:
            self.closed = demand.adapter_id

    def _hold(self, demand: Demand) -> None:
        self.holders[demand.adapter_id] = self.holders.get(demand.adapter_id, True) and not demand.prompt_only

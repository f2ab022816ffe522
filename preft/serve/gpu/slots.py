"""Which slot of the device's tables holds which adapter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from preft.errors import EngineError


class SlotTable:
    """Slots by least recent use. An adapter's id names its numbers for the life of the engine, so a slot stays valid.

    Args:
        num_slots: Slots of the device's tables.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slot_of: OrderedDict[int, int] = OrderedDict()
        self._free = list(range(num_slots))[::-1]

    def __getitem__(self, adapter_id: int) -> int:
        return self._slot_of[adapter_id]

    def __contains__(self, adapter_id: int) -> bool:
        return adapter_id in self._slot_of

    def bring_in(self, adapter_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Makes every one of a step's adapters resident.

        Those that are resident are marked as used first: else bringing in one could push out another that the same
        step needs.

        Returns:
            (adapter id, slot) of each that must be copied into its slot before the step.

        Raises:
            EngineError: The step needs more adapters than there are slots.
        """
        if len(set(adapter_ids)) > self.num_slots:
            raise EngineError(
                "A step needs more adapters than there are slots", got=f"{len(set(adapter_ids))} for {self.num_slots}"
            )
        for adapter_id in adapter_ids:
            if adapter_id in self._slot_of:
                self._slot_of.move_to_end(adapter_id)
        loads = []
        for adapter_id in adapter_ids:
            if adapter_id not in self._slot_of:
                slot = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
                self._slot_of[adapter_id] = slot
                loads.append((adapter_id, slot))
        return loads

    def forget(self, adapter_id: int) -> None:
        """Frees an adapter's slot, as when copying into it failed."""
        slot = self._slot_of.pop(adapter_id, None)
        if slot is not None:
            self._free.append(slot)

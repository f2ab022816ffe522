"""What an engine will take of this machine's memory, worked out before it serves anything."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preft.errors import EngineError

if TYPE_CHECKING:
    import torch
    from torch import nn

_GIB = 1 << 30
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, on each rank.

    Attributes:
        ranks: Workers on this machine.
        weight_bytes: The base model's weights.
        kv_cache_bytes: The KV cache.
        adapter_cache_bytes: Host memory for adapters at most.
        pushed_bytes: Host memory for adapters that were pushed from memory at most; nothing where none is pushed, so
            it is told but not part of the total.
        slots: Adapters that one step may hold.
        slot_bytes: What each slot takes beside the adapter cache. On CPU a slot is a reference into that, so this is
            no more than the stacks that vLLM allocates at rank 1.
        stack_bytes: Copies of the numbers of adapters that decode together, at most.
    """

    ranks: int
    weight_bytes: int
    kv_cache_bytes: int
    adapter_cache_bytes: int
    pushed_bytes: int
    slots: int
    slot_bytes: int
    stack_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of all ranks."""
        adapters = self.adapter_cache_bytes + self.slots * self.slot_bytes + self.stack_bytes
        return self.ranks * (self.weight_bytes + self.kv_cache_bytes + adapters)

    def to_dict(self) -> dict[str, int]:
        """For status answers."""
        return {**asdict(self), "total_bytes": self.total_bytes}


def describe_plan(plan: dict[str, int]) -> str:
    """One line of a plan's `to_dict`, for people."""
    parts = [
        f"weights {_gib(plan['weight_bytes'])}",
        f"KV cache {_gib(plan['kv_cache_bytes'])}",
        f"adapters up to {_gib(plan['adapter_cache_bytes'])}",
        f"their stacks up to {_gib(plan['stack_bytes'])}",
        f"{plan['slots']} slots of {plan['slot_bytes'] / 1024:.0f} KiB",
    ]
    ranks = f" on each of {plan['ranks']} ranks" if plan["ranks"] > 1 else ""
    pushed = f"; adapters pushed from memory, if any, up to {_gib(plan['pushed_bytes'])} more"
    return f"{', '.join(parts)}{ranks}: {_gib(plan['total_bytes'])} in all{pushed}"


def require_memory(plan: MemoryPlan, machine_bytes: int) -> None:
    """Refuses a plan that this machine cannot hold.

    Raises:
        EngineError: It cannot.
    """
    if plan.total_bytes > machine_bytes:
        raise EngineError(
            "The engine's plan exceeds this machine's memory",
            got=describe_plan(plan.to_dict()),
            accepted=f"at most {_gib(machine_bytes)}",
            hint="lower `--adapter-cache-gib`, `--kv-cache-gib` or `--slots`",
        )


def machine_memory(limits: Iterable[Path] = _CGROUP_LIMITS) -> int:
    """Bytes of memory that this process may use: the machine's, or a container's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in limits:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights on this rank; tensors that share memory count once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in model.parameters()}
    return sum(storages.values())


def slot_bytes(modules: Iterable[Any], slots: int) -> int:
    """Bytes that vLLM's stacks for slots take, by slot, rounded up.

    Args:
        modules: Wrapped modules.
        slots: How many slots the stacks are for.
    """
    stacks: list[torch.Tensor] = []
    for module in modules:
        for name in ("lora_a_stacked", "lora_b_stacked"):
            held = getattr(module, name, ())
            stacks += list(held) if isinstance(held, tuple | list) else [held]
    return -(-sum(stack.nbytes for stack in stacks) // slots)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"

"""What fits: weights, KV cache and adapter slots share the memory; what does not fit waits or is swapped."""

from __future__ import annotations

import math
from dataclasses import dataclass

from preft.errors import UsageError
from preft.plan.roofline import BatchTime, Roofline

MOST_SLOTS = 4096


@dataclass(frozen=True)
class Fit:
    """An arm within the memory.

    Attributes:
        arm: Which.
        slots: Adapters that a step may hold; 0 for base.
        batch: Requests that run at once.
        limited_by: What keeps the batch from growing: `requests`, `kv cache` or `slots`.
        slot_bytes: Memory of all slots on one GPU.
        kv_bytes: KV cache of the batch at full length on one GPU.
        free_bytes: Memory left over on one GPU.
        all_resident: Whether every adapter has a slot of its own.
        most_resident: Adapters that would fit if the batch were one request.
        load_bytes: That must come from the host to each GPU for one batch: its adapters, less the share in slots.
        load_s: Time of that.
        time: The batch's time without it.
    """

    arm: str
    slots: int
    batch: int
    limited_by: str
    slot_bytes: float
    kv_bytes: float
    free_bytes: float
    all_resident: bool
    most_resident: int
    load_bytes: float
    load_s: float
    time: BatchTime

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens over the batch's time, loads included."""
        seconds = self.time.prefill_s + self.time.decode_s
        return self.time.output_tokens_per_s * seconds / (seconds + self.load_s)


def usable_bytes(roof: Roofline) -> float:
    """Memory of one GPU for KV cache and adapters.

    Raises:
        UsageError: Not even the weights fit.
    """
    memory, assumed = roof.machine.gpu.memory_bytes, roof.assumptions
    usable = memory * assumed.memory_utilisation - assumed.reserve_bytes - roof.weight_bytes
    needed = roof.kv_bytes_per_token * (roof.workload.input_len + roof.workload.output_len)
    if usable < needed:
        raise UsageError(
            f"`{roof.shape.name}` with one request does not fit `{roof.machine.label}`",
            got=f"{(roof.weight_bytes + needed) / 1e9:.1f} GB on each GPU",
            accepted=f"{(memory * assumed.memory_utilisation - assumed.reserve_bytes) / 1e9:.1f} GB on each",
            hint="plan more GPUs (NAMExN), a larger one, or `--dtype fp8`",
        )
    return usable


def fit(roof: Roofline, arm: str, slots: int) -> Fit | None:
    """An arm with so many slots, at the largest batch that memory and slots allow; None if not one request fits."""
    load = roof.workload
    usable, size = usable_bytes(roof), roof.adapter_bytes(arm)
    slots = 0 if arm == "base" else min(slots, load.adapters)
    request_bytes = roof.kv_bytes_per_token * (load.input_len + load.output_len)
    by_memory = math.floor((usable - slots * size) / request_bytes)
    limits = {"requests": load.requests, "kv cache": by_memory}
    if arm == "lora" and slots < load.adapters:
        # It holds its slot until its last token; the others give it back with their last prompt token.
        limits["slots"] = math.floor(slots * load.requests_per_adapter)
    limited_by = min(limits, key=lambda name: limits[name])
    batch = limits[limited_by]
    if batch < 1:
        return None
    used = min(load.adapters, math.ceil(batch / load.requests_per_adapter))
    resident = arm == "base" or slots >= load.adapters
    load_bytes = 0.0 if resident else used * size * (1 - slots / load.adapters)
    most = load.adapters if arm == "base" else max(0, math.floor((usable - request_bytes) / size))
    return Fit(
        arm=arm,
        slots=slots,
        batch=batch,
        limited_by=limited_by,
        slot_bytes=slots * size,
        kv_bytes=batch * request_bytes,
        free_bytes=usable - slots * size - batch * request_bytes,
        all_resident=resident,
        most_resident=most,
        load_bytes=load_bytes,
        load_s=load_bytes / roof.assumptions.host_link,
        time=roof.batch(arm, batch, slots=slots or None),
    )


def best_fit(roof: Roofline, arm: str) -> Fit | None:
    """The number of slots with the most throughput; the fewest of those that come within 0.5 % of it."""
    if arm == "base":
        return fit(roof, arm, 0)
    found = [fit(roof, arm, slots) for slots in range(1, min(roof.workload.adapters, MOST_SLOTS) + 1)]
    fits = [candidate for candidate in found if candidate is not None]
    if not fits:
        return None
    most = max(candidate.output_tokens_per_s for candidate in fits)
    return next(candidate for candidate in fits if candidate.output_tokens_per_s >= 0.995 * most)

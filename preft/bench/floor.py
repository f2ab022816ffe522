"""What all-token LoRA cannot beat: base's own time, and the bytes and arithmetic of each adapter once a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from preft.bench.facts import ModelFacts
from preft.errors import UsageError

PROBE_BYTES = 1 << 30


@dataclass(frozen=True)
class Floor:
    """One all-token arm at one point against its floor.

    Attributes:
        adapters: Distinct ones.
        lora_rank: Of the point.
        bandwidth: Bytes/s that reading memory reaches on all cores.
        flops: FLOP/s that base reaches on prompts.
        adapter_bytes: Of all adapters in a decode step.
        base_s: Base's whole time.
        floor_s: Base's, and what adapters must add.
        measured_s: The arm's whole time.
        share_of_floor: `floor_s / measured_s`; 1 is a perfect kernel.
        kernel_floor_s: What adapters must add.
        kernel_s: What their kernels took, if that was measured.
        kernel_share_of_floor: `kernel_floor_s / kernel_s`.
    """

    adapters: int
    lora_rank: int | str
    bandwidth: float
    flops: float
    adapter_bytes: float
    base_s: float
    floor_s: float
    measured_s: float
    share_of_floor: float
    kernel_floor_s: float
    kernel_s: float | None
    kernel_share_of_floor: float | None

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def read_bandwidth(num_bytes: int = PROBE_BYTES, tries: int = 10) -> float:
    """Bytes/s of reading memory once on all of torch's threads: the best of several tries."""
    import torch

    values = torch.zeros(num_bytes // 8, dtype=torch.int64)
    best = float("inf")
    for _ in range(tries):
        started = time.perf_counter()
        values.sum()
        best = min(best, time.perf_counter() - started)
    return values.nbytes / best


def floors(
    rows: Sequence[Mapping[str, Any]], facts: ModelFacts, *, bandwidth: Callable[[], float] = read_bandwidth
) -> list[Floor]:
    """The floor of each measured `lora` arm that has base beside it, from the first repeat of its point.

    Args:
        rows: Of `preft bench throughput`.
        facts: Of the model.
        bandwidth: Measures bytes/s, on the machine of the rows.

    Raises:
        UsageError: There is no such arm.
    """
    done = [row for row in rows if row["output_tokens_per_s"]]
    pairs = [
        (row, base)
        for row in done
        if row["arm"] == "lora" and isinstance(row["lora_rank"], int)
        for base in done
        if base["arm"] == "base" and all(base[key] == row[key] for key in ("repeat", "adapters", "lora_rank"))
    ]
    if not pairs:
        raise UsageError("The result holds no point where both `base` and `lora` were measured")
    speed = bandwidth()
    return [_floor(row, base, facts, speed) for row, base in pairs if row["repeat"] == pairs[0][0]["repeat"]]


def _floor(row: Mapping[str, Any], base: Mapping[str, Any], facts: ModelFacts, bandwidth: float) -> Floor:
    values = row["lora_rank"] * facts.linear_widths
    prompt_tokens = row["requests"] * row["input_len"]
    flops = 2 * facts.weight_values * prompt_tokens / base["prefill_s"]
    active = min(row["adapters"], row["requests"], row["setup"].get("max_num_seqs") or row["requests"])
    adapter_bytes = 2.0 * values * active
    decode_s = max(adapter_bytes / bandwidth, 2 * values * row["requests"] / flops) * (row["output_len"] - 1)
    kernel_floor_s = 2 * values * prompt_tokens / flops + decode_s
    kernel_s = (row.get("adapter_kernels") or {}).get("seconds")
    return Floor(
        adapters=row["adapters"],
        lora_rank=row["lora_rank"],
        bandwidth=bandwidth,
        flops=flops,
        adapter_bytes=adapter_bytes,
        base_s=base["seconds"],
        floor_s=base["seconds"] + kernel_floor_s,
        measured_s=row["seconds"],
        share_of_floor=(base["seconds"] + kernel_floor_s) / row["seconds"],
        kernel_floor_s=kernel_floor_s,
        kernel_s=kernel_s,
        kernel_share_of_floor=kernel_floor_s / kernel_s if kernel_s else None,
    )

"""Fitting the roofline to a measured point, and how well it then predicts the others.

Six numbers are fitted: achieved bandwidth and arithmetic, seconds that each step costs beside them, microseconds a
launch of an adapter kernel, and how much longer than perfect kernels adapters and attention take. They are fitted to
the prompt time and the whole time of every arm at one point of a sweep; the other points are predictions. One point
cannot tell all six apart, so what it says little about stays near what such a machine is like.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from preft.errors import FileError, UsageError
from preft.plan.gpus import Gpu, Machine
from preft.plan.roofline import Roofline, Step
from preft.plan.shapes import ModelShape
from preft.plan.workload import ARMS, Assumptions, Workload

CLOSE = 0.15
"""Relative error of throughput below which a prediction counts as close."""
_STARTS = {"cpu": (2e10, 5e11, 1e-3, 100.0, 2.0, 2.0), "cuda": (2e12, 5e14, 1e-3, 10.0, 2.0, 2.0)}
"""What a machine is like before it is measured. On a CPU a launch is several operators of the framework in a row, tens
of microseconds each."""
_ROUNDS = 400
_RESTRAINT = 1e-3
"""Variance of a measured time (3 % of noise) over that of a number before it is measured (a factor of e)."""


@dataclass(frozen=True)
class Fitted:
    """What a machine was found to achieve.

    Attributes:
        bandwidth: Bytes/s.
        flops: FLOP/s.
        step_overhead_s: Seconds a step beside them.
        launch_us: Microseconds a launch of an adapter kernel.
        adapter_factor: Time of adapter kernels over that of perfect ones.
        attention_factor: The same of attention.
    """

    bandwidth: float
    flops: float
    step_overhead_s: float
    launch_us: float
    adapter_factor: float
    attention_factor: float


@dataclass(frozen=True)
class Measured:
    """One arm at one point of a sweep: medians over its repeats.

    Attributes:
        arm: Out of `ARMS`.
        adapters: Distinct ones.
        lora_rank: Of the point.
        load: The workload.
        prefill_s: Until every request had its first token.
        seconds: First request to last token.
        output_tokens_per_s: Throughput.
        shared: Whether it was measured at another point with the same requests.
        device: `cpu` or `cuda`.
    """

    arm: str
    adapters: int
    lora_rank: int
    load: Workload
    prefill_s: float
    seconds: float
    output_tokens_per_s: float
    shared: bool = False
    device: str = "cpu"

    @property
    def point(self) -> tuple[int, int]:
        """Adapters and rank."""
        return self.adapters, self.lora_rank


def read_measured(path: Path) -> list[Measured]:
    """Reads the rows of a benchmark: those of complete arms that the roofline has as well.

    Raises:
        FileError: There are none.
    """
    file = path / "rows.jsonl" if path.is_dir() else path
    groups: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if _is_predicted(row) and row["output_tokens_per_s"]:
                groups.setdefault((row["arm"], row["adapters"], row["lora_rank"]), []).append(row)
        found = [_measured(rows) for rows in groups.values()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(
            f"`{file}` cannot be read as rows of `preft bench throughput`", got=f"{type(error).__name__}: {error}"
        ) from None
    if not found:
        raise FileError(f"`{file}` holds no measured arm", accepted=f"rows of {', '.join(ARMS)}")
    return found


def _is_predicted(row: Mapping[str, Any]) -> bool:
    """Whether the roofline has the arm: no second arm of a kind, no mixed ranks."""
    return row["kind"] in ARMS and row["kind"] == row["arm"] and isinstance(row["lora_rank"], int)


def _measured(rows: Sequence[Mapping[str, Any]]) -> Measured:
    first = rows[0]
    setup, engine = first["setup"], first["engine"]
    load = Workload(
        adapters=first["adapters"],
        rank=first["lora_rank"],
        direft_rank=setup["direft_rank"],
        input_len=first["input_len"],
        output_len=first["output_len"],
        requests=first["requests"],
        dtype=engine.get("dtype", "bfloat16"),
        step_tokens=engine.get("max_num_batched_tokens", 8192),
    )
    prefill, seconds, speed = (
        statistics.median(row[key] for row in rows) for key in ("prefill_s", "seconds", "output_tokens_per_s")
    )
    shared, device = bool(first.get("shared")), engine.get("device", "cpu")
    return Measured(first["arm"], first["adapters"], first["lora_rank"], load, prefill, seconds, speed, shared, device)


def predict(shape: ModelShape, fitted: Fitted, measured: Measured) -> tuple[float, float]:
    """Prompt time and whole time of an arm, as the roofline has them."""
    gpu = Gpu("calibrated", math.inf, fitted.bandwidth, fitted.flops, fitted.flops, fitted.flops)
    assumed = replace(
        Assumptions(bandwidth_efficiency=1.0, compute_efficiency=1.0, launch_us=fitted.launch_us),
        step_overhead_s=fitted.step_overhead_s,
    )
    load, arm = measured.load, measured.arm
    roof = Roofline(shape, Machine(gpu, 1), load, assumed)
    prefill, steps = roof.prefill_step(arm, load.requests)
    prefill_s = _seconds(fitted, prefill) * steps
    decode_steps = load.output_len - 1
    if not decode_steps:
        return prefill_s, prefill_s
    decode = roof.decode_step(arm, load.requests, load.input_len + (load.output_len + 1) / 2)
    return prefill_s, prefill_s + _seconds(fitted, decode) * decode_steps


def _seconds(fitted: Fitted, step: Step) -> float:
    attention_s = (fitted.attention_factor - 1) * step.attention_s
    return step.base_s + attention_s + fitted.adapter_factor * step.adapter_s


def fit(shape: ModelShape, measured: Sequence[Measured]) -> Fitted:
    """The numbers that come closest to the measured times, by relative error."""
    starts = [math.log(value) for value in _STARTS["cpu" if measured[0].device == "cpu" else "cuda"]]

    def loss(logs: Sequence[float]) -> float:
        fitted = Fitted(*(math.exp(value) for value in logs))
        errors = 0.0
        for item in measured:
            prefill, seconds = predict(shape, fitted, item)
            errors += math.log(prefill / item.prefill_s) ** 2 + math.log(seconds / item.seconds) ** 2
        # What the data say little about stays near the start, instead of following noise wherever it leads.
        strayed = sum((value - start) ** 2 for value, start in zip(logs, starts, strict=True))
        return errors + _RESTRAINT * strayed

    return Fitted(*(math.exp(value) for value in _descend(loss, starts)))


def _descend(loss: Callable[[Sequence[float]], float], start: list[float]) -> list[float]:
    """Pattern search: steps along each axis that grow where they help and shrink where they do not."""
    here, best, steps = list(start), loss(start), [1.0] * len(start)
    for _ in range(_ROUNDS):
        before = list(here)
        for axis in range(len(here)):
            for step in (steps[axis], -steps[axis]):
                tried = [*here[:axis], here[axis] + step, *here[axis + 1 :]]
                value = loss(tried)
                if value < best:
                    here, best = tried, value
                    steps[axis] = min(2.0, steps[axis] * 1.5)
                    break
            else:
                steps[axis] *= 0.6
        # One more along the direction of the whole round, which follows valleys that lie across the axes.
        tried = [value + (value - old) for value, old in zip(here, before, strict=True)]
        value = loss(tried)
        if value < best:
            here, best = tried, value
        if max(steps) < 1e-5:
            break
    return here


def _is_same_base(item: Measured, fitting: Sequence[Measured]) -> bool:
    """Whether it is the measurement of base that a fitted point shares, and so no test of the fit."""
    lengths = (item.load.requests, item.load.input_len, item.load.output_len)
    return item.arm == "base" and any(
        other.arm == "base"
        and (other.shared or item.shared)
        and lengths == (other.load.requests, other.load.input_len, other.load.output_len)
        for other in fitting
    )


def calibrate(shape: ModelShape, measured: Sequence[Measured], at: tuple[int, int] | None = None) -> dict[str, Any]:
    """Fits one point and predicts every other.

    Args:
        shape: The model that was measured.
        measured: See `read_measured`.
        at: Adapters and LoRA rank of the point to fit; the first by default.

    Raises:
        UsageError: There is no such point.
    """
    points = list(dict.fromkeys(item.point for item in measured))
    chosen = at or points[0]
    fitting = [item for item in measured if item.point == chosen]
    if not fitting:
        raise UsageError(
            "There is no such point in the result",
            got=f"{chosen[0]} adapters of rank {chosen[1]}",
            accepted="; ".join(f"{adapters},{rank}" for adapters, rank in points),
        )
    fitted = fit(shape, fitting)
    rows: list[dict[str, Any]] = []
    for item in measured:
        if item.shared and item.point != chosen:
            continue
        seconds = predict(shape, fitted, item)[1]
        speed = item.load.requests * item.load.output_len / seconds
        rows.append(
            {
                "arm": item.arm,
                "adapters": item.adapters,
                "lora_rank": item.lora_rank,
                "measured_tokens_per_s": item.output_tokens_per_s,
                "predicted_tokens_per_s": speed,
                "error": speed / item.output_tokens_per_s - 1,
                "fitted": item.point == chosen or _is_same_base(item, fitting),
            }
        )
    others = [abs(row["error"]) for row in rows if not row["fitted"]]
    return {
        "model": shape.name,
        "calibrated_at": {"adapters": chosen[0], "lora_rank": chosen[1]},
        "achieved": asdict(fitted),
        "points": rows,
        "largest_error_elsewhere": max(others) if others else None,
        "close_elsewhere": max(others) <= CLOSE if others else None,
    }

"""A plan: every arm on one machine, what fits, what it costs, and how that stands beside published figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from preft.errors import UsageError
from preft.plan.limits import Fit, best_fit, fit, usable_bytes
from preft.plan.paper import SOURCE, UNKNOWNS, compare_with_paper
from preft.plan.roofline import BatchTime, Roofline, Step
from preft.plan.workload import ARMS

SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Plan:
    """What is predicted.

    Attributes:
        roof: The model, machine, workload and assumptions.
        slots: Adapters that a step may hold, or None for each arm's best.
        price: Of one GPU for one hour, in any currency, or None.
    """

    roof: Roofline
    slots: int | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        if self.slots is not None and self.slots < 1:
            raise UsageError("`--slots` is not valid", got=f"{self.slots}", accepted="at least 1")
        if self.price is not None and not 0 <= self.price < float("inf"):
            raise UsageError("`--price-per-gpu-hour` is not valid", got=f"{self.price}", accepted="0 or more")

    def fitted(self, arm: str) -> Fit | None:
        """An arm within memory, with the given slots or the best ones; None if it does not fit."""
        return best_fit(self.roof, arm) if self.slots is None else fit(self.roof, arm, self.slots)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `preft plan --json`."""
        roof, load = self.roof, self.roof.workload
        fits = {arm: self.fitted(arm) for arm in ARMS}
        return {
            "model": {**_model(roof), "weight_bytes_per_gpu": roof.weight_bytes},
            "gpu": {
                **asdict(roof.machine.gpu),
                "count": roof.machine.count,
                "achieved_bandwidth": roof.bandwidth,
                "achieved_flops": roof.compute,
                "usable_bytes_per_gpu": usable_bytes(roof),
            },
            "workload": asdict(load),
            "arms": {arm: self._arm(arm, fits) for arm in ARMS},
            "ratios": _ratios(roof, fits),
            "price_per_gpu_hour": self.price,
            "paper": {
                "source": SOURCE,
                "unknowns": list(UNKNOWNS),
                "figures": compare_with_paper(load, roof.assumptions),
            },
            "assumptions": roof.assumptions.to_dict(load),
        }

    def _arm(self, arm: str, fits: dict[str, Fit | None]) -> dict[str, Any]:
        roof, found = self.roof, fits[arm]
        ideal = roof.batch(arm, roof.workload.requests)
        document: dict[str, Any] = {
            "arm": arm,
            "rank": {"base": None, "direftp": roof.workload.direft_rank}.get(arm, roof.workload.rank),
            "adapter_bytes": roof.adapter_bytes_whole(arm),
            "adapter_bytes_per_gpu": roof.adapter_bytes(arm),
            "all_adapters_bytes_per_gpu": roof.adapter_bytes(arm) * roof.workload.adapters,
            "bytes_alone": _time(ideal),
        }
        if found is None:
            return {**document, "fits": False, "output_tokens_per_s": None, "ratio_to_base": None}
        speed = found.output_tokens_per_s
        return {
            **document,
            "fits": True,
            **_time(found.time),
            "output_tokens_per_s": speed,
            "ratio_to_base": _ratio(found, fits["base"]),
            "ratio_to_lora": _ratio(found, fits["lora"]),
            "slots": found.slots,
            "slots_are": "optimal" if self.slots is None else "given",
            "limited_by": found.limited_by,
            "slot_bytes_per_gpu": found.slot_bytes,
            "kv_bytes_per_gpu": found.kv_bytes,
            "free_bytes_per_gpu": found.free_bytes,
            "all_adapters_resident": found.all_resident,
            "most_resident_adapters": found.most_resident,
            "host_load_bytes_per_gpu": found.load_bytes,
            "host_load_s": found.load_s,
            "cost_per_million_output_tokens": self._cost(speed),
        }

    def _cost(self, tokens_per_s: float) -> float | None:
        if self.price is None:
            return None
        return self.price * self.roof.machine.count / (tokens_per_s * 3600) * 1e6


def sweep(plan: Plan, counts: Sequence[int] = SWEEP) -> dict[str, list[tuple[int, float | None]]]:
    """Throughput of each arm over numbers of adapters, for a plot; the requests stay as many as they are."""
    from dataclasses import replace

    rows: dict[str, list[tuple[int, float | None]]] = {arm: [] for arm in ARMS}
    for adapters in sorted({*counts, plan.roof.workload.adapters}):
        load = replace(plan.roof.workload, adapters=adapters)
        point = replace(plan, roof=replace(plan.roof, workload=load))
        for arm in ARMS:
            found = point.fitted(arm)
            rows[arm].append((adapters, found.output_tokens_per_s if found else None))
    return rows


def _model(roof: Roofline) -> dict[str, Any]:
    shape = roof.shape
    return {
        "name": shape.name,
        "values": shape.total_values,
        "hidden_size": shape.hidden_size,
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tied": shape.tied,
        "num_experts": shape.num_experts,
        "kv_bytes_per_token_per_gpu": roof.kv_bytes_per_token,
    }


def _ratios(roof: Roofline, fits: dict[str, Fit | None]) -> dict[str, Any]:
    """Ratios of throughput: within memory, and from bytes alone with every request running and every adapter held."""
    requests = roof.workload.requests
    ideal = {arm: roof.batch(arm, requests).output_tokens_per_s for arm in ARMS}
    return {
        f"{arm}_over_{other}": {
            "within_memory": _ratio(fits[arm], fits[other]),
            "bytes_alone": ideal[arm] / ideal[other],
        }
        for arm, other in (
            ("lorap", "lora"),
            ("direftp", "lora"),
            ("lora", "base"),
            ("lorap", "base"),
            ("direftp", "base"),
        )
    }


def _ratio(found: Fit | None, other: Fit | None) -> float | None:
    if found is None or other is None:
        return None
    return found.output_tokens_per_s / other.output_tokens_per_s


def _time(time: BatchTime) -> dict[str, Any]:
    return {
        "output_tokens_per_s": time.output_tokens_per_s,
        "batch": time.batch,
        "prefill_s": time.prefill_s,
        "decode_s": time.decode_s,
        "prefill_step": _step(time.prefill_step),
        "decode_step": _step(time.decode_step) if time.decode_step else None,
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "seconds": step.seconds,
        "base_s": step.base_s,
        "adapter_s": step.adapter_s,
        "base_bound_by": step.bound,
        "weight_bytes": step.weight_bytes,
        "kv_bytes": step.kv_bytes,
        "adapter_bytes": step.adapter_bytes,
        "adapter_activation_bytes": step.adapter_state_bytes,
        "flops": step.flops,
        "adapter_flops": step.adapter_flops,
    }

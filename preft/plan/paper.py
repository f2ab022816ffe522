"""The published throughput figures beside what bytes give, and which of them bytes alone cannot explain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from preft.errors import UsageError
from preft.plan.gpus import parse_machine
from preft.plan.limits import best_fit
from preft.plan.roofline import PROMPT_ONLY, Roofline
from preft.plan.shapes import KNOWN
from preft.plan.workload import Assumptions, Workload

SOURCE = "PreFT (arXiv 2605.14217): throughput over vLLM's multi-LoRA serving, 512 adapters"
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ADAPTERS = 512

UNKNOWNS = (
    "adapter ranks, and which modules LoRA acts on",
    "prompt and output lengths, data set and arrival process",
    "vLLM's flags: slots, steps, CUDA graphs or eager, and whether both arms ran in the same mode",
    "for 8B and 0.5B: the GPU, and whether 512 adapters were used as for 70B",
    "whether the multi-LoRA arm also paid for kernel launches, adapter swaps or a limit on slots",
)


@dataclass(frozen=True)
class Figures:
    """Published gains for one model.

    Attributes:
        model: Name in `KNOWN`.
        machine: GPUs; where the paper's are unknown, one H100.
        machine_is_known: Whether the paper names them.
        direftp: DiReFTP over multi-LoRA.
        lorap: LoRAP over multi-LoRA.
    """

    model: str
    machine: str
    machine_is_known: bool
    direftp: float
    lorap: float


PAPER = (
    Figures("llama-3.1-70b", "h100x4", True, 1.9, 1.87),
    Figures("llama-3.1-8b", "h100", False, 2.21, 1.83),
    Figures("qwen2.5-0.5b", "h100", False, 2.39, 1.63),
)


def compare_with_paper(workload: Workload, assumptions: Assumptions) -> list[dict[str, Any]]:
    """One row a published figure, predicted at this workload's rank and lengths with 512 adapters in 512 requests."""
    pairs = [(figures, arm) for figures in PAPER for arm in PROMPT_ONLY]
    return [_row(figures, arm, getattr(figures, arm), workload, assumptions) for figures, arm in pairs]


def _row(figures: Figures, arm: str, published: float, workload: Workload, assumptions: Assumptions) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": figures.model,
        "gpu": figures.machine,
        "gpu_is_published": figures.machine_is_known,
        "arm": arm,
        "published": published,
    }
    load = replace(workload, adapters=ADAPTERS, requests=ADAPTERS)
    try:
        roof = Roofline(KNOWN[figures.model], parse_machine(figures.machine), load, assumptions)
        slow, fast = best_fit(roof, "lora"), best_fit(roof, arm)
    except UsageError as error:
        return {**row, "not_predicted": error.what}
    bound = _bound(roof, arm)
    ideal = roof.batch(arm, ADAPTERS).output_tokens_per_s / roof.batch("lora", ADAPTERS).output_tokens_per_s
    fitted = fast.output_tokens_per_s / slow.output_tokens_per_s if slow and fast else None
    least = _least_rank(roof, arm, published)
    return {
        **row,
        "predicted_from_bytes": ideal,
        "upper_bound_from_bytes": bound,
        "predicted_within_memory": fitted,
        "bytes_alone_can_explain": bound >= published,
        "least_rank": least,
        "least_rank_is_resident": _is_resident(roof, least) if least else None,
        "verdict": _verdict(published, bound, fitted, roof, least),
    }


def _bound(roof: Roofline, arm: str) -> float:
    return roof.highest_ratio(arm, batches=range(1, ADAPTERS + 1))


def _at_rank(roof: Roofline, rank: int) -> Roofline:
    return replace(roof, workload=replace(roof.workload, rank=rank))


def _least_rank(roof: Roofline, arm: str, published: float) -> int | None:
    """The least LoRA rank, of powers of two, at which bytes could give the figure; None if none of them does."""
    return next((rank for rank in RANKS if _bound(_at_rank(roof, rank), arm) >= published), None)


def _is_resident(roof: Roofline, rank: int) -> bool:
    fitted = best_fit(_at_rank(roof, rank), "lora")
    return fitted is not None and fitted.most_resident >= ADAPTERS


def _verdict(published: float, bound: float, fitted: float | None, roof: Roofline, least: int | None) -> str:
    load = roof.workload
    where = f"at rank {load.rank} and prompts of {load.input_len} tokens"
    resident = _is_resident(roof, load.rank)
    swapped = "" if resident else f"; {ADAPTERS} adapters of this rank are not resident, so slots and swaps act as well"
    if bound >= published:
        return f"bytes can reach it {where} (at most {bound:.2f}){swapped}"
    text = f"bytes alone cannot explain it {where}: at most {bound:.2f}"
    if fitted is not None and fitted >= published:
        text += f"; memory could: {fitted:.2f} where all-token LoRA must hold a slot for each running adapter"
    elif least is not None:
        kept = "resident" if _is_resident(roof, least) else "not resident: a swap regime, not a roofline"
        text += f"; bytes could from rank {least} ({ADAPTERS} adapters {kept})"
    else:
        text += "; nor at any rank up to 256"
    return text + ("" if fitted is not None and fitted >= published else swapped)


def unexplained(rows: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """The figures that bytes alone cannot explain."""
    return [row for row in rows if row.get("bytes_alone_can_explain") is False]

"""What `preft plan` does, and how it shows a plan to people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preft.errors import UsageError
from preft.plan.calibrate import calibrate, read_measured
from preft.plan.gpus import GPUS, parse_machine
from preft.plan.plan import Plan
from preft.plan.plot import require_plot_path, save_plot
from preft.plan.roofline import Roofline
from preft.plan.shapes import read_shape
from preft.plan.workload import Assumptions, Workload
from preft_cli.console import Session
from preft_cli.render import fields, size, table

_LABELS = {"base": "base", "lora": "LoRA, every token", "lorap": "LoRAP", "direftp": "DiReFTP"}


def run_plan(
    session: Session,
    model: str,
    gpu: str | None,
    figures: Mapping[str, float | None],
    load: Workload,
    assumed: Assumptions,
    *,
    slots: int | None,
    price: float | None,
    plot: Path | None,
) -> None:
    """Plans and prints.

    Args:
        session: Where output goes.
        model: As given.
        gpu: As given.
        figures: Of the GPU, in place of the table's; see `parse_machine`.
        load: What runs.
        assumed: What the prediction rests on.
        slots: Adapters in one step, or None for each arm's best.
        price: Of a GPU hour, or None.
        plot: Where to draw, or None.

    Raises:
        PreftError: Something cannot be meant, read or written.
    """
    if gpu is None:
        raise UsageError("`--gpu` is missing", accepted=f"{', '.join(GPUS)}, with xN for N of them")
    machine = parse_machine(gpu, **figures)
    if plot is not None:
        require_plot_path(plot)
    made = Plan(Roofline(read_shape(model), machine, load, assumed), slots, price)
    document = made.to_dict()
    if plot is not None:
        save_plot(made, plot)
        session.note(f"wrote {plot}")
    if session.as_json:
        session.emit(document)
    else:
        show_plan(session, document)


def run_calibration(session: Session, model: str, result: Path, at: str | None) -> None:
    """Fits a measured point and prints the predictions of the others.

    Raises:
        PreftError: The result cannot be read or has no such point.
    """
    point = re.fullmatch(r"([0-9]{1,9}),([0-9]{1,9})", at, re.ASCII) if at is not None else None
    if at is not None and point is None:
        raise UsageError("`--calibrate-at` is not valid", got=f"`{at}`", accepted="ADAPTERS,RANK, such as 8,16")
    chosen = (int(point[1]), int(point[2])) if point else None
    document = calibrate(read_shape(model), read_measured(result), chosen)
    if session.as_json:
        session.emit(document)
        return
    achieved, error = document["achieved"], document["largest_error_elsewhere"]
    rows = [
        ("bandwidth", f"{achieved['bandwidth'] / 1e9:.4g} GB/s"),
        ("arithmetic", f"{achieved['flops'] / 1e9:.4g} GFLOP/s"),
        ("each step, beside them", f"{achieved['step_overhead_s'] * 1e3:.3g} ms"),
        ("each adapter kernel", f"{achieved['launch_us']:.3g} us"),
        ("adapter kernels over perfect ones", f"{achieved['adapter_factor']:.3g}"),
        ("attention over a perfect kernel", f"{achieved['attention_factor']:.3g}"),
        ("largest error of a point not fitted", "-" if error is None else f"{error:.1%}"),
    ]
    headers = ("arm", "adapters", "LoRA rank", "measured tokens/s", "predicted", "error", "fitted")
    cells = [
        (
            row["arm"],
            row["adapters"],
            row["lora_rank"],
            f"{row['measured_tokens_per_s']:.1f}",
            f"{row['predicted_tokens_per_s']:.1f}",
            f"{row['error']:+.1%}",
            "yes" if row["fitted"] else "no",
        )
        for row in document["points"]
    ]
    session.show(fields(rows), "", table(headers, cells, numeric=headers[1:6]))


def show_plan(session: Session, document: Mapping[str, Any]) -> None:
    """Prints set-up, arms, steps, memory, the paper's figures and every assumption."""
    session.show(_setup(document), "", _arms(document), "", _steps(document), "", _memory(document))
    session.show("", "Beside the paper's figures (throughput over multi-LoRA):", _paper(document))
    for row in document["paper"]["figures"]:
        if row.get("bytes_alone_can_explain") is False:
            session.show(f"{row['model']} {_LABELS[row['arm']]} {row['published']}: {row['verdict']}")
    session.show("", "Unknown about the paper's figures:", *(f"- {text}" for text in document["paper"]["unknowns"]))
    assumed = document["assumptions"]
    rows = [(key.replace("_", " "), _short(value)) for key, value in assumed.items() if key != "notes"]
    session.show("", "Assumptions:", fields(rows), *(f"- {note}" for note in assumed["notes"]))


def _setup(document: Mapping[str, Any]) -> Any:
    model, gpu, load = document["model"], document["gpu"], document["workload"]
    speeds = f"{gpu['achieved_bandwidth'] / 1e12:.2f} TB/s and {gpu['achieved_flops'] / 1e12:.0f} TFLOP/s achieved"
    machine = f"{gpu['name']} x{gpu['count']}: {gpu['memory_bytes'] / 1e9:.0f} GB, {speeds}, each ({gpu['source']})"
    lengths = f"{load['input_len']} tokens in, {load['output_len']} out"
    work = f"{load['requests']} requests over {load['adapters']} adapters, {lengths}"
    return fields(
        [
            ("model", f"{model['name']}, {model['values'] / 1e9:.2f} billion values, {load['dtype']}"),
            ("machine", machine),
            ("workload", work),
            ("ranks", f"LoRA {load['rank']} ({load['targets']} linears), DiReFT {load['direft_rank']} (every block)"),
        ]
    )


def _arms(document: Mapping[str, Any]) -> Any:
    ratios = document["ratios"]
    priced = document["price_per_gpu_hour"] is not None
    headers = ["arm", "tokens/s", "of base", "over LoRA", "over LoRA, bytes alone", "batch", "slots", "limited by"]
    rows = []
    for arm, row in document["arms"].items():
        bytes_alone = ratios.get(f"{arm}_over_lora", {}).get("bytes_alone")
        cells: list[object] = [_LABELS[arm]]
        if row["fits"]:
            cells += [f"{row['output_tokens_per_s']:.0f}", _ratio(row["ratio_to_base"]), _ratio(row["ratio_to_lora"])]
            cells += [_ratio(bytes_alone), row["batch"], row["slots"], row["limited_by"]]
            cells += [f"{row['cost_per_million_output_tokens']:.4g}"] if priced else []
        else:
            cells += [None, None, None, _ratio(bytes_alone), None, None, "memory: not one request fits"]
            cells += [None] if priced else []
        rows.append(cells)
    headers += ["cost/million tokens"] if priced else []
    return table(headers, rows, numeric=[name for name in headers if name not in ("arm", "limited by")])


def _steps(document: Mapping[str, Any]) -> Any:
    headers = ("step", "arm", "ms", "adapters ms", "weights", "KV", "adapters", "base bound by")
    rows: list[tuple[object, ...]] = []
    for key, name in (("prefill_step", "prefill"), ("decode_step", "decode")):
        for arm, row in document["arms"].items():
            step = row.get(key)
            if step is not None:
                times = (f"{step['seconds'] * 1e3:.2f}", f"{step['adapter_s'] * 1e3:.2f}")
                sizes = (size(step[part]) for part in ("weight_bytes", "kv_bytes", "adapter_bytes"))
                rows.append((name, _LABELS[arm], *times, *sizes, step["base_bound_by"]))
    return table(headers, rows, numeric=headers[2:7])


def _memory(document: Mapping[str, Any]) -> Any:
    headers = (
        "memory of each GPU",
        "one adapter",
        "all adapters",
        "slots",
        "KV cache",
        "free",
        "most resident",
        "swaps",
    )
    rows = []
    for arm, row in document["arms"].items():
        if arm == "base" or not row["fits"]:
            continue
        swaps = "none" if row["all_adapters_resident"] else f"{size(row['host_load_bytes_per_gpu'])} a batch"
        parts = ("adapter_bytes_per_gpu", "all_adapters_bytes_per_gpu", "slot_bytes_per_gpu", "kv_bytes_per_gpu")
        sizes = [size(row[part]) for part in (*parts, "free_bytes_per_gpu")]
        rows.append((_LABELS[arm], *sizes, row["most_resident_adapters"], swaps))
    return table(headers, rows, numeric=headers[1:7])


def _paper(document: Mapping[str, Any]) -> Any:
    headers = ("model", "machine", "arm", "paper", "bytes alone", "at most", "within memory", "bytes can explain it")
    rows = []
    for row in document["paper"]["figures"]:
        machine = row["gpu"] + ("" if row["gpu_is_published"] else " (assumed)")
        cells: tuple[object, ...] = (row["model"], machine, _LABELS[row["arm"]], row["published"])
        if "not_predicted" in row:
            rows.append((*cells, None, None, None, f"not predicted: {row['not_predicted']}"))
            continue
        figures = ("predicted_from_bytes", "upper_bound_from_bytes", "predicted_within_memory")
        explained = "yes" if row["bytes_alone_can_explain"] else "NO"
        rows.append((*cells, *(_ratio(row[figure]) for figure in figures), explained))
    return table(headers, rows, numeric=headers[3:7])


def _ratio(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _short(value: object) -> object:
    return f"{value:g}" if isinstance(value, float) else value

"""`preft plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preft.errors import UsageError
from preft_cli.console import Session
from preft_cli.options import Json, Quiet, command_app, examples, require_alone

app = command_app()

_Gpu = Annotated[
    str | None,
    typer.Option("--gpu", help="a100, h100, h200, b200 or mi300x, with xN for N of them in tensor parallel."),
]
_DireftRank = Annotated[int | None, typer.Option("--direft-rank", help="Of the DiReFT adapters. Default: --rank.")]
_Requests = Annotated[
    int | None, typer.Option("--requests", help="Requests that want to run at once. Default: as adapters, at least 64.")
]
_Targets = Annotated[str, typer.Option("--targets", help="Linears that LoRA acts on: all or attention.")]
_Dtype = Annotated[str, typer.Option("--dtype", help="Of the weights: bfloat16, float16, fp8, float32.")]
_Slots = Annotated[int | None, typer.Option("--slots", help="Adapters in one step. Default: each arm's best.")]
_LaunchUs = Annotated[float, typer.Option("--launch-us", help="Microseconds that one adapter kernel launch costs.")]
_Price = Annotated[float | None, typer.Option("--price-per-gpu-hour", help="For the cost of a million output tokens.")]
_Bandwidth = Annotated[float | None, typer.Option("--bandwidth-gbs", help="Of one GPU, in GB/s.")]
_Tflops = Annotated[float | None, typer.Option("--tflops", help="Of one GPU, dense, in TFLOP/s.")]
_Memory = Annotated[float | None, typer.Option("--memory-gb", help="Of one GPU, in GB.")]
_BandwidthShare = Annotated[
    float, typer.Option("--bandwidth-efficiency", help="Share of peak bandwidth that is reached.")
]
_ComputeShare = Annotated[float, typer.Option("--compute-efficiency", help="Share of peak arithmetic that is reached.")]
_HostLink = Annotated[float, typer.Option("--host-link-gbs", help="Host to GPU, for swaps, in GB/s.")]
_Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: png, svg or pdf.")]
_Calibrate = Annotated[
    Path | None,
    typer.Option("--calibrate", metavar="RESULT", help="Fit a `preft bench` result instead, and predict its points."),
]
_CalibrateAt = Annotated[
    str | None, typer.Option("--calibrate-at", metavar="N,R", help="Adapters and rank to fit. Default: the first.")
]


@app.command(
    "plan",
    epilog=examples(
        "preft plan --model llama-3.1-70b --gpu h100x4 --adapters 512 --rank 16 --input-len 512 --output-len 512",
        "preft plan --model llama-3.1-8b --gpu h200 --adapters 64 --rank 64 --price-per-gpu-hour 3.5 --json",
        "preft plan --model smollm2 --gpu mine --bandwidth-gbs 900 --tflops 120 --memory-gb 24 --plot plan.svg",
        "preft plan --model smollm2-135m --calibrate sweep --calibrate-at 8,16",
    ),
)
def plan(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", help="Known name, folder or `config.json`, or hub id.")],
    gpu: _Gpu = None,
    adapters: Annotated[int, typer.Option("--adapters", help="Distinct adapters in use.")] = 64,
    rank: Annotated[int, typer.Option("--rank", help="Of the LoRA adapters.")] = 16,
    direft_rank: _DireftRank = None,
    input_len: Annotated[int, typer.Option("--input-len", help="Prompt tokens a request.")] = 512,
    output_len: Annotated[int, typer.Option("--output-len", help="Output tokens a request.")] = 256,
    requests: _Requests = None,
    targets: _Targets = "all",
    dtype: _Dtype = "bfloat16",
    slots: _Slots = None,
    launch_us: _LaunchUs = 0.0,
    price: _Price = None,
    bandwidth_gbs: _Bandwidth = None,
    tflops: _Tflops = None,
    memory_gb: _Memory = None,
    bandwidth_efficiency: _BandwidthShare = 0.90,
    compute_efficiency: _ComputeShare = 0.75,
    host_link_gbs: _HostLink = 50.0,
    plot: _Plot = None,
    calibrate: _Calibrate = None,
    calibrate_at: _CalibrateAt = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict the gain of prompt-only adapters on other hardware.

    A roofline of prefill and decode, and what fits in memory. Needs no network for llama-3.1-8b, llama-3.1-70b,
    qwen2.5-0.5b and any local configuration. It predicts what cannot be beaten, not what an engine reaches; every
    assumption is printed.
    """
    session = Session(as_json=as_json, quiet=quiet)
    from preft.plan.workload import Assumptions, Workload
    from preft_cli.plan import run_calibration, run_plan

    if calibrate is not None:
        require_alone(context, "`--calibrate`", ("model", "calibrate", "calibrate_at", "as_json", "quiet"))
        run_calibration(session, model, calibrate, calibrate_at)
        return
    if calibrate_at is not None:
        raise UsageError("`--calibrate-at` needs a result", hint="name it with `--calibrate RESULT`")
    load = Workload(
        adapters=adapters,
        rank=rank,
        direft_rank=rank if direft_rank is None else direft_rank,
        input_len=input_len,
        output_len=output_len,
        requests=max(adapters, 64) if requests is None else requests,
        targets=targets,
        dtype=dtype,
    )
    assumed = Assumptions(bandwidth_efficiency, compute_efficiency, launch_us=launch_us, host_link=host_link_gbs * 1e9)
    figures = {"bandwidth_gbs": bandwidth_gbs, "tflops": tflops, "memory_gb": memory_gb}
    run_plan(session, model, gpu, figures, load, assumed, slots=slots, price=price, plot=plot)

"""`preft plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preft_cli.console import Session
from preft_cli.options import Json, Quiet, command_app, examples

app = command_app()


@app.command(
    "plan",
    epilog=examples(
        "preft plan --model llama-3.1-70b --gpu h100x4 --adapters 512 --rank 16 --input-len 512 --output-len 512",
        "preft plan --model llama-3.1-8b --gpu h200 --adapters 64 --rank 64 --price-per-gpu-hour 3.5 --json",
        "preft plan --model smollm2 --gpu mine --bandwidth-gbs 900 --tflops 120 --memory-gb 24 --plot plan.svg",
    ),
)
def plan(
    model: Annotated[str, typer.Option("--model", help="Known name, folder or `config.json`, or hub id.")],
    gpu: Annotated[str, typer.Option("--gpu", help="a100, h100, h200, b200 or mi300x, with xN for N of them.")],
    adapters: Annotated[int, typer.Option("--adapters", help="Distinct adapters in use.")] = 64,
    rank: Annotated[int, typer.Option("--rank", help="Of the LoRA adapters.")] = 16,
    direft_rank: Annotated[
        int | None, typer.Option("--direft-rank", help="Of the DiReFT adapters. Default: --rank.")
    ] = None,
    input_len: Annotated[int, typer.Option("--input-len", help="Prompt tokens a request.")] = 512,
    output_len: Annotated[int, typer.Option("--output-len", help="Output tokens a request.")] = 256,
    requests: Annotated[
        int | None,
        typer.Option("--requests", help="Requests that want to run at once. Default: as adapters, at least 64."),
    ] = None,
    targets: Annotated[str, typer.Option("--targets", help="Linears that LoRA acts on: all or attention.")] = "all",
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of the weights: bfloat16, float16, fp8, float32.")
    ] = "bfloat16",
    slots: Annotated[
        int | None, typer.Option("--slots", help="Adapters in one step. Default: each arm's best.")
    ] = None,
    launch_us: Annotated[
        float, typer.Option("--launch-us", help="Microseconds that one adapter kernel launch costs.")
    ] = 0.0,
    price: Annotated[
        float | None, typer.Option("--price-per-gpu-hour", help="For the cost of a million output tokens.")
    ] = None,
    bandwidth_gbs: Annotated[float | None, typer.Option("--bandwidth-gbs", help="Of one GPU, in GB/s.")] = None,
    tflops: Annotated[float | None, typer.Option("--tflops", help="Of one GPU, dense, in TFLOP/s.")] = None,
    memory_gb: Annotated[float | None, typer.Option("--memory-gb", help="Of one GPU, in GB.")] = None,
    bandwidth_efficiency: Annotated[
        float, typer.Option("--bandwidth-efficiency", help="Share of peak bandwidth that is reached.")
    ] = 0.90,
    compute_efficiency: Annotated[
        float, typer.Option("--compute-efficiency", help="Share of peak arithmetic that is reached.")
    ] = 0.75,
    host_link_gbs: Annotated[float, typer.Option("--host-link-gbs", help="Host to GPU, for swaps, in GB/s.")] = 50.0,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: png, svg or pdf.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict what prefill-only adapters gain on hardware you do not have: a roofline, and what fits in memory.

    Needs no network for llama-3.1-8b, llama-3.1-70b, qwen2.5-0.5b and any local configuration. It predicts what
    cannot be beaten, not what an engine reaches; every assumption is printed.
    """
    session = Session(as_json=as_json, quiet=quiet)
    from preft.plan.gpus import parse_machine
    from preft.plan.plan import Plan
    from preft.plan.plot import require_plot_path, save_plot
    from preft.plan.roofline import Roofline
    from preft.plan.shapes import read_shape
    from preft.plan.workload import Assumptions, Workload
    from preft_cli.plan import show_plan

    machine = parse_machine(gpu, bandwidth_gbs=bandwidth_gbs, tflops=tflops, memory_gb=memory_gb)
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
    assumed = Assumptions(
        bandwidth_efficiency=bandwidth_efficiency,
        compute_efficiency=compute_efficiency,
        launch_us=launch_us,
        host_link=host_link_gbs * 1e9,
    )
    if plot is not None:
        require_plot_path(plot)
    made = Plan(Roofline(read_shape(model), machine, load, assumed), slots, price)
    document = made.to_dict()
    if plot is not None:
        save_plot(made, plot)
        session.note(f"wrote {plot}")
    if as_json:
        session.emit(document)
    else:
        show_plan(session, document)

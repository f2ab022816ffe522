"""`preft bench`: throughput of adapters on this machine, and results against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preft.errors import UsageError
from preft_cli.console import Session
from preft_cli.options import Json, Quiet, Verbose, command_app, examples, require_unread

app = command_app()


@app.callback()
def bench() -> None:
    """Measure throughput and latency with adapters on this machine."""


_Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder, embedded name or hub id of the base model.")]
_Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="For rows, plots, page, logs and adapters.")]
_Arms = Annotated[
    str,
    typer.Option(
        "--arms",
        help="Of base, base-compiled, base-preft, stock-lora, lora, lorap, direftp, and preft's arms with `-compiled`.",
    ),
]
_Adapters = Annotated[str, typer.Option("--adapters", metavar="N[,N]", help="Distinct adapters.")]
_Slots = Annotated[int, typer.Option("--slots", help="Adapters that one step may hold.")]
_Rank = Annotated[str, typer.Option("--rank", metavar="R[,R]", help="Of the LoRA adapters; `8+64` mixes ranks.")]
_DireftRank = Annotated[int, typer.Option("--direft-rank", help="Of the DiReFT adapters.")]
_InputLen = Annotated[int, typer.Option("--input-len", help="Prompt tokens a request.")]
_OutputLen = Annotated[int, typer.Option("--output-len", help="Output tokens; end-of-sequence is ignored.")]
_Requests = Annotated[
    int | None, typer.Option("--requests", help="Requests a run, submitted at once. Default: 64, or as adapters.")
]
_MaxNumSeqs = Annotated[int | None, typer.Option("--max-num-seqs", help="Requests that run at once. Default: all.")]
_Mode = Annotated[str, typer.Option("--mode", help="eager, or default: compiled where it can be.")]
_Repeats = Annotated[int, typer.Option("--repeats", help="Processes an arm and point.")]
_WarmRuns = Annotated[int, typer.Option("--warm-runs", help="Runs of a process after its cold one.")]
_Popularity = Annotated[
    str,
    typer.Option("--popularity", help="How requests choose adapters: distinct, uniform, zipf:A or weights:W/W."),
]
_Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
_KvCache = Annotated[
    float | None, typer.Option("--kv-cache-gib", help="Size of the KV cache. Default: enough for all requests.")
]
_Targets = Annotated[
    str, typer.Option("--targets", help="Linears that LoRA acts on: all, attention, or names such as q_proj,v_proj.")
]
_Given = Annotated[
    list[str] | None,
    typer.Option("--given", metavar="ARM=DIR", help="Adapters of your own for an arm: the subfolders of DIR."),
]
_Tp = Annotated[int, typer.Option("--tp", help="GPUs or CPU workers that share the model.")]
_Once = Annotated[str, typer.Option("--once", metavar="ARM[,ARM]", help="Arms to measure in the first repeat only.")]
_ShareBase = Annotated[
    bool, typer.Option("--share-base", help="Measure arms without adapters once for points with the same requests.")
]
_ArmLimit = Annotated[
    float | None, typer.Option("--arm-limit-s", help="Stop a process of an arm after so many seconds, and say so.")
]
_AdapterDir = Annotated[
    Path | None, typer.Option("--adapter-dir", help="For generated adapters. Default: DIR/adapters.")
]
_Seed = Annotated[int, typer.Option("--seed", help="Of adapters, prompts and choices.")]


@app.command(
    "throughput",
    epilog=examples(
        "preft bench throughput smollm2 --arms base,lora,lorap,direftp --adapters 64 --slots 64 --out result",
        "preft bench throughput smollm2 --adapters 1,8,64 --rank 8,32,8+32 --popularity zipf:1.1 --out sweep --json",
        "preft bench throughput smollm2 --arms base,base --repeats 5 --out noise",
    ),
)
def throughput(
    model: _Model,
    out: _Out,
    arms: _Arms = "base,stock-lora,lora,lorap,direftp",
    adapters: _Adapters = "8",
    slots: _Slots = 8,
    rank: _Rank = "16",
    direft_rank: _DireftRank = 8,
    input_len: _InputLen = 128,
    output_len: _OutputLen = 128,
    requests: _Requests = None,
    max_num_seqs: _MaxNumSeqs = None,
    mode: _Mode = "eager",
    repeats: _Repeats = 3,
    warm_runs: _WarmRuns = 2,
    popularity: _Popularity = "distinct",
    dtype: _Dtype = "auto",
    kv_cache_gib: _KvCache = None,
    targets: _Targets = "all",
    given: _Given = None,
    tp: _Tp = 1,
    once: _Once = "",
    share_base: _ShareBase = False,
    arm_limit_s: _ArmLimit = None,
    adapter_dir: _AdapterDir = None,
    seed: _Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare base and adapters by tokens per second.

    The arms are base, stock vLLM multi-LoRA, all-token LoRA on this engine, LoRAP and DiReFTP. Each arm is an engine
    process of its own; arms take turns, and every run has new prompts. DIR gets rows.jsonl, throughput.png,
    throughput.svg and index.html. Rows of an earlier run there are kept under another name. Exit status 1 if an arm
    fails; rows of a partial run are marked.
    """
    session = Session(as_json=as_json, quiet=quiet, verbose=verbose)
    from preft.bench.spec import BenchSpec
    from preft_cli.bench import folders, names, numbers, rank_lists, run_throughput

    spec = BenchSpec(
        model=model,
        out=out,
        arms=names(arms),
        adapters=numbers("--adapters", adapters),
        slots=slots,
        ranks=rank_lists(rank),
        direft_rank=direft_rank,
        input_len=input_len,
        output_len=output_len,
        requests=requests,
        mode=mode,
        repeats=repeats,
        warm_runs=warm_runs,
        popularity=popularity,
        dtype=dtype,
        seed=seed,
        max_num_seqs=max_num_seqs,
        kv_cache_gib=kv_cache_gib,
        targets=targets,
        given=folders("--given", given or []),
        tp=tp,
        once=names(once),
        share_base=share_base,
        arm_limit_s=arm_limit_s,
        adapter_dir=adapter_dir,
    )
    status = run_throughput(spec, session)
    if status:
        raise typer.Exit(status)


_LatencyArms = Annotated[str, typer.Option("--arms", help="Of base, lora, lorap, direftp, all in one server.")]
_LatencyAdapters = Annotated[int, typer.Option("--adapters", min=1, help="Distinct adapters of each arm.")]
_Rates = Annotated[
    str,
    typer.Option("--rates", metavar="R[,R]", help="Requests/s, rising; auto doubles from 0.5 until past the knee."),
]
_Seconds = Annotated[float, typer.Option("--seconds", help="How long each load sends requests; at least 8 of them.")]
_Burstiness = Annotated[float, typer.Option("--burstiness", help="1: Poisson arrivals; less: burstier; more: evener.")]
_KneeFactor = Annotated[
    float, typer.Option("--knee-factor", help="The knee: median latency over that of the first rate.")
]
_Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help='Replay lines of {"at", "input_len", "output_len", "adapter"}.'),
]
_Url = Annotated[
    str | None, typer.Option("--url", help="A server that runs already, such as http://127.0.0.1:8000/v1.")
]
_Models = Annotated[str, typer.Option("--models", metavar="NAME[,NAME]", help="Names to ask that server for.")]
_ApiKey = Annotated[
    Path | None, typer.Option("--api-key-file", metavar="FILE", help="File with the key to present to that server.")
]
_OF_OUR_SERVER = (
    "arms",
    "adapters",
    "slots",
    "rank",
    "direft_rank",
    "max_num_seqs",
    "dtype",
    "kv_cache_gib",
    "compiled",
    "tp",
    "adapter_dir",
)
"""What only a server that is started here reads."""
_Compiled = Annotated[bool, typer.Option("--compile", help="Start the server with its model compiled.")]


def _require_read(context: typer.Context, url: str | None, trace: Path | None, api_key_file: Path | None) -> None:
    """Refuses what the chosen server or arrivals would ignore."""
    if url is not None:
        require_unread(context, "`--url`", _OF_OUR_SERVER)
    elif api_key_file is not None:
        raise UsageError("`--api-key-file` is for a server that runs already", accepted="`--url URL`")
    if trace is not None:
        require_unread(context, "`--trace`", ("seconds", "burstiness", "input_len", "output_len"))


@app.command(
    "latency",
    epilog=examples(
        "preft bench latency smollm2 --arms base,lora,lorap --adapters 16 --slots 16 --out latency",
        "preft bench latency smollm2 --rates 0.5,1,2,4 --popularity zipf:1.1 --out latency --json",
        "preft bench latency smollm2 --url http://127.0.0.1:8000/v1 --models mine,smollm2 --out latency",
        "preft bench latency smollm2 --trace arrivals.jsonl --adapters 8 --out replay",
    ),
)
def latency(
    context: typer.Context,
    model: _Model,
    out: _Out,
    arms: _LatencyArms = "base,lora,lorap,direftp",
    adapters: _LatencyAdapters = 8,
    slots: _Slots = 8,
    rank: _Rank = "16",
    direft_rank: _DireftRank = 8,
    input_len: _InputLen = 128,
    output_len: _OutputLen = 64,
    rates: _Rates = "auto",
    seconds: _Seconds = 30.0,
    burstiness: _Burstiness = 1.0,
    knee_factor: _KneeFactor = 2.0,
    trace: _Trace = None,
    url: _Url = None,
    models: _Models = "",
    api_key_file: _ApiKey = None,
    max_num_seqs: _MaxNumSeqs = None,
    repeats: _Repeats = 1,
    popularity: _Popularity = "distinct",
    dtype: _Dtype = "auto",
    kv_cache_gib: _KvCache = None,
    compiled: _Compiled = False,
    tp: _Tp = 1,
    adapter_dir: _AdapterDir = None,
    seed: _Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Load a server at rising rates until past its knee.

    Starts `preft serve` with generated adapters, or asks a server that runs, and reports the time to the first token
    and per later token, by arm and by adapter. Requests are sent and timed by vLLM's own serving benchmark. DIR gets
    rows.jsonl, latency.png, latency.svg and index.html. Exit status 1 if requests failed.
    """
    session = Session(as_json=as_json, quiet=quiet, verbose=verbose)
    _require_read(context, url, trace, api_key_file)
    from preft.bench.latency.spec import LatencySpec, read_trace
    from preft.bench.spec import BenchSpec
    from preft_cli.bench import names, rank_lists
    from preft_cli.bench_latency import rate_list, run_latency_bench

    bench_spec = BenchSpec(
        model=model,
        out=out,
        arms=names(arms),
        adapters=(adapters,),
        slots=slots,
        ranks=rank_lists(rank),
        direft_rank=direft_rank,
        input_len=input_len,
        output_len=output_len,
        repeats=repeats,
        popularity=popularity,
        dtype=dtype,
        seed=seed,
        max_num_seqs=max_num_seqs,
        kv_cache_gib=kv_cache_gib,
        tp=tp,
        adapter_dir=adapter_dir,
    )
    spec = LatencySpec(
        bench_spec,
        rate_list(rates),
        seconds,
        burstiness,
        knee_factor,
        read_trace(trace) if trace is not None else (),
        url,
        names(models),
        compiled,
    )
    status = run_latency_bench(spec, session, api_key_file=api_key_file)
    if status:
        raise typer.Exit(status)


@app.command(
    "compare",
    epilog=examples("preft bench compare before after", "preft bench compare before after --threshold 0.1 --json"),
)
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="A results folder, or its rows.jsonl.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    threshold: Annotated[float, typer.Option("--threshold", help="Share that B may lose before it fails.")] = 0.05,
    metric: Annotated[
        str, typer.Option("--metric", help="output_tokens_per_s, ratio_to_base, decode_tokens_per_s, ...")
    ] = "output_tokens_per_s",
    as_json: Json = False,
) -> None:
    """Say what became slower from A to B.

    Exit status 1 if anything did by more than the threshold.
    """
    session = Session(as_json=as_json)
    from preft.bench.compare import compare as compare_rows
    from preft.bench.rows import read_rows
    from preft_cli.bench import show_comparison

    found = compare_rows(read_rows(before), read_rows(after), threshold=threshold, metric=metric)
    if as_json:
        session.emit(found.to_dict())
    else:
        show_comparison(session, found)
    if found.regressed:
        raise typer.Exit(1)

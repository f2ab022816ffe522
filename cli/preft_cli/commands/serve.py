"""`preft serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from preft_cli.console import Session
from preft_cli.options import AllowBaseMismatch, NamedAdapters, Quiet, Verbose, command_app, examples

app = command_app()


@app.command(
    "serve",
    epilog=examples(
        "preft serve smollm2 --adapters adapters",
        "preft serve smollm2 --adapter mine=my-lorap --port 0 --api-key-file key.txt",
        "preft serve smollm2 --adapters adapters --watch --admin-key-file admin.txt --access-log requests.jsonl",
        "preft serve smollm2 --adapters adapters --slots 16 -- --max-num-seqs 128",
    ),
)
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, embedded name or hub id of the base model.")],
    vllm_options: Annotated[
        list[str] | None, typer.Argument(metavar="-- VLLM_OPTIONS", help="Options of vLLM's server.")
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option("--adapters", metavar="ROOT", help="Serve every adapter below this folder.")
    ] = None,
    adapter: NamedAdapters = None,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Adapters that one step may hold.")] = 8,
    max_rank: Annotated[int, typer.Option("--max-rank", min=1, help="Largest adapter rank accepted.")] = 512,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", min=1, help="Longest prompt plus output; default: the model's.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_cache_gib: Annotated[float, typer.Option("--kv-cache-gib", help="Size of the KV cache in GiB.")] = 1.0,
    adapter_cache_gib: Annotated[
        float, typer.Option("--adapter-cache-gib", help="Host memory for adapters in GiB.")
    ] = 4.0,
    lm_head: Annotated[bool, typer.Option("--lm-head", help="Accept adapters with an `lm_head` site.")] = False,
    allow_base_mismatch: AllowBaseMismatch = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the model: a slow first start, then faster steps. CPU only.")
    ] = False,
    host: Annotated[str, typer.Option("--host", help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", help="What clients call the base model; repeatable. Default: its name."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", metavar="FILE", help="File with the key that clients must present."),
    ] = None,
    keys_file: Annotated[
        Path | None,
        typer.Option("--keys-file", metavar="FILE", help="JSON of further keys, each with the adapters it may use."),
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option("--admin-key-file", metavar="FILE", help="File with the key for changes of adapters."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Take up adapters that change below ROOT.")] = False,
    max_push_mib: Annotated[
        int, typer.Option("--max-push-mib", min=1, help="Largest adapter accepted over HTTP, in MiB.")
    ] = 1024,
    access_log: Annotated[
        Path | None, typer.Option("--access-log", metavar="FILE", help="Append a line of JSON for each request.")
    ] = None,
    status_page: Annotated[
        bool, typer.Option("--status-page/--no-status-page", help="Answer `/preft` with a page that shows the server.")
    ] = True,
    adapter_metrics: Annotated[
        bool, typer.Option("--adapter-metrics", help="Count requests and cached tokens by adapter name in `/metrics`.")
    ] = False,
    adapter_metrics_limit: Annotated[
        int, typer.Option("--adapter-metrics-limit", min=1, help="Names counted so at most; the rest are `other`.")
    ] = 100,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Serve adapters and their base model over an OpenAI-compatible HTTP API; adapters are model names.

    The server is vLLM's own; what follows `--` goes to it. It is ready once every worker has shown that an adapter
    moves the model. Ctrl-C or SIGTERM ends it with status 0; it fails with status 1 if the engine dies.
    """
    # The session quietens vLLM more than a server should be.
    user_level = os.environ.get("VLLM_LOGGING_LEVEL")
    session = Session(quiet=quiet, verbose=verbose)
    from preft.serve.http.launch import ServeOptions
    from preft.serve.settings import EngineSettings
    from preft_cli.serve import Job, run_server

    environment = {key: value for key, value in os.environ.items() if key != "VLLM_LOGGING_LEVEL"}
    if user_level is not None:
        environment["VLLM_LOGGING_LEVEL"] = user_level
    settings = EngineSettings(
        slots=slots,
        max_rank=max_rank,
        dtype=dtype,
        max_model_len=max_model_len,
        kv_cache_gib=kv_cache_gib,
        adapter_cache_gib=adapter_cache_gib,
        lm_head=lm_head,
        allow_base_mismatch=allow_base_mismatch,
        compiled=compiled,
        adapter_metrics=adapter_metrics_limit if adapter_metrics else 0,
    )
    options = ServeOptions(
        host=host,
        port=port,
        names=tuple(served_model_name or ()),
        api_key_file=api_key_file,
        keys_file=keys_file,
        admin_key_file=admin_key_file,
        root=adapters,
        watch=watch,
        access_log=access_log,
        max_push_mib=max_push_mib,
        status_page=status_page,
        passthrough=tuple(vllm_options or ()),
        verbose=verbose,
    )
    run_server(Job(model, adapters, tuple(adapter or ()), settings, options, environment), session)

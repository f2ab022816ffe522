"""`preft serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from preft_cli.console import Session
from preft_cli.options import AllowBaseMismatch, NamedAdapters, Quiet, Verbose, command_app, examples, require_unread
from preft_cli.serve_options import (
    AccessLog,
    AdapterCacheGib,
    AdapterMetrics,
    AdapterMetricsLimit,
    AdminKeyFile,
    ApiKeyFile,
    Compiled,
    Dtype,
    Host,
    KeysFile,
    KvCacheGib,
    LmHead,
    MaxModelLen,
    MaxPushMib,
    MaxRank,
    Port,
    ServedModelName,
    Slots,
    StatusPage,
    Watch,
)

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
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, embedded name or hub id of the base model.")],
    vllm_options: Annotated[
        list[str] | None, typer.Argument(metavar="-- VLLM_OPTIONS", help="Options of vLLM's server.")
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option("--adapters", metavar="ROOT", help="Serve every adapter directly below this folder.")
    ] = None,
    adapter: NamedAdapters = None,
    slots: Slots = 8,
    max_rank: MaxRank = 512,
    max_model_len: MaxModelLen = None,
    dtype: Dtype = "auto",
    kv_cache_gib: KvCacheGib = 1.0,
    adapter_cache_gib: AdapterCacheGib = 4.0,
    lm_head: LmHead = False,
    allow_base_mismatch: AllowBaseMismatch = False,
    compiled: Compiled = False,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedModelName = None,
    api_key_file: ApiKeyFile = None,
    keys_file: KeysFile = None,
    admin_key_file: AdminKeyFile = None,
    watch: Watch = False,
    max_push_mib: MaxPushMib = 1024,
    access_log: AccessLog = None,
    status_page: StatusPage = True,
    adapter_metrics: AdapterMetrics = False,
    adapter_metrics_limit: AdapterMetricsLimit = 100,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Serve adapters and their base over an OpenAI-compatible API.

    Adapters are model names. The server is vLLM's own; what follows `--` goes to it. It is ready once every worker has
    shown that an adapter moves the model. Ctrl-C or SIGTERM ends it with status 0; it fails with status 1 if the engine
    dies.
    """
    # The session quietens vLLM more than a server should be.
    user_level = os.environ.get("VLLM_LOGGING_LEVEL")
    session = Session(quiet=quiet, verbose=verbose)
    if not adapter_metrics:
        require_unread(context, "A server without `--adapter-metrics`", ("adapter_metrics_limit",))
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

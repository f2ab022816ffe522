"""`preft generate`."""

from __future__ import annotations

from typing import Annotated

import typer

from preft_cli.console import Session
from preft_cli.options import (
    AllowBaseMismatch,
    Json,
    NamedAdapters,
    Quiet,
    Verbose,
    command_app,
    examples,
    require_unread,
)

app = command_app()


@app.command(
    "generate",
    epilog=examples(
        "preft generate smollm2 --adapter mine=my-lorap --prompts prompts.jsonl",
        "preft generate smollm2 --prompts prompts.jsonl --engine hf --dtype float32 --json > answers.jsonl",
        "preft generate smollm2 --adapter a=a --adapter b=b --slots 1 --prompts - < prompts.jsonl",
    ),
)
def generate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, embedded name or hub id of the base model.")],
    prompts: Annotated[
        str,
        typer.Option("--prompts", metavar="FILE", help="Requests, one JSON object a line; `-` reads standard input."),
    ],
    adapter: NamedAdapters = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Output tokens, where a row does not say.")
    ] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the sampling.")] = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Also report the log-probability of each output token.")
    ] = False,
    engine: Annotated[str, typer.Option("--engine", help="`vllm`, or `hf`: slow, plain Hugging Face.")] = "vllm",
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    slots: Annotated[int, typer.Option("--slots", min=1, help="Adapters in one step of the vLLM engine.")] = 8,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", min=1, help="Longest prompt plus output; default: the model's.")
    ] = None,
    allow_base_mismatch: AllowBaseMismatch = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the model: a slow first start, then faster steps. vLLM on CPU.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Complete prompts under adapters and the base, in one batch.

    A row is {"id", "adapter": NAME or null, "prompt" | "messages" | "prompt_token_ids", "max_tokens"?, "boundary"?}.
    Answers come in the order of the rows. A bad row fails alone, and then the exit status is 1.
    """
    session = Session(as_json=as_json, quiet=quiet, verbose=verbose)
    if engine == "hf":
        require_unread(context, "`--engine hf`", ("slots", "compiled"))
    from preft_cli.generation import Job, run_job

    job = Job(
        model=model,
        prompts=prompts,
        adapters=tuple(adapter or ()),
        engine=engine,
        dtype=dtype,
        slots=slots,
        max_model_len=max_model_len,
        allow_base_mismatch=allow_base_mismatch,
        compiled=compiled,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        logprobs=logprobs,
    )
    if not run_job(job, session):
        raise typer.Exit(1)

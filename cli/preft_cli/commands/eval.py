"""`preft eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preft_cli.console import Session
from preft_cli.options import (
    AllowBaseMismatch,
    Force,
    Json,
    NamedAdapters,
    Quiet,
    Verbose,
    command_app,
    examples,
    require_unread,
)

if TYPE_CHECKING:
    from preft.eval.run import Evaluation

app = command_app()
_PARTS = 2

Tasks = Annotated[
    str,
    typer.Option(
        "--tasks",
        metavar="T[,T]",
        help="Tasks, groups or tags of lm-evaluation-harness; * matches. Those named preft_... need no network.",
    ),
]
Compare = Annotated[
    list[str] | None,
    typer.Option("--compare", metavar="A,B", help="B against A; repeatable. Default: each adapter against base."),
]
IncludePath = Annotated[
    Path | None, typer.Option("--include-path", metavar="DIR", help="A folder of further task definitions.")
]
NumFewshot = Annotated[
    int | None, typer.Option("--num-fewshot", min=0, help="Examples in the prompt. Default: the task's own.")
]
Limit = Annotated[
    float | None, typer.Option("--limit", min=0.0, help="Examples of each task at most, or a share below 1.")
]
ApplyChatTemplate = Annotated[
    bool, typer.Option("--apply-chat-template", help="Render prompts as conversations, examples as turns.")
]
SystemInstruction = Annotated[
    str | None, typer.Option("--system-instruction", metavar="TEXT", help="First message of each prompt.")
]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Answers to each example, sampled; scored as pass@k.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="Of several answers to an example. Default: 0.8.")
]
AllowCodeExecution = Annotated[
    bool,
    typer.Option("--allow-code-execution", help="Run what the model writes, in a sandbox (preft_humaneval)."),
]


@app.command(
    "eval",
    epilog=examples(
        "preft eval smollm2 --adapter mine=my-lorap --tasks arc_easy,piqa --limit 200",
        "preft eval smollm2 --adapter a=my-lora --adapter b=my-lorap --tasks gsm8k --compare a,b --out scores",
        "preft eval smollm2 --adapter mine=my-lorap --tasks preft_instructions,preft_reasoning --apply-chat-template",
        "preft eval smollm2 --adapter mine=my-lorap --tasks preft_humaneval --samples 8 --allow-code-execution --out s",
        "preft eval smollm2 --adapter mine=my-lorap --tasks my_task --include-path tasks --engine hf --json",
    ),
)
def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, embedded name or hub id of the base model.")],
    tasks: Tasks,
    adapter: NamedAdapters = None,
    engine: Annotated[str, typer.Option("--engine", help="`vllm`, or `hf`: slow, plain Hugging Face.")] = "vllm",
    compare: Compare = None,
    include_path: IncludePath = None,
    num_fewshot: NumFewshot = None,
    limit: Limit = None,
    apply_chat_template: ApplyChatTemplate = False,
    system_instruction: SystemInstruction = None,
    samples: Samples = 1,
    temperature: Temperature = None,
    allow_code_execution: AllowCodeExecution = False,
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="Write each example's answers into DIR as well.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="For results.json and samples.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    batch_size: Annotated[
        str, typer.Option("--batch-size", metavar="N", help="Rows of a batch with --engine hf, or auto.")
    ] = "1",
    max_length: Annotated[
        int | None, typer.Option("--max-length", min=2, help="Tokens of input. Default: the model's limit.")
    ] = None,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Adapters in one step of the vLLM engine.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Of few-shot choices, samples and statistics.")] = 1234,
    allow_base_mismatch: AllowBaseMismatch = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Score base and adapters on tasks, and test the differences.

    Tasks are those of lm-evaluation-harness, and some that come with preft. Continuations are scored with the context
    as the boundary, so a prompt-only adapter never acts on them. Arms are compared example by example; p-values are
    corrected over all tasks. Exit status 1 if a request failed.
    """
    session = Session(as_json=as_json, quiet=quiet, verbose=verbose)
    from preft.errors import UsageError
    from preft.eval.run import EvalSpec
    from preft_cli.generation import named_adapters

    if log_samples and out is None:
        raise UsageError("`--log-samples` needs a folder to write to", accepted="`--out DIR`")
    require_unread(context, f"`--engine {engine}`", {"hf": ("slots",), "vllm": ("batch_size",)}.get(engine, ()))
    spec = EvalSpec(
        model=model,
        adapters=named_adapters(adapter or ()),
        tasks=tuple(_words(tasks)),
        engine=engine,
        compare=_pairs(compare or ()),
        include_path=include_path,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=apply_chat_template,
        system_instruction=system_instruction,
        dtype=dtype,
        batch_size=_batch_size(batch_size),
        max_length=max_length,
        slots=slots,
        seed=seed,
        samples=samples,
        temperature=temperature,
        allow_code_execution=allow_code_execution,
        allow_base_mismatch=allow_base_mismatch,
        engine_options={} if verbose or engine == "hf" else {"vllm": {"use_tqdm_on_load": False}},
    )
    found = _run(spec, session, out, log_samples=log_samples, force=force)
    if found.failures:
        raise typer.Exit(1)


def _run(spec: Any, session: Session, out: Path | None, *, log_samples: bool, force: bool) -> Evaluation:
    import json
    import logging

    from preft.errors import EngineError
    from preft.eval.files import dump, require_free, save_evaluation
    from preft.eval.plots import has_matplotlib, save_effects
    from preft.eval.run import evaluate as run_evaluation
    from preft_cli.engines import DTYPES, require_choice, vllm_is_installed

    require_choice("--dtype", spec.dtype, DTYPES)
    if spec.engine == "vllm" and not vllm_is_installed():
        raise EngineError("vLLM is not installed", hint="use the Hugging Face path (`--engine hf`)")
    if out is not None:
        require_free(out, force=force)
    if not session.verbose:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with session.diverted():
        found = run_evaluation(spec, progress=session.progress())
        files = save_evaluation(found, out, log_samples=log_samples) if out is not None else []
        if out is not None and has_matplotlib():
            files += save_effects(found.comparisons, out)
        elif out is not None:
            session.note("note: matplotlib is not installed, so there is no picture of the differences")
    for text in found.warnings:
        session.warn(text)
    for failure in found.failures:
        session.warn(f"{failure.arm}: {failure.task} example {failure.doc_id} failed: {failure.error['message']}")
    if session.as_json:
        session.emit(json.loads(dump(found.document)))
    else:
        _show(session, found)
    if files:
        session.note(f"wrote {len(files)} file{'s' * (len(files) > 1)} to {out}")
    return found


def _show(session: Session, found: Evaluation) -> None:
    """One table of scores, one of comparisons."""
    from preft_cli.render import table

    arms = found.document["arms"]
    intervals = {
        arm: {(row["task"], row["metric"], row["filter"]): row for row in values["intervals"]}
        for arm, values in arms.items()
    }
    scores = [
        (task, *key.partition(",")[::2], *(_score(arms[arm], intervals[arm], task, key) for arm in arms))
        for task, values in next(iter(arms.values()))["results"].items()
        for key in values
        if "," in key and not key.partition(",")[0].endswith("_stderr")
    ]
    session.show(table(("task", "metric", "filter", *arms), scores, numeric=tuple(arms)))
    rows = [
        (
            f"{row.second} - {row.first}",
            row.task,
            row.metric,
            row.paired.num_pairs,
            _signed(row.paired.difference),
            f"{_signed(row.paired.low)} to {_signed(row.paired.high)}" if row.paired.low is not None else None,
            None if row.adjusted is None else f"{row.adjusted:.2g}",
            None if row.paired.detectable is None else f"{row.paired.detectable:.3g}",
            row.verdict,
        )
        for row in found.comparisons
    ]
    if rows:
        headers = ("arms", "task", "metric", "n", "difference", "95 % interval", "p (Holm)", "detectable", "verdict")
        session.show("", table(headers, rows, numeric=headers[3:8]), "")
    for row in found.comparisons:
        lost = ", ".join(f"{len(ids)} {reason}" for reason, ids in row.left_out.items())
        more = f"; left out: {lost}" if lost else ""
        session.show(f"{row.second} - {row.first}, {row.task} {row.metric}: {row.verdict}: {row.reason}{more}")


def _score(
    arm: dict[str, Any], intervals: dict[tuple[str, str, str], dict[str, Any]], task: str, key: str
) -> str | None:
    """A metric as `0.512 [0.48, 0.55]`, or with its standard error where it gives no number an example."""
    value = arm["results"].get(task, {}).get(key)
    if not isinstance(value, int | float):
        return None if value is None else str(value)
    metric, _, kind = key.partition(",")
    row = intervals.get((task, metric, kind))
    if row is not None and row["low"] is not None:
        return f"{value:.4g} [{row['low']:.3g}, {row['high']:.3g}]"
    error = arm["results"][task].get(f"{metric}_stderr,{kind}")
    return f"{value:.4g} ± {error:.2g}" if isinstance(error, float) else f"{value:.4g}"


def _signed(value: float | None) -> str | None:
    return None if value is None else f"{value:+.3g}"


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _pairs(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    from preft.errors import UsageError

    found = []
    for text in texts:
        words = _words(text)
        if len(words) != _PARTS:
            raise UsageError("`--compare` is not valid", got=f"`{text}`", accepted="two arms, such as `base,mine`")
        found.append((words[0], words[1]))
    return tuple(found)


def _batch_size(text: str) -> int | str:
    from preft.errors import UsageError

    if text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise UsageError("`--batch-size` is not valid", got=f"`{text}`", accepted="a number of at least 1, or `auto`")
    return int(text)

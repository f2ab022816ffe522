"""`preft check`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preft_cli.console import Session
from preft_cli.options import AdapterFolder, AllowBaseMismatch, Force, Json, Quiet, Verbose, command_app, examples

if TYPE_CHECKING:
    from preft.checks.check import EngineFactory
    from preft.checks.report import CheckReport, SiteDelta

app = command_app()
ENGINES = ("auto", "vllm", "none")


@app.command(
    "check",
    epilog=examples(
        "preft check my-lorap --base smollm2",
        "preft check my-lorap --base smollm2 --engine none --json",
        'preft check my-lorap --base smollm2 --prompt "The capital of France is"',
        "preft check my-lorap --base smollm2 --eval rows.jsonl --report rows.html",
    ),
)
def check(
    adapter: AdapterFolder,
    base: Annotated[str, typer.Option("--base", help="The base model: folder, embedded name or hub id.")],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="Try it on this text; repeatable.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine", help="Engine to compare with Hugging Face: `vllm`, `none`, or `auto`: vllm where installed."
        ),
    ] = "auto",
    rows: Annotated[
        Path | None,
        typer.Option(
            "--eval", metavar="FILE", help="Compare with the base on these rows, as for `preft train sft`: JSON lines."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Rows at most. Default: all.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Tokens of an answer to a row. Default: 128.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="An HTML page with every row's two answers.")
    ] = None,
    allow_base_mismatch: AllowBaseMismatch = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Prove that an adapter is on, by its sites, logits and engine.

    It measures how far each site moves the model and how far the logits move from the base's, that decode runs on base
    weights, and that the vLLM engine answers as Hugging Face does, all in float32. With --eval, also whether it is
    better than the base on your own rows: the loss of the expected answers, how many answers are exactly those, and
    what both write. Exit status 1 if the adapter moves nothing, if decode does not run on base weights, if the engine
    answers otherwise than Hugging Face, or if a row failed.
    """
    session = Session(as_json=as_json, quiet=quiet, verbose=verbose)
    from preft.checks.check import check_adapter
    from preft_cli.engines import require_choice
    from preft_cli.own_rows import ANSWER_TOKENS, RowsRun, require_row_flags, save_page, show_rows

    require_choice("--engine", engine, ENGINES)
    require_row_flags(rows, limit=limit, max_tokens=max_tokens, report=report, force=force)
    factory = _factory(engine, session, allow_base_mismatch=allow_base_mismatch)
    with session.diverted(), RowsRun(rows, factory, limit=limit, max_tokens=max_tokens or ANSWER_TOKENS) as run:
        found = check_adapter(
            Path(adapter),
            base,
            engine_factory=run.factory,
            prompts=prompt or None,
            allow_base_mismatch=allow_base_mismatch,
            progress=session.progress(),
        )
        compared = run.compare(
            Path(adapter), base, allow_base_mismatch=allow_base_mismatch, progress=session.progress()
        )
    if as_json:
        session.emit({**found.to_dict(), "eval": None if compared is None else compared.to_dict()})
    else:
        _show(session, found)
        if compared is not None:
            show_rows(session, compared)
    if compared is not None and report is not None:
        session.note(f"wrote {save_page(compared, adapter, base, report)}")
    if not found.passed or (compared is not None and compared.failed):
        raise typer.Exit(1)


def _factory(engine: str, session: Session, *, allow_base_mismatch: bool) -> EngineFactory | None:
    from preft_cli.engines import open_vllm, vllm_is_installed

    if engine == "auto" and not vllm_is_installed():
        session.note("note: vLLM is not installed, so no engine is compared with Hugging Face")
    if engine == "none" or (engine == "auto" and not vllm_is_installed()):
        return None
    return lambda model, adapters: open_vllm(
        model, adapters, loud=session.verbose, dtype="float32", allow_base_mismatch=allow_base_mismatch
    )


def _show(session: Session, found: CheckReport) -> None:
    from preft_cli.render import fields, table

    equal = {True: "yes", False: "NO", None: "not expected: it acts on every token"}[found.decode.equals_base]
    parity = "not compared"
    if found.parity is not None:
        parity = f"{sum(row.equal for row in found.parity)} of {len(found.parity)} requests equal, token for token"
    rows: list[tuple[str, object]] = [
        ("adapter", found.adapter),
        ("kind", f"{found.label} (positions {found.positions})"),
        ("base", found.base),
        ("digest", found.digest),
        ("largest change of a logit", f"{found.gap.max_abs:.4g}"),
        ("KL to the base (nats)", f"{found.gap.kl_nats:.4g}"),
        ("output tokens that differ", f"{found.gap.tokens_differing} of {found.gap.num_tokens}"),
        ("adapter products in prefill", found.decode.prefill_products),
        ("adapter products in decode", found.decode.decode_products),
        ("decode step equals the base's", equal),
        ("engine against Hugging Face", parity),
        ("verdict", "passed" if found.passed else "FAILED"),
    ]
    rows += [("", reason) for reason in found.reasons]
    headers = ("module", "sites", "rank", "delta norm: median", "least", "most")
    session.show(fields(rows), "", table(headers, _site_rows(found.sites), numeric=headers[1:]))


def _site_rows(sites: tuple[SiteDelta, ...]) -> list[tuple[object, ...]]:
    """One row a type of module: norms of the updates, relative to the base output's."""
    groups: dict[str, list[SiteDelta]] = {}
    for site in sites:
        groups.setdefault("block output" if site.kind == "block" else site.site.rpartition(".")[2], []).append(site)
    rows: list[tuple[object, ...]] = []
    for module, members in groups.items():
        norms = [member.delta_norm for member in members]
        ranks = sorted({member.rank for member in members})
        spread = (f"{value:.3g}" for value in (statistics.median(norms), min(norms), max(norms)))
        rows.append((module, len(members), ranks[0] if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}", *spread))
    return rows

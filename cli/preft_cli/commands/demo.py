"""`preft demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preft_cli.console import Session
from preft_cli.options import Json, Quiet, Verbose, command_app, examples

if TYPE_CHECKING:
    from preft.demo.run import DemoReport

app = command_app()


@app.command("demo", epilog=examples("preft demo", "preft demo --adapters 64 --steps 60 --dir out/demo"))
def demo(
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Where to write adapters; default: the user's cache.")
    ] = None,
    adapters: Annotated[int, typer.Option("--adapters", min=2, help="Adapters to serve at once.")] = 32,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps of the style adapter.")] = 30,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Throughput runs of each arm, interleaved.")] = 3,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show the main job end to end on the embedded model, in minutes.

    Trains a small prefill-only LoRA, converts PEFT LoRAs of many ranks, serves them all from one engine, shows base
    and adapted answers side by side, proves that each adapter is on, and measures what it costs.
    """
    session = Session(as_json=as_json, quiet=quiet, verbose=verbose)
    from preft.demo.run import run_demo
    from preft.models.locate import cache_dir

    with session.diverted():
        report = run_demo(
            directory or cache_dir() / "demo",
            num_adapters=adapters,
            steps=steps,
            runs=runs,
            progress=session.progress(),
        )
    if as_json:
        session.emit(report.to_dict())
    else:
        show(report, session)
    if not report.passed:
        raise typer.Exit(1)


def show(report: DemoReport, session: Session) -> None:
    """Prints the report for people."""
    from rich.text import Text

    from preft_cli.render import table

    session.show(
        Text("Answers side by side", style="bold"),
        table(
            ["adapter", "question", "base", "adapted"],
            [(a.adapter, a.question, _line(a.base), _line(a.adapted)) for a in report.answers],
        ),
        "",
        Text("Is each adapter on? Measured on the serving engine", style="bold"),
        table(
            ["adapter", "digest", "kind", "rank", "largest log-prob change", "changed tokens of 8"],
            [(p.adapter, p.digest, p.kind, p.rank, f"{p.logprob_gap:.3f}", p.changed_tokens) for p in report.proofs],
            numeric=["rank", "largest log-prob change", "changed tokens of 8"],
        ),
        "",
        Text(f"Throughput, {len(report.proofs) - 1} requests of 64 + 64 tokens, one adapter each", style="bold"),
        table(
            ["arm", "output tokens/s", "ratio to base", "steps", "steps with adapter work"],
            [
                (t.arm, f"{t.tokens_per_s:.0f}", f"{t.ratio_to_base:.2f}", t.steps, t.adapted_steps)
                for t in report.throughput
            ],
            numeric=["output tokens/s", "ratio to base", "steps", "steps with adapter work"],
        ),
        "",
        Text(
            f"Trained `pirate` in {report.train_s:.0f} s (loss {report.first_loss:.2f} -> {report.last_loss:.2f}); "
            f"{report.styled} of 3 answers in style. Canary moved {report.canary['num_sites']} sites, base restored "
            f"exactly: {report.canary['restored']}. {len(report.proofs)} adapters over 8 slots; "
            f"{report.seconds:.0f} s in all."
        ),
        Text(f"The adapters are in {report.folder}; try `preft inspect {report.folder}/prompt/pirate`."),
    )


def _line(text: str, limit: int = 110) -> str:
    """An answer on one line of a table."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[: limit - 3]}..."

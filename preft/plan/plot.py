"""A picture of a plan: throughput over the number of adapters."""

from __future__ import annotations

from pathlib import Path

from preft.errors import FileError, UsageError
from preft.pictures import require_matplotlib
from preft.plan.plan import Plan, sweep

FORMATS = (".png", ".svg", ".pdf")
LOOKS = {
    "base": ("#555555", "--", "base (no adapter)"),
    "lora": ("#c2410c", "-", "LoRA on every token"),
    "lorap": ("#1d4ed8", "-", "LoRAP"),
    "direftp": ("#047857", "-", "DiReFTP"),
}


def require_plot_path(path: Path) -> None:
    """Checks, before anything is computed, that a plot can be written there.

    Raises:
        UsageError: Its ending is not a picture's.
        FileError: Its folder does not exist.
        UnsupportedError: matplotlib is not installed.
    """
    if path.suffix.casefold() not in FORMATS:
        raise UsageError(
            "`--plot` names no picture", got=f"`{path}`", accepted=f"a file ending in {', '.join(FORMATS)}"
        )
    if not path.absolute().parent.is_dir():
        raise FileError(f"The folder of `{path}` does not exist")
    require_matplotlib("Plots")


def save_plot(plan: Plan, path: Path) -> None:
    """Draws a plan's throughput over numbers of adapters.

    Raises:
        FileError: The file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 4.2), layout="constrained")
    for arm, points in sweep(plan).items():
        colour, style, label = LOOKS[arm]
        shown = [(count, speed) for count, speed in points if speed is not None]
        axes.plot([x for x, _ in shown], [y for _, y in shown], style, color=colour, marker=".", label=label)
    load = plan.roof.workload
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("adapters")
    axes.set_ylabel("output tokens/s, predicted")
    axes.set_title(
        f"{plan.roof.shape.name} on {plan.roof.machine.label}: rank {load.rank}, "
        f"{load.input_len} in, {load.output_len} out, {load.requests} requests",
        fontsize=10,
    )
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise FileError(f"`{path}` cannot be written", got=error.strerror) from None
    finally:
        pyplot.close(figure)

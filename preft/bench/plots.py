"""Pictures of a result: throughput over the number of adapters, one panel a rank, or bars for a single point."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from preft.bench.facts import plain_arm
from preft.errors import FileError
from preft.pictures import svg_element

LOOKS = {
    "base": ("#6b7280", "--"),
    "base-compiled": ("#6b7280", "-."),
    "base-preft": ("#9ca3af", ":"),
    "stock-lora": ("#d97706", "-"),
    "lora": ("#dc2626", "-"),
    "lorap": ("#2563eb", "-"),
    "direftp": ("#059669", "-"),
}


def look_of(kind: str) -> tuple[str, str]:
    """Colour and line of an arm; a compiled one is dashed and dotted."""
    return LOOKS[kind] if kind in LOOKS else (LOOKS[plain_arm(kind)][0], "-.")


Draw = Callable[[Any], Any]
"""Draws with pyplot and returns the figure."""
INK = "#0a0b0c"
"""Colour of text and axes in the page's picture, replaced there by the page's own."""


def save_plots(entries: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Writes `throughput.png` and `throughput.svg`; nothing if no arm was measured.

    Raises:
        FileError: They cannot be written.
    """
    measured = _measured(entries)
    return save_figure(lambda pyplot: _figure(measured, pyplot), folder, "throughput") if measured else []


def inline_svgs(entries: Sequence[dict[str, Any]]) -> list[str]:
    """The pictures for a page, one a rank, so that a phone can show them below each other."""
    measured = _measured(entries)
    ranks = dict.fromkeys(entry["lora_rank"] for entry in measured)
    most = max((entry["output_tokens_per_s"]["max"] for entry in measured), default=0.0)

    def drawn(rank: int | str) -> str:
        own = [entry for entry in measured if entry["lora_rank"] == rank]
        return inline_figure(lambda pyplot: _figure(own, pyplot, top=1.05 * most), salt=f"rank {rank}")

    return [drawn(rank) for rank in ranks]


def save_figure(draw: Draw, folder: Path, name: str) -> list[Path]:
    """Writes a figure as PNG and SVG.

    Raises:
        FileError: They cannot be written.
    """
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with _drawn(draw, ink="#111111") as figure:
        try:
            for path in paths:
                figure.savefig(path, dpi=150, facecolor="white")
        except OSError as error:
            raise FileError(f"`{error.filename}` cannot be written", got=error.strerror) from None
    return paths


def inline_figure(draw: Draw, salt: str = "preft") -> str:
    """A figure for a page: no background, text as text, and ink in the page's own colour.

    Args:
        draw: Draws it.
        salt: Of the names inside; two figures of one page need different ones.
    """
    buffer = io.StringIO()
    with _drawn(draw, ink=INK, salt=salt) as figure:
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return svg_element(buffer.getvalue()).replace(INK, "currentColor")


def _measured(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["output_tokens_per_s"]["median"]]


@contextlib.contextmanager
def _drawn(draw: Draw, *, ink: str, salt: str = "preft") -> Iterator[Any]:
    """A figure while it is needed. The settings hold for drawing and for saving."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": salt, **dict.fromkeys(colours, ink)}
    with matplotlib.rc_context(settings):
        figure = draw(pyplot)
        try:
            yield figure
        finally:
            pyplot.close(figure)


def _figure(measured: Sequence[dict[str, Any]], pyplot: Any, top: float | None = None) -> Any:
    ranks = sorted({entry["lora_rank"] for entry in measured}, key=lambda rank: (isinstance(rank, str), rank))
    counts = sorted({entry["adapters"] for entry in measured})
    width = 5.6 if len(ranks) == 1 else 4.2 * len(ranks)
    figure, panels = pyplot.subplots(
        1, len(ranks), figsize=(width, 3.8), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, rank in zip(panels[0], ranks, strict=True):
        chosen = [entry for entry in measured if entry["lora_rank"] == rank]
        if len(counts) == 1:
            _bars(panel, chosen)
        else:
            _lines(panel, chosen, counts)
        panel.set_title(f"LoRA rank {rank}" + (f", {counts[0]} adapters" if len(counts) == 1 else ""), fontsize=10)
        panel.set_ylim(bottom=0, top=top)
        panel.grid(alpha=0.25, axis="y")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("output tokens/s (median, least to most)")
    return figure


def _bars(panel: Any, entries: Sequence[dict[str, Any]]) -> None:
    for place, entry in enumerate(entries):
        speed = entry["output_tokens_per_s"]
        colour = look_of(entry["kind"])[0]
        panel.bar(place, speed["median"], color=colour, alpha=0.85, yerr=_reach(speed), ecolor=INK, capsize=3)
    panel.set_xticks(range(len(entries)), [entry["arm"] for entry in entries], rotation=20)


def _lines(panel: Any, entries: Sequence[dict[str, Any]], counts: Sequence[int]) -> None:
    for arm in dict.fromkeys(entry["arm"] for entry in entries):
        points = sorted((entry for entry in entries if entry["arm"] == arm), key=lambda entry: entry["adapters"])
        colour, style = look_of(points[0]["kind"])
        speeds = [point["output_tokens_per_s"] for point in points]
        reach = [[_reach(speed)[side][0] for speed in speeds] for side in (0, 1)]
        panel.errorbar(
            [point["adapters"] for point in points],
            [speed["median"] for speed in speeds],
            yerr=reach,
            color=colour,
            linestyle=style,
            marker="o",
            markersize=3.5,
            capsize=2,
            label=arm,
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(counts), [str(count) for count in counts])
    panel.minorticks_off()
    panel.set_xlabel("adapters")
    panel.legend(frameon=False, fontsize=8)


def _reach(speed: dict[str, float]) -> list[list[float]]:
    return [[speed["median"] - speed["min"]], [speed["max"] - speed["median"]]]

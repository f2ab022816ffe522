"""Pictures of a run's metrics: one panel a quantity over the steps, as a PNG and as parts of a page.

Whatever a run writes to its `metrics.jsonl` is drawn: what `PANELS` knows goes together and is titled, and every other
number gets a panel of its own.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft.errors import FileError, UnsupportedError

CURVES_NAME = "curves.png"
INK = "#0a0b0c"
"""Colour of text and axes in a page's picture, replaced there by the page's own."""
_COLOURS = ("#3b82f6", "#d97706", "#059669", "#dc2626", "#8b5cf6", "#6b7280")
_DENSE = 40
"""Points from which a series is drawn faintly, with its running mean on top."""
_SIZE = (4.6, 2.7)
"""Of one panel, in inches: on a phone the page shows it at about its own size."""


@dataclass(frozen=True)
class Panel:
    """Metrics that share an axis.

    Attributes:
        title: What the axis shows, with its unit.
        prefixes: Names of the metrics; one that ends in `/` stands for all that begin with it.
        is_noisy: Draw long curves with their running mean.
    """

    title: str
    prefixes: tuple[str, ...]
    is_noisy: bool = True

    def holds(self, name: str) -> bool:
        """Whether a metric belongs here."""
        return any(name.startswith(prefix) if prefix.endswith("/") else name == prefix for prefix in self.prefixes)


PANELS = (
    Panel("Loss, nats a token", ("loss", "eval_loss")),
    Panel("Reward, mean of a step", ("reward", "eval_reward", "rewards/")),
    Panel("KL to the base model, nats a token", ("kl",)),
    Panel("Completion length, tokens", ("completion_tokens", "completions/mean_length")),
    Panel("Learning rate", ("learning_rate",), is_noisy=False),
    Panel("Gradient norm", ("grad_norm",)),
)


@dataclass(frozen=True)
class Curve:
    """One metric over the steps; values that are not finite are left out."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


def require_matplotlib() -> None:
    """Checks that curves can be drawn.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UnsupportedError("Curves need matplotlib", hint="pip install matplotlib") from None


def read_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """The metrics of a run by name.

    Args:
        rows: Objects with `step` and any numbers, as `metrics.jsonl` holds them.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name != "step" and is_number and math.isfinite(value):
                found.setdefault(name, []).append((int(row["step"]), float(value)))
    return {name: Curve(name, *map(tuple, zip(*points, strict=True))) for name, points in found.items()}


def panels_of(curves: Mapping[str, Curve]) -> list[tuple[str, list[Curve]]]:
    """What is drawn together: title and curves of each panel."""
    found = [(panel.title, [curve for name, curve in curves.items() if panel.holds(name)]) for panel in PANELS]
    others = [(name, [curve]) for name, curve in curves.items() if not any(panel.holds(name) for panel in PANELS)]
    return [(title, held) for title, held in found + others if held]


def save_curves(
    rows: Sequence[Mapping[str, Any]], folder: Path, *, baselines: Mapping[str, float] | None = None
) -> Path | None:
    """Writes `curves.png`; nothing if there is nothing to draw.

    Args:
        rows: See `read_curves`.
        folder: Where.
        baselines: The base model's value of a metric, drawn as a level line.

    Raises:
        UnsupportedError: matplotlib is not installed.
        FileError: It cannot be written.
    """
    require_matplotlib()
    panels = panels_of(read_curves(rows))
    if not panels:
        return None
    path = folder / CURVES_NAME

    def save(figure: Any) -> None:
        try:
            figure.savefig(path, dpi=150, facecolor="white")
        except OSError as error:
            raise FileError(f"`{path}` cannot be written", got=error.strerror) from None

    _with_figure(panels, baselines or {}, save, ink="#111111")
    return path


def inline_curves(
    rows: Sequence[Mapping[str, Any]], *, baselines: Mapping[str, float] | None = None
) -> list[tuple[str, str]]:
    """Title and SVG of each panel, for a page: no background, text as text, ink in the page's own colour."""
    require_matplotlib()
    found = []
    for number, (title, curves) in enumerate(panels_of(read_curves(rows))):
        buffer = io.StringIO()

        def save(figure: Any, buffer: io.StringIO = buffer) -> None:
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})

        _with_figure([(title, curves)], baselines or {}, save, ink=INK, salt=f"preft{number}")
        found.append((title, _bare_svg(buffer.getvalue(), title)))
    return found


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of up to `window` values that end at each."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[end] - sums[max(0, end - window)]) / min(end, window) for end in range(1, len(values) + 1)]


def _with_figure(
    panels: Sequence[tuple[str, Sequence[Curve]]],
    baselines: Mapping[str, float],
    use: Callable[[Any], None],
    *,
    ink: str,
    salt: str = "preft",
) -> None:
    """Draws, and hands the figure on; the settings hold for drawing and for saving. No global state is touched."""
    import matplotlib
    from matplotlib.figure import Figure

    colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 10, **dict.fromkeys(colours, ink)}
    with matplotlib.rc_context(settings):
        columns = min(2, len(panels))
        lines = math.ceil(len(panels) / columns)
        figure = Figure(figsize=(_SIZE[0] * columns, _SIZE[1] * lines), layout="constrained")
        for place, (title, curves) in enumerate(panels, start=1):
            _draw(figure.add_subplot(lines, columns, place), title, curves, baselines)
        use(figure)


def _draw(axes: Any, title: str, curves: Sequence[Curve], baselines: Mapping[str, float]) -> None:
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        smooth = any(panel.holds(curve.name) and not panel.is_noisy for panel in PANELS)
        if smooth or len(curve.values) < _DENSE:
            marker = None if smooth else "o"
            axes.plot(curve.steps, curve.values, color=colour, marker=marker, markersize=3, label=curve.name)
        else:
            window = max(2, len(curve.values) // 20)
            axes.plot(curve.steps, curve.values, color=colour, alpha=0.3, linewidth=0.8)
            mean = running_mean(curve.values, window)
            axes.plot(curve.steps, mean, color=colour, label=f"{curve.name}, mean of {window}")
        if curve.name in baselines:
            axes.axhline(baselines[curve.name], color=colour, linestyle=":", label=f"{curve.name}, base model")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.grid(alpha=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    _, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        axes.legend(frameon=False, fontsize=9)


def _bare_svg(text: str, title: str) -> str:
    """The picture alone: without document type and metadata, which only name addresses that nobody needs."""
    text = text[text.index("<svg") :]
    start, end = text.find("<metadata>"), text.find("</metadata>")
    if start >= 0:
        text = text[:start] + text[end + len("</metadata>") :]
    label = title.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return text.replace(INK, "currentColor").replace("<svg", f'<svg role="img" aria-label="{label}"', 1)

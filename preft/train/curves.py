"""Pictures of a run's metrics: one panel a quantity over the steps, as a PNG and as parts of a page.

Whatever a run writes to its `metrics.jsonl` is drawn: what `PANELS` knows goes together and is titled, and every other
number gets a panel of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft.pictures import COLOURS, PANEL_SIZE, Picture, finish_axes, inline_svg, save_png

CURVES_NAME = "curves.png"
_DENSE = 40
"""Points from which a series is drawn faintly, with its running mean on top."""


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
    panels = panels_of(read_curves(rows))
    if not panels:
        return None
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)

    def draw(figure: Any) -> None:
        for place, (title, curves) in enumerate(panels, start=1):
            _draw(figure.add_subplot(lines, columns, place), title, curves, baselines or {})

    return save_png(draw, folder / CURVES_NAME, (PANEL_SIZE[0] * columns, PANEL_SIZE[1] * lines))


def inline_curves(rows: Sequence[Mapping[str, Any]], *, baselines: Mapping[str, float] | None = None) -> list[Picture]:
    """The picture of each panel, for a page."""

    def picture(title: str, curves: Sequence[Curve]) -> Picture:
        return inline_svg(lambda figure: _draw(figure.add_subplot(), title, curves, baselines or {}), title)

    return [picture(title, curves) for title, curves in panels_of(read_curves(rows))]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of up to `window` values that end at each."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[end] - sums[max(0, end - window)]) / min(end, window) for end in range(1, len(values) + 1)]


def _draw(axes: Any, title: str, curves: Sequence[Curve], baselines: Mapping[str, float]) -> None:
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
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
    finish_axes(axes)

"""The picture of an evaluation: every difference with its interval, one panel for each scale."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preft.errors import FileError
from preft.eval.pairing import Comparison

NAMES = ("effects.png", "effects.svg")
_COLOURS = {"better": "#059669", "worse": "#dc2626", "higher": "#2563eb", "lower": "#2563eb", "cannot tell": "#6b7280"}
_MARKS = {"better": "^", "worse": "v", "higher": ">", "lower": "<", "cannot tell": "o"}
_ROW_INCHES, _HEAD_INCHES, _WIDTH_INCHES = 0.32, 0.95, 8.0


def has_matplotlib() -> bool:
    """Whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def save_effects(comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """Writes `effects.png` and `effects.svg`; nothing if no arms were compared.

    Raises:
        FileError: They cannot be written.
    """
    rows = [row for row in comparisons if row.paired.difference is not None]
    if not rows:
        return []
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    paths = [folder / name for name in NAMES]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "preft", "font.size": 9}):
        figure = _figure(_panels(rows))
        FigureCanvasAgg(figure)
        for path in paths:
            try:
                figure.savefig(
                    path, dpi=150, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None
                )
            except OSError as error:
                raise FileError(f"`{path}` cannot be written", got=error.strerror) from None
    return paths


def _panels(rows: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Rows that may share an axis: all shares of examples, and each other metric by itself."""
    panels: dict[str, list[Comparison]] = {}
    for row in rows:
        values = (row.paired.first, row.paired.second)
        is_share = all(value is not None and 0 <= value <= 1 for value in values) and not _is_signed(row)
        panels.setdefault("share of examples, or pass@k" if is_share else row.metric, []).append(row)
    return panels


def _is_signed(row: Comparison) -> bool:
    return row.verdict in ("higher", "lower") or row.metric.startswith("log_")


def _figure(panels: dict[str, list[Comparison]]) -> Any:
    from matplotlib.figure import Figure

    sizes = [len(rows) for rows in panels.values()]
    height = sum(_HEAD_INCHES + _ROW_INCHES * size for size in sizes)
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": [size + 2 for size in sizes]})
    for axis, (title, rows) in zip(axes[:, 0], panels.items(), strict=True):
        _draw(axis, title, rows)
    return figure


def _draw(axis: Any, title: str, rows: Sequence[Comparison]) -> None:
    for place, row in enumerate(rows):
        paired, colour = row.paired, _COLOURS[row.verdict]
        if paired.low is not None:
            axis.plot([paired.low, paired.high], [place, place], color=colour, linewidth=1.5)
        axis.plot([paired.difference], [place], marker=_MARKS[row.verdict], color=colour, markersize=6)
        beside = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
        axis.annotate(row.verdict, (1.01, place), color=colour, **beside)
    axis.axvline(0, color="#111111", linewidth=0.8)
    axis.set_yticks(range(len(rows)), [_label(row) for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlabel(f"difference with 95 % interval: {title}")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _label(row: Comparison) -> str:
    kind = "" if row.filter == "none" else f" ({row.filter})"
    return f"{row.second} - {row.first}\n{row.task}, {row.metric}{kind}, n = {row.paired.num_pairs}"

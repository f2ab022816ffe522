"""Pictures for files and pages, by matplotlib, without touching its global state.

A page's picture has no background, text as text, and ink in the page's own colour, so it is legible in light and dark.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft.errors import FileError, UnsupportedError

COLOURS = ("#3b82f6", "#d97706", "#059669", "#dc2626", "#8b5cf6", "#6b7280")
PANEL_SIZE = (4.6, 2.7)
"""Of one panel, in inches: on a phone the page shows it at about its own size."""
_INK = "#0a0b0c"
"""Colour of text and axes in a page's picture, replaced there by the page's own."""

Draw = Callable[[Any], None]
"""Draws on a `matplotlib.figure.Figure`."""


@dataclass(frozen=True)
class Picture:
    """A picture for a page.

    Attributes:
        title: What it shows.
        svg: The element.
    """

    title: str
    svg: str


def require_matplotlib(what: str = "Curves") -> None:
    """Checks that pictures can be drawn.

    Args:
        what: The pictures, as a sentence begins with them.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UnsupportedError(f"{what} need matplotlib", hint="pip install matplotlib") from None


def save_png(draw: Draw, path: Path, size: tuple[float, float] = PANEL_SIZE) -> Path:
    """Writes a picture.

    Raises:
        UnsupportedError: matplotlib is not installed.
        FileError: It cannot be written.
    """

    def save(figure: Any) -> None:
        try:
            figure.savefig(path, dpi=150, facecolor="white", format="png")
        except OSError as error:
            raise FileError(f"`{path}` cannot be written", got=error.strerror) from None

    _with_figure(draw, save, size, ink="#111111")
    return path


def inline_svg(draw: Draw, title: str, size: tuple[float, float] = PANEL_SIZE) -> Picture:
    """A picture for a page; its inner names follow from what it shows, so that pictures do not clip each other.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    buffer = io.StringIO()

    def save(figure: Any) -> None:
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})

    _with_figure(draw, save, size, ink=_INK, salt=hashlib.sha256(title.encode()).hexdigest())
    text = svg_element(buffer.getvalue())
    label = title.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    svg = text.replace(_INK, "currentColor").replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return Picture(title, svg)


def svg_element(document: str) -> str:
    """The element of an SVG file for a page.

    Neither document type nor metadata block go with it: both only name addresses that nobody needs.
    """
    text = document[document.index("<svg") :]
    start, end = text.find("<metadata>"), text.find("</metadata>")
    return text if start < 0 else text[:start] + text[end + len("</metadata>") :]


def finish_axes(axes: Any) -> None:
    """The looks that all panels share; a legend where there is something to tell apart."""
    axes.grid(alpha=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    _, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        axes.legend(frameon=False, fontsize=9)


def _with_figure(
    draw: Draw, use: Callable[[Any], None], size: tuple[float, float], *, ink: str, salt: str = "preft"
) -> None:
    """Draws, and hands the figure on; the settings hold for drawing and for saving."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 10, **dict.fromkeys(colours, ink)}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        use(figure)

"""Curves and the page of a run: everything that was logged is drawn, and the page asks the network for nothing."""

from __future__ import annotations

import builtins
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from preft.errors import UnsupportedError
from preft.train.curves import inline_curves, panels_of, read_curves, running_mean, save_curves
from preft.train.page import save_page

ROWS: list[dict[str, Any]] = [
    {"step": step, "loss": 3 / step, "learning_rate": 1e-3, "grad_norm": 1.0, "rewards/format": 0.1 * step}
    for step in range(1, 61)
]
ROWS[10]["loss"] = float("nan")
ROWS += [{"step": 30, "eval_loss": 0.7, "note": "not a number", "flag": True}, {"step": 60, "reward": 1.0, "odd": 2}]


def test_metrics_are_read_and_put_together() -> None:
    curves = read_curves(ROWS)
    assert set(curves) == {"loss", "learning_rate", "grad_norm", "rewards/format", "eval_loss", "reward", "odd"}
    assert 11 not in curves["loss"].steps
    assert curves["loss"].values[1] == pytest.approx(1.5)
    held = {title: [curve.name for curve in found] for title, found in panels_of(curves)}
    assert held == {
        "Loss, nats a token": ["loss", "eval_loss"],
        "Reward, mean of a step": ["rewards/format", "reward"],
        "Learning rate": ["learning_rate"],
        "Gradient norm": ["grad_norm"],
        "odd": ["odd"],
    }


def test_the_running_mean() -> None:
    assert running_mean([1, 3, 5, 7], 2) == [1, 2, 4, 6]
    assert running_mean([1, 3], 5) == [1, 2]


def test_the_picture_is_written(tmp_path: Path) -> None:
    path = save_curves(ROWS, tmp_path, baselines={"eval_loss": 2.0})
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    assert save_curves([{"step": 1}], tmp_path / "nowhere") is None


class _Page(HTMLParser):
    """What a page would load, and what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts = 0
        self.cells: list[str] = []
        self.labels: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.loads += [value for name, value in found.items() if name in ("src", "href", "xlink:href", "data")]
        self.scripts += tag == "script"
        if tag == "svg":
            self.labels.append(found["aria-label"])

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def test_the_page_stands_alone(tmp_path: Path) -> None:
    path = save_page(
        tmp_path,
        "Run <1>",
        inline_curves(ROWS, baselines={"eval_loss": 2.0}),
        summary={"steps": 60},
        tables=[("Settings", [{"key": "model", "value": None, "origin": "--set"}]), ("Nothing", [])],
        remarks=["look & see"],
    )
    text = path.read_text()
    page = _Page()
    page.feed(text)
    assert page.scripts == 0
    # References inside the page's own pictures, and an empty icon; nothing else.
    assert [load for load in page.loads if not load.startswith(("#", "data:"))] == []
    assert re.findall(r"url\((?!#)|@import", text) == []
    assert page.labels == [
        "Loss, nats a token", "Reward, mean of a step", "Learning rate", "Gradient norm", "odd",
    ]  # fmt: skip
    assert {"Run <1>", "look & see", "steps", "60", "null", "--set", "eval_loss, base model"} <= set(page.cells)
    assert "Nothing" not in page.cells
    assert "width=device-width" in text
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    clips = [
        name for name in ids if not re.match(r"^(figure|axes|patch|line2d|text|matplotlib|xtick|ytick|legend)", name)
    ]
    assert len(clips) == len(set(clips)), "pictures would clip by each other's frames"


def test_pictures_are_the_same_twice() -> None:
    assert inline_curves(ROWS) == inline_curves(ROWS)


def test_without_matplotlib_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UnsupportedError, match="Curves need matplotlib"):
        save_curves(ROWS, tmp_path)
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        inline_curves(ROWS)

"""What a sweep says: each arm with an interval, differences to the first method, a plot and a page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from preft.errors import FileError
from preft.pictures import COLOURS, Picture, finish_axes, inline_svg, save_png
from preft.train.page import save_page

PLOT_NAME = "sweep.png"
SUMMARY_NAME = "summary.json"
RESAMPLES = 2000
_CHUNK = 200
_SIZE = (5.2, 3.4)
_MEASURES = {"eval_loss": "Evaluation loss, nats a token", "eval_exact": "Completions given exactly"}
_NEAR = 0.1
"""Part by which numbers of parameters that count as equal may differ."""


def summarise(rows: Sequence[Mapping[str, Any]], *, seed: int = 0) -> dict[str, Any]:
    """Arms and differences of a sweep.

    Intervals are 95 % of a bootstrap over the evaluation examples and the seeds at once: a resample draws examples and
    seeds, the same ones for every arm. Deviations of seeds are widened by `sqrt(n / (n - 1))` first, or few seeds
    would look more alike than they are. With one seed the interval is of the examples alone, and says nothing about
    another run.

    Args:
        rows: Of `rows.jsonl`, in the order of the methods.
        seed: Of the resampling.

    Returns:
        `arms`: one object a method and rank; `differences`: each arm minus the first method's at equal rank, and at
        an equal number of parameters, over the seeds that both have.
    """
    grouped: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((row["method"], row["rank"]), {})[row["seed"]] = row
    if not grouped:
        return {"arms": [], "differences": []}
    first = next(iter(grouped))[0]
    arms = [_arm(method, rank, found, seed) for (method, rank), found in grouped.items()]
    differences = []
    for (method, rank), found in grouped.items():
        if method == first:
            continue
        for (other, other_rank), reference in grouped.items():
            if other != first:
                continue
            size, other_size = (next(iter(held.values()))["parameters"] for held in (found, reference))
            equal = [
                name
                for name, holds in (("rank", rank == other_rank), ("parameters", abs(size / other_size - 1) < _NEAR))
                if holds
            ]
            if equal:
                differences.append(_difference((method, rank, found), (other, other_rank, reference), equal, seed))
    return {"arms": arms, "differences": differences}


def save_sweep(folder: Path, rows: Sequence[Mapping[str, Any]], setup: Mapping[str, Any]) -> dict[str, Any]:
    """Writes `summary.json`, `sweep.png` and `index.html`, and returns the summary.

    Raises:
        UnsupportedError: matplotlib is not installed; the summary is written all the same.
        FileError: Something cannot be written.
    """
    summary = summarise(rows)
    try:
        (folder / SUMMARY_NAME).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise FileError(f"`{folder / SUMMARY_NAME}` cannot be written", got=error.strerror) from None

    def draw(figure: Any) -> None:
        for place, measure in enumerate(_MEASURES, start=1):
            _draw(figure.add_subplot(1, 2, place), summary["arms"], measure)

    save_png(draw, folder / PLOT_NAME, (2 * _SIZE[0], _SIZE[1]))
    pictures = [_picture(summary["arms"], measure) for measure in _MEASURES]
    arm = summary["arms"][0]
    save_page(
        folder,
        f"Sweep of {setup['recipe']['model']}",
        pictures,
        summary={
            "cells": len(rows),
            "evaluation examples": arm["examples"],
            "base model": f"loss {arm['base_eval_loss']:.4f}, {arm['base_eval_exact']:.1%} exact",
            "steps of a run": setup["recipe"]["train.max_steps"],
        },
        tables=[
            ("Arms", [arm_cells(found) for found in summary["arms"]]),
            ("Differences", [difference_cells(found) for found in summary["differences"]]),
            ("Settings", [{"key": key, "value": value} for key, value in setup["recipe"].items()]),
        ],
        remarks=remarks_of(summary),
    )
    return summary


def _picture(arms: Sequence[Mapping[str, Any]], measure: str) -> Picture:
    return inline_svg(lambda figure: _draw(figure.add_subplot(), arms, measure), _MEASURES[measure], _SIZE)


def arm_cells(arm: Mapping[str, Any]) -> dict[str, Any]:
    """An arm as a row of a table."""
    return {
        "arm": arm["arm"],
        "parameters": f"{arm['parameters']:,}",
        "seeds": len(arm["seeds"]),
        "rate": f"{arm['learning_rate']:g}",
        "eval loss [95 %]": _interval(arm["eval_loss"], "{:.4f}"),
        "exact [95 %]": _interval(arm["eval_exact"], "{:.1%}"),
        "seconds a run": f"{arm['seconds']:.0f}",
    }


def difference_cells(found: Mapping[str, Any]) -> dict[str, Any]:
    """A difference as a row of a table."""
    return {
        "arm": found["arm"],
        "against": found["against"],
        "equal": " and ".join(found["equal"]),
        "seeds": found["seeds"],
        "eval loss [95 %]": _interval(found["eval_loss"], "{:+.4f}"),
        "loss is": found["eval_loss"]["verdict"],
        "exact [95 %]": _interval(found["eval_exact"], "{:+.1%}"),
        "exact is": found["eval_exact"]["verdict"],
    }


def remarks_of(summary: Mapping[str, Any]) -> list[str]:
    """What a reader must know before the numbers."""
    least = min((len(arm["seeds"]) for arm in summary["arms"]), default=0)
    if least == 1:
        return ["An arm has one seed: its interval is of the examples alone, and says nothing about another run."]
    return []


def _arm(method: str, rank: int, found: Mapping[int, Mapping[str, Any]], seed: int) -> dict[str, Any]:
    rows = [found[key] for key in sorted(found)]
    first = rows[0]
    return {
        "arm": f"{method} r{rank}",
        "method": method,
        "rank": rank,
        "parameters": first["parameters"],
        "learning_rate": first["learning_rate"],
        "seeds": sorted(found),
        "examples": len(first["tokens"]),
        "base_eval_loss": first["base_eval_loss"],
        "base_eval_exact": first["base_eval_exact"],
        "seconds": sum(row["seconds"] for row in rows) / len(rows),
        **{
            measure: {
                **_estimate(_values(rows, measure), _weights(rows, measure), seed),
                "by_seed": [row[measure] for row in rows],
            }
            for measure in _MEASURES
        },
    }


def _difference(
    arm: tuple[str, int, Mapping[int, Mapping[str, Any]]],
    reference: tuple[str, int, Mapping[int, Mapping[str, Any]]],
    equal: list[str],
    seed: int,
) -> dict[str, Any]:
    seeds = sorted(set(arm[2]) & set(reference[2]))
    document: dict[str, Any] = {
        "arm": f"{arm[0]} r{arm[1]}",
        "against": f"{reference[0]} r{reference[1]}",
        "equal": equal,
        "seeds": len(seeds),
    }
    own, other = ([held[2][key] for key in seeds] for held in (arm, reference))
    for measure in _MEASURES:
        if not seeds:
            document[measure] = {"value": None, "low": None, "high": None, "verdict": "cannot tell"}
            continue
        values = _values(own, measure) - _values(other, measure)
        found = _estimate(values, _weights(own, measure), seed)
        document[measure] = {**found, "verdict": _verdict(found)}
    return document


def _verdict(found: Mapping[str, Any]) -> str:
    if found["low"] is None or found["low"] <= 0 <= found["high"]:
        return "cannot tell"
    return "higher" if found["low"] > 0 else "lower"


def _values(rows: Sequence[Mapping[str, Any]], measure: str) -> Any:
    """[S, N]: what each seed has of each example; summed over the weights it gives the measure."""
    return np.asarray([row["losses" if measure == "eval_loss" else "exact"] for row in rows], dtype=np.float64)


def _weights(rows: Sequence[Mapping[str, Any]], measure: str) -> Any:
    """[N]: tokens of each example, or 1."""
    tokens = np.asarray(rows[0]["tokens"], dtype=np.float64)
    return tokens if measure == "eval_loss" else np.ones_like(tokens)


def _estimate(values: Any, weights: Any, seed: int) -> dict[str, Any]:
    """Mean over seeds of `sum(values) / sum(weights)`, with its interval; see `summarise`."""
    num_seeds, num_examples = values.shape
    value = float(values.sum() / weights.sum() / num_seeds)
    if num_examples < 2:
        return {"value": value, "low": None, "high": None}
    if num_seeds > 1:
        centre = values.mean(axis=0)
        values = centre + (values - centre) * math.sqrt(num_seeds / (num_seeds - 1))
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(0, RESAMPLES, _CHUNK):
        # How often each example and each seed is drawn, one resample a row.
        picked = draw.multinomial(num_examples, np.full(num_examples, 1 / num_examples), _CHUNK)
        runs = draw.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), _CHUNK) / num_seeds
        found.append(((runs @ values) * picked).sum(axis=1) / (picked @ weights))
    low, high = np.quantile(np.concatenate(found), [0.025, 0.975])
    return {"value": value, "low": float(low), "high": float(high)}


def _interval(found: Mapping[str, Any], form: str) -> str:
    if found["value"] is None:
        return "-"
    text = form.format(found["value"])
    return text if found["low"] is None else f"{text} [{form.format(found['low'])}, {form.format(found['high'])}]"


def _draw(axes: Any, arms: Sequence[Mapping[str, Any]], measure: str) -> None:
    for number, method in enumerate(dict.fromkeys(arm["method"] for arm in arms)):
        own = sorted((arm for arm in arms if arm["method"] == method), key=lambda arm: arm["parameters"])
        colour = COLOURS[number % len(COLOURS)]
        # Arms of equal size would hide each other's intervals.
        sizes = [arm["parameters"] * 1.04**number for arm in own]
        centres = [arm[measure]["value"] for arm in own]
        ends = [(found["low"], found["high"]) for arm in own if (found := arm[measure])]
        reach = [
            [0.0 if end[side] is None else abs(end[side] - centre) for end, centre in zip(ends, centres, strict=True)]
            for side in (0, 1)
        ]
        axes.errorbar(sizes, centres, yerr=reach, color=colour, marker="o", markersize=4, capsize=2, label=method)
        for arm, size in zip(own, sizes, strict=True):
            seeds = arm[measure]["by_seed"]
            axes.plot([size] * len(seeds), seeds, ".", color=colour, alpha=0.4, markersize=4)
            axes.annotate(
                f"r{arm['rank']}", (size, arm[measure]["value"]), (3, 3),
                textcoords="offset points", fontsize=8, color=colour,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("trained parameters")
    axes.set_title(_MEASURES[measure], fontsize=10)
    finish_axes(axes)

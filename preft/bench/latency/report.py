"""Pictures and the page of a latency benchmark."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from preft.bench.page import PAGE_NAME, as_text, number_text, page_text, table_text, write_page
from preft.bench.plots import LOOKS, inline_figure, save_figure

SERVED_LOOK = ("#2563eb", "-")
PANELS = {"ttft_s": "time to first token, ms", "tpot_s": "time per later token, ms"}

COLUMNS = {
    "arm": lambda entry: entry["arm"],
    "requests/s offered": lambda entry: "trace" if entry["rate"] is None else f"{entry['rate']:g}",
    "served": lambda entry: number_text(entry["requests_per_s"], digits=2),
    "tokens/s": lambda entry: number_text(entry["output_tokens_per_s"]),
    "n": lambda entry: entry["requests"],
    "TTFT p50 ms": lambda entry: number_text(entry["ttft_s_p50"], 1e3, 0),
    "TTFT p95 ms": lambda entry: number_text(entry["ttft_s_p95"], 1e3, 0),
    "TTFT p99 ms": lambda entry: number_text(entry["ttft_s_p99"], 1e3, 0),
    "TPOT p50 ms": lambda entry: number_text(entry["tpot_s_p50"], 1e3),
    "TPOT p99 ms": lambda entry: number_text(entry["tpot_s_p99"], 1e3),
    "ITL p99 ms": lambda entry: number_text(entry["itl_s_p99"], 1e3),
    "whole p50 s": lambda entry: number_text(entry["latency_s_p50"], digits=2),
    "whole p99 s": lambda entry: number_text(entry["latency_s_p99"], digits=2),
    "failed": lambda entry: entry["failed"],
    "knee": lambda entry: "beyond" if entry["past_knee"] else "",
}
ADAPTER_COLUMNS = {
    "arm": lambda entry: entry["arm"],
    "requests/s offered": lambda entry: "trace" if entry["rate"] is None else f"{entry['rate']:g}",
    "adapters": lambda entry: entry["adapters"],
    "least TTFT ms": lambda entry: number_text(entry["adapter_ttft_s_min"], 1e3, 0),
    "median": lambda entry: number_text(entry["adapter_ttft_s_median"], 1e3, 0),
    "most": lambda entry: number_text(entry["adapter_ttft_s_max"], 1e3, 0),
    "Jain index": lambda entry: number_text(entry["jain_index"], digits=3),
}


def save_report(
    entries: Sequence[Mapping[str, Any]], notes: Sequence[str], setup: Mapping[str, Any], out: Path
) -> Path:
    """Writes `latency.png`, `latency.svg` and the page, and returns the page's path.

    Raises:
        FileError: One cannot be written.
    """
    drawn = [entry for entry in entries if entry["rate"] is not None and entry["ttft_s_p50"] is not None]
    picture = ""
    if drawn:
        save_figure(functools.partial(_figure, drawn, metrics=list(PANELS)), out, "latency")
        # One below the other on a phone.
        figures = {metric: functools.partial(_figure, drawn, metrics=[metric]) for metric in PANELS}
        picture = "".join(inline_figure(draw, metric) for metric, draw in figures.items())
        picture = f"<figure>{picture}</figure>"
    title = f"Latency of {Path(str(setup['model'])).name}"
    machine = setup.get("machine", {})
    lengths = (
        f"{setup['trace_requests']} requests of a trace"
        if setup["trace_requests"]
        else f"{setup['input_len']} tokens in, {setup['output_len']} out; arrivals of shape {setup['burstiness']:g}"
        f"{' (Poisson)' if setup['burstiness'] == 1 else ''}, {setup['seconds']:g} s a load"
    )
    parts = [
        f"<h1>{as_text(title)}</h1>",
        f'<p class="soft">{as_text(lengths)}; {as_text(setup["popularity"])} adapters. '
        f"{as_text(machine.get('processor', ''))}, {as_text(machine.get('cores', '?'))} cores; client and server share "
        f"them unless the server is elsewhere. {as_text(setup.get('created', '')[:16])}</p>",
        "".join(f"<p{_tone(note)}>{as_text(note)}</p>" for note in notes),
        picture,
        "<h2>By load</h2>",
        table_text(COLUMNS, entries),
        f'<p class="soft">The knee: the last rate whose median time of a whole request is at most '
        f"{setup['knee_factor']:g} times that of the first, without a failure.</p>",
        "<h2>By adapter</h2>",
        table_text(ADAPTER_COLUMNS, entries),
        "<h2>Set-up</h2>",
        f"<pre>{as_text(json.dumps(setup, indent=2, sort_keys=True))}</pre>",
    ]
    return write_page(out / PAGE_NAME, page_text(title, parts))


def _tone(note: str) -> str:
    return "" if note.startswith("the knee") else ' class="warn"'


def _figure(entries: Sequence[Mapping[str, Any]], pyplot: Any, metrics: Sequence[str]) -> Any:
    figure, grid = pyplot.subplots(
        1, len(metrics), figsize=(4.6 * len(metrics), 3.6), layout="constrained", squeeze=False
    )
    panels = grid[0]
    for panel, metric in zip(panels, metrics, strict=True):
        for arm in dict.fromkeys(entry["arm"] for entry in entries):
            own = [entry for entry in entries if entry["arm"] == arm and entry[f"{metric}_p50"] is not None]
            colour, style = LOOKS.get(own[0]["kind"], SERVED_LOOK) if own else SERVED_LOOK
            rates = [entry["rate"] for entry in own]
            panel.plot(
                rates,
                [entry[f"{metric}_p50"] * 1e3 for entry in own],
                style,
                color=colour,
                marker="o",
                ms=3.5,
                label=arm,
            )
            panel.plot(rates, [entry[f"{metric}_p99"] * 1e3 for entry in own], ":", color=colour, marker=".", ms=3)
        panel.set_title(PANELS[metric], fontsize=10)
        panel.set_xlabel("requests/s offered")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.minorticks_off()
        panel.set_yscale("log")
        for format_ticks in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
            format_ticks("{x:g}")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8, title="line p50, dots p99", title_fontsize=8)
    return figure

"""One self-contained HTML page of a result: no script, no request, light and dark, wide and narrow."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from preft.bench.plots import inline_svgs
from preft.errors import FileError

PAGE_NAME = "index.html"
Columns = Mapping[str, Callable[[Any], object]]
"""Titles and cells of a table."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --soft: #5c5c5c; --line: #d9d9d9; --warn: #9a3412; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #131417; --soft: #a3a3a3; --line: #34363b; --warn: #fdba74; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 100rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; line-height: 1.25; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p, li { overflow-wrap: anywhere; }
.soft { color: var(--soft); } .warn { color: var(--warn); }
.wide { overflow-x: auto; }
figure { margin: 1rem 0; display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure svg { display: block; width: 100%; height: auto; max-width: 44rem; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem 0.3rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
tr.point th { padding-top: 1rem; max-width: 0; overflow: visible; font-weight: normal; color: var(--soft); }
p { max-width: 60rem; }
pre { overflow-x: auto; font-size: 0.8rem; padding: 0.6rem; border: 1px solid var(--line); }
"""


def save_page(folder: Path, entries: Sequence[dict[str, Any]], remarks: Sequence[str], setup: dict[str, Any]) -> Path:
    """Writes the page.

    Args:
        folder: Where.
        entries: See `preft.bench.summary.summarise`.
        remarks: What a reader must know first.
        setup: Of the whole benchmark.

    Raises:
        FileError: It cannot be written.
    """
    path = folder / PAGE_NAME
    return write_page(path, build_page(entries, remarks, setup))


def write_page(path: Path, text: str) -> Path:
    """Writes a page and returns where.

    Raises:
        FileError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(f"`{path}` cannot be written", got=error.strerror) from None
    return path


def build_page(entries: Sequence[dict[str, Any]], remarks: Sequence[str], setup: dict[str, Any]) -> str:
    """The page as text."""
    title = f"Throughput of {Path(str(setup['model'])).name}"
    pictures = inline_svgs(entries)
    machine = setup.get("machine", {})
    workloads = dict.fromkeys((entry["input_len"], entry["output_len"], entry["requests"]) for entry in entries)
    lengths = "; ".join(f"{given} tokens in, {out} out, {count} requests a run" for given, out, count in workloads)
    parts = [
        f"<h1>{as_text(title)}</h1>",
        f'<p class="soft">{as_text(lengths)}; {as_text(setup["popularity"])} adapters, {as_text(setup["slots"])} '
        f"slots, mode {as_text(setup['mode'])}, {as_text(setup['repeats'])} repeats. "
        f"{as_text(machine.get('processor', ''))}, "
        f"{as_text(machine.get('cores', '?'))} cores. {as_text(setup.get('created', '')[:16])}</p>",
        "".join(f'<p class="warn">{as_text(remark)}</p>' for remark in remarks),
        f"<figure>{''.join(pictures)}</figure>" if pictures else '<p class="warn">No arm was measured.</p>',
        "<h2>Throughput</h2>",
        table_text(SPEED_COLUMNS, entries),
        '<p class="soft">Ratios are geometric means of paired repeats with a 95 % interval. An interval that includes '
        "1 shows no difference.</p>",
        '<p class="soft">Cold: the first run of a process, with adapters that the engine has never seen.</p>',
        "<h2>Latency</h2>",
        table_text(LATENCY_COLUMNS, entries),
        '<p class="soft">Adapters in prefill and decode: share of step time spent in adapter kernels.</p>',
        "<h2>Per adapter, and memory</h2>",
        table_text(FAIRNESS_COLUMNS, entries),
        "<h2>Set-up</h2>",
        f"<pre>{as_text(json.dumps(setup, indent=2, sort_keys=True))}</pre>",
    ]
    return page_text(title, parts)


def page_text(title: str, parts: Sequence[str]) -> str:
    """A whole page around parts of HTML."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{as_text(title)}</title><style>{_STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def ratio_text(interval: dict[str, Any] | None) -> str:
    """A ratio with its interval, such as `0.93 [0.90, 0.96]`, and whether it includes 1."""
    if interval is None:
        return "-"
    if interval["low"] is None:
        return f"{interval['ratio']:.3f}"
    tail = " (includes 1)" if interval["includes_one"] else ""
    return f"{interval['ratio']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]{tail}"


def range_text(values: dict[str, float | None], digits: int = 1) -> str:
    """A median with its range, such as `431.0 (420.1-440.9)`."""
    if values["median"] is None:
        return "-"
    return f"{values['median']:.{digits}f} ({values['min']:.{digits}f}-{values['max']:.{digits}f})"


def number_text(value: float | None, factor: float = 1.0, digits: int = 1) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value * factor:.{digits}f}"


def share_text(value: float | None) -> str:
    """A share of step time in per cent."""
    return "-" if value is None else f"{value:.1%}"


SPEED_COLUMNS = {
    "arm": lambda entry: entry["arm"],
    "adapters": lambda entry: entry["adapters"],
    "rank": lambda entry: "-" if entry["kind"].startswith("base") else entry["rank"],
    "n": lambda entry: entry["repeats"],
    "tokens/s, median (range)": lambda entry: range_text(entry["output_tokens_per_s"]),
    "of base": lambda entry: ratio_text(entry["ratio_to_base"]),
    "of compiled base": lambda entry: ratio_text(entry["ratio_to_base_compiled"]),
    "over lora": lambda entry: ratio_text(entry["ratio_to_lora"]),
    "over stock-lora": lambda entry: ratio_text(entry["ratio_to_stock_lora"]),
    "requests/s": lambda entry: number_text(entry["requests_per_s"], digits=2),
    "cold tokens/s": lambda entry: number_text(entry["cold_output_tokens_per_s"]),
}
"""Titles and cells of the first table; the command line shows the same."""

LATENCY_COLUMNS = {
    "arm": lambda entry: entry["arm"],
    "adapters": lambda entry: entry["adapters"],
    "LoRA rank": lambda entry: entry["lora_rank"],
    "prefill s": lambda entry: number_text(entry["prefill_s"], digits=3),
    "decode s": lambda entry: number_text(entry["decode_s"], digits=3),
    "decode tokens/s": lambda entry: number_text(entry["decode_tokens_per_s"]),
    "adapters in prefill": lambda entry: share_text(entry["adapter_prefill_share"]),
    "adapters in decode": lambda entry: share_text(entry["adapter_decode_share"]),
    "TTFT p50 ms": lambda entry: number_text(entry["ttft_s_p50"], 1e3),
    "TTFT p95 ms": lambda entry: number_text(entry["ttft_s_p95"], 1e3),
    "TTFT p99 ms": lambda entry: number_text(entry["ttft_s_p99"], 1e3),
    "TPOT p50 ms": lambda entry: number_text(entry["tpot_s_p50"], 1e3, 2),
    "TPOT p99 ms": lambda entry: number_text(entry["tpot_s_p99"], 1e3, 2),
    "ITL p50 ms": lambda entry: number_text(entry["itl_s_p50"], 1e3, 2),
    "ITL p95 ms": lambda entry: number_text(entry["itl_s_p95"], 1e3, 2),
    "ITL p99 ms": lambda entry: number_text(entry["itl_s_p99"], 1e3, 2),
}

FAIRNESS_COLUMNS = {
    "arm": lambda entry: entry["arm"],
    "adapters": lambda entry: entry["adapters"],
    "LoRA rank": lambda entry: entry["lora_rank"],
    "request tokens/s, median (range)": lambda entry: (
        range_text(entry["fairness"]["request_tokens_per_s"], 2) if entry["fairness"] else "-"
    ),
    "TTFT s, median (range)": lambda entry: range_text(entry["fairness"]["ttft_s"], 3) if entry["fairness"] else "-",
    "Jain index": lambda entry: number_text((entry["fairness"] or {}).get("jain_index"), digits=3),
    "peak RSS GB": lambda entry: number_text(entry["peak_rss_bytes"], 1e-9, 2),
    "peak GPU GB": lambda entry: number_text(entry["peak_gpu_bytes"], 1e-9, 2),
    "J/token": lambda entry: number_text(entry["joules_per_output_token"], digits=3),
    "other busy cores": lambda entry: number_text(entry["other_busy_cores"], digits=2),
}


def shown_columns(columns: Columns, entries: Sequence[Mapping[str, Any]]) -> dict[str, Callable[[Any], object]]:
    """The columns that say something of at least one entry."""
    return {
        title: cell for title, cell in columns.items() if any(cell(entry) not in ("-", "") for entry in entries)
    } or dict(columns)


def table_text(columns: Columns, entries: Sequence[Mapping[str, Any]]) -> str:
    """A table of HTML that scrolls by itself where it is wide, with a line above each point where there are several."""
    columns = shown_columns(columns, entries)
    points = list(dict.fromkeys((entry["adapters"], entry["lora_rank"]) for entry in entries))
    head = "".join(f"<th>{as_text(title)}</th>" for title in columns)
    body, last = "", None
    for entry in entries:
        point = (entry["adapters"], entry["lora_rank"])
        if len(points) > 1 and point != last:
            text = f"{point[0]} adapter{'' if point[0] == 1 else 's'}, LoRA rank {point[1]}"
            body += f'<tr class="point"><th>{as_text(text)}</th><th colspan="{len(columns) - 1}"></th></tr>'
        last = point
        body += "<tr>" + "".join(f"<td>{as_text(cell(entry))}</td>" for cell in columns.values()) + "</tr>"
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def as_text(value: object) -> str:
    """A value as text of HTML."""
    return html.escape(str(value))

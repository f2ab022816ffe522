"""The model card that lies beside an adapter."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Sequence
from string import Template

from preft.adapters.adapter import Adapter
from preft.positions import Policy


def model_card(adapter: Adapter, *, title: str, origin: str, remarks: Sequence[str] = ()) -> str:
    """Fills the card's template.

    Args:
        adapter: What the card is about.
        title: Its heading.
        origin: One line on what it was made from.
        remarks: Notes and warnings, each a sentence.
    """
    source = importlib.resources.files("preft_templates").joinpath("cards", "adapter.md")
    manifest = adapter.manifest
    ranks = sorted({site.rank for site in manifest.sites})
    return Template(source.read_text(encoding="utf-8")).substitute(
        base=_line(manifest.base.model),
        base_yaml=json.dumps(_line(manifest.base.model), ensure_ascii=False),
        kind=manifest.kind,
        title=_line(title),
        label=manifest.label,
        num_sites=len(manifest.sites),
        ranks=str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}",
        size=format_bytes(adapter.num_bytes),
        dtype=manifest.dtype,
        positions=str(manifest.positions),
        meaning=meaning(manifest.positions),
        origin=_line(origin),
        digest=adapter.digest,
        remarks="".join(f"\n- {_line(remark)}" for remark in remarks),
    )


def meaning(policy: Policy) -> str:
    """A position policy in words."""
    if policy.name == "all":
        return "every token, prompt and output alike."
    if policy.name == "prompt":
        return "every prompt token and no output token. Output token 1 is sampled under it; decode runs on base."
    parts = [f"the first {policy.first}"] * bool(policy.first) + [f"the last {policy.last}"] * bool(policy.last)
    return f"{' and '.join(parts)} prompt tokens, and no output token."


def format_bytes(count: int) -> str:
    """A byte count for people, such as `4.7 MB`."""
    value, units = float(count), ("B", "kB", "MB", "GB", "TB")
    for unit in units:
        if value < 1000 or unit == units[-1]:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{count} B"


def _line(text: str) -> str:
    """A text that cannot break out of its line: names come from files of others."""
    return " ".join(text.split())

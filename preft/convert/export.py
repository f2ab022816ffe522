"""Back to PEFT: the same sites as an ordinary LoRA, which acts on every token."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft.adapters.adapter import Adapter
from preft.adapters.store import atomic_folder, load_adapter, require_writable_target
from preft.convert.names import PEFT_PREFIX
from preft.convert.peft_lora import CONFIG_NAME
from preft.convert.weights import SAFETENSORS_NAME
from preft.errors import UnsupportedError, UsageError
from preft.types import Site, SiteKind


@dataclass(frozen=True)
class ExportReport:
    """What an export did.

    Attributes:
        folder: Where the PEFT adapter lies.
        digest: Of the adapter that was exported.
        positions: Its policy, which the PEFT adapter does not have.
        num_sites: Modules that PEFT will wrap.
        notes: What changes.
        seconds: How long it took.
    """

    folder: Path
    digest: str
    positions: str
    num_sites: int
    notes: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "folder": str(self.folder),
            "format": "peft",
            "digest": self.digest,
            "positions": self.positions,
            "num_sites": self.num_sites,
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }


def export_peft(source: Path, target: Path, *, as_all_token: bool, force: bool = False) -> ExportReport:
    """Writes an adapter as a PEFT LoRA folder.

    Args:
        source: An adapter folder of ours.
        target: Folder to write; it must not exist or be empty, unless `force` and it holds a PEFT adapter.
        as_all_token: Acknowledges that PEFT will apply the adapter to every token, outputs included. An adapter that
            does so anyway (`positions: all`) needs no acknowledgement.
        force: Replace the PEFT adapter that is there.

    Raises:
        UsageError: The acknowledgement is missing, or the target is taken.
        UnsupportedError: A site has no form in PEFT.
        FileError: Something cannot be read or written.
        AdapterError: The source is not a valid adapter.
    """
    began = time.monotonic()
    require_writable_target(target, force=force, marker=CONFIG_NAME, what="a PEFT adapter")
    adapter = load_adapter(source)
    manifest = adapter.manifest
    blocks = [site.path for site in manifest.sites if site.kind is SiteKind.BLOCK]
    if blocks:
        raise UnsupportedError(
            "An adapter with block sites (DiReFT) has no form in PEFT",
            got=f"{len(blocks)} block sites, the first at `{blocks[0]}`",
            accepted="an adapter whose sites are all linear modules",
        )
    if manifest.positions.is_prompt_only and not as_all_token:
        raise UsageError(
            "PEFT has no positions: it would apply this adapter to every token, outputs included",
            got=f"positions `{manifest.positions}`",
            hint="pass `--as-all-token` if that is what you want; outputs will differ from prefill-only serving",
        )
    notes = []
    if manifest.positions.is_prompt_only:
        notes.append(f"positions `{manifest.positions}` are lost: PEFT adapts every token, so outputs will differ")
    _write(adapter, target)
    seconds = time.monotonic() - began
    return ExportReport(target, adapter.digest, str(manifest.positions), len(manifest.sites), tuple(notes), seconds)


def _write(adapter: Adapter, target: Path) -> None:
    from peft import LoraConfig
    from safetensors.torch import save_file

    sites = adapter.manifest.sites
    rank = _commonest([site.rank for site in sites])
    rslora = _needs_rslora(sites)
    alphas = {site.path: _alpha(site, rslora=rslora) for site in sites}
    alpha = _commonest(list(alphas.values()))
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=adapter.manifest.base.model,
        inference_mode=True,
        r=rank,
        lora_alpha=alpha,
        use_rslora=rslora,
        target_modules=[site.path for site in sites],
        rank_pattern={_pattern(site.path): site.rank for site in sites if site.rank != rank},
        alpha_pattern={_pattern(path): value for path, value in alphas.items() if value != alpha},
    )
    tensors = {}
    for site in sites:
        numbers = adapter.site_tensors(site)
        tensors[f"{PEFT_PREFIX}{site.path}.lora_A.weight"] = numbers.down.contiguous()
        tensors[f"{PEFT_PREFIX}{site.path}.lora_B.weight"] = numbers.up.contiguous()
    with atomic_folder(target) as partial:
        config.save_pretrained(os.fspath(partial))
        save_file(tensors, partial / SAFETENSORS_NAME, metadata={"format": "pt"})


def _pattern(path: str) -> str:
    """A key that PEFT's pattern matching finds for this path and for no other."""
    return f"^{re.escape(path)}"


def _commonest(values: Sequence[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]


def _denominator(site: Site, *, rslora: bool) -> float:
    return float(site.rank**0.5) if rslora else site.rank


def _needs_rslora(sites: Sequence[Site]) -> bool:
    """Whether only alpha / sqrt(rank) reproduces every scale from round alphas."""

    def is_round(*, rslora: bool) -> bool:
        return all(float(_alpha(site, rslora=rslora)).is_integer() for site in sites)

    return not is_round(rslora=False) and is_round(rslora=True)


def _alpha(site: Site, *, rslora: bool) -> int | float:
    """The alpha from which PEFT computes the site's scale, bit for bit where a float can do that."""
    divisor = _denominator(site, rslora=rslora)
    alpha = site.scale * divisor
    near = round(alpha)
    return near if near / divisor == site.scale else alpha

"""Conversion from end to end: find the adapter and its base, read one against the other, write ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preft.adapters.adapter import Adapter
from preft.adapters.fingerprint import BaseFingerprint, fingerprint_base
from preft.adapters.manifest import Manifest
from preft.adapters.remarks import head_note
from preft.adapters.store import require_writable_target, save_adapter
from preft.config.progress import Progress, stage
from preft.convert.card import model_card
from preft.convert.detect import SourceKind, detect, locate_source
from preft.convert.draft import Base, Draft
from preft.convert.peft_lora import convert_peft_lora, read_peft_lora
from preft.convert.pyreft import POSITIONS_REASON, convert_pyreft, read_pyreft
from preft.errors import AdapterError, BaseMismatchError, PreftError, UsageError
from preft.models.chat_template import chat_template_sha256
from preft.models.locate import find_local_model, is_embedded, locate_model
from preft.positions import ACCEPTED, PROMPT, Policy
from preft.provenance import provenance

MOVES_NOTHING = "the adapter moves nothing: {why}; `preft check` will fail on it"


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        manifest: Of the adapter that was written.
        folder: Where it lies.
        source: What it was made from, as the user named it.
        warnings: What the user should look at.
        notes: What was resolved on the way.
        seconds: How long it took.
    """

    manifest: Manifest
    folder: Path
    source: str
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        manifest = self.manifest
        return {
            "folder": str(self.folder),
            "source": self.source,
            "label": manifest.label,
            "kind": manifest.kind,
            "positions": str(manifest.positions),
            "base": manifest.base.model,
            "base_mismatch_allowed": manifest.base.mismatch_allowed,
            "digest": manifest.digest,
            "dtype": manifest.dtype,
            "num_sites": len(manifest.sites),
            "ranks": sorted({site.rank for site in manifest.sites}),
            "scales": sorted({site.scale for site in manifest.sites}),
            "sites": [{"path": site.path, "rank": site.rank, "scale": site.scale} for site in manifest.sites],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class _Opened:
    """A source that has been read as far as it can be without its base."""

    named_base: str | None
    default_positions: Policy | None
    read: Callable[[Base], Draft]
    positions_reason: str = ""


def convert(
    source: str,
    target: Path,
    *,
    base: str | None = None,
    positions: str | None = None,
    force: bool = False,
    allow_base_mismatch: bool = False,
    max_rank: int | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Converts a PEFT LoRA or a pyreft checkpoint to an adapter of ours.

    Args:
        source: A folder, or a hub id `org/name[@revision]`.
        target: Folder to write; it must not exist or be empty, unless `force`.
        base: The base model; the one that the source names by default.
        positions: Position policy; `prompt` for a PEFT LoRA by default, required for a pyreft checkpoint.
        force: Replace the adapter that is there.
        allow_base_mismatch: Accept a `base` whose weights differ from those of the base that the source names, if
            that one is on this machine to compare with; recorded in the manifest, and honoured wherever the adapter
            is loaded. Needed for quantised and re-saved bases. Shapes and architecture are never overridden.
        max_rank: Refuse a site of a larger rank.
        progress: Receives the stages, or None.

    Raises:
        UsageError: An argument cannot be meant, or the target is taken.
        FileError: Something cannot be read or written.
        AdapterError: The source is damaged, or does not agree with itself or its base.
        UnsupportedError: It is something that cannot be converted.
    """
    began = time.monotonic()
    policy = Policy.parse(positions) if positions is not None else None
    require_writable_target(target, force=force)
    with stage(progress, f"Reading {source}"):
        folder = locate_source(source, progress=None)
        opened = _open(folder)
    policy = policy or opened.default_positions
    if policy is None:
        raise UsageError(
            "The positions that the source was trained on must be named: `--positions`",
            got=opened.positions_reason or "a source that does not record them",
            accepted=ACCEPTED,
            hint="pass the same ones as in training, such as `--positions f1+l1`; `prompt` for every prompt token",
        )
    found, remarks = _find_base(base, opened.named_base, allow_base_mismatch=allow_base_mismatch, progress=progress)
    with stage(progress, f"Checking it against {found.name}"):
        draft = opened.read(found)
        _require_rank(draft, max_rank)
        adapter, notes, warnings = _build(draft, found, policy, folder, source, remarks)
    with stage(progress, f"Writing {target}"):
        name = Path(source).resolve().name if Path(source).is_dir() else source
        title = f"{name} ({adapter.manifest.label})"
        card = model_card(adapter, title=title, origin=f"`{source}`", remarks=(*warnings, *notes))
        save_adapter(adapter, target, readme=card, force=force)
    return ConversionReport(adapter.manifest, target, source, warnings, notes, time.monotonic() - began)


def _open(folder: Path) -> _Opened:
    """Reads the source. A new format is one more branch: what it names, its default policy, and how it is read."""
    kind = detect(folder)
    if kind is SourceKind.PYREFT:
        checkpoint = read_pyreft(folder)
        return _Opened(None, None, lambda base: convert_pyreft(checkpoint, base), POSITIONS_REASON)
    lora = read_peft_lora(folder)
    return _Opened(lora.named_base, PROMPT, lambda base: convert_peft_lora(lora, base))


def _find_base(
    given: str | None, named: str | None, *, allow_base_mismatch: bool, progress: Progress | None
) -> tuple[Base, _Remarks]:
    """The base to convert against, compared with the one that the source names where that is possible."""
    name = given or named
    if name is None:
        raise UsageError("The adapter names no base model", hint="name it: `--base MODEL`")
    try:
        folder = locate_model(name, progress=progress)
    except PreftError as error:
        if given is not None:
            raise
        raise type(error)(
            f"The base model that the adapter names cannot be found: {error.what}",
            got=error.got or f"`{name}`",
            accepted=error.accepted,
            hint="name the base yourself: `--base MODEL`",
        ) from None
    fingerprint = fingerprint_base(folder, model=name)
    remarks = _Remarks()
    if named is not None and not _same_model(name, named, folder):
        fingerprint = _compare(fingerprint, named, allow=allow_base_mismatch, remarks=remarks)
    return Base(name, folder, fingerprint), remarks


class _Remarks:
    """Notes and warnings about the base."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []


def _same_model(name: str, named: str, folder: Path) -> bool:
    if name == named or (is_embedded(name) and is_embedded(named)):
        return True
    other = Path(named).expanduser()
    return other.is_dir() and other.resolve() == folder.resolve()


def _compare(fingerprint: BaseFingerprint, named: str, *, allow: bool, remarks: _Remarks) -> BaseFingerprint:
    """Compares the given base with the one that the source names, if that one is here; nothing is fetched for it."""
    local = find_local_model(named)
    if local is None:
        says = f"the adapter names `{named}` as its base, and `{fingerprint.model}` was given"
        text = f"{says}: the shapes agree, and the weights could not be compared"
        (remarks.notes if _base_name(named) == _base_name(fingerprint.model) else remarks.warnings).append(text)
        return fingerprint
    theirs = fingerprint_base(local, model=named)
    try:
        theirs.require_same(fingerprint)
    except BaseMismatchError:
        theirs.require_same(fingerprint, allow_weights=allow)
        remarks.warnings.append(
            f"the weights of `{fingerprint.model}` are not those of `{named}`, which the adapter was made for; "
            "accepted as asked, and recorded in the manifest"
        )
        return replace(fingerprint, mismatch_allowed=True)
    remarks.notes.append(f"`{fingerprint.model}` has the weights of `{named}`, which the adapter names")
    return fingerprint


def _base_name(model: str) -> str:
    return Path(model.partition("@")[0].rstrip("/")).name.casefold()


def _require_rank(draft: Draft, max_rank: int | None) -> None:
    largest = max(draft.sites, key=lambda site: site.rank)
    if max_rank is not None and largest.rank > max_rank:
        raise AdapterError(
            "The adapter's rank is above the limit",
            got=f"rank {largest.rank} at `{largest.path}`",
            accepted=f"at most {max_rank}, by `--max-rank`",
            hint="raise `--max-rank`, and the server's limit with it",
        )


def _build(
    draft: Draft, base: Base, policy: Policy, folder: Path, source: str, remarks: _Remarks
) -> tuple[Adapter, tuple[str, ...], tuple[str, ...]]:
    notes = [*remarks.notes, *draft.notes]
    warnings = [*remarks.warnings, *draft.warnings]
    manifest = Manifest(
        positions=policy,
        dtype=draft.dtype,
        sites=draft.sites,
        base=base.fingerprint,
        chat_template_sha256=chat_template_sha256(folder),
    )
    note = head_note(manifest)
    notes += [note] if note is not None else []
    facts = {"source": source, **draft.facts, "notes": notes}
    manifest = replace(manifest, provenance=provenance("convert", facts))
    adapter = Adapter.build(manifest, draft.tensors)
    if adapter.moves_nothing():
        why = "every scale is 0" if all(site.scale == 0 for site in draft.sites) else "every update is exactly zero"
        warnings.append(MOVES_NOTHING.format(why=why))
    return adapter, tuple(notes), tuple(warnings)

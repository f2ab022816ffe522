"""What an adapter is, read from its files alone: manifest, sites, ranks, scales, bytes, digest, and its base."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from preft.adapters.adapter import Adapter
from preft.adapters.fingerprint import fingerprint_base
from preft.adapters.manifest import Manifest
from preft.adapters.remarks import head_note
from preft.adapters.store import load_adapter
from preft.errors import BaseMismatchError
from preft.models.locate import locate_model
from preft.models.structure import ModelStructure, read_structure
from preft.types import Site, SiteKind


@dataclass(frozen=True)
class SiteGroup:
    """The sites of one type of module, such as all `q_proj`.

    Attributes:
        module: Last part of the modules' paths, or `block output`.
        kind: `linear` or `block`.
        count: How many sites.
        ranks: Their ranks, each once.
        scales: Their scales, each once.
        parameters: Values in their tensors.
    """

    module: str
    kind: str
    count: int
    ranks: tuple[int, ...]
    scales: tuple[float, ...]
    parameters: int


@dataclass(frozen=True)
class BaseMatch:
    """How an adapter and a base fit.

    Attributes:
        model: The base that was named.
        result: `match`, `unverified` (no weights to compare), `weights differ` or `another architecture`.
        detail: What differs, or None.
        missing_sites: Sites that the base has no module for, or one of another shape.
    """

    model: str
    result: str
    detail: str | None
    missing_sites: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the adapter can be used with this base as it stands."""
        return self.result in ("match", "unverified") and not self.missing_sites


@dataclass(frozen=True)
class InspectReport:
    """What was found.

    Attributes:
        folder: The adapter's folder.
        manifest: Its manifest.
        label: The field's name for it, such as `LoRAP`.
        groups: Its sites by type of module.
        num_bytes: Bytes of its tensors.
        file_bytes: Bytes of its folder's two files.
        digest_verified: Whether the tensors give the digest that the manifest records. A load refuses any other.
        head_note: What a site on the output head can do, or None if there is none.
        moves_nothing: Whether every update is exactly zero.
        base: How it fits the base that was named, or None if none was.
    """

    folder: Path
    manifest: Manifest
    label: str
    groups: tuple[SiteGroup, ...]
    num_bytes: int
    file_bytes: int
    digest_verified: bool
    head_note: str | None
    moves_nothing: bool
    base: BaseMatch | None

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "folder": str(self.folder),
            "label": self.label,
            "digest": self.manifest.digest,
            "digest_verified": self.digest_verified,
            "num_sites": len(self.manifest.sites),
            "max_rank": self.manifest.max_rank,
            "bytes": self.num_bytes,
            "file_bytes": self.file_bytes,
            "moves_nothing": self.moves_nothing,
            "head_note": self.head_note,
            "groups": [asdict(group) for group in self.groups],
            "base_match": {**asdict(self.base), "fits": self.base.fits} if self.base is not None else None,
            "manifest": self.manifest.to_dict(),
        }


def inspect_adapter(folder: Path, *, base: str | None = None) -> InspectReport:
    """Reads an adapter and, where a base is named, compares the two. A mismatch is reported, not raised.

    Args:
        folder: An adapter folder.
        base: A model to compare with, as for `preft.models.locate.locate_model`.

    Raises:
        FileError: The folder or the base cannot be read.
        AdapterError: The folder is not a valid adapter, its digest included.
    """
    folder = Path(folder)
    adapter = load_adapter(folder)
    manifest = adapter.manifest
    return InspectReport(
        folder=folder,
        manifest=manifest,
        label=manifest.label,
        groups=group_sites(manifest.sites),
        num_bytes=adapter.num_bytes,
        file_bytes=sum((folder / name).stat().st_size for name in ("preft.json", "preft.safetensors")),
        digest_verified=True,
        head_note=head_note(manifest),
        moves_nothing=adapter.moves_nothing(),
        base=match_base(adapter, base) if base is not None else None,
    )


def group_sites(sites: Iterable[Site]) -> tuple[SiteGroup, ...]:
    """Sites by type of module, in the order in which the types first occur."""
    found: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        module = "block output" if site.kind is SiteKind.BLOCK else site.path.rpartition(".")[2]
        found.setdefault((module, site.kind.value), []).append(site)
    return tuple(
        SiteGroup(
            module=module,
            kind=kind,
            count=len(members),
            ranks=tuple(sorted({site.rank for site in members})),
            scales=tuple(sorted({site.scale for site in members})),
            parameters=sum(site.num_parameters for site in members),
        )
        for (module, kind), members in found.items()
    )


def match_base(adapter: Adapter, model: str) -> BaseMatch:
    """Compares an adapter with a base: fingerprints, then every site.

    Raises:
        FileError: The base cannot be read.
    """
    folder = locate_model(model)
    recorded, found = adapter.manifest.base, fingerprint_base(folder, model=model)
    missing = _missing_sites(adapter.manifest.sites, read_structure(folder))
    try:
        recorded.require_same(found, allow_weights=True)
    except BaseMismatchError as error:
        return BaseMatch(model, "another architecture", f"{error.got}; the adapter: {error.accepted}", missing)
    if recorded.weights is None or found.weights is None:
        return BaseMatch(model, "unverified", "there are no weight digests to compare", missing)
    names = sorted(set(recorded.weights) & set(found.weights))
    differing = [name for name in names if recorded.weights[name] != found.weights[name]]
    if differing or not names:
        detail = f"{len(differing)} of {len(names)} compared tensors differ" if names else "no tensor name in common"
        if recorded.mismatch_allowed:
            detail += "; the manifest allows it"
        return BaseMatch(model, "weights differ", detail, missing)
    return BaseMatch(model, "match", None, missing)


def _missing_sites(sites: Iterable[Site], structure: ModelStructure) -> tuple[str, ...]:
    missing = []
    for site in sites:
        if site.kind is SiteKind.BLOCK:
            fits = site.path in structure.blocks and site.in_features == structure.hidden_size
        else:
            info = structure.modules.get(site.path)
            fits = info is not None and (info.in_features, info.out_features) == (site.in_features, site.out_features)
        if not fits:
            missing.append(site.path)
    return tuple(missing)

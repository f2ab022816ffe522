"""Names to adapters, on the front end's side: what a client's `model` field can mean.

An adapter is checked when it is registered: read, digested, compared with the base model and the engine's limits. One
that fails stays listed as unavailable with its reason, and blocks nobody. A name that is registered again means the
new digest for new requests; requests in flight carry the old digest and finish under it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from preft.adapters.adapter import Adapter
from preft.adapters.catalog import require_name, require_no_twin, unknown_adapter
from preft.adapters.fingerprint import BaseFingerprint
from preft.adapters.manifest import Manifest
from preft.adapters.store import load_adapter
from preft.errors import AdapterError, PreftError, UnsupportedError
from preft.serve.backend.reference import AdapterReference
from preft.serve.settings import EngineSettings
from preft.types import SiteKind


@dataclass(frozen=True)
class Registered:
    """An adapter that can be served.

    Attributes:
        name: What clients call it.
        reference: What the engine calls it.
        manifest: What it is.
        num_bytes: Of its tensors on disk.
    """

    name: str
    reference: AdapterReference
    manifest: Manifest
    num_bytes: int

    def to_dict(self) -> dict[str, object]:
        """For status answers; no path, which would name the server's folders."""
        return {
            "name": self.name,
            "available": True,
            "digest": self.reference.digest,
            "kind": self.manifest.label,
            "positions": str(self.manifest.positions),
            "max_rank": self.manifest.max_rank,
            "sites": len(self.manifest.sites),
            "bytes": self.num_bytes,
        }


@dataclass(frozen=True)
class Unavailable:
    """An adapter that cannot be served.

    Attributes:
        name: What clients would call it.
        error: Why.
    """

    name: str
    error: PreftError

    def to_dict(self) -> dict[str, object]:
        """For status answers."""
        return {"name": self.name, "available": False, "error": self.error.to_dict()}


class AdapterRegistry:
    """The registered adapters of one engine.

    Args:
        base: Fingerprint of the base model.
        settings: The engine's limits.
        reserved: Names that mean the base model.
    """

    def __init__(self, base: BaseFingerprint, settings: EngineSettings, *, reserved: Collection[str] = ()) -> None:
        self._base = base
        self._settings = settings
        self._reserved = frozenset(reserved)
        self._entries: dict[str, Registered | Unavailable] = {}

    def register(self, name: str, source: Path | str) -> Registered:
        """Checks an adapter and registers it, replacing what the name meant.

        Raises:
            UsageError: The name is not acceptable, or differs from another only in case.
            PreftError: The adapter cannot be served; the name keeps its meaning.
        """
        require_name(name, reserved=self._reserved)
        require_no_twin(name, self._entries)
        folder = Path(source).resolve()
        adapter = load_adapter(folder)
        self._require_servable(adapter)
        reference = AdapterReference(adapter.digest, adapter.manifest.positions, str(folder))
        entry = Registered(name, reference, adapter.manifest, adapter.num_bytes)
        self._entries[name] = entry
        return entry

    def register_all(self, sources: Mapping[str, Path]) -> list[Unavailable]:
        """Registers many; those that cannot be served are listed as unavailable, and returned."""
        failed = []
        for name, source in sources.items():
            require_name(name, reserved=self._reserved)
            try:
                self.register(name, source)
            except PreftError as error:
                failed.append(Unavailable(name, error))
                self._entries[name] = failed[-1]
        return failed

    def remove(self, name: str) -> None:
        """Forgets a name; requests in flight are not touched.

        Raises:
            UnknownAdapterError: It is not registered.
        """
        if name not in self._entries:
            raise unknown_adapter(name, self._entries)
        del self._entries[name]

    def resolve(self, name: str) -> Registered:
        """What a name means now.

        Raises:
            UnknownAdapterError: Nothing.
            AdapterError: An adapter that cannot be served.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise unknown_adapter(name, self._entries)
        if isinstance(entry, Unavailable):
            raise AdapterError(f"The adapter `{name}` is not available", got=entry.error.what, hint=entry.error.hint)
        return entry

    def entries(self) -> list[Registered | Unavailable]:
        """All names, sorted."""
        return [self._entries[name] for name in sorted(self._entries)]

    def _require_servable(self, adapter: Adapter) -> None:
        manifest, settings = adapter.manifest, self._settings
        manifest.base.require_same(self._base, allow_weights=settings.allow_base_mismatch)
        manifest.require_rank(settings.max_rank)
        head = any(site.kind is SiteKind.LINEAR and site.path.endswith("lm_head") for site in manifest.sites)
        if head and not settings.lm_head:
            raise UnsupportedError(
                "The adapter has an `lm_head` site, and the engine's head takes no adapters",
                hint="start the engine with `--lm-head`",
            )

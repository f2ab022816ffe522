"""Names to adapters, on the front end's side: what a client's `model` field can mean.

An adapter is checked when it is registered: read, digested, compared with the base model and the engine's limits. One
that fails stays listed as unavailable with its reason, and blocks nobody. A name that is registered again means the
new digest for new requests; requests in flight carry the old digest and finish under it. Digests that no name means
any more are remembered until no request uses them, so that the workers can then let go of them.
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
from preft.errors import AdapterError, PreftError, UnsupportedError, UsageError
from preft.serve.backend.reference import AdapterReference
from preft.serve.settings import EngineSettings
from preft.types import SiteKind

Source = Path | str | Adapter
"""Where an adapter comes from: its folder, or memory."""


@dataclass(frozen=True)
class Registered:
    """An adapter that can be served.

    Attributes:
        name: What clients call it.
        reference: What the engine calls it.
        manifest: What it is.
        num_bytes: Of its tensors.
        version: How many adapters the name has meant, this one included.
    """

    name: str
    reference: AdapterReference
    manifest: Manifest
    num_bytes: int
    version: int = 1

    @property
    def digest(self) -> str:
        """Its identity."""
        return self.reference.digest

    @property
    def in_memory(self) -> bool:
        """Whether it was pushed from memory, and is gone when the engine ends."""
        return not self.reference.folder

    def to_dict(self) -> dict[str, object]:
        """For status answers; no path, which would name the server's folders."""
        return {
            "name": self.name,
            "available": True,
            "digest": self.digest,
            "version": self.version,
            "source": "memory" if self.in_memory else "folder",
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
        self._retired: set[str] = set()

    def check(self, name: str, source: Source, *, within: Path | None = None) -> tuple[Registered, Adapter]:
        """Checks an adapter and says what registering it would mean; nothing is changed.

        Args:
            name: What it is to be called.
            source: Where it comes from.
            within: A folder that the adapter's folder must really lie in, or None for anywhere.

        Raises:
            UsageError: The name is not acceptable, or differs from another only in case.
            PreftError: The adapter cannot be served.
        """
        self.require_name(name)
        if isinstance(source, Adapter):
            adapter, folder = source, ""
        else:
            adapter = load_adapter(source, within=within)
            folder = str(Path(source).resolve())
        self._require_servable(adapter)
        reference = AdapterReference(adapter.digest, adapter.manifest.positions, folder)
        before = self._entries.get(name)
        version = before.version + 1 if isinstance(before, Registered) else 1
        return Registered(name, reference, adapter.manifest, adapter.num_bytes, version), adapter

    def install(self, entry: Registered) -> None:
        """Makes a name mean what `check` returned, for requests from now on."""
        self._displace(entry.name)
        self._entries[entry.name] = entry
        self._retired.discard(entry.digest)

    def register(self, name: str, folder: Path | str) -> Registered:
        """Checks an adapter's folder and registers it, replacing what the name meant.

        Raises:
            PreftError: As `check`; the name keeps its meaning.
        """
        entry, _ = self.check(name, folder)
        self.install(entry)
        return entry

    def register_all(self, sources: Mapping[str, Path]) -> list[Unavailable]:
        """Registers many; those that cannot be served are listed as unavailable, and returned."""
        failed = []
        for name, source in sources.items():
            self.require_name(name, alone=True)
            try:
                self.register(name, source)
            except PreftError as error:
                failed.append(Unavailable(name, error))
                self.mark_unavailable(failed[-1])
        return failed

    def mark_unavailable(self, entry: Unavailable) -> None:
        """Lists a name as one that cannot be served, whatever it meant."""
        self._displace(entry.name)
        self._entries[entry.name] = entry

    def remove(self, name: str) -> None:
        """Forgets a name; requests in flight are not touched.

        Raises:
            UnknownAdapterError: It is not registered.
        """
        if name not in self._entries:
            raise unknown_adapter(name, self._entries)
        self._displace(name)
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

    def get(self, name: str) -> Registered | Unavailable | None:
        """What a name means now, or None."""
        return self._entries.get(name)

    def entries(self) -> list[Registered | Unavailable]:
        """All names, sorted."""
        return [self._entries[name] for name in sorted(self._entries)]

    def require_name(self, name: str, *, alone: bool = False) -> None:
        """Checks that a name may be given to an adapter.

        Args:
            name: The name.
            alone: Look at the name itself, not at the others.

        Raises:
            UsageError: It is malformed, means the base model, or differs from another only in case.
        """
        require_name(name, reserved=self._reserved)
        if not alone:
            require_no_twin(name, self._entries)

    def require_new(self, name: str) -> None:
        """Checks that a name is free.

        Raises:
            UsageError: It is taken.
        """
        if name in self._entries:
            raise UsageError(f"The adapter name `{name}` is taken", hint="replace it, or choose another name")

    def require_known(self, name: str) -> None:
        """Checks that a name is registered.

        Raises:
            UnknownAdapterError: It is not.
        """
        if name not in self._entries:
            raise unknown_adapter(name, self._entries)

    @property
    def has_retired(self) -> bool:
        """Whether some digest waits for the requests that use it to end."""
        return bool(self._retired)

    def take_unused(self, in_use: Collection[str]) -> list[str]:
        """Digests that no name means and no request uses; each is returned once.

        Args:
            in_use: Digests of the adapters of all unfinished requests.
        """
        unused = sorted(self._retired - set(in_use))
        self._retired.difference_update(unused)
        return unused

    def _displace(self, name: str) -> None:
        entry = self._entries.get(name)
        if not isinstance(entry, Registered):
            return
        others = (other for other in self._entries.values() if isinstance(other, Registered) and other.name != name)
        if all(other.digest != entry.digest for other in others):
            self._retired.add(entry.digest)

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

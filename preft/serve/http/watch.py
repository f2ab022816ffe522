"""The watched folder of adapters: what is added, replaced or removed there is taken up while the server runs.

A folder counts when its two files read as a whole adapter whose digest is the recorded one, so a copy that is under
way is not served: it is looked at again when more of it arrives. A name that is served already keeps its old version
until then.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from preft.adapters.catalog import require_inside, require_no_twin
from preft.adapters.manifest import MANIFEST_NAME, TENSORS_NAME
from preft.errors import PreftError, UnknownAdapterError
from preft.serve.registry import Registered, Unavailable

if TYPE_CHECKING:
    from preft.serve.http.operations import Operations

logger = logging.getLogger(__name__)

Signature = tuple[str, tuple[tuple[int, int, int] | None, ...]]


class Watch:
    """Keeps a registry at what a folder holds.

    Args:
        operations: What may be done to the adapters.
        root: The folder.
        fixed: Names that do not come from it.
        seen: Signatures of the adapters that are registered, taken before they were read.
    """

    def __init__(
        self, operations: Operations, root: Path, fixed: frozenset[str], seen: Mapping[str, Signature]
    ) -> None:
        self._operations = operations
        self._root = root
        self._fixed = fixed
        self._seen = dict(seen)
        self._refused: set[str] = set()
        operations.on_write = self._note_write

    async def run(self) -> None:
        """Watches until it is cancelled."""
        from watchfiles import awatch

        # Once more at the start: something may have changed while the server came up.
        await self.look()
        async for _ in awatch(self._root, debounce=400, step=50, recursive=True, ignore_permission_denied=True):
            try:
                await self.look()
            except Exception:
                logger.exception("The watched folder could not be taken up")

    async def look(self) -> None:
        """Takes up what has changed since the last look."""
        found = await asyncio.to_thread(self._scan)
        if found is None:
            return
        for name in sorted(set(self._seen) - set(found)):
            del self._seen[name]
            await self._remove(name)
        for name, folder in found.items():
            signature = await asyncio.to_thread(sign, folder)
            if self._seen.get(name) != signature:
                self._seen[name] = signature
                await self._take_up(name)

    def _note_write(self, name: str, folder: Path) -> None:
        """What the server itself wrote is served already, and must not come back once it is unloaded."""
        self._seen[name] = sign(folder)

    def _scan(self) -> dict[str, Path] | None:
        """The folder's adapters; None where it cannot be read, which is no reason to forget any."""
        try:
            entries = sorted(entry for entry in self._root.iterdir() if (entry / MANIFEST_NAME).exists())
        except OSError as error:
            logger.warning("The watched folder cannot be read: %s", error.strerror)
            return None
        found: dict[str, Path] = {}
        for entry in entries:
            if entry.name.startswith(".") or entry.name in self._fixed:
                continue
            try:
                self._operations.registry.require_name(entry.name)
                require_no_twin(entry.name, found)
                require_inside(entry, self._root)
                found[entry.name] = entry
            except PreftError as error:
                if entry.name not in self._refused:
                    logger.warning("A folder among the adapters is left alone: %s", error)
                self._refused.add(entry.name)
        return found

    async def _take_up(self, name: str) -> None:
        registry = self._operations.registry
        before = registry.get(name)
        try:
            entry = await self._operations.load(name, replace=True)
            logger.info("Adapter `%s` is served at version %d", name, entry.version)
        except PreftError as error:
            if isinstance(before, Registered):
                # The files of what the name means are gone, but requests still use it.
                await self._operations.hold(before)
                logger.warning("The new version of adapter `%s` is not served: %s", name, error)
            else:
                registry.mark_unavailable(Unavailable(name, error))

    async def _remove(self, name: str) -> None:
        entry = self._operations.registry.get(name)
        if isinstance(entry, Registered) and entry.in_memory:
            return
        try:
            if isinstance(entry, Registered):
                await self._operations.hold(entry)
            await self._operations.unload(name, drain=True)
        except UnknownAdapterError:
            return


def sign(folder: Path) -> Signature:
    """What tells whether an adapter's files have changed: where they really are, and size, time and inode of each."""
    stats: list[tuple[int, int, int] | None] = []
    for name in (MANIFEST_NAME, TENSORS_NAME):
        try:
            info = os.stat(folder / name)
            stats.append((info.st_size, info.st_mtime_ns, info.st_ino))
        except OSError:
            stats.append(None)
    return os.path.realpath(folder), tuple(stats)

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
from preft.errors import EngineError, PreftError, UnknownAdapterError
from preft.serve.registry import Registered, Unavailable

if TYPE_CHECKING:
    from preft.serve.http.operations import Operations

logger = logging.getLogger(__name__)

Signature = tuple[str, tuple[tuple[int, int, int] | None, ...]]

LOOK_S = 10.0
"""Seconds between two looks where the system tells of no change."""
_NEVER: Signature = ("", ())


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
        self._is_lost = False
        operations.on_write = self._note_write

    async def run(self) -> None:
        """Watches until it is cancelled."""
        from watchfiles import awatch

        # Once more at the start: something may have changed while the server came up.
        await self._look_on()
        while True:
            try:
                # Looks without being told as well: a network file system tells nothing of what others write, and a
                # root that is itself replaced tells nothing ever after.
                async for _ in awatch(
                    self._root,
                    debounce=400,
                    step=50,
                    rust_timeout=int(1000 * LOOK_S),
                    yield_on_timeout=True,
                    recursive=True,
                    ignore_permission_denied=True,
                ):
                    await self._look_on()
            except Exception as error:
                logger.warning("The watched folder cannot be watched: %s", error)
            await asyncio.sleep(LOOK_S)
            await self._look_on()

    async def _look_on(self) -> None:
        """Looks, and goes on watching whatever comes of it."""
        try:
            await self.look()
        except Exception:
            logger.exception("The watched folder could not be taken up")

    async def look(self) -> None:
        """Takes up what has changed since the last look."""
        known = set(self._seen)
        found = await asyncio.to_thread(self._scan)
        if found is None:
            return
        # Not what the server has written meanwhile.
        for name in sorted(known - set(found)):
            await self._remove(name)
        for name, signature in found.items():
            if self._seen.get(name) != signature:
                self._seen[name] = signature
                try:
                    await self._take_up(name)
                except Exception:
                    logger.exception("Adapter `%s` could not be taken up", name)
                    self._seen[name] = _NEVER

    def _note_write(self, name: str, folder: Path) -> None:
        """What the server itself wrote is served already, and must not come back once it is unloaded."""
        self._seen[name] = sign(folder)

    def _scan(self) -> dict[str, Signature] | None:
        """The folder's adapters, signed before they are read; None, which forgets none, where it cannot be listed."""
        try:
            entries = sorted(entry for entry in self._root.iterdir() if (entry / MANIFEST_NAME).exists())
        except OSError as error:
            if not self._is_lost:
                logger.warning("The watched folder cannot be read: %s", error.strerror)
            self._is_lost = True
            return None
        self._is_lost = False
        found: dict[str, Signature] = {}
        for entry in entries:
            if entry.name.startswith(".") or entry.name in self._fixed:
                continue
            try:
                self._operations.registry.require_name(entry.name)
                require_no_twin(entry.name, found)
                require_inside(entry, self._root)
                found[entry.name] = sign(entry)
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
            if isinstance(error, EngineError):
                # Not the adapter's fault, so that it may go better at the next look.
                self._seen[name] = _NEVER
            if isinstance(before, Registered):
                # The files of what the name means are gone, but requests still use it.
                await self._operations.hold(before)
                logger.warning("The new version of adapter `%s` is not served: %s", name, error)
            else:
                registry.mark_unavailable(Unavailable(name, error))

    async def _remove(self, name: str) -> None:
        def is_gone() -> bool:
            # While the server replaces a folder itself, there is none for a moment.
            gone = not (self._root / name / MANIFEST_NAME).exists()
            if gone:
                self._seen.pop(name, None)
            entry = self._operations.registry.get(name)
            return gone and not (isinstance(entry, Registered) and entry.in_memory)

        entry = self._operations.registry.get(name)
        try:
            if isinstance(entry, Registered) and not entry.in_memory:
                await self._operations.hold(entry)
            await self._operations.unload(name, drain=True, only_if=is_gone)
        except UnknownAdapterError:
            self._seen.pop(name, None)


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

"""Changes of the adapters of a running server: one at a time, whole or not at all.

An adapter is read, checked in front, taken in by every worker on its loader's thread, and only then given its name.
Requests under way keep what they started with, whatever happens to the name or the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preft.adapters.adapter import Adapter
from preft.adapters.catalog import is_inside, require_name
from preft.adapters.store import adapter_from_bytes, adapter_to_bytes, load_adapter, save_adapter
from preft.errors import AdapterError, EngineError, PreftError, UsageError
from preft.serve.backend.reference import AdapterReference
from preft.serve.http.notes import Notes
from preft.serve.pushes import require_pushed
from preft.serve.registry import AdapterRegistry, Registered

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

logger = logging.getLogger(__name__)

_POLL_S = 0.01
_REAP_S = 1.0
_PUSH_S = 300.0


class NameTakenError(UsageError):
    """An adapter of this name is registered already."""

    http_status = 409


class InUseError(UsageError):
    """Requests under an adapter are under way."""

    http_status = 409


@dataclass(frozen=True)
class Upload:
    """An adapter as a client sent it.

    Attributes:
        manifest: Contents of `preft.json`.
        tensors: Contents of `preft.safetensors`.
    """

    manifest: bytes
    tensors: bytes


class Operations:
    """What may be done to the adapters of one server.

    Args:
        registry: What names mean.
        engine: vLLM's client of the engine.
        notes: Requests under way.
        root: Folder that adapters are loaded from and written to, or None.

    Attributes:
        on_write: Told the name and folder of each adapter written below the root.
    """

    def __init__(self, registry: AdapterRegistry, engine: EngineClient, notes: Notes, root: Path | None) -> None:
        self.registry = registry
        self.root = root
        self.on_write: Callable[[str, Path], None] = lambda _name, _folder: None
        self._engine = engine
        self._notes = notes
        self._lock = asyncio.Lock()
        self._reaper: asyncio.Task[None] | None = None

    async def load(self, name: str, folder: str | None = None, *, replace: bool) -> Registered:
        """Registers an adapter that lies below the root.

        Args:
            name: What requests will call it.
            folder: Name of its folder; the same as its own by default.
            replace: Accept a name that is taken.

        Raises:
            PreftError: It cannot be served; nothing is changed.
        """
        async with self._lock:
            self._require_free(name, replace)
            source = self._below_root(folder if folder is not None else name)
            entry, adapter = await asyncio.to_thread(self.registry.check, name, source, within=self.root)
            before = self.registry.get(name)
            if isinstance(before, Registered) and before.reference == entry.reference:
                return before
            await self._send(entry.digest, *await asyncio.to_thread(adapter_to_bytes, adapter))
            await self._install(entry)
            return entry

    async def push(self, name: str, upload: Upload, *, persist: bool, replace: bool) -> Registered:
        """Registers an adapter that came with the request.

        Args:
            name: What requests will call it.
            upload: Its files.
            persist: Write it below the root, so that it is there after a restart; otherwise it is in memory alone.
            replace: Accept a name that is taken.

        Raises:
            PreftError: It cannot be served or written; nothing is changed.
        """
        async with self._lock:
            self._require_free(name, replace)
            target = self._below_root(name) if persist else None
            if target is not None:
                self._require_unshared(name, target)
            adapter = await asyncio.to_thread(adapter_from_bytes, upload.manifest, upload.tensors, name=name)
            entry, _ = await asyncio.to_thread(self.registry.check, name, adapter)
            await self._send(entry.digest, upload.manifest, upload.tensors)
            if target is not None:
                entry = await self._write(name, adapter, target)
            await self._install(entry)
            return entry

    async def unload(self, name: str, *, drain: bool, only_if: Callable[[], bool] = lambda: True) -> int:
        """Forgets a name; its folder stays.

        Args:
            name: The name.
            drain: Let requests under way finish; otherwise refuse while there are any.
            only_if: Asked while no other change is under way; nothing is done if it says no.

        Returns:
            How many requests are under way.

        Raises:
            UnknownAdapterError: It is not registered.
            InUseError: Requests are under way, and `drain` is false.
        """
        async with self._lock:
            self.registry.require_known(name)
            if not only_if():
                return 0
            count = self._notes.count(name)
            if count and not drain:
                raise InUseError(
                    f"Requests under the adapter `{name}` are under way",
                    got=f"{count}",
                    hint="wait for them, or unload with `mode=drain`: they finish, and later ones are refused",
                )
            self.registry.remove(name)
            self._reap_soon()
            return count

    async def hold(self, entry: Registered) -> None:
        """Keeps an adapter in memory while requests use it, although its folder is about to change or has changed."""
        if entry.digest in self._digests_in_use():
            try:
                await self._call("preft_hold", entry.reference.encode())
                await self._require_taken(entry.digest)
            except (PreftError, TimeoutError) as error:
                logger.warning("Requests under `%s` may fail: %s", entry.name, str(error) or "the engine took too long")

    def requests(self, name: str) -> int:
        """How many requests under an adapter are under way."""
        return self._notes.count(name)

    async def why_failed(self, digest: str) -> str | None:
        """Why the workers could not load an adapter, as far as they remember."""
        with contextlib.suppress(Exception):
            reasons: list[str | None] = await self._call("preft_failure", digest)
            return next((reason for reason in reasons if reason), None)
        return None

    def _require_free(self, name: str, replace: bool) -> None:
        self.registry.require_name(name)
        if not replace and isinstance(self.registry.get(name), Registered):
            raise NameTakenError(f"The adapter name `{name}` is taken", hint="replace it with PUT, or unload it first")

    def _below_root(self, folder: str) -> Path:
        if self.root is None:
            raise UsageError(
                "The server has no folder of adapters", hint="start it with `--adapters ROOT`, or push from memory"
            )
        require_name(folder)
        path = self.root / folder
        if path.exists() and not is_inside(path, self.root):
            raise AdapterError(f"The adapter folder `{folder}` leads out of the adapter root")
        return path

    def _require_unshared(self, name: str, target: Path) -> None:
        """Refuses to overwrite a folder that another name is served from: its requests would fail."""
        folder = str(target.resolve())
        for entry in self.registry.entries():
            if isinstance(entry, Registered) and entry.name != name and entry.reference.folder == folder:
                raise InUseError(
                    f"The folder `{target.name}` is where the adapter `{entry.name}` is served from",
                    hint=f"choose another name, or load `{entry.name}` from another folder first",
                )

    async def _keep(self, entry: Registered) -> None:
        """Brings what is on disk into memory before it is overwritten, while no step waits for it.

        Requests may ask for it until its name means something else.
        """
        try:
            adapter = await asyncio.to_thread(load_adapter, entry.reference.folder, expected_digest=entry.digest)
            await self._send(entry.digest, *await asyncio.to_thread(adapter_to_bytes, adapter))
        except PreftError as error:
            logger.warning("Requests under `%s` may fail until it is replaced: %s", entry.name, error)

    async def _write(self, name: str, adapter: Adapter, target: Path) -> Registered:
        before = self.registry.get(name)
        kept = before if isinstance(before, Registered) and before.reference.folder == str(target.resolve()) else None
        if kept is not None and kept.digest != adapter.digest:
            await self._keep(kept)
        try:
            await asyncio.to_thread(save_adapter, adapter, target, force=True)
            self.on_write(name, target)
            entry, _ = await asyncio.to_thread(self.registry.check, name, target, within=self.root)
        except BaseException:
            await self._release([adapter.digest])
            if kept is not None:
                await self._release([kept.digest], keep_named=False)
            raise
        return entry

    async def _send(self, digest: str, manifest: bytes, tensors: bytes) -> None:
        """Brings an adapter into every worker's memory; leaves nothing there if one refuses it."""
        try:
            await self._call("preft_push", digest, manifest, tensors)
            await self._require_taken(digest)
        except BaseException as error:
            with contextlib.suppress(Exception):
                await self._release([digest])
            if isinstance(error, PreftError) or not isinstance(error, Exception):
                raise
            logger.exception("A push failed")
            raise EngineError("The engine did not take the adapter in", got=type(error).__name__) from error

    async def _require_taken(self, digest: str) -> None:
        """Waits until every worker holds an adapter; no step waits for it."""
        async with asyncio.timeout(_PUSH_S):
            while None in (answers := await self._call("preft_pushed", digest, False)):
                await asyncio.sleep(_POLL_S)
        require_pushed(digest, answers)

    async def _install(self, entry: Registered) -> None:
        before = self.registry.get(entry.name)
        if isinstance(before, Registered) and not before.in_memory and before.digest != entry.digest:
            await self.hold(before)
        self.registry.install(entry)
        if not entry.in_memory:
            # It was there for the workers to look at; from now on the scheduler decides when it is. What was kept of
            # the old version goes now where nothing uses it.
            kept = [before.digest] if isinstance(before, Registered) and not before.in_memory else []
            await self._release([entry.digest, *kept], keep_named=False)
        self._reap_soon()

    async def _release(self, digests: Sequence[str], *, keep_named: bool = True) -> None:
        kept = self._digests_in_use()
        held = [entry for entry in self.registry.entries() if isinstance(entry, Registered)]
        kept |= {entry.digest for entry in held if keep_named or entry.in_memory}
        unused = [digest for digest in digests if digest not in kept]
        if unused:
            await self._call("preft_release", unused)

    def _digests_in_use(self) -> set[str]:
        engine: Any = self._engine
        states: Collection[Any] = engine.output_processor.request_states.values()
        requests = [state.lora_request for state in states if state.lora_request is not None]
        return {AdapterReference.decode(request.lora_path).digest for request in requests} | set(self._notes.digests())

    def _reap_soon(self) -> None:
        if self.registry.has_retired and (self._reaper is None or self._reaper.done()):
            self._reaper = asyncio.create_task(self._reap())

    async def _reap(self) -> None:
        """Lets go of adapters that no name means as soon as no request uses them."""
        while self.registry.has_retired:
            async with self._lock:
                unused = self.registry.take_unused(self._digests_in_use())
                if unused:
                    try:
                        await self._call("preft_release", unused)
                    except Exception:
                        logger.exception("Adapters could not be let go")
                        return
            if self.registry.has_retired:
                await asyncio.sleep(_REAP_S)

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._engine.collective_rpc(method, args=args)

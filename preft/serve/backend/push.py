"""Adapters that the front end keeps in a worker's memory: pushed there, or held while a folder changes beneath them.

The scheduler's book (`ledger`) decides what else is in memory, and may drop its own reference to one of these at any
time: it comes back from here at once. Only the front end, which knows what names mean and which requests are under
way, lets go of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Any

from preft.adapters.store import adapter_from_bytes
from preft.errors import AdapterError, EngineError, PreftError
from preft.serve.backend.sites import PackedAdapter


class HeldAdapters:
    """The adapters that one worker keeps for the front end.

    Args:
        pool: Where adapters are parsed and packed; never the engine's thread, which would stall running requests.
        pack: From manifest and tensors to this worker's numbers; raises `PreftError`.
        budget_bytes: Memory that they may take together.
    """

    def __init__(self, pool: Executor, pack: Callable[[Any], PackedAdapter], budget_bytes: int) -> None:
        self._pool = pool
        self._pack = pack
        self._budget_bytes = budget_bytes
        self._held: dict[str, PackedAdapter] = {}
        self._pushes: dict[str, Future[PackedAdapter]] = {}
        self._released: dict[str, None] = {}

    def push(self, digest: str, manifest: bytes, tensors: bytes) -> None:
        """Starts taking in an adapter; `pushed` tells the outcome.

        Args:
            digest: The identity it must have.
            manifest: Contents of `preft.json`.
            tensors: Contents of `preft.safetensors`.
        """

        def take() -> PackedAdapter:
            name = f"pushed adapter {digest[:12]}"
            return self._pack(adapter_from_bytes(manifest, tensors, name=name, expected_digest=digest))

        self.expect(digest, lambda: self._pool.submit(take))

    def expect(self, digest: str, start: Callable[[], Future[PackedAdapter]]) -> None:
        """Holds what a load will bring, unless it is held already; `pushed` tells the outcome."""
        if digest not in self._held:
            self._pushes[digest] = start()

    def pushed(self, digest: str, *, wait: bool) -> dict[str, Any] | None:
        """The outcome of a push or a hold, for the front end: plain data.

        Args:
            digest: What was pushed or is to be held.
            wait: Wait for it.

        Returns:
            None while it is under way; then the digest and its bytes here, or the parts of an error.
        """
        push = self._pushes.get(digest)
        if push is not None:
            if not wait and not push.done():
                return None
            try:
                self.keep(push.result())
            except Exception as error:
                return {"error": _parts(error)}
            finally:
                del self._pushes[digest]
        if digest not in self._held:
            return {"error": EngineError("The adapter was never pushed to this worker", got=digest[:12]).to_dict()}
        return {"digest": self._held[digest].digest, "bytes": self._held[digest].num_bytes}

    def keep(self, packed: PackedAdapter) -> None:
        """Holds an adapter that is packed already.

        Raises:
            AdapterError: There is no room for it.
        """
        needed = self.num_bytes + packed.num_bytes
        if packed.digest not in self._held and needed > self._budget_bytes:
            raise AdapterError(
                "There is no room for another adapter in memory",
                got=f"{needed} bytes with it",
                accepted=f"{self._budget_bytes} bytes",
                hint="remove adapters that were pushed, or start the engine with a larger `--adapter-cache-gib`",
            )
        self._released.pop(packed.digest, None)
        self._held[packed.digest] = packed

    def get(self, digest: str) -> PackedAdapter | None:
        """The numbers of one, or None."""
        return self._held.get(digest)

    def release(self, digests: Iterable[str]) -> None:
        """Lets go of adapters that no name means and no request uses."""
        for digest in digests:
            self._pushes.pop(digest, None)
            self._held.pop(digest, None)
            self._released[digest] = None

    def take_released(self) -> list[str]:
        """What was let go since the last call, for the scheduler's book."""
        released, self._released = list(self._released), {}
        return released

    @property
    def num_adapters(self) -> int:
        """How many are held."""
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        """Bytes that they take."""
        return sum(packed.num_bytes for packed in self._held.values())


def _parts(error: Exception) -> dict[str, str]:
    if isinstance(error, PreftError):
        return error.to_dict()
    return EngineError("The adapter could not be taken in", got=f"{type(error).__name__}: {error}").to_dict()

"""An engine's client with the real host memory for pushes on two ranks, and no model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from preft.adapters.adapter import Adapter
from preft.adapters.store import adapter_to_bytes
from preft.serve.backend.push import HeldAdapters
from preft.serve.backend.reference import AdapterReference
from preft.serve.backend.sites import PackedAdapter
from preft.serve.http.operations import Upload


class FakeEngine:
    """What `Operations` asks of vLLM's client.

    Attributes:
        ranks: Their memory.
        refuse: From how many adapters were packed, this one included, to the error of packing this one.
    """

    def __init__(self) -> None:
        self.ranks = [HeldAdapters(ThreadPoolExecutor(1), self._pack, 1 << 30) for _ in range(2)]
        self.output_processor = SimpleNamespace(request_states={})
        self.refuse: Callable[[int], Exception | None] = lambda _rank: None
        self.packed = 0

    def _pack(self, adapter: Adapter) -> PackedAdapter:
        self.packed += 1
        error = self.refuse(self.packed)
        if error is not None:
            raise error
        return PackedAdapter(adapter.digest, (), adapter.num_bytes)

    @staticmethod
    def _hold(rank: HeldAdapters, reference: AdapterReference) -> None:
        load: Future[PackedAdapter] = Future()
        load.set_result(PackedAdapter(reference.digest, (), 0))
        rank.expect(reference.digest, lambda: load)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        calls = {
            "preft_push": lambda rank: rank.push(*args),
            "preft_pushed": lambda rank: rank.pushed(args[0], wait=args[1]),
            "preft_release": lambda rank: rank.release(*args),
            "preft_hold": lambda rank: self._hold(rank, AdapterReference.decode(args[0])),
            "preft_failure": lambda _rank: "gone",
        }
        return [calls[method](rank) for rank in self.ranks]

    def held(self) -> list[int]:
        return [rank.num_adapters for rank in self.ranks]


def upload(adapter: Adapter) -> Upload:
    return Upload(*adapter_to_bytes(adapter))

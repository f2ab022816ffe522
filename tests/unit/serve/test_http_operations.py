"""Changes of adapters in front of an engine that can be made to fail: whole or not at all, nothing kept for long."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import UploadFile
from starlette.requests import Request

from preft.adapters import store
from preft.adapters.adapter import Adapter
from preft.adapters.fingerprint import fingerprint_base
from preft.adapters.store import adapter_to_bytes, load_adapter, save_adapter
from preft.errors import AdapterError, EngineError, FileError, PreftError
from preft.serve.backend.push import HeldAdapters
from preft.serve.backend.sites import PackedAdapter
from preft.serve.http.admin import add_adapter, error_response, put_adapter, remove_adapter
from preft.serve.http.notes import Note, Notes
from preft.serve.http.operations import InUseError, NameTakenError, Operations
from preft.serve.registry import AdapterRegistry, Registered
from preft.serve.settings import EngineSettings
from tests.helpers.fake_engine import FakeEngine, upload
from tests.helpers.tiny import random_adapter


@pytest.fixture
def adapter(tiny_llama: Path) -> Adapter:
    return random_adapter(tiny_llama, seed=1, targets=("q_proj",))


@pytest.fixture
def other(tiny_llama: Path) -> Adapter:
    return random_adapter(tiny_llama, seed=2, targets=("q_proj",))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def operations(tiny_llama: Path, engine: FakeEngine, notes: Notes, tmp_path: Path) -> Operations:
    registry = AdapterRegistry(fingerprint_base(tiny_llama), EngineSettings(), reserved=("base",))
    (tmp_path / "root").mkdir()
    return Operations(registry, engine, notes, tmp_path / "root")  # type: ignore[arg-type]


def run(*steps: Coroutine[Any, Any, Any]) -> list[Any]:
    """Runs changes in one loop, one after the other, and lets what follows in the background happen."""

    async def all_of() -> list[Any]:
        done = [await step for step in steps]
        await asyncio.sleep(0.05)
        return done

    return asyncio.run(all_of())


def names(operations: Operations) -> list[str]:
    return [entry.name for entry in operations.registry.entries()]


def test_a_push_is_on_every_rank_before_it_has_a_name(
    operations: Operations, engine: FakeEngine, adapter: Adapter, other: Adapter
) -> None:
    run(operations.push("it", upload(adapter), persist=False, replace=False))
    assert engine.held() == [1, 1]
    (entry,) = run(operations.push("it", upload(other), persist=False, replace=True))
    assert (entry.digest, entry.version) == (other.digest, 2)
    assert engine.held() == [1, 1]
    assert all(rank.get(other.digest) is not None for rank in engine.ranks)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("error", [AdapterError("does not fit"), MemoryError("no memory")])
def test_one_rank_that_refuses_is_enough(
    operations: Operations, engine: FakeEngine, adapter: Adapter, other: Adapter, rank: int, error: Exception
) -> None:
    run(operations.push("it", upload(adapter), persist=False, replace=False))
    engine.packed = 0
    engine.refuse = lambda number: error if number == rank else None
    with pytest.raises(PreftError, match=r"does not fit|could not be taken in"):
        run(operations.push("it", upload(other), persist=True, replace=True))
    assert operations.registry.resolve("it").digest == adapter.digest
    assert engine.held() == [1, 1]
    assert not list(operations.root.iterdir())  # type: ignore[union-attr]


def test_an_engine_that_does_not_answer_is_told_as_such(
    operations: Operations, engine: FakeEngine, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dead(*args: object, **kwargs: object) -> None:
        raise ConnectionError("the engine is dead")

    monkeypatch.setattr(engine, "collective_rpc", dead)
    with pytest.raises(EngineError) as caught:
        run(operations.push("it", upload(adapter), persist=False, replace=False))
    assert error_response(caught.value).status_code == 503
    assert names(operations) == []


def test_a_full_disk_leaves_the_old_version_in_memory_and_on_disk(
    operations: Operations, engine: FakeEngine, adapter: Adapter, other: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(operations.push("it", upload(adapter), persist=True, replace=False))
    before = {path.name: path.read_bytes() for path in (operations.root / "it").iterdir()}  # type: ignore[operator]

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "_swap_in", full)
    for name in ("it", "new"):
        with pytest.raises(FileError, match="No space left") as caught:
            run(operations.push(name, upload(other), persist=True, replace=True))
        assert error_response(caught.value).status_code == 507
    assert names(operations) == ["it"]
    assert operations.registry.resolve("it").digest == adapter.digest
    assert [path.name for path in operations.root.iterdir()] == ["it"]  # type: ignore[union-attr]
    assert {path.name: path.read_bytes() for path in (operations.root / "it").iterdir()} == before  # type: ignore[operator]
    assert engine.held() == [0, 0]


def test_changes_wait_for_one_another(operations: Operations, adapter: Adapter, other: Adapter) -> None:
    async def at_once() -> list[Any]:
        pushes = [operations.push("it", upload(one), persist=False, replace=False) for one in (adapter, other) * 3]
        return await asyncio.gather(*pushes, return_exceptions=True)

    results = asyncio.run(at_once())
    assert [type(result) for result in results] == [Registered] + [NameTakenError] * 5
    assert operations.registry.resolve("it").digest == adapter.digest


def test_an_old_version_stays_while_a_request_uses_it(
    operations: Operations, engine: FakeEngine, notes: Notes, adapter: Adapter, other: Adapter
) -> None:
    """From the moment that its name is looked up to the end of its answer, and as long as the engine knows it."""
    (entry,) = run(operations.push("it", upload(adapter), persist=False, replace=False))
    with notes.open(Note("POST", "/v1/completions", entry=entry)):
        with pytest.raises(InUseError):
            run(operations.unload("it", drain=False))
        run(operations.push("it", upload(other), persist=False, replace=True))
        assert engine.held() == [2, 2]
        state = SimpleNamespace(lora_request=entry.reference.to_lora_request("it"))
        engine.output_processor.request_states["1"] = state
    run(operations.push("more", upload(other), persist=False, replace=True))
    assert engine.held() == [2, 2]
    engine.output_processor.request_states.clear()
    run(operations.unload("more", drain=False), _soon(operations))
    assert engine.held() == [1, 1]


async def _soon(operations: Operations) -> None:
    operations._reaper = None
    operations._reap_soon()


def test_an_adapter_from_a_folder_is_looked_at_and_let_go(
    operations: Operations, engine: FakeEngine, adapter: Adapter
) -> None:
    save_adapter(adapter, operations.root / "it")  # type: ignore[operator]
    first, again = run(operations.load("it", replace=False), operations.load("it", replace=True))
    assert first is again
    assert engine.packed == 2
    assert engine.held() == [0, 0]
    engine.refuse = lambda _number: AdapterError("does not fit")
    with pytest.raises(AdapterError, match="does not fit"):
        run(operations.load("other", "it", replace=False))
    assert names(operations) == ["it"]


@pytest.mark.parametrize("is_full", [False, True])
def test_a_request_that_comes_while_its_folder_is_overwritten_finds_the_old_version(
    operations: Operations,
    engine: FakeEngine,
    notes: Notes,
    adapter: Adapter,
    other: Adapter,
    monkeypatch: pytest.MonkeyPatch,
    is_full: bool,
) -> None:
    """None was under way when the change began, so nothing but the folder held the old version."""
    (entry,) = run(operations.push("it", upload(adapter), persist=True, replace=False))
    assert engine.held() == [0, 0]
    swap, note = store._swap_in, Note("POST", "/v1/completions")

    def swap_with_a_request(partial: Path, folder: Path) -> None:
        note.entry = operations.registry.resolve("it")
        assert all(rank.get(adapter.digest) is not None for rank in engine.ranks)
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        swap(partial, folder)

    monkeypatch.setattr(store, "_swap_in", swap_with_a_request)
    with notes.open(note):
        with pytest.raises(FileError) if is_full else contextlib.nullcontext():
            run(operations.push("it", upload(other), persist=True, replace=True))
        assert all(rank.get(adapter.digest) is not None for rank in engine.ranks), "its request is not over"
    assert operations.registry.resolve("it").digest == (entry if is_full else other).digest
    monkeypatch.setattr(store, "_swap_in", swap)
    run(operations.push("it", upload(other), persist=True, replace=True), _soon(operations))
    assert engine.held() == [0, 0]


def test_an_idle_version_that_was_kept_for_a_change_goes_with_it(
    operations: Operations, engine: FakeEngine, adapter: Adapter, other: Adapter
) -> None:
    run(operations.push("it", upload(adapter), persist=True, replace=False))
    run(operations.push("it", upload(other), persist=True, replace=True))
    assert engine.held() == [0, 0]


def test_a_push_does_not_overwrite_the_folder_of_another_name(
    operations: Operations, adapter: Adapter, other: Adapter
) -> None:
    save_adapter(adapter, operations.root / "v2")  # type: ignore[operator]
    (entry,) = run(operations.load("it", "v2", replace=False))
    with pytest.raises(InUseError, match="`v2` is where the adapter `it` is served from"):
        run(operations.push("v2", upload(other), persist=True, replace=False))
    assert load_adapter(entry.reference.folder).digest == adapter.digest
    run(operations.push("v2", upload(other), persist=False, replace=False))


def test_a_root_that_is_not_there_and_names_that_are_taken(operations: Operations, adapter: Adapter) -> None:
    run(operations.push("it", upload(adapter), persist=False, replace=False))
    with pytest.raises(NameTakenError):
        run(operations.load("it", replace=False))
    operations.root = None
    for change in (
        operations.load("new", replace=False),
        operations.push("new", upload(adapter), persist=True, replace=True),
    ):
        with pytest.raises(PreftError, match="no folder of adapters"):
            run(change)
    assert names(operations) == ["it"]


def test_held_adapters_have_their_own_budget(adapter: Adapter, other: Adapter) -> None:
    def pack(one: Adapter) -> PackedAdapter:
        return PackedAdapter(one.digest, (), one.num_bytes)

    held = HeldAdapters(ThreadPoolExecutor(1), pack, adapter.num_bytes)
    held.push(adapter.digest, *adapter_to_bytes(adapter))
    assert held.pushed(adapter.digest, wait=True) == {"digest": adapter.digest, "bytes": adapter.num_bytes}
    held.push(other.digest, *adapter_to_bytes(other))
    told = held.pushed(other.digest, wait=True)
    assert told is not None
    assert told["error"]["message"] == "There is no room for another adapter in memory"
    held.push("0" * 64, *adapter_to_bytes(other))
    told = held.pushed("0" * 64, wait=True)
    assert told is not None
    assert "digest" in told["error"]["message"]
    held.release([adapter.digest])
    assert held.take_released() == [adapter.digest]
    assert held.take_released() == []
    assert (held.num_adapters, held.num_bytes) == (0, 0)


@pytest.mark.parametrize("route", [add_adapter, put_adapter, remove_adapter])
@pytest.mark.parametrize(
    ("configured", "given", "status"),
    [(None, None, 403), (None, "", 403), ("secret", None, 401), ("secret", "", 401), ("secret", "Secret", 401)],
)
def test_no_change_without_the_admins_key(
    route: Callable[[Request], Any], configured: str | None, given: str | None, status: int
) -> None:
    front = SimpleNamespace(plan=SimpleNamespace(admin_key=configured))
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/preft/adapters",
        "headers": [(b"x-preft-admin-key", given.encode())] if given is not None else [],
        "app": SimpleNamespace(state=SimpleNamespace(preft=front)),
    }
    answer = asyncio.run(route(Request(scope)))
    assert answer.status_code == status
    assert (b"without an admin key" if status == 403 else b"missing or wrong") in answer.body


@pytest.mark.parametrize(("chunks", "status"), [(3, 400), (40, 413)])
def test_a_body_without_a_length_ends_at_the_limit(chunks: int, status: int) -> None:
    answer, read = put_chunks(chunks)
    assert answer.status_code == status, answer.body
    assert read <= 12


def test_a_full_temporary_folder_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large body passes through one."""
    written: list[int] = []

    async def full(_file: UploadFile, data: bytes) -> None:
        written.append(len(data))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(UploadFile, "write", full)
    answer, _ = put_chunks(8)
    assert written
    assert answer.status_code == 507
    assert b"temporary folder" in answer.body


def put_chunks(chunks: int) -> tuple[Any, int]:
    """The answer to a body of so many chunks without a length, and how many of them were read."""
    head, read = b'--b\r\nContent-Disposition: form-data; name="tensors"; filename="t"\r\n\r\n', [0]

    async def receive() -> dict[str, Any]:
        read[0] += 1
        body = head if read[0] == 1 else b"x" * 1000
        return {"type": "http.request", "body": body, "more_body": read[0] < chunks}

    front = SimpleNamespace(
        plan=SimpleNamespace(admin_key="secret", max_push_bytes=10_000),
        registry=SimpleNamespace(get=lambda _name: None),
        redact=lambda _name, error: error,
    )
    scope = {
        "type": "http",
        "method": "PUT",
        "path": "/v1/preft/adapters/it",
        "path_params": {"name": "it"},
        "headers": [
            (b"x-preft-admin-key", b"secret"),
            (b"content-type", b"multipart/form-data; boundary=b"),
            (b"transfer-encoding", b"chunked"),
        ],
        "app": SimpleNamespace(state=SimpleNamespace(preft=front)),
    }
    return asyncio.run(put_adapter(Request(scope, receive))), read[0]

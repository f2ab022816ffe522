"""The watched folder, one look at a time: what is taken up, what is left alone, and what came before the first look."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from preft.adapters import store
from preft.adapters.adapter import Adapter
from preft.adapters.fingerprint import fingerprint_base
from preft.adapters.store import save_adapter
from preft.errors import EngineError
from preft.serve.http import watch as watch_module
from preft.serve.http.notes import Notes
from preft.serve.http.operations import Operations, Upload
from preft.serve.http.watch import Watch, sign
from preft.serve.registry import AdapterRegistry, Registered
from preft.serve.settings import EngineSettings
from tests.helpers.fake_engine import FakeEngine, upload
from tests.helpers.tiny import random_adapter


@pytest.fixture
def adapters(tiny_llama: Path) -> list[Adapter]:
    return [random_adapter(tiny_llama, seed=seed, targets=("q_proj",)) for seed in range(3)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def operations(tiny_llama: Path, root: Path) -> Operations:
    registry = AdapterRegistry(fingerprint_base(tiny_llama), EngineSettings(), reserved=("base",))
    return Operations(registry, FakeEngine(), Notes(), root)  # type: ignore[arg-type]


def digest(operations: Operations, name: str) -> str | None:
    entry = operations.registry.get(name)
    return entry.digest if isinstance(entry, Registered) else None


def look(watch: Watch) -> None:
    asyncio.run(watch.look())


def test_it_takes_up_what_is_added_replaced_and_removed(
    operations: Operations, root: Path, adapters: list[Adapter]
) -> None:
    watch = Watch(operations, root, frozenset(), {})
    save_adapter(adapters[0], root / "it")
    look(watch)
    assert digest(operations, "it") == adapters[0].digest
    look(watch)
    assert operations.registry.resolve("it").version == 1
    save_adapter(adapters[1], root / "it", force=True)
    look(watch)
    assert digest(operations, "it") == adapters[1].digest
    assert operations.registry.resolve("it").version == 2
    os.utime(root / "it" / "preft.json", (1, 1))
    look(watch)
    assert operations.registry.resolve("it").version == 2
    shutil.rmtree(root / "it")
    look(watch)
    assert operations.registry.entries() == []


def test_what_changed_while_the_server_came_up_is_seen_at_the_first_look(
    operations: Operations, root: Path, adapters: list[Adapter]
) -> None:
    save_adapter(adapters[0], root / "changed")
    save_adapter(adapters[0], root / "gone")
    seen = {name: sign(root / name) for name in ("changed", "gone")}
    operations.registry.register_all({name: root / name for name in seen})
    save_adapter(adapters[1], root / "changed", force=True)
    save_adapter(adapters[2], root / "new")
    shutil.rmtree(root / "gone")

    look(Watch(operations, root, frozenset(), seen))

    assert [entry.name for entry in operations.registry.entries()] == ["changed", "new"]
    assert digest(operations, "changed") == adapters[1].digest


def test_half_a_copy_is_not_served_and_does_not_unseat_what_is(
    operations: Operations, root: Path, adapters: list[Adapter]
) -> None:
    watch = Watch(operations, root, frozenset(), {})
    save_adapter(adapters[0], root / "it")
    look(watch)
    save_adapter(adapters[1], root / "new")
    whole = (root / "new" / "preft.safetensors").read_bytes()
    for name in ("it", "new"):
        (root / name / "preft.safetensors").write_bytes(whole[:-100])
    look(watch)
    assert digest(operations, "it") == adapters[0].digest
    assert digest(operations, "new") is None
    assert operations.registry.get("new") is not None
    (root / "new" / "preft.safetensors").write_bytes(whole)
    look(watch)
    assert digest(operations, "new") == adapters[1].digest


def test_names_from_elsewhere_and_names_that_are_none_are_left_alone(
    operations: Operations, root: Path, adapters: list[Adapter], tmp_path: Path
) -> None:
    save_adapter(adapters[0], tmp_path / "fixed")
    operations.registry.register("fixed", tmp_path / "fixed")
    watch = Watch(operations, root, frozenset({"fixed"}), {})
    save_adapter(adapters[1], root / "fixed")
    look(watch)
    assert digest(operations, "fixed") == adapters[0].digest
    shutil.rmtree(root / "fixed")
    look(watch)
    assert digest(operations, "fixed") == adapters[0].digest

    (root / "link").symlink_to(tmp_path / "fixed")
    save_adapter(adapters[2], root / ".hidden")
    look(watch)
    assert [entry.name for entry in operations.registry.entries()] == ["fixed"]


def test_one_bad_name_does_not_hide_the_others(operations: Operations, root: Path, adapters: list[Adapter]) -> None:
    watch = Watch(operations, root, frozenset(), {})
    save_adapter(adapters[0], root / "it")
    look(watch)
    save_adapter(adapters[1], root / "not a name")
    save_adapter(adapters[1], root / "base")
    save_adapter(adapters[1], root / "other")
    look(watch)
    assert digest(operations, "it") == adapters[0].digest
    assert digest(operations, "other") == adapters[1].digest
    assert digest(operations, "base") is None


@pytest.mark.parametrize(("is_new", "scan_s"), [(True, 0.2), (False, 0.0), (False, 0.2)])
def test_a_look_in_the_middle_of_a_write_forgets_nothing(
    operations: Operations,
    root: Path,
    adapters: list[Adapter],
    monkeypatch: pytest.MonkeyPatch,
    is_new: bool,
    scan_s: float,
) -> None:
    """There is no folder for a moment while one is replaced, and there was none yet when the look began."""
    watch = Watch(operations, root, frozenset(), {})
    if not is_new:
        asyncio.run(operations.push("it", upload(adapters[1]), persist=True, replace=False))
    swap = store._swap_in

    async def push_while_looking() -> None:
        loop, looked = asyncio.get_running_loop(), []

        def swap_slowly(partial: Path, folder: Path) -> None:
            if folder.exists():
                folder.rename(root / ".old")
            found = watch._scan()
            assert found == {}, "the premise: the folder is not there"

            def scan_slowly() -> object:
                time.sleep(scan_s)
                return found

            monkeypatch.setattr(watch, "_scan", scan_slowly)
            loop.call_soon_threadsafe(lambda: looked.append(loop.create_task(watch.look())))
            time.sleep(0.05)
            swap(partial, folder)

        monkeypatch.setattr(store, "_swap_in", swap_slowly)
        await operations.push("it", upload(adapters[0]), persist=True, replace=True)
        await looked[0]

    asyncio.run(push_while_looking())
    assert digest(operations, "it") == adapters[0].digest
    monkeypatch.undo()
    look(watch)
    assert operations.registry.resolve("it").version == (1 if is_new else 2)
    shutil.rmtree(root / "it")
    look(watch)
    assert digest(operations, "it") is None


def test_what_is_not_the_adapters_fault_is_tried_again(
    operations: Operations, root: Path, adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(operations, root, frozenset(), {})
    save_adapter(adapters[0], root / "a")
    save_adapter(adapters[1], root / "b")
    load = operations.load
    for error in (EngineError("busy"), RuntimeError("unforeseen")):

        async def fail(name: str, *, replace: bool, error: Exception = error) -> Registered:
            if name == "a":
                raise error
            return await load(name, replace=replace)

        monkeypatch.setattr(operations, "load", fail)
        look(watch)
        assert digest(operations, "a") is None
        assert digest(operations, "b") == adapters[1].digest
    monkeypatch.undo()
    look(watch)
    assert digest(operations, "a") == adapters[0].digest


def test_it_looks_though_nothing_tells_of_a_change_and_whatever_a_look_comes_to(
    operations: Operations, root: Path, adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system tells nothing, and a root that is replaced tells nothing of the new one."""
    watch = Watch(operations, root, frozenset(), {})
    looked, look_once = [0], watch.look

    async def look_badly() -> None:
        looked[0] += 1
        if looked[0] == 1:
            raise RuntimeError("the first look fails")
        await look_once()

    async def until(reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not reached():
                await asyncio.sleep(0.02)

    async def replace_the_root() -> None:
        running = asyncio.create_task(watch.run())
        await until(lambda: looked[0] >= 2)
        root.rename(root.parent / "before")
        await asyncio.sleep(0.3)
        root.mkdir()
        save_adapter(adapters[0], root / "it")
        await until(lambda: digest(operations, "it") == adapters[0].digest)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    monkeypatch.setattr(watch, "look", look_badly)
    monkeypatch.setattr(watch_module, "LOOK_S", 0.2)
    asyncio.run(replace_the_root())


def test_what_the_server_wrote_itself_does_not_come_back(
    operations: Operations, root: Path, adapters: list[Adapter]
) -> None:
    watch = Watch(operations, root, frozenset(), {})
    sent: Upload = upload(adapters[0])
    asyncio.run(operations.push("it", sent, persist=True, replace=False))
    asyncio.run(operations.unload("it", drain=False))
    look(watch)
    assert operations.registry.entries() == []

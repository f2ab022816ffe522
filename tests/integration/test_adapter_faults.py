"""Adapters that break between registration and use, counted: each costs its own requests, and nobody else's."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from preft import save_adapter
from preft.adapters.adapter import Adapter
from preft.serve.backend.tier import HostTier
from preft.serve.engine import Engine
from tests.helpers.engines import Oracle, open_engine, prompt_of, request_of, reset_cache, save_all
from tests.helpers.tiny import random_adapter

pytestmark = pytest.mark.engine

TABLE = Path(__file__).parents[2] / "docs" / "concepts" / "serving.md"
TENSORS, MANIFEST = "preft.safetensors", "preft.json"
SCARCE = 1
"""A budget in bytes under which an adapter goes as soon as another one comes."""


def _truncate(folder: Path) -> None:
    data = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(data[: len(data) // 2])


def _flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / TENSORS).read_bytes())
    data[-9] ^= 1
    (folder / TENSORS).write_bytes(bytes(data))


def _replace_by_a_link(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (folder / TENSORS).rename(outside / TENSORS)
    (folder / TENSORS).symlink_to(outside / TENSORS)


def _replace_by_a_pipe(folder: Path) -> None:
    (folder / TENSORS).unlink()
    os.mkfifo(folder / TENSORS)


def _replace_by_another(folder: Path) -> None:
    donor = folder.parent / "donor"
    for name in (TENSORS, MANIFEST):
        (folder / name).write_bytes((donor / name).read_bytes())


@dataclass(frozen=True)
class Fault:
    """One way to break an adapter.

    Attributes:
        damage: Does it to the folder.
        reason: What the request's error says, as a pattern.
    """

    damage: Callable[[Path], object]
    reason: str


FILES = {
    "folder deleted": Fault(shutil.rmtree, "cannot be opened"),
    "tensors deleted": Fault(lambda folder: (folder / TENSORS).unlink(), f"has no `{TENSORS}`"),
    "tensors truncated": Fault(_truncate, "not a valid safetensors|truncated"),
    "one bit flipped": Fault(_flip_a_bit, "digest"),
    "manifest not JSON": Fault(lambda folder: (folder / MANIFEST).write_text("{"), "JSON"),
    "symbolic link to outside": Fault(_replace_by_a_link, "cannot be opened|regular file"),
    "pipe in place of a file": Fault(_replace_by_a_pipe, "regular file"),
    "another adapter's files": Fault(_replace_by_another, "digest"),
}
UNREADABLE = "file unreadable"
RAISED: dict[str, BaseException] = {
    "loader thread out of memory": MemoryError("no room"),
    "loader thread raising anything else": ZeroDivisionError("a fault of ours"),
    "loader thread asked to exit": SystemExit(3),
}


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path) -> dict[str, Adapter]:
    return {
        "plain": random_adapter(tiny_llama, seed=1),
        "blocks": random_adapter(tiny_llama, seed=2, rank=4, targets=(), blocks=(0, 1, 2), strength=0.3),
        "all": random_adapter(tiny_llama, seed=3, positions="all"),
    }


@pytest.fixture(scope="module")
def engine(
    tiny_llama: Path, adapters: dict[str, Adapter], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with open_engine(tiny_llama, save_all(tmp_path_factory.mktemp("adapters"), adapters)) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path, adapters: dict[str, Adapter]) -> Oracle:
    return Oracle(tiny_llama, adapters)


class Victim:
    """An adapter that is registered and whole."""

    def __init__(self, engine: Engine, oracle: Oracle, model: Path, folder: Path, fault: str) -> None:
        seed = 1000 + [*FILES, UNREADABLE, *RAISED].index(fault)
        self.engine, self.oracle, self.folder = engine, oracle, folder / "victim"
        self.adapter = random_adapter(model, seed=seed)
        save_adapter(self.adapter, self.folder)
        save_adapter(random_adapter(model, seed=999), folder / "donor")
        engine.registry.register("victim", self.folder)

    def use(self) -> None:
        """Uses it, then others until it is dropped from memory."""
        assert self.engine.generate([request_of("use", prompt_of(3, 40), "victim", tokens=2)])[0].error is None
        self.engine.generate([request_of(f"{i}", prompt_of(i, 40), "plain", tokens=2) for i in range(2)])
        assert self.adapter.digest not in self.engine._scheduler.preft_ledger.entries

    def require_failed_alone(self, reason: str) -> None:
        """Its requests fail with the reason, in one batch with others that are answered as ever."""
        reset_cache(self.engine)
        prompt = prompt_of(1, 70)
        names = (None, "victim", "plain", "blocks", "victim", "all")
        batch = [request_of(f"{i} {name}", prompt, name) for i, name in enumerate(names)]
        answered = list(zip(batch, self.engine.generate(batch), strict=True))
        failed = [result for request, result in answered if request.adapter == "victim"]
        others = [pair for pair in answered if pair[0].adapter != "victim"]
        for result in failed:
            assert result.error is not None
            assert not result.token_ids
            assert result.error["message"] == "The request failed in the engine"
            assert re.search(reason, result.error["got"]), result.error
        self.oracle.require_equal(*(list(column) for column in zip(*others, strict=True)))

    def require_served_again(self) -> None:
        """Put right, the same name and digest work."""
        shutil.rmtree(self.folder, ignore_errors=True)
        save_adapter(self.adapter, self.folder)
        result = self.engine.generate([request_of("again", prompt_of(1, 70), "victim", tokens=4)])[0]
        assert result.error is None
        assert result.digest == self.adapter.digest
        self.engine.remove("victim")


@pytest.fixture
def make_victim(
    engine: Engine, oracle: Oracle, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Victim]:
    monkeypatch.setattr(engine._scheduler.preft_ledger, "budget_bytes", SCARCE)
    return lambda fault: Victim(engine, oracle, tiny_llama, tmp_path, fault)


@pytest.mark.parametrize("used", [False, True], ids=["never used", "used and dropped"])
@pytest.mark.parametrize("fault", FILES)
def test_broken_files_fail_their_requests_alone(make_victim: Callable[[str], Victim], fault: str, used: bool) -> None:
    victim = make_victim(fault)
    if used:
        victim.use()
    FILES[fault].damage(victim.folder)

    victim.require_failed_alone(FILES[fault].reason)
    victim.require_served_again()


def test_an_unreadable_file_fails_its_requests_alone(
    make_victim: Callable[[str], Victim], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the system's own answer, where the tests do not run as root, for whom every file is readable."""
    victim = make_victim(UNREADABLE)
    with monkeypatch.context() as patch:
        (victim.folder / TENSORS).chmod(0)
        if os.geteuid() == 0:
            right, inode = os.open, (victim.folder / TENSORS).stat().st_ino

            def refuse(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
                descriptor = right(path, flags, mode, dir_fd=dir_fd)
                if os.fstat(descriptor).st_ino == inode:
                    os.close(descriptor)
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
                return descriptor

            patch.setattr(os, "open", refuse)
        victim.require_failed_alone("Permission denied")
    victim.require_served_again()


@pytest.mark.parametrize("fault", RAISED)
def test_a_loader_thread_that_raises_fails_those_requests_alone(
    make_victim: Callable[[str], Victim], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    victim = make_victim(fault)
    right = HostTier._load

    def load(self: HostTier, reference: object) -> object:
        if reference.digest == victim.adapter.digest:  # type: ignore[attr-defined]
            raise RAISED[fault]
        return right(self, reference)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(HostTier, "_load", load)
        victim.require_failed_alone(type(RAISED[fault]).__name__)
    victim.require_served_again()


def test_the_table_of_faults_is_what_is_tested() -> None:
    """Every row of the documentation's table is a case above, and every case has a row."""
    section = TABLE.read_text().partition("## Faults")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")]
    assert rows[0] == "Fault of an adapter"
    assert rows[2:] == [*FILES, UNREADABLE, *RAISED]

"""A worker's host tier: it loads on a thread of its own, reports what happened, and never raises for a bad adapter."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from preft.adapters.adapter import Adapter
from preft.adapters.fingerprint import fingerprint_base
from preft.adapters.store import save_adapter
from preft.errors import EngineError
from preft.serve.backend.messages import LoadOrders
from preft.serve.backend.packing import ModuleInfo, Packer
from preft.serve.backend.reference import AdapterReference
from preft.serve.backend.tier import HostTier
from preft.types import SiteKind
from tests.helpers.tiny import linear_sizes, random_adapter


def tier_of(tiny_llama: Path, dtype: torch.dtype) -> HostTier:
    modules = [
        ModuleInfo(index, path, SiteKind.LINEAR, (path,), sizes[0], (sizes[1],), None)
        for index, (path, sizes) in enumerate(linear_sizes(tiny_llama).items())
    ]
    packer = Packer(modules, lambda path: path, dtype, 64)
    return HostTier(packer, fingerprint_base(tiny_llama), allow_base_mismatch=False)


@pytest.fixture
def tier(tiny_llama: Path) -> HostTier:
    return tier_of(tiny_llama, torch.float32)


@pytest.fixture
def adapter(tiny_llama: Path) -> Adapter:
    return random_adapter(tiny_llama, seed=1)


@pytest.fixture
def reference(adapter: Adapter, tmp_path: Path) -> AdapterReference:
    save_adapter(adapter, tmp_path / "it")
    return AdapterReference(adapter.digest, adapter.manifest.positions, str(tmp_path / "it"))


def settle(tier: HostTier) -> tuple[dict[str, int], dict[str, str]]:
    tier._pool.submit(lambda: None).result()
    report = tier.take_report()
    return report.loaded, report.failed


def test_an_order_is_obeyed_and_reported_once(tier: HostTier, reference: AdapterReference) -> None:
    tier.obey(LoadOrders(load=(reference.encode(),)))

    loaded, failed = settle(tier)
    assert (list(loaded), failed) == ([reference.digest], {})
    assert not tier.take_report()
    assert loaded[reference.digest] == tier.num_bytes == tier.get(reference.digest).num_bytes
    tier.obey(LoadOrders(drop=(reference.digest,)))
    assert (tier.num_adapters, tier.num_bytes) == (0, 0)
    with pytest.raises(EngineError, match="not loaded"):
        tier.get(reference.digest)


def test_one_that_is_here_is_reported_when_it_is_ordered_and_not_when_it_is_wished_for(
    tier: HostTier, reference: AdapterReference
) -> None:
    assert tier.prefetch([reference]) == {}
    assert list(settle(tier)[0]) == [reference.digest]

    assert tier.prefetch([reference]) == {}
    assert not tier.take_report()
    tier.obey(LoadOrders(load=(reference.encode(),)))
    assert list(settle(tier)[0]) == [reference.digest]


def test_a_failure_that_was_put_right_before_it_was_reported_is_forgotten(
    tier: HostTier, reference: AdapterReference, adapter: Adapter
) -> None:
    shutil.rmtree(reference.folder)
    assert "cannot be opened" in tier.prefetch([reference])[reference.digest]

    save_adapter(adapter, reference.folder)
    tier.obey(LoadOrders(load=(reference.encode(),)))
    loaded, failed = settle(tier)
    assert (list(loaded), failed) == ([reference.digest], {})


def test_other_weights_than_were_registered_are_a_reported_failure(
    tier: HostTier, reference: AdapterReference, tiny_llama: Path
) -> None:
    save_adapter(random_adapter(tiny_llama, seed=2), reference.folder, force=True)
    tier.obey(LoadOrders(load=(reference.encode(),)))

    assert "digest" in settle(tier)[1][reference.digest]


@pytest.mark.parametrize(("strength", "scale"), [(1e5, 1.0), (1.0, 1e6)])
def test_numbers_that_overflow_in_the_engines_type_are_a_reported_failure(
    tiny_llama: Path, tmp_path: Path, strength: float, scale: float
) -> None:
    adapter = random_adapter(tiny_llama, seed=3, targets=("q_proj",), strength=strength, scale=scale)
    save_adapter(adapter, tmp_path / "large")
    large = AdapterReference(adapter.digest, adapter.manifest.positions, str(tmp_path / "large"))

    assert tier_of(tiny_llama, torch.bfloat16).prefetch([large]) == {}
    failed = tier_of(tiny_llama, torch.float16).prefetch([large])
    assert "do not fit the engine's number type" in failed[adapter.digest]


@contextmanager
def busy_loader(tier: HostTier) -> Iterator[None]:
    """The loader has something else to do; longer than any wait below, so that one who waits for it fails."""
    others = threading.Event()
    tier._pool.submit(others.wait, 60)
    try:
        yield
    finally:
        others.set()


def test_keeping_what_is_in_memory_does_not_wait_for_other_loads(tier: HostTier, reference: AdapterReference) -> None:
    tier.prefetch([reference])
    settle(tier)
    with busy_loader(tier), ThreadPoolExecutor(1) as caller:
        caller.submit(tier.hold, reference).result(timeout=5)
        outcome = caller.submit(tier.held.pushed, reference.digest, wait=False).result(timeout=5)
        assert outcome is not None
        assert outcome["digest"] == reference.digest
    shutil.rmtree(reference.folder)
    tier.obey(LoadOrders(drop=(reference.digest,)))
    assert tier.get(reference.digest).digest == reference.digest


def test_keeping_what_is_still_on_disk_stops_no_step(tier: HostTier, reference: AdapterReference) -> None:
    with busy_loader(tier), ThreadPoolExecutor(1) as engine:
        engine.submit(tier.hold, reference).result(timeout=5)
        assert engine.submit(tier.held.pushed, reference.digest, wait=False).result(timeout=5) is None
    outcome = tier.held.pushed(reference.digest, wait=True)
    assert outcome is not None
    assert outcome["digest"] == reference.digest
    shutil.rmtree(reference.folder)
    assert tier.get(reference.digest).digest == reference.digest


def test_what_cannot_be_kept_is_told(tier: HostTier, reference: AdapterReference) -> None:
    shutil.rmtree(reference.folder)
    tier.hold(reference)
    outcome = tier.held.pushed(reference.digest, wait=True)
    assert outcome is not None
    assert "cannot be opened" in outcome["error"]["message"]


def test_loading_gives_way_to_the_threads_that_run_steps(tier: HostTier) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert tier._pool.submit(niceness).result(timeout=30) == 19 >= niceness()

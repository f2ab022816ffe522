"""How stock vLLM is set up for its arms."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from preft.bench.engines import bind_ranks
from preft.bench.facts import available_memory, machine_facts, room_for_adapters
from preft.errors import UsageError
from preft.serve.stock import LORA_RANKS, StockSettings, installed_version

ADAPTERS = tuple(Path(f"a{index}") for index in range(5))


def test_base_has_no_lora() -> None:
    arguments = StockSettings(max_num_seqs=7, kv_cache_gib=0.5).engine_arguments("m")
    assert arguments["enforce_eager"] is True
    assert arguments["kv_cache_memory_bytes"] == 1 << 29
    assert not any("lora" in key for key in arguments)
    assert "tensor_parallel_size" not in arguments
    assert StockSettings(tp=2).engine_arguments("m")["tensor_parallel_size"] == 2
    assert "enforce_eager" not in StockSettings(eager=False).engine_arguments("m")


@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (4, 8), (16, 16), (17, 32), (300, 320), (512, 512)])
def test_a_rank_is_padded_to_what_vllm_takes(rank: int, padded: int) -> None:
    arguments = StockSettings(adapters=ADAPTERS, slots=3, max_rank=rank).engine_arguments("m")
    assert (arguments["max_lora_rank"], arguments["max_loras"], arguments["max_cpu_loras"]) == (padded, 3, 5)


def test_slots_beyond_the_adapters_are_not_asked_for() -> None:
    assert StockSettings(adapters=ADAPTERS, slots=64).engine_arguments("m")["max_loras"] == 5
    with pytest.raises(UsageError, match="no LoRA of this rank"):
        StockSettings(adapters=ADAPTERS, max_rank=513).engine_arguments("m")


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_CPU_OMP_THREADS_BIND"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 0, 2, 1})
    monkeypatch.setenv(name, "so that the end restores what was there")
    for ranks, bound in ((2, "0,1|2,3"), (3, "0|1|2"), (5, "nobind")):
        monkeypatch.delenv(name, raising=False)
        bind_ranks(ranks)
        assert os.environ[name] == bound
    bind_ranks(2)
    assert os.environ[name] == "nobind"  # what is set stays
    monkeypatch.delenv(name)
    bind_ranks(1)
    assert name not in os.environ


@pytest.mark.engine
def test_the_ranks_are_those_of_the_installed_vllm() -> None:
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == LORA_RANKS


def test_the_machine(tmp_path: Path) -> None:
    facts = machine_facts()
    assert facts["cores"] >= 1
    assert 0 < available_memory() <= facts["memory_bytes"]
    empty = room_for_adapters(tmp_path)
    (tmp_path / "a").write_bytes(b"x" * (1 << 20))
    assert room_for_adapters(tmp_path) == pytest.approx(empty, rel=0.01)
    assert installed_version("pytest")
    assert installed_version("no-such-package-at-all") is None

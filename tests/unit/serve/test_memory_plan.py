"""The plan of memory: what counts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from preft.errors import EngineError
from preft.serve.backend.memory_plan import (
    MemoryPlan,
    describe_plan,
    machine_memory,
    require_memory,
    slot_bytes,
    weight_bytes,
)

GIB = 1 << 30
PLAN = MemoryPlan(
    ranks=2,
    weight_bytes=GIB,
    kv_cache_bytes=2 * GIB,
    adapter_cache_bytes=4 * GIB,
    pushed_bytes=4 * GIB,
    slots=8,
    slot_bytes=GIB // 8,
    stack_bytes=2 * GIB,
)


def test_a_plan_beyond_the_machine_is_refused_and_one_that_fits_is_not() -> None:
    assert PLAN.total_bytes == 20 * GIB
    require_memory(PLAN, 20 * GIB)

    with pytest.raises(EngineError, match="exceeds this machine's memory") as caught:
        require_memory(PLAN, 20 * GIB - 1)
    assert caught.value.got is not None
    assert "adapters up to 4.00 GiB" in caught.value.got
    assert "20.00 GiB in all" in caught.value.got


def test_a_plan_in_words_names_every_part() -> None:
    words = describe_plan(PLAN.to_dict())
    assert words == (
        "weights 1.00 GiB, KV cache 2.00 GiB, adapters up to 4.00 GiB, their stacks up to 2.00 GiB, "
        "8 slots of 131072 KiB on each of 2 ranks: 20.00 GiB in all; "
        "adapters pushed from memory, if any, up to 4.00 GiB more"
    )


def test_a_containers_limit_counts_where_it_is_lower(tmp_path: Path) -> None:
    whole = machine_memory(())
    for text, expected in (("1073741824\n", GIB), ("max\n", whole), (f"{1 << 62}\n", whole)):
        (tmp_path / "limit").write_text(text)
        assert machine_memory((tmp_path / "absent", tmp_path / "limit")) == expected
    assert whole > GIB


def test_tied_weights_count_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(8, 4, bias=False))
    assert weight_bytes(model) == 2 * 8 * 4 * 4
    model[1].weight = model[0].weight
    assert weight_bytes(model) == 8 * 4 * 4


def test_stacks_of_slots_are_counted_in_each_form_vllm_has() -> None:
    fused = SimpleNamespace(lora_a_stacked=(torch.zeros(3, 5),) * 2, lora_b_stacked=[torch.zeros(3, 7)])
    plain = SimpleNamespace(lora_a_stacked=torch.zeros(3, 1))
    assert slot_bytes([fused, plain, SimpleNamespace()], slots=3) == (2 * 15 + 21 + 3) * 4 // 3

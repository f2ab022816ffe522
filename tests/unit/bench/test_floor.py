"""The floor of all-token LoRA, from numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from preft.bench.floor import floors, read_bandwidth
from preft.errors import UsageError
from tests.unit.bench.common import FACTS


def row(arm: str, **changes: Any) -> dict[str, Any]:
    return {
        "arm": arm,
        "repeat": 0,
        "adapters": 4,
        "lora_rank": 8,
        "requests": 4,
        "input_len": 100,
        "output_len": 11,
        "prefill_s": 2.0,
        "seconds": 10.0,
        "output_tokens_per_s": 4.4,
        "setup": {},
        **changes,
    }


def test_a_floor_by_hand() -> None:
    """A model of 1 M values, 400 prompt tokens in 2 s: 400 MFLOP/s. An adapter of 8 x 2000 values is 32 kB."""
    base, lora = row("base"), row("lora", seconds=20.0, adapter_kernels={"seconds": 8.0})
    (found,) = floors([base, lora], FACTS, bandwidth=lambda: 128e3)
    assert found.flops == pytest.approx(400e6)
    assert found.adapter_bytes == 4 * 32_000
    # A second a step for bytes, 10 later tokens; 2 x 16000 x 400 / 400e6 = 0.032 s for the prompts.
    assert found.kernel_floor_s == pytest.approx(10.032)
    assert found.floor_s == pytest.approx(20.032)
    assert found.share_of_floor == pytest.approx(1.0016)
    assert found.kernel_share_of_floor == pytest.approx(1.254)
    # So fast a memory that arithmetic bounds decode: 2 x 16000 x 4 / 400e6 a step.
    (found,) = floors([base, lora], FACTS, bandwidth=lambda: 1e15)
    assert found.kernel_floor_s == pytest.approx(0.032 + 10 * 0.00032)


def test_a_slower_arm_is_further_from_it() -> None:
    base = row("base")
    near, far = (
        floors([base, row("lora", seconds=seconds)], FACTS, bandwidth=lambda: 128e3)[0] for seconds in (21.0, 40.0)
    )
    assert near.share_of_floor > 0.9
    assert far.share_of_floor == pytest.approx(near.share_of_floor * 21 / 40)
    assert far.kernel_share_of_floor is None


def test_only_points_with_base_count() -> None:
    rows = [row("base"), row("lora", adapters=8), row("lora", lora_rank="8+16"), row("base", lora_rank="8+16")]
    with pytest.raises(UsageError, match="no point where both"):
        floors(rows, FACTS, bandwidth=lambda: 1.0)
    assert (
        len(floors([*rows, row("lora"), row("lora", repeat=1), row("base", repeat=1)], FACTS, bandwidth=lambda: 1.0))
        == 1
    )


def test_bandwidth_is_a_plausible_one() -> None:
    assert 1e8 < read_bandwidth(1 << 22, tries=3) < 1e13

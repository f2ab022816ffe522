"""The all-token baseline, row by row, against float64."""

from __future__ import annotations

import pytest
import torch

from preft_kernels.lora_rows import lora_rows_
from preft_kernels.reference import lora_rows_reference
from preft_kernels.rows import Segment
from preft_kernels.segments import plan_rows
from preft_kernels.tolerances import error_bound
from tests.kernels.cases import BF16, F16, F32

CASES = [(896, (896, 128, 128), 8), (576, (576, 192, 192), 4), (300, (200, 72), 12), (512, (256,), 64)]


def build(width: int, wide: tuple[int, ...], rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor | list]:
    rows = torch.tensor([0, 3, 4, 9, 17, 18], dtype=torch.int32)
    slots = torch.tensor([4, 0, 4, 1, 2, 2], dtype=torch.int32)
    generator = torch.Generator().manual_seed(width + rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    downs = [(draw(5, rank, width) / width**0.5).to(dtype) for _ in wide]
    ups = [(draw(5, size, rank) / rank**0.5).to(dtype) for size in wide]
    for table in (*downs, *ups):
        table[3] = torch.nan
    x, y = draw(20, width).to(dtype), draw(20, sum(wide)).to(dtype)
    return {"y": y, "x": x, "downs": downs, "ups": ups, "scales": torch.rand(5, generator=generator) + 0.5,
            "rows": rows, "slots": slots}  # fmt: skip


def exact(batch: dict) -> torch.Tensor:
    update = torch.zeros_like(batch["y"], dtype=torch.float64)
    for row, slot in zip(batch["rows"].tolist(), batch["slots"].tolist(), strict=True):
        x = batch["x"][row].double()
        parts = [
            up[slot].double() @ (down[slot].double() @ x) for down, up in zip(batch["downs"], batch["ups"], strict=True)
        ]
        update[row] = torch.cat(parts) * batch["scales"][slot].double()
    return update


def assert_close(batch: dict, before: torch.Tensor, update: torch.Tensor, dtype: torch.dtype) -> None:
    rows = batch["rows"].long()
    others = torch.ones(len(before), dtype=torch.bool)
    others[rows] = False
    assert torch.equal(batch["y"][others], before[others])
    wanted = before.double() + update
    bound = error_bound(update[rows], wanted[rows], dtype)
    assert update[rows].norm() > 20 * bound
    assert (batch["y"].double() - wanted)[rows].norm() <= bound


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(("width", "wide", "rank"), CASES)
def test_against_float64(width: int, wide: tuple[int, ...], rank: int, dtype: torch.dtype) -> None:
    batch = build(width, wide, rank, dtype)
    before, update = batch["y"].clone(), exact(batch)
    count = len(batch["rows"])
    from preft_kernels.lora_rows import SPLIT

    scratch = torch.full((count, SPLIT, len(wide), rank), torch.nan)
    lora_rows_(**batch, scratch=scratch)
    assert_close(batch, before, update, dtype)


@pytest.mark.parametrize(("width", "wide", "rank"), CASES)
def test_the_reference_is_the_same(width: int, wide: tuple[int, ...], rank: int) -> None:
    batch = build(width, wide, rank, F32)
    before, update = batch["y"].clone(), exact(batch)
    plan = plan_rows([Segment(r, 1, s) for r, s in zip(batch["rows"].tolist(), batch["slots"].tolist(), strict=True)])
    lora_rows_reference(batch["y"], batch["x"], batch["downs"], batch["ups"], batch["scales"], plan)
    assert_close(batch, before, update, F32)


@pytest.mark.interpreter
def test_no_rows_and_what_is_refused() -> None:
    batch = build(300, (200, 72), 12, F32)
    before = batch["y"].clone()
    lora_rows_(**{**batch, "rows": batch["rows"][:0], "slots": batch["slots"][:0]})
    assert torch.equal(batch["y"], before)
    with pytest.raises(ValueError, match="4 slices"):
        lora_rows_(**{**batch, "downs": batch["downs"] * 2, "ups": batch["ups"] * 2})

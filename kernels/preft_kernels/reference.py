"""What the kernels compute: float32 semantics, in plain torch. The specification, and the fallback on any device.

Numbers are widened to float32 (or stay float64), every product and sum is done there, and the result is rounded once,
when it is stored. A kernel may round the operands of its products to the type of the weights and must sum in float32;
`preft_kernels.tolerances` says how far that may take it from here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from preft_kernels.segments import RowPlan
from preft_kernels.tables import BlockTables


def block_delta_reference(
    hidden: torch.Tensor, residual: torch.Tensor | None, tables: BlockTables, plan: RowPlan
) -> None:
    """Adds the update of a block-output site to the planned rows.

    Semantics, for each planned row i under slot s of rank r > 0, with h = hidden[i] + residual[i]:
        hidden[i] += (h @ down[s, :r].T + bias[s, :r]) @ up[s, :r]

    Args:
        hidden: [T, D], any strides; mutated in place at planned rows only.
        residual: [T, D], or None where `hidden` is the whole residual stream.
        tables: Numbers of the site.
        plan: Rows.
    """
    wide = torch.float64 if hidden.dtype is torch.float64 else torch.float32
    for slot, rows in _rows_by_slot(plan, hidden.device):
        rank = int(tables.ranks[slot])
        if not rank:
            continue
        base = hidden[rows].to(wide)
        stream = base if residual is None else base + residual[rows].to(wide)
        inner = stream @ tables.down[slot, :rank].to(wide).T + tables.bias[slot, :rank].to(wide)
        hidden[rows] = (base + inner @ tables.up[slot, :rank].to(wide)).to(hidden.dtype)


def lora_rows_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    downs: Sequence[torch.Tensor],
    ups: Sequence[torch.Tensor],
    scales: torch.Tensor,
    plan: RowPlan,
) -> None:
    """Adds the update of a fused linear site to the planned rows: slice j writes its own range of columns.

    Semantics, for each planned row i under slot s: y[i, slice j] += scales[s] * (x[i] @ downs[j][s].T) @ ups[j][s].T

    Args:
        y: [T, sum of N_j]; mutated in place at planned rows only.
        x: [T, K].
        downs: For each slice, [slots, r, K].
        ups: For each slice, [slots, N_j, r].
        scales: [slots] float32.
        plan: Rows.
    """
    for slot, rows in _rows_by_slot(plan, y.device):
        column = 0
        for down, up in zip(downs, ups, strict=True):
            stop = column + up.shape[1]
            update = scales[slot].float() * (x[rows].float() @ down[slot].float().T) @ up[slot].float().T
            y[rows, column:stop] = (y[rows, column:stop].float() + update).to(y.dtype)
            column = stop


def _rows_by_slot(plan: RowPlan, device: torch.device) -> list[tuple[int, torch.Tensor]]:
    return [
        (int(slot), torch.from_numpy(plan.rows[first : first + length]).long().to(device))
        for slot, first, length in plan.tiles
    ]

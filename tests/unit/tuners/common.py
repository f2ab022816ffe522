"""What the tests of the tuners share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

PROMPTS = (list(range(20, 41)), list(range(100, 107)), [5, 9, 300, 301, 17, 44, 260, 261, 262, 6, 90, 91, 92, 93])
MOVES = 0.5
"""Logit change that shows an adapter, or a wrong rule, at work; the tiny models' logits spread over several units."""
EXACT = 2e-4
"""Float32 noise between two orders of summation, in logits."""


def load(folder: Path, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **settings).eval()


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor([list(row) for row in rows])


def padded(rows: list[list[int]], side: str) -> dict[str, torch.Tensor]:
    """A padded batch with position ids that start at 0 in every row."""
    width = max(map(len, rows))
    pads = [[0] * (width - len(row)) for row in rows]
    tokens = [pad + row if side == "left" else row + pad for pad, row in zip(pads, rows, strict=True)]
    marks = [
        [0] * len(pad) + [1] * len(row) if side == "left" else [1] * len(row) + [0] * len(pad)
        for pad, row in zip(pads, rows, strict=True)
    ]
    attention = torch.tensor(marks)
    return {
        "input_ids": torch.tensor(tokens),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
    }


def gap(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max())

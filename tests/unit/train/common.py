"""What the tests of training share."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from preft.data.examples import Example

STYLE = (40, 41, 42, 43)
"""Completion that every example asks for, whatever its prompt."""
EXACT = 2e-4
"""Float32 noise between two orders of summation, in logits of the tiny models."""


def examples(count: int, *, seed: int = 0, style: tuple[int, ...] = STYLE) -> list[Example]:
    """Random prompts of 4 to 12 tokens that all have one completion, the end of sequence included."""
    generator = random.Random(seed)
    return [
        Example(
            tuple(generator.randrange(50, 500) for _ in range(generator.randrange(4, 13))), (*style, 2), f"row {index}"
        )
        for index in range(count)
    ]


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def gap(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max())

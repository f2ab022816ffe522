"""Batches of training examples: padded token ids, labels, and the adapted tokens as the rule gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from preft.data.examples import Example
from preft.errors import UsageError
from preft.positions import Policy

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""Label of a token that is not learnt, as PyTorch's and Transformers' losses have it."""


def collate(
    examples: Sequence[Example], *, policy: Policy, pad_id: int = 0, side: str = "left"
) -> dict[str, torch.Tensor]:
    """Makes one batch.

    Everything follows from the examples' lengths, never from token values, so a pad token that is also the end of
    sequence changes nothing. Labels and adapted tokens are separate things: a token that is not learnt need not be
    adapted.

    Args:
        examples: At least one.
        policy: Which positions below a boundary are adapted.
        pad_id: Fills rows up; any id of the vocabulary.
        side: Where padding stands. On the left, completions end together, and the output head need see only the last
            columns.

    Returns:
        `input_ids`, `attention_mask`, `position_ids` and `labels` [B, T] int64, and `preft_mask` [B, T] bool.
    """
    import torch

    if not examples:
        raise UsageError("A batch needs an example")
    if side not in ("left", "right"):
        raise UsageError("Padding has no such side", got=f"`{side}`", accepted="`left` or `right`")
    width = max(example.num_tokens for example in examples)
    rows: dict[str, list[list[int]]] = {}
    for example in examples:
        pads = width - example.num_tokens
        for name, values, filler in (
            ("input_ids", [*example.prompt_ids, *example.completion_ids], pad_id),
            ("attention_mask", [1] * example.num_tokens, 0),
            ("position_ids", list(range(example.num_tokens)), 0),
            ("labels", [IGNORED] * example.boundary + list(example.completion_ids), IGNORED),
            ("preft_mask", [int(flag) for flag in policy.mask(example.boundary, 0, example.num_tokens)], 0),
        ):
            padding = [filler] * pads
            rows.setdefault(name, []).append(padding + values if side == "left" else values + padding)
    batch = {name: torch.tensor(values, dtype=torch.long) for name, values in rows.items()}
    batch["preft_mask"] = batch["preft_mask"].bool()
    return batch

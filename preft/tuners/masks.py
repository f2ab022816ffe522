"""Masks of adapted tokens as tensors. Which positions are adapted is decided by `preft.positions` alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from preft.errors import UnsupportedError, UsageError
from preft.positions import Policy

PADDING = -1
"""Position of a padding token: below every span, so never adapted."""


def request_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Absolute position of each token in its request.

    Semantics: `where(attention_mask, cumsum(attention_mask) - 1, PADDING)`

    Args:
        attention_mask: [B, T], non-zero for real tokens; padding may stand on either side.

    Returns:
        [B, T] int64; padding has position `PADDING`.
    """
    real = attention_mask.bool()
    return torch.where(real, real.long().cumsum(-1) - 1, PADDING)


def policy_mask(policy: Policy, boundaries: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
    """The adapted tokens of a batch.

    Args:
        policy: Which positions below a boundary are adapted.
        boundaries: One for each row.
        positions: [B, T] absolute positions, `PADDING` where there is no token.

    Returns:
        [B, T] bool.
    """
    rows = []
    for boundary, row in zip(boundaries, positions, strict=True):
        mask = torch.zeros_like(row, dtype=torch.bool)
        for start, stop in policy.spans(boundary):
            mask |= (row >= start) & (row < stop)
        rows.append(mask)
    return torch.stack(rows)


def batch_mask(policy: Policy, boundaries: Sequence[int], attention_mask: torch.Tensor) -> torch.Tensor:
    """The adapted tokens [B, T] of a padded batch with one boundary a row: what a collator passes as `preft_mask`."""
    return policy_mask(policy, boundaries, request_positions(attention_mask))


def row_boundaries(boundary: object, num_rows: int) -> list[int]:
    """Reads `preft_boundary`: one integer for all rows, or one for each.

    Raises:
        UsageError: It is neither, or a value is negative.
    """
    given = boundary.tolist() if isinstance(boundary, torch.Tensor) else boundary
    found: Sequence[object] = given if isinstance(given, list | tuple) else [given] * num_rows
    values = [value for value in found if isinstance(value, int) and not isinstance(value, bool) and value >= 0]
    if len(values) != len(found) or len(values) != num_rows:
        raise UsageError(
            "`preft_boundary` is not valid",
            got=f"{boundary!r} for a batch of {num_rows}",
            accepted=f"an integer of at least 0, or {num_rows} of them",
        )
    return values


@dataclass(frozen=True)
class StepMask:
    """The adapted tokens of one forward pass, with what a layer needs to skip work.

    Attributes:
        mask: [B, T] bool, or None if every token is adapted, or none is.
        any: Whether any token is adapted; False skips the update altogether.
    """

    mask: torch.Tensor | None
    any: bool

    @classmethod
    def of(cls, mask: torch.Tensor) -> StepMask:
        """Reads the flags off a mask."""
        if not bool(mask.any()):
            return NONE_ADAPTED
        return ALL_ADAPTED if bool(mask.all()) else cls(mask, True)

    def window(self, logits_to_keep: int | torch.Tensor) -> StepMask:
        """The part that the output head sees when it computes logits for some tokens only; 0 means all of them."""
        if self.mask is None or (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            return self
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return StepMask.of(self.mask[:, kept])

    def only(self, low: torch.Tensor) -> torch.Tensor:
        """`low` at adapted tokens, and zero elsewhere, so that what is computed from it adds nothing there.

        The mask is applied between the two factors of an update, where a token has R values and not D.

        Args:
            low: [B, T, R], or [B * T, R] from a module that flattens its input.

        Raises:
            UnsupportedError: The module sees other tokens than the model does, as a mixture's experts do.
        """
        if self.mask is None:
            return low
        leading = low.shape[:-1]
        if leading.numel() != self.mask.numel() or (len(leading) > 1 and leading != self.mask.shape):
            raise UnsupportedError(
                "An adapted module does not see the model's tokens in their order",
                got=f"an input of shape {tuple(low.shape)} for a mask of {tuple(self.mask.shape)}",
                hint="sites inside a mixture's experts cannot be adapted by position",
            )
        return torch.where(self.mask.to(low.device).reshape(leading).unsqueeze(-1), low, 0.0)


ALL_ADAPTED = StepMask(None, True)
NONE_ADAPTED = StepMask(None, False)

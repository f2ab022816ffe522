"""The loss of GRPO on tensors: nothing of models, engines or rewards."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_STD_FLOOR = 1e-4
"""Added to a standard deviation before dividing by it, as TRL has it."""


def group_advantages(rewards: torch.Tensor, group_size: int, scale: str = "group") -> tuple[torch.Tensor, torch.Tensor]:
    """How much better each completion is than its group.

    Semantics: `(reward - mean of its group) / (standard deviation + 1e-4)`

    Args:
        rewards: [N * group_size], group after group.
        group_size: Completions of one prompt, at least 2.
        scale: Whose standard deviation: of the `group`, of the `batch`; `none` leaves the difference.

    Returns:
        The advantages [N * group_size], and whether all rewards of a group are the same [N].
    """
    groups = rewards.view(-1, group_size)
    differences = groups - groups.mean(dim=1, keepdim=True)
    spread = groups.std(dim=1, keepdim=True)
    level = torch.isclose(spread, torch.zeros_like(spread)).squeeze(1)
    if scale == "group":
        differences = differences / (spread + _STD_FLOOR)
    elif scale == "batch":
        differences = differences / (rewards.std() + _STD_FLOOR)
    return differences.flatten(), level


@dataclass(frozen=True)
class LossShape:
    """How the tokens of one update are weighed. Sums over its parts are then the update's loss, however it is split.

    Attributes:
        kind: One of `preft.config.grpo.LOSSES`.
        rows: Completions of the update.
        tokens: Their tokens.
        max_tokens: Longest completion that sampling allows.
    """

    kind: str
    rows: int
    tokens: int
    max_tokens: int

    def weights(self, mask: torch.Tensor) -> torch.Tensor:
        """The weight of each token.

        Args:
            mask: [B, T], true at completion tokens.

        Returns:
            [B, T] float32, zero outside the mask.
        """
        real = mask.float()
        if self.kind == "grpo":
            return real / real.sum(dim=1, keepdim=True).clamp(min=1.0) / self.rows
        return real / (self.tokens if self.kind == "dapo" else self.rows * self.max_tokens)


@dataclass(frozen=True)
class Clipping:
    """The clipped objective.

    Attributes:
        low: The ratio counts down to 1 minus this.
        high: And up to 1 plus this.
        beta: Weight of the divergence from the reference.
    """

    low: float
    high: float
    beta: float = 0.0


@dataclass(frozen=True)
class TokenTerms:
    """What the loss is made of, for each token [B, T].

    Attributes:
        loss: Before weighing.
        kl: Divergence from the reference, or None without one.
        is_clipped: Where clipping takes the gradient away.
    """

    loss: torch.Tensor
    kl: torch.Tensor | None
    is_clipped: torch.Tensor


def token_terms(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clipping: Clipping,
    *,
    reference: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> TokenTerms:
    """The clipped loss of each token.

    Semantics: `-min(r A, clip(r, 1 - low, 1 + high) A) * importance + beta r (exp(q - p) - (q - p) - 1)`
    with `r = exp(p - old)`, `p` the policy's log-probability and `q` the reference's. The factor `r` of the divergence
    makes its gradient that of the reverse divergence, as TRL has it by default.

    Args:
        logprobs: [B, T] of the policy, with its graph.
        old_logprobs: [B, T] of the policy that the completions came from.
        advantages: [B].
        clipping: Limits and beta.
        reference: [B, T] of the reference model; needed if beta is not 0.
        importance: [B, T] factors, or None for 1.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    gain = advantages.unsqueeze(1)
    loss = -torch.min(ratio * gain, ratio.clamp(1 - clipping.low, 1 + clipping.high) * gain)
    if importance is not None:
        loss = loss * importance
    kl = None
    if reference is not None:
        kl = (torch.exp(reference - logprobs) - (reference - logprobs) - 1) * ratio
        loss = loss + clipping.beta * kl
    is_clipped = ((ratio < 1 - clipping.low) & (gain < 0)) | ((ratio > 1 + clipping.high) & (gain > 0))
    return TokenTerms(loss, kl, is_clipped)

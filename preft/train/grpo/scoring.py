"""Log-probabilities of completions in the trainer, under the mask, and how far the engine's are from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from preft.data.collate import IGNORED, collate
from preft.data.examples import Example
from preft.errors import EngineError
from preft.positions import Policy
from preft.train.grpo.rollout import Completion


@dataclass(frozen=True)
class Batch:
    """Completions of one forward pass; T is the length of the longest, and they end together.

    Attributes:
        inputs: Arguments of the model.
        targets: [B, T] token ids of the completions.
        mask: [B, T] true at completion tokens.
        engine: [B, T] the engine's log-probabilities, zero outside the mask.
    """

    inputs: dict[str, torch.Tensor]
    targets: torch.Tensor
    mask: torch.Tensor
    engine: torch.Tensor

    @classmethod
    def of(cls, completions: Sequence[Completion], policy: Policy, device: torch.device | str) -> Batch:
        """Makes a batch: the boundary of each row is the length of its prompt."""
        examples = [Example(found.prompt.token_ids, found.token_ids) for found in completions]
        columns = {name: value.to(device) for name, value in collate(examples, policy=policy).items()}
        labels = columns.pop("labels")
        width = max(len(found.token_ids) for found in completions)
        targets = labels[:, -width:]
        mask = targets != IGNORED
        engine = torch.zeros(targets.shape, device=device)
        for row, found in enumerate(completions):
            engine[row, width - len(found.token_ids) :] = torch.tensor(found.logprobs, device=device)
        return cls(columns, targets.clamp(min=0), mask, engine)


def completion_logprobs(model: Any, batch: Batch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each completion token under the model.

    Args:
        model: A causal language model, with an adapter in use or not.
        batch: What to score.
        temperature: That the policy is sampled at.

    Returns:
        [B, T] at the temperature, and [B, T] before it and without a graph; zero outside the mask.
    """
    width = batch.targets.shape[1]
    logits = model(**batch.inputs, use_cache=False, logits_to_keep=width + 1).logits[:, :-1].float()
    own = _chosen(logits / temperature if temperature != 1 else logits, batch.targets).masked_fill(~batch.mask, 0.0)
    if temperature == 1:
        return own, own.detach()
    return own, _chosen(logits.detach(), batch.targets).masked_fill(~batch.mask, 0.0)


def _chosen(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


@dataclass
class Agreement:
    """The log ratio of trainer to engine over the tokens of a step, which a perfect pair of them makes zero.

    Attributes:
        largest: Largest |log ratio| of a token.
        total: Sum of log ratios.
        ratio_total: Sum of ratios.
        tokens: How many.
    """

    largest: float = 0.0
    total: float = 0.0
    ratio_total: float = 0.0
    tokens: int = 0

    def add(self, batch: Batch, logprobs: torch.Tensor) -> None:
        """Takes in a batch with the trainer's log-probabilities [B, T], before the temperature."""
        found = (logprobs - batch.engine)[batch.mask].double()
        # `max` passes a value over that is no number.
        largest = float(found.abs().max()) if bool(found.isfinite().all()) else float("inf")
        self.largest = max(self.largest, largest)
        self.total += float(found.sum())
        self.ratio_total += float(found.exp().sum())
        self.tokens += found.numel()

    def metrics(self) -> dict[str, float]:
        """As a run reports them."""
        count = max(1, self.tokens)
        return {
            "ratio/max_abs_log": self.largest,
            "ratio/mean_log": self.total / count,
            "ratio/mean": self.ratio_total / count,
        }

    def require(self, tolerance: float, occasion: str) -> None:
        """Checks that engine and trainer are one policy.

        Raises:
            EngineError: Their probabilities of a token differ by more.
        """
        if not self.largest <= tolerance:
            raise EngineError(
                f"Engine and trainer disagree about the policy {occasion}",
                got=f"a |log ratio| of {self.largest:.3g} for one of {self.tokens} tokens",
                accepted=f"at most {tolerance:g}",
                hint="both must hold the same adapter, boundary, weights and number type; in half precision "
                "`train.ratio_tolerance` may have to be wider",
            )

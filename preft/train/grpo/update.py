"""The updates of one step: completions with their advantages in, a better policy and its metrics out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from preft.config.grpo import GrpoRecipe
from preft.errors import EngineError
from preft.train.grpo.loss import Clipping, LossShape, token_terms
from preft.train.grpo.rollout import Completion
from preft.train.grpo.scoring import Agreement, Batch, completion_logprobs
from preft.train.model import learning_rate_factor
from preft.tuners.attach import AttachedModel
from preft.tuners.trainable import parameter_groups


class Updater:
    """Holds the optimiser of the adapter in use on a model.

    Args:
        handle: The model's adapters; the one in use must be trainable.
        recipe: How to learn.

    Attributes:
        optimizer: AdamW.
        updates: Updates that were made, those before a checkpoint included.
        is_updating: Whether values are being changed right now, so that an interruption leaves them half done.
    """

    def __init__(self, handle: AttachedModel, recipe: GrpoRecipe) -> None:
        self._handle, self._recipe = handle, recipe
        self._name = str(handle.active)
        settings = recipe.train
        groups = parameter_groups(handle, self._name, weight_decay=settings.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate)
        self.updates = 0
        self.is_updating = False
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
        self._clipping = Clipping(settings.epsilon, high, settings.beta)

    def score(self, completions: Sequence[Completion]) -> Agreement:
        """How the trainer's probabilities of completions agree with the engine's."""
        agreement = Agreement()
        with torch.no_grad():
            for batch in self._batches(completions):
                agreement.add(batch, completion_logprobs(self._handle.model, batch)[1])
        return agreement

    def __call__(self, completions: Sequence[Completion], advantages: Sequence[float], step: int) -> dict[str, float]:
        """Learns from a step's completions.

        Args:
            completions: Of the policy as it is now.
            advantages: One for each.
            step: Its number, from 0.

        Returns:
            Metrics of the updates.

        Raises:
            EngineError: Engine and trainer disagree about the policy, or a loss or gradient is not finite.
        """
        settings = self._recipe.train
        # A completion without an advantage has no gradient, unless it is held to the base model.
        chosen = [n for n, value in enumerate(advantages) if value != 0 or settings.beta > 0] or [0]
        chosen.sort(key=lambda n: len(completions[n].prompt.token_ids) + len(completions[n].token_ids))
        batches = self._batches([completions[n] for n in chosen])
        gains = torch.tensor([advantages[n] for n in chosen], dtype=torch.float32).split(settings.batch_size)
        tokens = sum(len(found.token_ids) for found in completions)
        shape = LossShape(settings.loss, len(completions), tokens, self._recipe.rollout.max_tokens)
        references = self._reference(batches)
        old: list[torch.Tensor | None] = [None] * len(batches)
        rate = settings.learning_rate * self._rate(step)
        totals = _Totals()
        for _ in range(settings.iterations):
            for number, batch in enumerate(batches):
                logprobs, plain = completion_logprobs(self._handle.model, batch, self._recipe.rollout.temperature)
                previous = old[number]
                if previous is None:
                    previous = old[number] = logprobs.detach()
                    totals.agreement.add(batch, plain)
                    totals.agreement.require(self._recipe.ratio_tolerance, f"at step {step + 1}")
                terms = token_terms(
                    logprobs,
                    previous,
                    gains[number].to(logprobs.device),
                    self._clipping,
                    reference=references[number],
                    importance=self._importance(batch, previous),
                )
                loss = (terms.loss * shape.weights(batch.mask)).sum()
                _require_finite(float(loss.detach()), "loss", step, [completions[n] for n in chosen])
                if loss.requires_grad:
                    loss.backward()
                totals.add(batch, loss, terms.kl, terms.is_clipped, previous)
            totals.norms.append(self._apply(rate, step, [completions[n] for n in chosen]))
        return totals.metrics(rate, settings.iterations)

    def _batches(self, completions: Sequence[Completion]) -> list[Batch]:
        size = self._recipe.train.batch_size
        policy = self._handle.policies[self._name]
        device = self._handle.model.device
        return [Batch.of(completions[n : n + size], policy, device) for n in range(0, len(completions), size)]

    def _reference(self, batches: Sequence[Batch]) -> list[torch.Tensor | None]:
        """The base model's log-probabilities, which need no second model: the adapter is taken out of use."""
        if self._clipping.beta == 0:
            return [None] * len(batches)
        temperature = self._recipe.rollout.temperature
        self._handle.use(None)
        try:
            with torch.no_grad():
                return [completion_logprobs(self._handle.model, _unmasked(batch), temperature)[0] for batch in batches]
        finally:
            self._handle.use(self._name)

    def _importance(self, batch: Batch, old: torch.Tensor) -> torch.Tensor | None:
        cap = self._recipe.train.importance_cap
        return None if cap is None else torch.exp(old - batch.engine).clamp(max=cap)

    def _rate(self, step: int) -> float:
        settings = self._recipe.train
        factor = learning_rate_factor(step, settings.max_steps, settings.warmup)
        rising = round(settings.max_steps * settings.warmup)
        return factor if settings.decay or step < rising else 1.0

    def _apply(self, rate: float, step: int, completions: Sequence[Completion]) -> float:
        limit = self._recipe.train.max_gradient_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, limit))
        _require_finite(norm, "gradient", step, completions)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.is_updating = True
        self.optimizer.step()
        self.updates += 1
        self.is_updating = False
        self.optimizer.zero_grad()
        return norm


@dataclass
class _Totals:
    """Sums over the batches of all updates of a step."""

    agreement: Agreement = field(default_factory=Agreement)
    loss: float = 0.0
    kl: float | None = None
    clipped: float = 0.0
    surprise: float = 0.0
    tokens: int = 0
    norms: list[float] = field(default_factory=list)

    def add(
        self,
        batch: Batch,
        loss: torch.Tensor,
        kl: torch.Tensor | None,
        is_clipped: torch.Tensor,
        old: torch.Tensor,
    ) -> None:
        self.loss += float(loss.detach())
        self.clipped += float((is_clipped & batch.mask).sum())
        self.surprise -= float(old[batch.mask].sum())
        self.tokens += int(batch.mask.sum())
        if kl is not None:
            self.kl = (self.kl or 0.0) + float(kl.detach()[batch.mask].sum())

    def metrics(self, rate: float, iterations: int) -> dict[str, float]:
        found = {
            "loss": self.loss / iterations,
            "grad_norm": sum(self.norms) / len(self.norms),
            "learning_rate": rate,
            # The mean surprise of tokens drawn from the policy estimates its entropy.
            "entropy": self.surprise / self.tokens,
            "clip_fraction": self.clipped / self.tokens,
            **self.agreement.metrics(),
        }
        return found if self.kl is None else {**found, "kl": self.kl / self.tokens}


def _unmasked(batch: Batch) -> Batch:
    """The batch for a model with no adapter in use, which takes no mask."""
    inputs = {name: value for name, value in batch.inputs.items() if name != "preft_mask"}
    return Batch(inputs, batch.targets, batch.mask, batch.engine)


def _require_finite(value: float, what: str, step: int, completions: Sequence[Completion]) -> None:
    if math.isfinite(value):
        return
    lines = sorted({found.prompt.line for found in completions})
    raise EngineError(
        f"The {what} is not finite at step {step + 1}",
        got=f"{value} for the prompts of the lines {', '.join(map(str, lines[:16]))}",
        hint="lower the learning rate; earlier checkpoints are intact",
    )

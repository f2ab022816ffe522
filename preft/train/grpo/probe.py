"""The proof, before the first step, that engine and trainer apply one adapter under one rule.

A new adapter moves nothing, so a wrong mask or a push that never arrives would go unseen in the first step's ratio.
So a copy filled with noise is pushed, sampled from and scored, and then taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from preft.errors import EngineError
from preft.train.grpo.prompts import Prompt
from preft.train.grpo.rollout import Sampler
from preft.train.grpo.update import Updater
from preft.tuners.attach import AttachedModel
from preft.tuners.trainable import adapter_state, extract_adapter, load_adapter_state, trainable_parameters

PROMPTS = 4
_STRENGTHS = (0.02, 0.08, 0.3)
"""Standard deviations of the noise, tried until the adapter is felt."""
_FELT = 10.0
"""How many times the tolerance the noise must move the probabilities, for agreement to mean something."""


@dataclass(frozen=True)
class Probe:
    """What the proof found.

    Attributes:
        largest: Largest |log ratio| between engine and trainer under the noisy adapter, in nats.
        felt: Largest change of a token's log-probability that the noisy adapter makes, in nats.
    """

    largest: float
    felt: float


def prove(
    handle: AttachedModel, updater: Updater, sampler: Sampler, prompts: Sequence[Prompt], *, tolerance: float, seed: int
) -> Probe:
    """Compares engine and trainer under an adapter that moves the outputs.

    Args:
        handle: The model's adapters; the one in use is filled with noise, and restored.
        updater: Scores completions in the trainer.
        sampler: Samples them in the engine.
        prompts: Some are used.
        tolerance: Largest |log ratio| of a token, in nats.
        seed: Of the noise.

    Raises:
        EngineError: They disagree, or no noise moves the outputs.
    """
    name = str(handle.active)
    kept = adapter_state(handle, name)
    felt = 0.0
    try:
        for strength in _STRENGTHS:
            _fill(handle, name, strength, seed)
            sampler.push(extract_adapter(handle, name))
            completions = sampler.sample(prompts[:PROMPTS], 1, occasion="probe")
            found = updater.score(completions)
            handle.use(None)
            felt = updater.score(completions).largest
            handle.use(name)
            found.require(tolerance, "under an adapter of noise, before the first step")
            if felt >= _FELT * tolerance:
                return Probe(found.largest, felt)
    finally:
        handle.use(name)
        load_adapter_state(handle, kept, name)
    raise EngineError(
        "Nothing that the adapter can hold moves the model's outputs by enough to compare engine and trainer",
        got=f"a change of {felt:.3g}",
        accepted=f"{_FELT:g} times `train.ratio_tolerance`, {_FELT * tolerance:g}",
        hint="adapt more of the model, or set a smaller tolerance",
    )


def _fill(handle: AttachedModel, name: str, strength: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in trainable_parameters(handle, name).items():
            noise = torch.randn(parameter.shape, generator=generator) * strength
            # An orthogonal R stays as it is; its W and bias carry the noise.
            if ".parametrizations." not in path:
                parameter.add_(noise.to(parameter.device))

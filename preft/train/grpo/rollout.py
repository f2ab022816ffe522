"""Completions of prompts under the policy as it is now, from an engine that the policy was pushed into."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from preft.adapters.adapter import Adapter
from preft.data.requests import GenerationRequest, GenerationResult
from preft.errors import EngineError, PreftError
from preft.train.grpo.prompts import Prompt

POLICY_NAME = "policy"


class RolloutEngine(Protocol):
    """What samples. `preft.serve.engine.Engine` and `preft.serve.hf_engine.HFEngine` are such engines."""

    def push(self, name: str, adapter: Adapter) -> Any:
        """Makes a name mean an adapter from memory."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Completes prompts, in their order."""

    def close(self) -> None:
        """Frees the engine."""


OpenEngine = Callable[[Path], RolloutEngine]
"""Opens an engine on a checkpoint folder."""


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Attributes:
        prompt: What it completes.
        token_ids: At least one.
        logprobs: Of each token, as the engine reports it: under the policy, before the temperature.
        text: Without special tokens.
        is_cut: Whether it reached the length limit.
    """

    prompt: Prompt
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    is_cut: bool


class Sampler:
    """Samples from an engine under one adapter at a time.

    Args:
        engine: Where.
        max_tokens: Longest completion.
        temperature: Of sampling.
        seed: Of the run.
    """

    def __init__(self, engine: RolloutEngine, *, max_tokens: int, temperature: float, seed: int) -> None:
        self._engine, self._max_tokens, self._temperature, self._seed = engine, max_tokens, temperature, seed
        self._digest: str | None = None

    def push(self, adapter: Adapter) -> None:
        """Makes an adapter the policy that completions come from."""
        self._engine.push(POLICY_NAME, adapter)
        self._digest = adapter.digest

    def sample(self, prompts: Sequence[Prompt], group_size: int, *, occasion: str) -> list[Completion]:
        """Completions under the policy.

        Args:
            prompts: Some.
            group_size: Completions of each.
            occasion: What they are for, such as a step's number; with the run's seed it decides the sampling.

        Returns:
            Group after group.

        Raises:
            EngineError: A completion failed, or came from another policy than the one pushed last.
        """
        seeds = random.Random(f"{self._seed}/{occasion}")
        wanted = [prompt for prompt in prompts for _ in range(group_size)]
        requests = [
            self._request(prompt, number, POLICY_NAME, self._temperature, seeds.getrandbits(62))
            for number, prompt in enumerate(wanted)
        ]
        return self._complete(wanted, requests, self._digest)

    def greedy(self, prompts: Sequence[Prompt], *, base: bool = False) -> list[Completion]:
        """The likeliest completions under the policy, or under the base model; see `sample`."""
        name = None if base else POLICY_NAME
        requests = [self._request(prompt, number, name, 0.0, None) for number, prompt in enumerate(prompts)]
        return self._complete(prompts, requests, None if base else self._digest)

    def _request(
        self, prompt: Prompt, number: int, name: str | None, temperature: float, seed: int | None
    ) -> GenerationRequest:
        return GenerationRequest(
            id=str(number),
            prompt_token_ids=prompt.token_ids,
            adapter=name,
            max_tokens=self._max_tokens,
            temperature=temperature,
            seed=seed,
            num_logprobs=0,
        )

    def _complete(
        self, prompts: Sequence[Prompt], requests: Sequence[GenerationRequest], digest: str | None
    ) -> list[Completion]:
        try:
            results = self._engine.generate(requests)
        except PreftError:
            raise
        except Exception as error:  # whatever an engine makes of weights that it cannot sample from
            raise EngineError(
                "The engine failed to sample",
                got=f"{type(error).__name__}: {error}"[:200],
                hint="if it happens after some steps, the policy may have left the numbers: lower the learning rate",
            ) from error
        return [_completion(prompt, result, digest) for prompt, result in zip(prompts, results, strict=True)]


def _completion(prompt: Prompt, result: GenerationResult, digest: str | None) -> Completion:
    where = f"the prompt of line {prompt.line}"
    if result.error is not None:
        raise EngineError(f"The engine failed {where}", got=str(result.error.get("message")))
    if result.digest != digest:
        raise EngineError(
            f"The engine completed {where} under another policy than the trainer's",
            got=f"digest {str(result.digest)[:16]}",
            accepted=f"digest {str(digest)[:16]}",
            hint="the push of the policy was lost; this is a defect of the engine",
        )
    if result.logprobs is None or len(result.logprobs) != len(result.token_ids) or not result.token_ids:
        raise EngineError(f"The engine reports no probabilities for {where}")
    return Completion(prompt, result.token_ids, result.logprobs, result.text, result.finish_reason == "length")

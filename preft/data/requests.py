"""What is asked of an engine, and what it answers: shared by the Hugging Face path and the vLLM backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to complete.

    Attributes:
        id: Names the request in its result; unique within a batch.
        prompt_token_ids: Token ids of the prompt; not empty.
        adapter: Name of a registered adapter, or None for the base model.
        boundary: Number of leading prompt tokens that an adapter may act on, or None for all of them.
        max_tokens: Output tokens at most, at least 1.
        temperature: 0 is greedy.
        seed: Seed of the sampling, or None.
        ignore_eos: Go on to `max_tokens` whatever is generated.
        num_logprobs: How many alternatives to report for each output token, or None for no log-probabilities.
        want_prompt_logprobs: Report the log-probability of each prompt token under the model.
        stop: Texts that end the output. None of them is in the answer's text; its tokens reach to the one that
            completed the stop text.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    adapter: str | None = None
    boundary: int | None = None
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    num_logprobs: int | None = None
    want_prompt_logprobs: bool = False
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class GenerationResult:
    """The answer to one request.

    Attributes:
        id: The request's.
        adapter: The adapter's name, or None for base.
        digest: Digest of the adapter that was used, or None for base.
        prompt_token_ids: Token ids of the prompt.
        boundary: The boundary that was used; 0 for base.
        token_ids: Generated token ids.
        text: Their text.
        finish_reason: `stop`, `length`, or None if it failed.
        logprobs: For each output token, its log-probability; None unless asked for.
        prompt_logprobs: For each prompt token but the first, its log-probability; None unless asked for.
        error: Parts of the error (see `PreftError.to_dict`) if this request failed, else None.
    """

    id: str
    adapter: str | None
    digest: str | None
    prompt_token_ids: tuple[int, ...]
    boundary: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    logprobs: tuple[float, ...] | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    error: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `preft generate --json`; keys that do not apply are left out."""
        document: dict[str, Any] = {
            "id": self.id,
            "adapter": self.adapter,
            "digest": self.digest,
            "prompt_token_ids": list(self.prompt_token_ids),
            "boundary": self.boundary,
            "token_ids": list(self.token_ids),
            "text": self.text,
            "finish_reason": self.finish_reason,
        }
        if self.logprobs is not None:
            document["logprobs"] = list(self.logprobs)
        if self.prompt_logprobs is not None:
            document["prompt_logprobs"] = list(self.prompt_logprobs)
        if self.error is not None:
            document["error"] = dict(self.error)
        return document


@dataclass(frozen=True)
class RequestUpdate:
    """How far a submitted request is.

    Attributes:
        ticket: What `submit` returned.
        num_tokens: Output tokens so far.
        text: Their text, which may still grow at its end.
        result: Its answer once it is finished, else None.
    """

    ticket: str
    num_tokens: int
    text: str = ""
    result: GenerationResult | None = None

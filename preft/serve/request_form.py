"""A request's way into an engine and out of it: what is refused in front, and vLLM's form of what is not.

Shared by both engines, so that they refuse and answer alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from preft.data.requests import GenerationRequest, GenerationResult
from preft.errors import PreftError, RequestError
from preft.positions import resolve_boundary

if TYPE_CHECKING:
    from vllm import SamplingParams

_SEEDS = 1 << 63
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer ends with that was given the first bytes of a character; vLLM waits for the others."""


def check_request(
    request: GenerationRequest, *, max_model_len: int, vocab_size: int, has_tokenizer: bool = True
) -> None:
    """Refuses, in the front end, a request that the engine could not serve.

    Args:
        request: What is asked.
        max_model_len: Longest prompt plus output.
        vocab_size: Number of token ids that the model has.
        has_tokenizer: Whether the engine can make text of tokens.

    Raises:
        RequestError: Its prompt, boundary, stop strings or limits are not valid.
    """
    length = len(request.prompt_token_ids)
    if not length:
        raise RequestError("The prompt is empty", accepted="at least one token")
    if length >= max_model_len:
        raise RequestError(
            "The prompt does not fit the context", got=f"{length} tokens", accepted=f"at most {max_model_len - 1}"
        )
    outside = [token for token in request.prompt_token_ids if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(
            "The prompt holds a token id that the model does not have",
            got=str(outside[0]),
            accepted=f"0 to {vocab_size - 1}",
        )
    _check_settings(request)
    _check_stop(request.stop, has_tokenizer)
    if request.adapter is None and request.boundary not in (None, 0):
        raise RequestError("A boundary was given without an adapter", hint="name an adapter, or leave `boundary` out")
    if request.adapter is not None:
        resolve_boundary(length, request.boundary)


def _check_settings(request: GenerationRequest) -> None:
    if request.max_tokens < 1:
        raise RequestError("`max_tokens` is not valid", got=str(request.max_tokens), accepted="at least 1")
    if not 0 <= request.temperature < math.inf:
        raise RequestError("`temperature` is not valid", got=str(request.temperature), accepted="a number from 0")
    if request.seed is not None and not 0 <= request.seed < _SEEDS:
        raise RequestError("`seed` is not valid", got=str(request.seed), accepted=f"0 to {_SEEDS - 1}")
    if request.num_logprobs is not None and request.num_logprobs < 0:
        raise RequestError("`num_logprobs` is not valid", got=str(request.num_logprobs), accepted="at least 0")


def _check_stop(stop: object, has_tokenizer: bool) -> None:
    if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
        raise RequestError("`stop` is not valid", got=repr(stop)[:80], accepted="a tuple of texts that are not empty")
    if stop and not has_tokenizer:
        raise RequestError("Stop strings were given to a model without a tokenizer", hint="leave `stop` out")


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where an output ends that was read one token at a time.

    Args:
        text: The output so far; without its last token, no stop string was in it.
        stop: Stop strings.

    Returns:
        The first character of the stop string that is complete first, or None if there is none.
    """
    if text.endswith(HALF_CHARACTER):
        return None
    found = [(start + len(end), start) for end in stop if (start := text.find(end)) >= 0]
    return min(found)[1] if found else None


def failed_result(request: GenerationRequest, error: PreftError) -> GenerationResult:
    """The result of a request that failed alone."""
    return GenerationResult(
        request.id, request.adapter, None, request.prompt_token_ids, request.boundary or 0, error=error.to_dict()
    )


def sampling_params(request: GenerationRequest) -> SamplingParams:
    """VLLM's form of a request's settings."""
    from vllm import SamplingParams

    from preft.serve.backend.request import BOUNDARY_ARGUMENT

    named = request.adapter is not None and request.boundary is not None
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
        stop=list(request.stop) or None,
        logprobs=request.num_logprobs,
        prompt_logprobs=0 if request.want_prompt_logprobs else None,
        extra_args={BOUNDARY_ARGUMENT: request.boundary} if named else None,
    )


def token_logprobs(tokens: Sequence[int], table: Any) -> tuple[float, ...] | None:
    """The log-probability of each token, out of vLLM's table of alternatives."""
    if table is None:
        return None
    return tuple(float(row[token].logprob) for token, row in zip(tokens, table, strict=True))

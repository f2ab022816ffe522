"""Generation that ends at a stop sequence, on an engine that knows only tokens.

Outputs grow in rounds, each longer than the last; between rounds the text is searched. A request goes on as a longer
prompt whose boundary is still the end of the original one, so by the rule of positions nothing changes: what was
generated unadapted is recomputed unadapted, or found in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from preft.config.progress import Progress
from preft.data.requests import GenerationRequest, GenerationResult

FIRST_ROUND = 64
"""Output tokens of the first round; each round has twice as many as the one before."""


@dataclass(frozen=True)
class Job:
    """A request and the texts that end its output.

    Attributes:
        request: The request; its id is unique.
        stops: Texts; the output may go on beyond them by what was left of the round.
    """

    request: GenerationRequest
    stops: tuple[str, ...] = ()


class Generator(Protocol):
    """What is asked of an engine."""

    def generate(
        self, requests: Sequence[GenerationRequest], *, progress: Progress | None = None
    ) -> list[GenerationResult]:
        """Completes prompts."""


def run_rounds(
    engine: Generator,
    jobs: Sequence[Job],
    decode: Callable[[list[int]], str],
    *,
    progress: Progress | None = None,
    first_round: int = FIRST_ROUND,
) -> list[GenerationResult]:
    """Completes prompts until each has ended, holds one of its stops, or is as long as it may be.

    Args:
        engine: The engine.
        jobs: What to complete.
        decode: Makes text of output tokens.
        progress: Told of each finished request of each round.
        first_round: Output tokens of the first round.

    Returns:
        One result a job, in their order, as if each had been one request.
    """
    outputs: list[tuple[int, ...]] = [()] * len(jobs)
    results: dict[int, GenerationResult] = {}
    open_jobs, size = list(range(len(jobs))), first_round
    while open_jobs:
        requests = [_continued(jobs[index].request, outputs[index], size) for index in open_jobs]
        still_open = []
        for index, result in zip(open_jobs, engine.generate(requests, progress=progress), strict=True):
            job = jobs[index]
            outputs[index] += result.token_ids
            results[index] = replace(result, prompt_token_ids=job.request.prompt_token_ids, token_ids=outputs[index])
            ended = result.error is not None or result.finish_reason != "length" or not result.token_ids
            if (
                not ended
                and len(outputs[index]) < job.request.max_tokens
                and not _has_stop(job, outputs[index], decode)
            ):
                still_open.append(index)
        open_jobs, size = still_open, size * 2
    return [results[index] for index in range(len(jobs))]


def _continued(request: GenerationRequest, output: tuple[int, ...], size: int) -> GenerationRequest:
    """The rest of a request, for at most `size` more tokens."""
    boundary = request.boundary
    if output and request.adapter is not None and boundary is None:
        boundary = len(request.prompt_token_ids)
    # The same seed again would sample the new tokens with the random numbers of the old.
    seed = request.seed if request.seed is None else (request.seed + len(output)) % (1 << 32)
    return replace(
        request,
        prompt_token_ids=(*request.prompt_token_ids, *output),
        seed=seed,
        boundary=boundary,
        max_tokens=min(size, request.max_tokens - len(output)),
    )


def _has_stop(job: Job, output: tuple[int, ...], decode: Callable[[list[int]], str]) -> bool:
    text = decode(list(output))
    return any(stop and stop in text for stop in job.stops)

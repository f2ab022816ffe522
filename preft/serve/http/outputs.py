"""What comes out of the engine, as it passes through the front end: counted for the log, and explained where it failed.

vLLM's engine only says that a request ended in an error, and its front end answers with as little.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from preft.serve.http.notes import Note, current_note

if TYPE_CHECKING:
    from preft.serve.http.names import Redactor
    from preft.serve.http.operations import Operations

_MAX_REASON = 500


def observe_outputs(engine: Any, operations: Operations, redact: Redactor) -> None:
    """Puts a tap between the engine's client and vLLM's handlers, which call its `generate`.

    Args:
        engine: vLLM's client of the engine; its `generate` is wrapped.
        operations: Finds the reason of a failure.
        redact: Takes server paths out of it.
    """
    from vllm.exceptions import GenerationError
    from vllm.sampling_params import RequestOutputKind

    generate = engine.generate

    async def observed(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        note = current_note()
        counts: dict[int, int] = {}
        is_delta = sampling_params.output_kind == RequestOutputKind.DELTA
        # Closed with this one, so that a client that goes away ends its request at once.
        async with aclosing(generate(prompt, sampling_params, *args, **kwargs)) as outputs:
            async for output in outputs:
                if note is not None:
                    _count(note, output, counts, is_delta)
                if any(completion.finish_reason == "error" for completion in output.outputs):
                    raise GenerationError(await _explain(note, operations, redact))
                yield output

    engine.generate = observed


def _count(note: Note, output: Any, counts: dict[int, int], is_delta: bool) -> None:
    if note.request_id is None:
        note.request_id = output.request_id
    if output.finished:
        note.cached_tokens += output.num_cached_tokens or 0
    for completion in output.outputs:
        before = counts.get(completion.index, 0)
        total = before + len(completion.token_ids) if is_delta else max(before, len(completion.token_ids))
        counts[completion.index] = total
        note.output_tokens += total - before


async def _explain(note: Note | None, operations: Operations, redact: Redactor) -> str:
    entry = note.entry if note is not None else None
    reason = await operations.why_failed(entry.digest) if entry is not None else None
    if entry is None or reason is None:
        return "The request failed in the engine; the server's log says why"
    reason = " ".join(redact.text(entry.name, reason).split())
    return f"The adapter `{entry.name}` could not be loaded: {reason[:_MAX_REASON]}"

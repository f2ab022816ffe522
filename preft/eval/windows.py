"""What a request of the harness becomes: the tokens that are fed, where the adapter stops, and which are scored.

The harness's own rules of truncation hold: what does not fit is cut off on the left. The boundary moves with the cut,
so that it still lies between context and continuation. Pure Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from preft.errors import RequestError


@dataclass(frozen=True)
class Window:
    """One forward pass that scores the end of a text.

    Attributes:
        tokens: Context and continuation, after truncation.
        boundary: How many of them an adapter may act on: the context.
        num_scored: How many at the end are scored: the continuation.
    """

    tokens: tuple[int, ...]
    boundary: int
    num_scored: int


def scoring_window(
    context: Sequence[int], continuation: Sequence[int], max_length: int, *, boundary: int | None = None
) -> Window:
    """The window of a loglikelihood request.

    The last token is only a target, so `max_length` tokens of input hold `max_length + 1` of text.

    Args:
        context: Its tokens; the harness puts a prefix token where it is empty, which then is the prompt.
        continuation: Its tokens.
        max_length: Tokens of input that the model takes.
        boundary: Leading tokens of the window that an adapter may act on, or None for the context.

    Raises:
        RequestError: There is nothing to score, no context, or the continuation alone does not fit.
    """
    if not context or not continuation:
        raise RequestError(
            "A loglikelihood request needs a context and a continuation",
            got=f"{len(context)} and {len(continuation)} tokens",
        )
    if len(continuation) > max_length:
        raise RequestError(
            "The continuation does not fit the context window",
            got=f"{len(continuation)} tokens",
            accepted=f"at most {max_length}",
        )
    whole = (*context, *continuation)
    dropped = max(0, len(whole) - (max_length + 1))
    tokens = whole[dropped:]
    limit = len(context) - dropped if boundary is None else min(boundary, len(tokens))
    return Window(tokens, limit, len(continuation))


def prompt_window(prompt: Sequence[int], max_new_tokens: int, max_length: int) -> tuple[int, ...]:
    """The prompt of a generation request: its end, so far as the new tokens leave room.

    Raises:
        RequestError: The new tokens alone fill the window, or the prompt is empty.
    """
    room = max_length - max_new_tokens
    if room < 1:
        raise RequestError(
            "The task asks for more new tokens than the model's window holds",
            got=f"{max_new_tokens}",
            accepted=f"less than {max_length}",
            hint="lower the task's `max_gen_toks`",
        )
    if not prompt:
        raise RequestError("The prompt is empty", accepted="at least one token")
    return tuple(prompt[-room:])

"""The rule: which token positions of a request an adapter acts on.

A token is adapted if and only if its absolute position in the request is smaller than the request's **boundary**
and the adapter's position policy selects it. The boundary is the number of original prompt tokens, or a smaller
number that the request names. Nothing else decides it: not whether a step is a prefill step, not how many tokens a
step holds, not whether the token is recomputed after a preemption.

Three policies exist. `prompt` selects every position below the boundary. `fN+lM` selects the first N and the last M
of them, clamped on short prompts as pyreft clamps. `all` selects every position and ignores the boundary: an
ordinary LoRA.

Everything is expressed as half-open spans `(start, stop)` of absolute positions. Training masks, Hugging Face
generation, the scheduler, the worker, the cache keys and the evaluation all call this module; it is pure Python.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from preft.errors import UsageError

Span = tuple[int, int]
"""A half-open range of absolute token positions."""

UNBOUNDED = 1 << 40
"""Stop of a span that never ends: beyond any position a request can have."""

ACCEPTED = "`prompt`, `all`, or `fN+lM` such as `f3+l3`, `f1`, `l1`"

_ENDS = re.compile(r"(?:f(?P<first>[0-9]{1,6}))?(?P<plus>\+)?(?:l(?P<last>[0-9]{1,6}))?")


@dataclass(frozen=True)
class Policy:
    """Which positions below the boundary an adapter acts on.

    Attributes:
        name: `prompt`, `all` or `ends`.
        first: For `ends`, how many leading prompt positions; 0 otherwise.
        last: For `ends`, how many trailing prompt positions; 0 otherwise.
    """

    name: str
    first: int = 0
    last: int = 0

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Reads `prompt`, `all` or `fN+lM`.

        Raises:
            UsageError: The text is none of them, or selects no position at all.
        """
        if text in ("prompt", "all"):
            return cls(text)
        match = _ENDS.fullmatch(text) if isinstance(text, str) else None
        if match is not None and text:
            first, last, plus = match["first"], match["last"], match["plus"]
            well_formed = (plus is not None) == (first is not None and last is not None)
            policy = cls("ends", int(first or 0), int(last or 0))
            if well_formed and policy.first + policy.last > 0:
                return policy
        raise UsageError(f"Unknown position policy: `{text}`", accepted=ACCEPTED)

    def __str__(self) -> str:
        if self.name != "ends":
            return self.name
        return "+".join(
            part for part in (f"f{self.first}" * bool(self.first), f"l{self.last}" * bool(self.last)) if part
        )

    @property
    def is_prompt_only(self) -> bool:
        """Whether the adapter is off for every generated token."""
        return self.name != "all"

    def spans(self, boundary: int) -> tuple[Span, ...]:
        """The adapted positions of a request, as sorted, disjoint, non-empty spans."""
        if self.name == "all":
            return ((0, UNBOUNDED),)
        if boundary <= 0:
            return ()
        if self.name == "prompt":
            return ((0, boundary),)
        first, last = self._clamped(boundary)
        if first + last == boundary:
            return ((0, boundary),)
        return tuple(span for span in ((0, first), (boundary - last, boundary)) if span[0] < span[1])

    def _clamped(self, boundary: int) -> tuple[int, int]:
        """N and M after pyreft's clamping of short prompts: each end takes at most half of them, rounded down.

        Source: stanfordnlp/pyreft `pyreft/dataset.py`, `get_intervention_locations`.
        """
        return min(self.first, boundary // 2), min(self.last, boundary // 2)

    def is_adapted(self, boundary: int, position: int) -> bool:
        """Whether the token at an absolute position is adapted."""
        return any(start <= position < stop for start, stop in self.spans(boundary))

    def mask(self, boundary: int, start: int, stop: int) -> list[bool]:
        """One flag for each absolute position in `range(start, stop)`."""
        flags = [False] * (stop - start)
        for low, high in self.within(boundary, start, stop):
            flags[low:high] = [True] * (high - low)
        return flags

    def within(self, boundary: int, start: int, stop: int) -> tuple[Span, ...]:
        """The adapted spans inside `[start, stop)`, relative to `start`.

        This is what a cache block's key must hold: two blocks of equal tokens are interchangeable only if the same
        positions in them were adapted. A mere count would not do under `fN+lM`.
        """
        return clip(self.spans(boundary), start, stop)

    def adapted_until(self, boundary: int) -> int:
        """One past the last adapted position: an adapter is needed until this many positions are computed."""
        spans = self.spans(boundary)
        return spans[-1][1] if spans else 0


PROMPT = Policy("prompt")
ALL = Policy("all")


def clip(spans: Sequence[Span], start: int, stop: int) -> tuple[Span, ...]:
    """The part of `spans` inside `[start, stop)`, relative to `start`."""
    inside = ((max(low, start) - start, min(high, stop) - start) for low, high in spans)
    return tuple((low, high) for low, high in inside if low < high)


def resolve_boundary(prompt_length: int, requested: object = None) -> int:
    """The boundary of a request with `prompt_length` tokens.

    Args:
        prompt_length: Number of original prompt tokens.
        requested: What the request names, or None for the whole prompt. 0 means that no token is adapted.

    Raises:
        UsageError: `requested` is not an integer from 0 to `prompt_length`.
    """
    if requested is None:
        return prompt_length
    if isinstance(requested, bool) or not isinstance(requested, int) or not 0 <= requested <= prompt_length:
        raise UsageError(
            "The boundary of a request is not valid",
            got=f"{requested!r} for a prompt of {prompt_length} tokens",
            accepted=f"an integer from 0 to {prompt_length}, or nothing for the whole prompt",
        )
    return requested

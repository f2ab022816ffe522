"""Training examples: a prompt, and the completion that is learnt. Nothing but token ids; the boundary is exact."""

from __future__ import annotations

from dataclasses import dataclass, replace

from preft.errors import UsageError


@dataclass(frozen=True)
class Example:
    """One example. The number of its prompt tokens is its boundary.

    Attributes:
        prompt_ids: Token ids of the prompt; not empty.
        completion_ids: Token ids to learn, the end of the turn included; not empty.
        id: Names it in errors, such as `line 3, turn 2`.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    id: str = ""

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.completion_ids:
            raise UsageError(
                f"The example `{self.id}` has no {'completion' if self.prompt_ids else 'prompt'}",
                accepted="at least one token of each",
            )

    @property
    def boundary(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and completion together."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class Limits:
    """How long an example may be, and what gives way.

    Attributes:
        max_tokens: Prompt and completion together, at most.
        cut_completions: Cut a completion that is too long, at its end, so that no end of turn is learnt from it;
            otherwise such an example is refused.
        min_prompt_tokens: Prompt tokens that must be left.
    """

    max_tokens: int
    cut_completions: bool = False
    min_prompt_tokens: int = 1


def fit(example: Example, limits: Limits) -> Example | None:
    """The example within the limits, or None if it cannot fit.

    The completion is kept whole, and the prompt loses its first tokens: its end is what the completion answers. Only
    a completion that leaves no room for a prompt is cut, if at all; a token to learn is always left.
    """
    if example.num_tokens <= limits.max_tokens:
        return example
    room = limits.max_tokens - limits.min_prompt_tokens
    completion = example.completion_ids
    if len(completion) > room:
        if not limits.cut_completions or room < 1:
            return None
        completion = completion[:room]
    kept = min(len(example.prompt_ids), limits.max_tokens - len(completion))
    return replace(example, prompt_ids=example.prompt_ids[len(example.prompt_ids) - kept :], completion_ids=completion)

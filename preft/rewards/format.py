"""Whether a completion has a form: a pattern, or tagged parts in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from preft.errors import UsageError

DEFAULT_TAGS = ("think", "answer")
_TIMEOUT_S = 0.2


class RegexReward:
    """1 where a pattern is found in a completion, else 0.

    Args:
        pattern: Of the `regex` package, a superset of Python's `re`; anchor it with `^` and `$` for the whole text.

    Raises:
        UsageError: It is not valid.
    """

    def __init__(self, pattern: str) -> None:
        import regex

        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            raise UsageError("The pattern is not valid", got=f"`{pattern}`: {error}"[:160]) from None

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Scores one completion; a search that takes too long finds nothing."""
        try:
            return float(self._pattern.search(completion, timeout=_TIMEOUT_S) is not None)
        except TimeoutError:
            return 0.0


class FormatReward:
    """1 for a completion that consists of tagged parts in their order, each once, with nothing but space between.

    Args:
        tags: Their names: `think` and `answer` for `<think>...</think> <answer>...</answer>`.

    Raises:
        UsageError: A tag is no name.
    """

    def __init__(self, tags: Sequence[str] = DEFAULT_TAGS) -> None:
        bad = [tag for tag in tags if not tag.replace("-", "_").isidentifier()]
        if bad or not tags or len(set(tags)) < len(tags):
            raise UsageError("The tags are not valid", got=", ".join(tags) or "none", accepted="names, each once")
        self._tags = tuple(tags)

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Scores one completion."""
        return float(tagged_parts(completion, self._tags) is not None)


def tagged_parts(text: str, tags: Sequence[str] = DEFAULT_TAGS) -> dict[str, str] | None:
    """The content of each tagged part of a text of `FormatReward`'s form, or None where it has another form.

    A tag inside a part is another form: parts are found without searching back and forth.
    """
    rest, parts = text.strip(), {}
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if not rest.startswith(opening) or closing not in rest:
            return None
        content, _, rest = rest.removeprefix(opening).partition(closing)
        parts[tag], rest = content, rest.lstrip()
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    is_nested = any(mark in part for part in parts.values() for mark in marks)
    return None if rest or is_nested else parts

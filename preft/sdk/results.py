"""Results that show themselves: as a table in a notebook, as a data frame, and token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from preft.data.requests import GenerationResult
from preft.errors import RequestError
from preft.sdk import html


@dataclass(frozen=True)
class Completion:
    """One answer, with what was adapted in it.

    Attributes:
        result: What the engine answered.
        prompt_pieces: Text of each prompt token.
        output_pieces: Text of each output token.
        adapted: For each prompt and output token, whether the adapter acted on it.
        positions: The adapter's position policy, or None for the base model.
    """

    result: GenerationResult
    prompt_pieces: tuple[str, ...]
    output_pieces: tuple[str, ...]
    adapted: tuple[bool, ...]
    positions: str | None

    @property
    def text(self) -> str:
        """The answer.

        Raises:
            RequestError: The request failed.
        """
        if self.result.error is not None:
            raise RequestError(str(self.result.error.get("message", "The request failed")))
        return self.result.text

    @property
    def adapter(self) -> str | None:
        """The adapter's name, or None for the base model."""
        return self.result.adapter

    @property
    def num_adapted(self) -> int:
        """How many tokens the adapter acted on."""
        return sum(self.adapted)

    def to_dict(self) -> dict[str, Any]:
        """The engine's answer as JSON, and how many tokens were adapted."""
        return {**self.result.to_dict(), "positions": self.positions, "num_adapted": self.num_adapted}

    def __repr__(self) -> str:
        name = self.adapter or "base"
        if self.result.error is not None:
            return f"Completion({name!r}, error={self.result.error.get('message')!r})"
        adapted = f"{self.num_adapted} of {len(self.adapted)} tokens adapted"
        return f"Completion({name!r}, {self.result.text!r}, {adapted})"

    def _repr_html_(self) -> str:
        return html.page(html.completion(self))


class _Rows(ABC):
    """What lists of results share."""

    @abstractmethod
    def to_dicts(self) -> list[dict[str, Any]]:
        """One dictionary a row."""

    def to_pandas(self) -> Any:
        """A pandas DataFrame with one row each.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        return pandas.DataFrame(self.to_dicts())


class Completions(_Rows, Sequence[Completion]):
    """Answers, in the order of what was asked."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._completions = tuple(completions)

    @overload
    def __getitem__(self, index: int) -> Completion: ...
    @overload
    def __getitem__(self, index: slice) -> Completions: ...
    def __getitem__(self, index: int | slice) -> Completion | Completions:
        if isinstance(index, slice):
            return Completions(self._completions[index])
        return self._completions[index]

    def __len__(self) -> int:
        return len(self._completions)

    def __iter__(self) -> Iterator[Completion]:
        return iter(self._completions)

    @property
    def texts(self) -> list[str]:
        """The answers' text.

        Raises:
            RequestError: One of them failed.
        """
        return [completion.text for completion in self]

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dictionary an answer."""
        return [completion.to_dict() for completion in self]

    def __repr__(self) -> str:
        return "Completions([\n" + "".join(f"  {completion!r},\n" for completion in self) + "])"

    def _repr_html_(self) -> str:
        return html.page(html.completions(self))


@dataclass(frozen=True)
class Score:
    """How likely a model finds a given continuation of a context.

    Attributes:
        adapter: The adapter's name, or None for the base model.
        context: What stands before.
        continuation: What is scored. No adapter acts on it, unless its policy is `all`.
        pieces: Text of each token of the continuation.
        logprobs: Natural-log probability of each of them.
    """

    adapter: str | None
    context: str
    continuation: str
    pieces: tuple[str, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        """Natural-log probability of the continuation."""
        return sum(self.logprobs)

    def to_dict(self) -> dict[str, Any]:
        """The score as JSON."""
        return {
            "adapter": self.adapter,
            "context": self.context,
            "continuation": self.continuation,
            "logprob": self.total,
            "logprobs": list(self.logprobs),
        }


class Scores(_Rows, Sequence[Score]):
    """Scores, in the order of what was asked."""

    def __init__(self, scores: Sequence[Score]) -> None:
        self._scores = tuple(scores)

    @overload
    def __getitem__(self, index: int) -> Score: ...
    @overload
    def __getitem__(self, index: slice) -> Scores: ...
    def __getitem__(self, index: int | slice) -> Score | Scores:
        return Scores(self._scores[index]) if isinstance(index, slice) else self._scores[index]

    def __len__(self) -> int:
        return len(self._scores)

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dictionary a score."""
        return [score.to_dict() for score in self]

    def plot(self) -> Any:
        """A matplotlib figure: the log-probability of each continuation, by adapter.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 0.5 + 0.35 * len(self)), layout="constrained")
        axes = figure.subplots()
        labels = [f"{score.adapter or 'base'}: {html.shorten(score.continuation, 24)}" for score in self]
        axes.barh(range(len(self)), [score.total for score in self])
        axes.set_yticks(range(len(self)), labels)
        axes.invert_yaxis()
        axes.set_xlabel("log-probability of the continuation")
        return figure

    def _repr_html_(self) -> str:
        return html.page(html.scores(self))

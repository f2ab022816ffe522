"""Base against adapter on the user's own rows: how likely each makes the expected answer, and what each writes.

Needs no harness: rows are those of training, prompt and completion, and so is the boundary between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from preft.config.progress import Progress
from preft.data.chat import ChatEncoder
from preft.data.examples import Example, Limits
from preft.data.requests import GenerationRequest, GenerationResult
from preft.data.training import DataReport, load_examples
from preft.errors import RequestError
from preft.eval.arms import BASE
from preft.eval.stats import Paired, compare_pairs, holm, verdict

ARMS = (BASE, "adapter")
LOSS, EXACT = "loss", "exact"


class RowEngine(Protocol):
    """An engine with the adapter registered."""

    max_model_len: int

    def generate(
        self, requests: Sequence[GenerationRequest], *, progress: Progress | None = None
    ) -> Sequence[GenerationResult]:
        """Completes prompts."""


@dataclass(frozen=True)
class RowScore:
    """One row under both arms; each mapping has a value for `base` and `adapter`.

    Attributes:
        id: Such as `line 3, turn 2`.
        prompt: Its text, special tokens included.
        expected: The completion's text.
        num_tokens: Tokens of the completion.
        answers: What greedy decoding writes.
        loss: Mean negative log-likelihood of the expected answer's tokens, in nats.
        exact: Whether the answer is the expected one, but for white space around it.
        errors: Why an arm has no result; such a row counts for nothing.
    """

    id: str
    prompt: str
    expected: str
    num_tokens: int
    answers: Mapping[str, str]
    loss: Mapping[str, float]
    exact: Mapping[str, bool]
    errors: Mapping[str, str]

    @property
    def is_same(self) -> bool:
        """Whether both arms write the same."""
        return len(set(self.answers.values())) == 1

    @property
    def gain(self) -> float:
        """By how much the adapter lowers the loss, in nats a token; negative where it raises it."""
        return self.loss[ARMS[0]] - self.loss[ARMS[1]] if not self.errors else 0.0


@dataclass(frozen=True)
class RowMetric:
    """Base and adapter compared over all rows.

    Attributes:
        metric: `loss` or `exact`.
        paired: The numbers; differences are adapter minus base.
        adjusted: p-value after Holm's correction over the metrics.
        verdict: `better`, `worse` or `cannot tell`.
        reason: Why.
    """

    metric: str
    paired: Paired
    adjusted: float | None
    verdict: str
    reason: str


@dataclass(frozen=True)
class RowsReport:
    """What came of a file.

    Attributes:
        data: The file, and what became of its rows.
        rows: By line.
        metrics: Loss and exact answers.
    """

    data: DataReport
    rows: tuple[RowScore, ...]
    metrics: tuple[RowMetric, ...]

    @property
    def failed(self) -> tuple[RowScore, ...]:
        """Rows that an engine could not serve."""
        return tuple(row for row in self.rows if row.errors)

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "data": self.data.to_dict(),
            "num_rows": len(self.rows),
            "num_failed": len(self.failed),
            "num_same": sum(row.is_same for row in self.rows if not row.errors),
            "metrics": [asdict(metric) for metric in self.metrics],
            "rows": [asdict(row) for row in self.rows],
        }


def read_own_rows(
    path: Path, tokenizer: Any, max_model_len: int, *, limit: int | None = None
) -> tuple[list[Example], DataReport]:
    """Reads rows as training reads them; of a conversation, the last answer.

    Args:
        path: JSON lines of `messages`, or of `prompt` and `completion`.
        tokenizer: The base model's.
        max_model_len: Of the engine, which needs room for one token beyond the row.
        limit: Rows at most, from the start.

    Raises:
        RequestError: The model has no tokenizer.
        FileError: The file cannot be read, or a row cannot be used.
    """
    if tokenizer is None:
        raise RequestError("The model has no tokenizer, so rows of text mean nothing to it")
    found, report = load_examples(path, ChatEncoder(tokenizer), Limits(max_model_len - 1), turns="last", max_bad_rows=0)
    return found[: len(found) if limit is None else limit], report


def compare_rows(
    engine: RowEngine,
    adapter: str,
    examples: Sequence[Example],
    data: DataReport,
    decode: Callable[[Sequence[int]], str],
    *,
    max_tokens: int = 128,
    progress: Progress | None = None,
) -> RowsReport:
    """Scores and answers every row under base and adapter.

    Args:
        engine: Has the adapter.
        adapter: Its name there.
        examples: The rows.
        data: Where they are from.
        decode: Makes text of tokens, special tokens left out.
        max_tokens: Of an answer, at most.
        progress: Told of each request.
    """
    requests = [
        request
        for index, example in enumerate(examples)
        for arm in ARMS
        for request in _requests(index, example, None if arm == BASE else adapter, engine.max_model_len, max_tokens)
    ]
    results = {result.id: result for result in engine.generate(requests, progress=progress)}
    rows = tuple(_row(index, example, results, decode) for index, example in enumerate(examples))
    return RowsReport(data, rows, _metrics([row for row in rows if not row.errors]))


def _requests(
    index: int, example: Example, adapter: str | None, max_model_len: int, max_tokens: int
) -> list[GenerationRequest]:
    """One that scores the expected answer with the prompt as the boundary, and one that writes an answer."""
    arm = BASE if adapter is None else ARMS[1]
    room = max_model_len - example.boundary
    return [
        GenerationRequest(
            f"{index} {arm} score",
            (*example.prompt_ids, *example.completion_ids),
            adapter,
            boundary=example.boundary if adapter is not None else None,
            max_tokens=1,
            want_prompt_logprobs=True,
        ),
        GenerationRequest(f"{index} {arm} answer", example.prompt_ids, adapter, max_tokens=min(max_tokens, room)),
    ]


def _row(
    index: int, example: Example, results: Mapping[str, GenerationResult], decode: Callable[[Sequence[int]], str]
) -> RowScore:
    expected = decode(example.completion_ids)
    answers, loss, exact, errors = {}, {}, {}, {}
    for arm in ARMS:
        scored, answer = (results[f"{index} {arm} {kind}"] for kind in ("score", "answer"))
        for result in (scored, answer):
            if result.error is not None:
                errors[arm] = str(result.error.get("message"))
        logprobs = (scored.prompt_logprobs or ())[-len(example.completion_ids) :]
        if arm in errors or len(logprobs) != len(example.completion_ids):
            errors.setdefault(arm, "the engine gave no log-probabilities")
            continue
        answers[arm] = decode(answer.token_ids)
        loss[arm] = -sum(logprobs) / len(logprobs)
        exact[arm] = answers[arm].strip() == expected.strip()
    return RowScore(
        example.id, decode(example.prompt_ids), expected, len(example.completion_ids), answers, loss, exact, errors
    )


def _metrics(rows: Sequence[RowScore]) -> tuple[RowMetric, ...]:
    first, second = ARMS
    compared = [
        (LOSS, compare_pairs([row.loss[first] for row in rows], [row.loss[second] for row in rows]), False),
        (EXACT, compare_pairs([float(r.exact[first]) for r in rows], [float(r.exact[second]) for r in rows]), True),
    ]
    adjusted = holm([paired.p_value for _, paired, _ in compared])
    return tuple(
        RowMetric(metric, paired, p_value, *verdict(paired, p_value, higher_is_better=upwards))
        for (metric, paired, upwards), p_value in zip(compared, adjusted, strict=True)
    )

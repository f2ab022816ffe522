"""`preft check --eval`: one engine for the check and for the rows, what is shown, and the page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from preft.errors import FileError, UsageError

if TYPE_CHECKING:
    from preft.checks.check import EngineFactory
    from preft.config.progress import Progress
    from preft.eval.own_rows import RowsReport
    from preft_cli.console import Session

ANSWER_TOKENS = 128
_NAME = "adapter"


def require_row_flags(
    rows: Path | None, *, limit: int | None, max_tokens: int | None, report: Path | None, force: bool
) -> None:
    """Checks the flags that only mean something with rows, before anything is loaded.

    Raises:
        UsageError: One is given without rows.
        FileError: The page is there already, or has no folder.
    """
    given = {"--limit": limit, "--max-tokens": max_tokens, "--report": report}
    alone = [flag for flag, value in given.items() if value is not None]
    if rows is None and alone:
        raise UsageError(f"`{alone[0]}` has no meaning without rows", accepted="`--eval FILE`")
    if report is None:
        return
    if report.exists() and not force:
        raise FileError("There is a file already", got=f"`{report}`", hint="name another, or replace it with `--force`")
    if not report.absolute().parent.is_dir():
        raise FileError("The page's folder does not exist", got=f"`{report.parent}`")


class RowsRun:
    """Keeps the engine that the check compares with, so that the rows need no second one.

    Args:
        rows: The file, or None for no rows.
        factory: Makes the engine; None for Hugging Face alone.
        limit: Rows at most.
        max_tokens: Of an answer.
    """

    def __init__(self, rows: Path | None, factory: EngineFactory | None, *, limit: int | None, max_tokens: int) -> None:
        self._rows, self._limit, self._max_tokens = rows, limit, max_tokens
        self._make = factory
        self._kept: Any = None
        self.factory = factory if rows is None or factory is None else self._keeping

    def __enter__(self) -> RowsRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._kept is not None:
            self._kept.close()

    def compare(
        self, adapter: Path, base: str, *, allow_base_mismatch: bool, progress: Progress | None
    ) -> RowsReport | None:
        """Compares base and adapter on the rows; None without rows.

        Raises:
            PreftError: The rows or the model cannot be used.
        """
        if self._rows is None:
            return None
        from preft.data.encode import load_tokenizer
        from preft.eval.own_rows import compare_rows, read_own_rows
        from preft.models.locate import locate_model
        from preft.serve.hf_engine import HFEngine

        if self._kept is None:
            self._kept = HFEngine(base, {_NAME: adapter}, allow_base_mismatch=allow_base_mismatch)
        tokenizer = load_tokenizer(locate_model(base))
        examples, data = read_own_rows(self._rows, tokenizer, self._kept.max_model_len, limit=self._limit)

        def decode(tokens: Any) -> str:
            return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

        return compare_rows(self._kept, _NAME, examples, data, decode, max_tokens=self._max_tokens, progress=progress)

    def _keeping(self, model: Path | str, adapters: Mapping[str, Path]) -> Any:
        assert self._make is not None
        self._kept = self._make(model, adapters)
        return _Lent(self._kept)


class _Lent:
    """An engine that does not end when the check is done with it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def generate(self, requests: Any) -> Any:
        return self._engine.generate(requests)


def show_rows(session: Session, found: RowsReport) -> None:
    """One line a metric."""
    from preft_cli.render import table

    rows = [
        (
            metric.metric,
            metric.paired.num_pairs,
            _number(metric.paired.first),
            _number(metric.paired.second),
            _number(metric.paired.difference, "+"),
            None
            if metric.paired.low is None
            else f"{_number(metric.paired.low, '+')} to {_number(metric.paired.high, '+')}",
            None if metric.adjusted is None else f"{metric.adjusted:.2g}",
            metric.verdict,
        )
        for metric in found.metrics
    ]
    headers = ("on your rows", "n", "base", "adapter", "difference", "95 % interval", "p (Holm)", "verdict")
    session.show("", table(headers, rows, numeric=headers[1:7]), "")
    for metric in found.metrics:
        session.show(f"{metric.metric}: {metric.verdict}: {metric.reason}")
    for row in found.failed:
        session.warn(f"{row.id} failed: {'; '.join(row.errors.values())}")


def save_page(found: RowsReport, adapter: str, base: str, path: Path) -> Path:
    """Writes the page of the rows."""
    from preft.eval.rows_page import save_rows_page

    return save_rows_page(found, f"{Path(adapter).name} against {Path(base).name}", path)


def _number(value: float | None, sign: str = "") -> str | None:
    return None if value is None else f"{value:{sign}.4g}"

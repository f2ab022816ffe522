"""What the functions of the SDK return: each shows itself, becomes a data frame, and draws itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft.adapters.adapter import Adapter
from preft.pictures import svg_element
from preft.sdk import html


@dataclass(frozen=True)
class Drawing:
    """Pictures, as a notebook shows them.

    Attributes:
        svgs: One element a picture.
    """

    svgs: tuple[str, ...]

    def _repr_html_(self) -> str:
        return html.page("".join(self.svgs))


class Report(ABC):
    """What every report can do. A subclass says its rows and its pictures."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """One dictionary a row of its table."""

    @abstractmethod
    def svgs(self) -> Sequence[str]:
        """Its pictures."""

    def columns(self) -> Sequence[str]:
        """Names of the columns that a notebook shows; the data frame has all."""
        return list(self.rows()[0]) if self.rows() else []

    def to_pandas(self) -> Any:
        """Its rows as a pandas DataFrame.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        return pandas.DataFrame(self.rows())

    def plot(self) -> Drawing:
        """Its pictures.

        Raises:
            UnsupportedError: matplotlib is not installed.
        """
        return Drawing(tuple(self.svgs()))

    def _repr_html_(self) -> str:
        columns = self.columns()
        cells = [[_shown(row.get(column)) for column in columns] for row in self.rows()]
        return html.page(html.table(columns, cells))


@dataclass(frozen=True)
class TrainingRun(Report):
    """A training run that has ended.

    Attributes:
        folder: Where everything of it lies; the adapter at its root.
        adapter: What was trained.
        summary: The run's report as JSON.
    """

    folder: Path
    adapter: Adapter
    summary: dict[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary a logged step, as in `metrics.jsonl`."""
        from preft.train.output import METRICS_NAME
        from preft.train.trainer import read_metrics

        return read_metrics(self.folder / METRICS_NAME)

    def svgs(self) -> Sequence[str]:
        """A curve for each metric."""
        from preft.train.curves import inline_curves

        return [picture.svg for picture in inline_curves(self.rows())]

    def _repr_html_(self) -> str:
        facts = [(key, _shown(value)) for key, value in self.summary.items() if not isinstance(value, dict | list)]
        return html.page(html.table(("run", ""), facts))


@dataclass(frozen=True)
class EvaluationReport(Report):
    """Scores of the base and the adapters, and which differences are real.

    Attributes:
        evaluation: Everything; see `preft.eval.run.Evaluation`.
    """

    evaluation: Any

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary a pair of arms and metric."""
        return [comparison.to_dict() for comparison in self.evaluation.comparisons]

    def columns(self) -> Sequence[str]:
        """What decides."""
        return ("task", "metric", "arms", "mean_first", "mean_second", "difference", "p_adjusted", "verdict")

    def svgs(self) -> Sequence[str]:
        """The effects with their intervals."""
        import tempfile

        from preft.eval.plots import save_effects

        with tempfile.TemporaryDirectory() as folder:
            paths = save_effects(self.evaluation.comparisons, Path(folder))
            return [svg_element(path.read_text()) for path in paths if path.suffix == ".svg"]


@dataclass(frozen=True)
class BenchReport(Report):
    """What a benchmark measured.

    Attributes:
        entries: One an arm and point: medians, spreads, ratios with intervals.
        notes: What a reader must know first.
        measured: One an arm, point and repeat.
        page: The HTML page.
        status: `complete`, `failed` or `interrupted`.
    """

    entries: list[dict[str, Any]]
    notes: list[str]
    measured: list[dict[str, Any]]
    page: Path
    status: str

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary an arm, point and repeat."""
        return self.measured

    def columns(self) -> Sequence[str]:
        """What is asked for first."""
        return ("arm", "repeat", "adapters", "lora_rank", "output_tokens_per_s", "ratio_to_base", "partial")

    def svgs(self) -> Sequence[str]:
        """Throughput of each arm."""
        from preft.bench.plots import inline_svgs

        return inline_svgs(self.entries)


@dataclass(frozen=True)
class PlanReport(Report):
    """What a plan predicts.

    Attributes:
        plan: See `preft.plan.plan.Plan`.
    """

    plan: Any

    def to_dict(self) -> dict[str, Any]:
        """Every figure and every assumption, as `preft plan --json` prints them."""
        document: dict[str, Any] = self.plan.to_dict()
        return document

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary an arm."""
        return list(self.to_dict()["arms"].values())

    def columns(self) -> Sequence[str]:
        """What is asked for first."""
        return (
            "arm",
            "output_tokens_per_s",
            "ratio_to_base",
            "ratio_to_lora",
            "slots",
            "limited_by",
            "cost_per_million_output_tokens",
        )

    def svgs(self) -> Sequence[str]:
        """Throughput over the number of adapters."""
        import tempfile

        from preft.plan.plot import save_plot

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.svg"
            save_plot(self.plan, path)
            return [svg_element(path.read_text())]


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)

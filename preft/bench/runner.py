"""The whole benchmark: adapters first, then every arm of every point in turn, again and again.

Arms of one point and repeat run side by side in time, in an order that turns with each repeat, so that a machine that
grows slower or faster favours none of them. Rows are on disk as soon as they exist, marked as partial until the last
one is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preft.bench.adapters import AdapterPaths, make_adapters
from preft.bench.facts import UNADAPTED, ModelFacts, machine_facts, plain_arm
from preft.bench.given import given_rank
from preft.bench.job import ArmJob
from preft.bench.process import ARM_COMMAND, TIME_LIMIT, run_arm
from preft.bench.rows import Row, add_ratios, keep_earlier, make_row, point_of, share_row, write_rows
from preft.bench.spec import BenchSpec, Point, kv_cache_gib
from preft.config.progress import Progress
from preft.provenance import provenance

COMPLETE, FAILED, INTERRUPTED = "complete", "failed", "interrupted"


@dataclass
class Outcome:
    """What came of a benchmark.

    Attributes:
        rows: One an arm, point and repeat.
        status: `complete`, `failed` (an arm did) or `interrupted`.
        setup: What every row holds as well.
        earlier: Where an earlier run's rows were moved, or None.
    """

    rows: list[Row] = field(default_factory=list)
    status: str = INTERRUPTED
    setup: dict[str, Any] = field(default_factory=dict)
    earlier: Path | None = None

    @property
    def failures(self) -> list[Row]:
        """Rows of arms that failed; one that was stopped at its limit, as asked, has not."""
        return [row for row in self.rows if row["error"] is not None and row["error"].get("type") != TIME_LIMIT]


def run_bench(
    spec: BenchSpec,
    model: Path,
    facts: ModelFacts,
    *,
    command: Sequence[str] = ARM_COMMAND,
    adapters: Callable[..., AdapterPaths] = make_adapters,
    progress: Progress | None = None,
) -> Outcome:
    """Measures every arm. Ctrl-C ends it early with what there is; nothing else does.

    Args:
        spec: What is asked; already found to fit.
        model: Checkpoint folder.
        facts: Of the model.
        command: What an arm's process runs.
        adapters: Makes the adapters.
        progress: Told of each process.

    Raises:
        FileError: Adapters or rows cannot be written.
    """
    outcome = Outcome(earlier=keep_earlier(spec.out))
    asked = {**spec.to_dict(), "kv_cache_gib": kv_cache_gib(spec, facts)}
    outcome.setup = {**provenance("bench throughput", asked), "machine": machine_facts()}
    try:
        paths = adapters(spec, model, progress=progress)
        turns = [(repeat, point) for repeat in range(spec.repeats) for point in spec.points]
        for turn, (repeat, point) in enumerate(turns):
            labels = list(spec.labels)
            for label in labels[turn % len(labels) :] + labels[: turn % len(labels)]:
                if _failed_before(outcome, label, point) or (repeat and label in spec.once):
                    continue
                same = _shared(outcome, spec, label, repeat, point)
                if same is not None:
                    outcome.rows.append(share_row(same, adapters=point.adapters, lora_rank=point.rank))
                    add_ratios(outcome.rows)
                    write_rows(spec.out, outcome.rows)
                    continue
                job = make_job(spec, model, facts, label, repeat, point, paths)
                if progress is not None:
                    place = f"repeat {repeat + 1} of {spec.repeats}"
                    progress.start(f"{label}, {point.adapters} adapters of rank {point.rank}, {place}", None)
                try:
                    log = spec.out / "logs" / f"{label}-n{point.adapters}-r{point.rank}-{repeat}.log"
                    result = run_arm(job, log, command=command, limit_s=spec.arm_limit_s)
                finally:
                    if progress is not None:
                        progress.finish()
                outcome.rows.append(make_row(job, result, outcome.setup))
                add_ratios(outcome.rows)
                write_rows(spec.out, outcome.rows)
    except KeyboardInterrupt:
        outcome.status = INTERRUPTED
    else:
        outcome.status = FAILED if outcome.failures else COMPLETE
    for row in outcome.rows:
        row["partial"] = outcome.status != COMPLETE
    write_rows(spec.out, outcome.rows)
    return outcome


def _failed_before(outcome: Outcome, label: str, point: Point) -> bool:
    """Whether this arm has failed at this point; it would again, and each time take as long as it took."""
    failed = (row for row in outcome.rows if row["error"] is not None)
    return any(row["arm"] == label and point_of(row) == (point.adapters, point.rank) for row in failed)


def _shared(outcome: Outcome, spec: BenchSpec, label: str, repeat: int, point: Point) -> Row | None:
    """The row of an arm without adapters that measured the same requests at another point of this repeat."""
    if not spec.share_base or spec.labels[label] not in UNADAPTED:
        return None
    wanted = (label, repeat, spec.requests_at(point.adapters))
    found = (row for row in outcome.rows if (row["arm"], row["repeat"], row["requests"]) == wanted)
    return next((row for row in found if not row["shared"]), None)


def make_job(
    spec: BenchSpec, model: Path, facts: ModelFacts, label: str, repeat: int, point: Point, paths: AdapterPaths
) -> ArmJob:
    """What one process of one arm is told."""
    arm = spec.labels[label]
    plain = plain_arm(arm)
    own = paths.get((plain, point.ranks), [])[: point.adapters]
    rank = spec.direft_rank if plain == "direftp" else max(point.ranks)
    if plain in spec.given:
        rank = given_rank(plain, own)
    held = facts.adapter_bytes(arm, rank, rank) * point.adapters
    requests = spec.requests_at(point.adapters)
    return ArmJob(
        label=label,
        arm=arm,
        repeat=repeat,
        model=str(model),
        adapter_paths=tuple(str(path) for path in own),
        adapters=point.adapters,
        slots=spec.slots,
        rank=rank,
        lora_rank=point.rank,
        input_len=spec.input_len,
        output_len=spec.output_len,
        requests=requests,
        vocab_size=facts.vocab_size,
        mode=spec.mode,
        warm_runs=spec.warm_runs,
        popularity=spec.popularity,
        dtype=spec.dtype,
        seed=spec.seed,
        max_num_seqs=spec.max_num_seqs or requests,
        kv_cache_gib=kv_cache_gib(spec, facts),
        # Twice the files: float32 engines hold bfloat16 adapters in float32.
        adapter_cache_gib=0.25 + 2.2 * held / (1 << 30),
        tp=spec.tp,
    )

"""What a throughput benchmark is asked to do, and everything that is refused before an engine starts."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from preft.bench.facts import UNADAPTED, ModelFacts
from preft.bench.workload import Popularity
from preft.errors import FileError, UsageError

ARMS = ("base", "stock-lora", "lora", "lorap", "direftp", "base-preft")
DEFAULT_ARMS = ARMS[:-1]
ADAPTED = ("stock-lora", "lora", "lorap", "direftp")
MODES = ("eager", "default")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_RANK = 512


@dataclass(frozen=True)
class Point:
    """One point of a sweep: a number of adapters of one rank."""

    adapters: int
    rank: int


@dataclass(frozen=True)
class BenchSpec:
    """One call of `preft bench throughput`.

    Attributes:
        model: Base model: folder, known name or hub id.
        out: Folder for rows, plots, the page, logs and generated adapters.
        arms: Names out of `ARMS`; a name given twice makes two arms that should not differ.
        adapters: Numbers of distinct adapters, one point of the sweep each.
        slots: Adapters that one step may hold.
        ranks: LoRA ranks, one point of the sweep each.
        direft_rank: Rank of the DiReFT adapters.
        input_len: Prompt tokens a request.
        output_len: Output tokens a request; end-of-sequence is ignored.
        requests: Requests a run, all submitted at its start.
        mode: `eager`, or `default`: whatever the engine would choose.
        repeats: Processes an arm and point.
        warm_runs: Runs of a process after its cold one.
        popularity: How requests choose adapters.
        dtype: Type of weights and activations.
        seed: Of adapters, prompts and choices.
        max_num_seqs: Requests that run at once, or None for all of them.
        kv_cache_gib: Size of the KV cache, or None for what the requests need.
    """

    model: str
    out: Path
    arms: tuple[str, ...] = DEFAULT_ARMS
    adapters: tuple[int, ...] = (8,)
    slots: int = 8
    ranks: tuple[int, ...] = (16,)
    direft_rank: int = 8
    input_len: int = 128
    output_len: int = 128
    requests: int = 64
    mode: str = "eager"
    repeats: int = 3
    warm_runs: int = 2
    popularity: str = "distinct"
    dtype: str = "auto"
    seed: int = 0
    max_num_seqs: int | None = None
    kv_cache_gib: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("input_len", 1), ("output_len", 1), ("requests", 1), ("repeats", 1)):
            _require_whole(name, getattr(self, name), least)
        for name in ("warm_runs", "direft_rank"):
            _require_whole(name, getattr(self, name), 1)
        if self.max_num_seqs is not None:
            _require_whole("max_num_seqs", self.max_num_seqs, 1)
        if self.kv_cache_gib is not None and not 0 < self.kv_cache_gib < float("inf"):
            raise UsageError("`--kv-cache-gib` is not valid", got=f"{self.kv_cache_gib}", accepted="above 0")
        for name, values in (("adapters", self.adapters), ("rank", self.ranks)):
            for value in values:
                _require_whole(name, value, 1)
            if not values or len(set(values)) < len(values):
                raise UsageError(f"`--{name}` is not valid", got=_joined(values), accepted="different whole numbers")
        for rank in (*self.ranks, self.direft_rank):
            if rank > MAX_RANK:
                raise UsageError("The rank is too large", got=f"{rank}", accepted=f"at most {MAX_RANK}")
        unknown = [arm for arm in self.arms if arm not in ARMS]
        if unknown or not self.arms:
            raise UsageError("`--arms` is not valid", got=_joined(unknown) or "none", accepted=", ".join(ARMS))
        for name, chosen, choices in (("mode", self.mode, MODES), ("dtype", self.dtype, DTYPES)):
            if chosen not in choices:
                raise UsageError(f"`--{name}` is not valid", got=f"`{chosen}`", accepted=", ".join(choices))
        Popularity.parse(self.popularity)

    @property
    def points(self) -> tuple[Point, ...]:
        """The points of the sweep."""
        return tuple(Point(adapters, rank) for rank in self.ranks for adapters in self.adapters)

    @property
    def labels(self) -> dict[str, str]:
        """Label to arm; the second of two equal arms is told apart by a number."""
        found: dict[str, str] = {}
        for arm in self.arms:
            number = sum(kind == arm for kind in found.values()) + 1
            found[arm if number == 1 else f"{arm}-{number}"] = arm
        return found

    def to_dict(self) -> dict[str, Any]:
        """The whole set-up, as every row holds it."""
        return {**asdict(self), "out": str(self.out)}


def require_fitting(spec: BenchSpec, facts: ModelFacts, *, memory_bytes: int, disk_bytes: int) -> None:
    """Refuses what the model or the machine cannot do.

    Args:
        spec: What is asked.
        facts: Of the model.
        memory_bytes: Memory available to one engine.
        disk_bytes: Free at `spec.out`.

    Raises:
        UsageError: The requests do not fit the context, or the adapters or the KV cache do not fit the machine.
    """
    length = spec.input_len + spec.output_len
    if facts.max_length is not None and length > facts.max_length:
        raise UsageError(
            "The requests are longer than the model's context",
            got=f"{length} tokens",
            accepted=f"--input-len and --output-len of at most {facts.max_length} together",
        )
    kinds = [arm for arm in dict.fromkeys(spec.arms) if arm not in UNADAPTED]
    most, rank = max(spec.adapters), max(spec.ranks)
    sizes = {arm: facts.adapter_bytes(arm, rank, spec.direft_rank) for arm in kinds}
    fixed = facts.weight_values * facts.value_bytes + int(kv_cache_gib(spec, facts) * (1 << 30))
    for arm, size in sizes.items():
        needed = fixed + size * (most + (spec.slots if arm == "stock-lora" else 0))
        if needed > memory_bytes:
            raise UsageError(
                f"{most} adapters of the arm `{arm}` do not fit the memory",
                got=f"{needed / 1e9:.1f} GB with weights and KV cache; one adapter takes {size / 1e6:.1f} MB",
                accepted=f"{memory_bytes / 1e9:.1f} GB, which is what is available",
                hint="fewer --adapters, a smaller --rank, or fewer --requests at once (--max-num-seqs)",
            )
    stored = sum(
        facts.adapter_bytes(arm, value, spec.direft_rank) * most
        for arm in kinds
        for value in (spec.ranks if arm != "direftp" else spec.ranks[:1])
    )
    if stored > disk_bytes:
        raise UsageError(
            f"The generated adapters do not fit the disk at `{spec.out}`",
            got=f"{stored / 1e9:.1f} GB",
            accepted=f"{disk_bytes / 1e9:.1f} GB free",
        )


def kv_cache_gib(spec: BenchSpec, facts: ModelFacts) -> float:
    """Size of the KV cache: as given, or so that no request of the run is ever preempted."""
    if spec.kv_cache_gib is not None:
        return spec.kv_cache_gib
    # Blocks of up to 128 tokens, and a tenth for what the engine keeps to itself.
    tokens = (
        -(-(spec.input_len + spec.output_len) // 128) * 128 * min(spec.requests, spec.max_num_seqs or spec.requests)
    )
    return max(0.25, 1.1 * tokens * facts.kv_values_per_token * facts.value_bytes / (1 << 30))


def require_writable(out: Path) -> None:
    """Creates the folder of results and proves that it can be written.

    Raises:
        FileError: It is a file, or cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise FileError(
            f"The folder `{out}` cannot be written", got=error.strerror or str(error), hint="choose another --out"
        ) from None


def _require_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        flag = name.replace("_", "-")
        raise UsageError(f"`--{flag}` is not valid", got=f"{value}", accepted=f"a whole number of at least {least}")


def _joined(values: tuple[object, ...] | list[str]) -> str:
    return ", ".join(str(value) for value in values)

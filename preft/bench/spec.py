"""What a throughput benchmark is asked to do, and everything that is refused before an engine starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from preft.bench.facts import ALL, ModelFacts, plain_arm
from preft.bench.workload import Popularity
from preft.errors import FileError, UsageError

DEFAULT_ARMS = ("base", "stock-lora", "lora", "lorap", "direftp")
OWN_ARMS = ("base-preft", "lora", "lorap", "direftp")
ARMS = (*DEFAULT_ARMS, "base-compiled", "base-preft", *(f"{arm}-compiled" for arm in OWN_ARMS))
ADAPTED = ("stock-lora", "lora", "lorap", "direftp")
MODES = ("eager", "default")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_RANK = 512
LEAST_REQUESTS = 64


@dataclass(frozen=True)
class Point:
    """One point of a sweep.

    Attributes:
        adapters: Distinct adapters.
        ranks: Their LoRA ranks, in turn; one number where all are of one rank.
    """

    adapters: int
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int | str:
        """The rank as rows hold it: a number, or `8+64` where adapters differ."""
        return self.ranks[0] if len(self.ranks) == 1 else "+".join(str(rank) for rank in self.ranks)


@dataclass(frozen=True)
class BenchSpec:
    """One call of `preft bench throughput`.

    Attributes:
        model: Base model: folder, known name or hub id.
        out: Folder for rows, plots, the page, logs and generated adapters.
        arms: Names out of `ARMS`; a name given twice makes two arms that should not differ.
        adapters: Numbers of distinct adapters, one point of the sweep each.
        slots: Adapters that one step may hold.
        ranks: LoRA ranks, one point of the sweep each; several numbers for adapters of mixed ranks.
        direft_rank: Rank of the DiReFT adapters.
        input_len: Prompt tokens a request.
        output_len: Output tokens a request; end-of-sequence is ignored.
        requests: Requests a run, all submitted at its start, or None for 64, and one an adapter where those are more.
        mode: `eager`, or `default`: compiled, as stock vLLM does by default; stock vLLM with LoRA on CPU stays eager.
        repeats: Processes an arm and point.
        warm_runs: Runs of a process after its cold one.
        popularity: How requests choose adapters.
        dtype: Type of weights and activations.
        seed: Of adapters, prompts and choices.
        max_num_seqs: Requests that run at once, or None for all of them.
        kv_cache_gib: Size of the KV cache, or None for what the requests need.
        targets: Linears that the LoRA arms act on; see `preft.bench.facts.lora_modules`.
        given: Arm to a folder of its adapters, for arms whose adapters are not generated.
        tp: GPUs or CPU workers that share the model.
        once: Arms that are measured in the first repeat only.
        share_base: Measure arms without adapters at one point of those with the same requests.
        adapter_dir: Where generated adapters are kept, or None for below `out`.
        arm_limit_s: Seconds after which a process of an arm is stopped, or None.
    """

    model: str
    out: Path
    arms: tuple[str, ...] = DEFAULT_ARMS
    adapters: tuple[int, ...] = (8,)
    slots: int = 8
    ranks: tuple[tuple[int, ...], ...] = ((16,),)
    direft_rank: int = 8
    input_len: int = 128
    output_len: int = 128
    requests: int | None = None
    mode: str = "eager"
    repeats: int = 3
    warm_runs: int = 2
    popularity: str = "distinct"
    dtype: str = "auto"
    seed: int = 0
    max_num_seqs: int | None = None
    kv_cache_gib: float | None = None
    targets: str = ALL
    given: Mapping[str, Path] = field(default_factory=dict)
    tp: int = 1
    once: tuple[str, ...] = ()
    share_base: bool = False
    adapter_dir: Path | None = None
    arm_limit_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("slots", "input_len", "output_len", "repeats", "warm_runs", "direft_rank", "tp"):
            _require_whole(name, getattr(self, name))
        for name in ("requests", "max_num_seqs"):
            if getattr(self, name) is not None:
                _require_whole(name, getattr(self, name))
        for name in ("kv_cache_gib", "arm_limit_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"`--{name.replace('_', '-')}` is not valid", got=f"{value}", accepted="above 0")
        self._check_sweep()
        self._check_arms()
        for name, chosen, choices in (("mode", self.mode, MODES), ("dtype", self.dtype, DTYPES)):
            if chosen not in choices:
                raise UsageError(f"`--{name}` is not valid", got=f"`{chosen}`", accepted=", ".join(choices))

    def _check_sweep(self) -> None:
        for value in self.adapters:
            _require_whole("adapters", value)
        for rank in (*(rank for ranks in self.ranks for rank in ranks), self.direft_rank):
            _require_whole("rank", rank)
            if rank > MAX_RANK:
                raise UsageError("The rank is too large", got=f"{rank}", accepted=f"at most {MAX_RANK}")
        for name, values in (("adapters", self.adapters), ("rank", self.ranks)):
            if not values or not all(values) or len(set(values)) < len(values):  # type: ignore[arg-type,call-overload]
                got = _joined(values)
                raise UsageError(f"`--{name}` is not valid", got=got, accepted="different whole numbers")
        popularity = Popularity.parse(self.popularity)
        for value in self.adapters:
            popularity.require_adapters(value)

    def _check_arms(self) -> None:
        unknown = [arm for arm in self.arms if arm not in ARMS]
        if unknown or not self.arms:
            raise UsageError("`--arms` is not valid", got=_joined(unknown) or "none", accepted=", ".join(ARMS))
        for name, chosen, choices in (
            ("once", tuple(self.once), tuple(self.labels)),
            ("given", tuple(self.given), self.adapted),
        ):
            wrong = [value for value in chosen if value not in choices]
            if wrong:
                raise UsageError(f"`--{name}` is not valid", got=_joined(wrong), accepted=", ".join(choices) or "none")
        if self.given and len(self.ranks) > 1:
            raise UsageError(
                "`--rank` is a sweep",
                got=_joined(self.ranks),
                accepted="one rank, since `--given` adapters have theirs",
            )

    @property
    def points(self) -> tuple[Point, ...]:
        """The points of the sweep."""
        return tuple(Point(adapters, ranks) for ranks in self.ranks for adapters in self.adapters)

    @property
    def generated(self) -> Path:
        """Where generated adapters are kept."""
        return self.adapter_dir or self.out / "adapters"

    def requests_at(self, adapters: int) -> int:
        """Requests of a run with so many adapters."""
        return self.requests or max(LEAST_REQUESTS, adapters)

    @property
    def most_requests(self) -> int:
        """Requests of the largest run."""
        return max(self.requests_at(adapters) for adapters in self.adapters)

    @property
    def adapted(self) -> tuple[str, ...]:
        """Arms that need adapters of their own; a compiled arm takes those of the plain one."""
        plain = {plain_arm(arm) for arm in self.arms}
        return tuple(arm for arm in ADAPTED if arm in plain)

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
        given = {arm: str(folder) for arm, folder in self.given.items()}
        return {
            **asdict(self),
            "out": str(self.out),
            "given": given,
            "adapter_dir": str(self.generated),
            "ranks": [Point(1, item).rank for item in self.ranks],
        }


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
    kinds = spec.adapted
    most = max(spec.adapters)
    sizes = {
        arm: max(facts.adapter_bytes(arm, _mean(ranks), spec.direft_rank) for ranks in spec.ranks) for arm in kinds
    }
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
        facts.adapter_bytes(arm, _mean(ranks), spec.direft_rank) * most
        for arm in kinds
        if arm not in spec.given
        for ranks in (spec.ranks if arm != "direftp" else spec.ranks[:1])
    )
    if stored > disk_bytes:
        raise UsageError(
            f"The generated adapters do not fit the disk at `{spec.generated}`",
            got=f"{stored / 1e9:.1f} GB",
            accepted=f"{disk_bytes / 1e9:.1f} GB free",
        )


def kv_cache_gib(spec: BenchSpec, facts: ModelFacts) -> float:
    """Size of the KV cache: as given, or so that no request of the run is ever preempted."""
    if spec.kv_cache_gib is not None:
        return spec.kv_cache_gib
    # Blocks of up to 128 tokens, and a tenth for what the engine keeps to itself.
    most = spec.most_requests
    tokens = -(-(spec.input_len + spec.output_len) // 128) * 128 * min(most, spec.max_num_seqs or most)
    return max(0.25, 1.1 * tokens * facts.kv_values_per_token * facts.value_bytes / (1 << 30))


def require_writable(out: Path, flag: str = "--out") -> None:
    """Creates a folder of results and proves that it can be written.

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
            f"The folder `{out}` cannot be written", got=error.strerror or str(error), hint=f"choose another {flag}"
        ) from None


def _require_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        flag = name.replace("_", "-")
        raise UsageError(f"`--{flag}` is not valid", got=f"{value}", accepted="a whole number of at least 1")


def _mean(ranks: tuple[int, ...]) -> float:
    return sum(ranks) / len(ranks)


def _joined(values: Iterable[object]) -> str:
    return ", ".join("+".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in values)

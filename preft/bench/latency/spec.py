"""What a latency benchmark is asked to do."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from preft.bench.facts import ModelFacts
from preft.bench.spec import BenchSpec, kv_cache_gib
from preft.bench.workload import Popularity, make_prompts
from preft.errors import FileError, UsageError

ARMS = ("base", "lora", "lorap", "direftp")
SERVED = "served"
"""The arm of a server that somebody else has started."""
LEAST_REQUESTS = 8
MOST_REQUESTS = 20_000
MOST_RATES = 12
FIRST_RATE = 0.5


@dataclass(frozen=True)
class Arrival:
    """One request of a trace.

    Attributes:
        at: Seconds after the first one may be sent.
        input_len: Prompt tokens.
        output_len: Output tokens.
        adapter: Number of its adapter, or None for one by popularity.
    """

    at: float
    input_len: int
    output_len: int
    adapter: int | None = None


@dataclass(frozen=True)
class LatencySpec:
    """One call of `preft bench latency`.

    Attributes:
        bench: Model, folder, arms, one number of adapters and one rank, slots, lengths, repeats, popularity, seed.
        rates: Requests/s, rising; empty to double from `FIRST_RATE` until past the knee.
        seconds: Of each load: requests are sent for so long, at least `LEAST_REQUESTS` of them.
        burstiness: 1 for Poisson arrivals; less is burstier, more is evener.
        knee_factor: The knee is the last rate whose median latency is at most so many times that of the first.
        trace: Arrivals to replay instead of rates.
        url: A server that is already there, such as `http://127.0.0.1:8000/v1`, or None to start one.
        models: Names to ask it for.
        compiled: Start the server with its model compiled.
    """

    bench: BenchSpec
    rates: tuple[float, ...] = ()
    seconds: float = 30.0
    burstiness: float = 1.0
    knee_factor: float = 2.0
    trace: tuple[Arrival, ...] = ()
    url: str | None = None
    models: tuple[str, ...] = ()
    compiled: bool = False

    def __post_init__(self) -> None:
        for name, least in (("seconds", 0.0), ("burstiness", 0.0), ("knee_factor", 1.0)):
            value = getattr(self, name)
            if not least < value < math.inf:
                flag = name.replace("_", "-")
                raise UsageError(f"`--{flag}` is not valid", got=f"{value}", accepted=f"above {least:g}")
        if any(not 0 < rate < 1e6 for rate in self.rates) or list(self.rates) != sorted(set(self.rates)):
            got = ", ".join(f"{rate:g}" for rate in self.rates)
            raise UsageError("`--rates` is not valid", got=got, accepted="rising numbers above 0, such as 0.5,1,2")
        if self.rates and self.trace:
            raise UsageError("`--rates` and `--trace` both say when requests arrive", accepted="one of them")
        if (self.url is None) != (not self.models):
            raise UsageError("`--url` and `--models` belong together", accepted="both, or none to start a server here")
        unknown = [arm for arm in self.bench.arms if arm not in ARMS]
        if unknown and self.url is None:
            raise UsageError("`--arms` is not valid", got=", ".join(unknown), accepted=", ".join(ARMS))
        if len(self.bench.points) != 1:
            raise UsageError("A latency benchmark has one number of adapters and one rank", got="a list of them")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise UsageError("`--url` is not valid", got=f"`{self.url}`", accepted="such as http://127.0.0.1:8000/v1")
        outside = [
            item.adapter for item in self.trace if item.adapter is not None and item.adapter >= self.num_adapters
        ]
        if outside:
            raise UsageError(
                "The trace names an adapter that is not there",
                got=f"{outside[0]}",
                accepted=f"0 to {self.num_adapters - 1}",
            )

    @property
    def num_adapters(self) -> int:
        """Models that requests of an arm choose among."""
        return len(self.models) or self.bench.adapters[0]

    def require_length(self, most: int | None) -> None:
        """Refuses requests that the model's context cannot hold.

        Raises:
            UsageError: One is longer than `most` tokens.
        """
        lengths = [item.input_len + item.output_len for item in self.trace]
        longest = max(lengths, default=self.bench.input_len + self.bench.output_len)
        if most is not None and longest > most:
            raise UsageError(
                "The requests are longer than the model's context", got=f"{longest} tokens", accepted=f"at most {most}"
            )

    def to_dict(self) -> dict[str, Any]:
        """The whole set-up, as every row holds it."""
        own = {key: value for key, value in asdict(self).items() if key not in ("bench", "trace")}
        return {**self.bench.to_dict(), **own, "rates": list(self.rates), "trace_requests": len(self.trace)}

    def load(self, rate: float | None, names: Sequence[str], vocab_size: int, *, repeat: int) -> list[dict[str, Any]]:
        """The requests of one load, in the form of `preft.serve.load_client`, each with its adapter's number.

        Args:
            rate: Requests/s, or None for the trace.
            names: What the server calls the arm's models.
            vocab_size: Token ids are below it.
            repeat: Which repeat: prompts differ between repeats and rates, and are the same for all arms.
        """
        spec = self.bench
        seed = (spec.seed * 1009 + repeat) * 1_000_003 + round((rate or 0.0) * 1000)
        arrivals = self.trace
        if rate is not None:
            count = min(MOST_REQUESTS, max(LEAST_REQUESTS, math.ceil(rate * self.seconds)))
            arrivals = (Arrival(0.0, spec.input_len, spec.output_len),) * count
        choices = Popularity.parse(spec.popularity).choose(len(arrivals), self.num_adapters, seed=seed)
        requests = []
        for index, (item, choice) in enumerate(zip(arrivals, choices, strict=True)):
            adapter = choice if item.adapter is None else item.adapter
            (prompt,) = make_prompts(1, item.input_len, vocab_size, seed=seed * 100_003 + index)
            model = names[adapter % len(names)]
            at = item.at if rate is None else None
            requests.append(
                {"model": model, "prompt": prompt, "output_len": item.output_len, "at": at, "adapter": adapter}
            )
        return requests


def next_rate(spec: LatencySpec, done: Sequence[float], *, past_knee: bool) -> float | None:
    """The rate to measure after `done`, or None where the sweep ends."""
    if spec.rates:
        return spec.rates[len(done)] if len(done) < len(spec.rates) else None
    if past_knee or len(done) >= MOST_RATES:
        return None
    return FIRST_RATE * 2.0 ** len(done)


def read_trace(path: Path) -> tuple[Arrival, ...]:
    """Reads a trace: a line a request, `{"at": 0.5, "input_len": 128, "output_len": 64, "adapter": 3}`.

    Args:
        path: The file; `adapter` may be left out.

    Raises:
        FileError: It cannot be read, or a line is not of that form.
    """
    accepted = '{"at": 0.5, "input_len": 128, "output_len": 64} and, if you like, "adapter": 3; `at` never falls'
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"`{path}` cannot be read", got=getattr(error, "strerror", None) or "not text") from None
    found: list[Arrival] = []
    for number, line in enumerate(lines, start=1):
        try:
            item = Arrival(**json.loads(line))
            whole = (item.input_len, item.output_len, *(() if item.adapter is None else (item.adapter + 1,)))
            good = item.at >= (found[-1].at if found else 0.0) and all(
                type(value) is int and value > 0 for value in whole
            )
        except (ValueError, TypeError):
            good = False
        if not good:
            raise FileError(f"Line {number} of `{path}` is not a request", got=line[:80], accepted=accepted)
        found.append(item)
    if not found:
        raise FileError(f"`{path}` holds no requests", accepted=accepted)
    return tuple(found)


def server_kv_gib(spec: LatencySpec, facts: ModelFacts) -> float:
    """KV cache of a server that is started here: as given, or enough for all that may run at once."""
    return kv_cache_gib(spec.bench, facts)


def shuffled_arms(spec: LatencySpec, repeat: int) -> list[str]:
    """The order of the arms in a repeat: another in each, so that none is always the first after the start."""
    arms = [SERVED] if spec.url is not None else list(spec.bench.labels)
    random.Random(f"arms {spec.bench.seed} {repeat}").shuffle(arms)
    return arms

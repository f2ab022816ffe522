"""Driving an engine through one run, and what its clock says about it."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from preft.bench.stats import extent, fairness_index, spread
from preft.errors import EngineError


@dataclass(frozen=True)
class Delivered:
    """What one step gave one request.

    Attributes:
        id: The request's.
        num_tokens: Output tokens it has by now.
        finished: Whether it has ended.
    """

    id: str
    num_tokens: int
    finished: bool


class Stepper(Protocol):
    """An engine as a benchmark drives it: submit everything, then step until nothing is left."""

    def submit(self, prompt: Sequence[int], adapter: int | None, max_tokens: int) -> str:
        """Adds a request that ignores end-of-sequence; returns its id."""

    def step(self) -> list[Delivered]:
        """Runs one step."""

    def has_unfinished(self) -> bool:
        """Whether a request is left."""

    def adapter_s(self) -> float | None:
        """Seconds spent in adapter kernels so far; None where nothing tells."""


@dataclass(frozen=True)
class StepTime:
    """The clock of one step.

    Attributes:
        stop_s: When it ended, since the run began.
        seconds: How long it took; the first includes the submission of the requests.
        adapter_s: In adapter kernels; None where nothing tells.
    """

    stop_s: float
    seconds: float
    adapter_s: float | None


@dataclass
class Trace:
    """The clock of one request.

    Attributes:
        adapter: Number of the adapter it named.
        times: When tokens came, in seconds since the run began.
        counts: Output tokens by then.
    """

    adapter: int
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.times[0]

    @property
    def last_s(self) -> float:
        """Time to the last token."""
        return self.times[-1]

    @property
    def per_token_s(self) -> float | None:
        """Mean time of an output token after the first; None if there is only one."""
        after = self.counts[-1] - self.counts[0]
        return (self.last_s - self.first_s) / after if after else None

    def gaps(self) -> list[float]:
        """Times between one output token and the next."""
        found: list[float] = []
        for index in range(1, len(self.times)):
            tokens = self.counts[index] - self.counts[index - 1]
            found += [(self.times[index] - self.times[index - 1]) / tokens] * tokens if tokens else []
        return found


def drive(
    engine: Stepper,
    prompts: Sequence[Sequence[int]],
    choices: Sequence[int],
    *,
    with_adapters: bool,
    output_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Trace], list[StepTime]]:
    """Submits every prompt at once and steps to the end.

    Args:
        engine: What runs.
        prompts: Token ids of each.
        choices: The adapter's number of each.
        with_adapters: Whether requests name their adapters; base ones do not, and are still told apart by them.
        output_len: Output tokens that each must give.
        clock: Seconds.

    Raises:
        EngineError: A request gave fewer tokens; a ratio of runs of unequal length would mean nothing.
    """
    start = clock()
    traces: dict[str, Trace] = {}
    for prompt, choice in zip(prompts, choices, strict=True):
        traces[engine.submit(prompt, choice if with_adapters else None, output_len)] = Trace(choice)
    steps: list[StepTime] = []
    now, spent = 0.0, engine.adapter_s()
    while engine.has_unfinished():
        delivered = engine.step()
        before, now = now, clock() - start
        earlier, spent = spent, engine.adapter_s()
        steps.append(
            StepTime(now, now - before, spent - earlier if spent is not None and earlier is not None else None)
        )
        for item in delivered:
            trace = traces[item.id]
            if item.num_tokens > (trace.counts[-1] if trace.counts else 0):
                trace.times.append(now)
                trace.counts.append(item.num_tokens)
    short = [trace for trace in traces.values() if not trace.counts or trace.counts[-1] != output_len]
    if short:
        raise EngineError(
            "Requests ended before their length",
            got=f"{len(short)} of {len(traces)}, one with {short[0].counts[-1] if short[0].counts else 0} tokens",
            accepted=f"{output_len} tokens each",
        )
    return list(traces.values()), steps


def metrics(traces: Sequence[Trace], steps: Sequence[StepTime] = ()) -> dict[str, Any]:
    """The numbers of one run."""
    seconds = max(trace.last_s for trace in traces)
    first = max(trace.first_s for trace in traces)
    tokens = sum(trace.counts[-1] for trace in traces)
    after = sum(
        count - (trace.counts[index - 1] if index else 0)
        for trace in traces
        for index, (moment, count) in enumerate(zip(trace.times, trace.counts, strict=True))
        if moment > first
    )
    decode_s = seconds - first
    return {
        "seconds": seconds,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds,
        "requests_per_s": len(traces) / seconds,
        "prefill_s": first,
        "decode_s": decode_s,
        "decode_tokens_per_s": after / decode_s if after else None,
        "ttft_s": spread([trace.first_s for trace in traces]),
        "tpot_s": spread([time_s for trace in traces if (time_s := trace.per_token_s) is not None]),
        "itl_s": spread([gap for trace in traces for gap in trace.gaps()]),
        "fairness": fairness(traces),
        "adapter_kernels": adapter_kernels(steps, first),
    }


def adapter_kernels(steps: Sequence[StepTime], first_s: float) -> dict[str, Any] | None:
    """Time in adapter kernels and its share of step time: whole, until every request had a token, and after.

    Returns:
        None where nothing tells; a share is None where no step ran.
    """
    if not steps or any(step.adapter_s is None for step in steps):
        return None
    found: dict[str, Any] = {}
    for name, chosen in (
        ("", steps),
        ("prefill_", [step for step in steps if step.stop_s <= first_s]),
        ("decode_", [step for step in steps if step.stop_s > first_s]),
    ):
        seconds = sum(step.adapter_s or 0.0 for step in chosen)
        whole = sum(step.seconds for step in chosen)
        found[f"{name}seconds"] = seconds
        found[f"{name}share"] = seconds / whole if whole else None
    return found


def fairness(traces: Sequence[Trace]) -> dict[str, Any]:
    """How evenly adapters were served: each one's mean time to the first token and mean speed of a request."""
    first: dict[int, list[float]] = {}
    speed: dict[int, list[float]] = {}
    for trace in traces:
        first.setdefault(trace.adapter, []).append(trace.first_s)
        speed.setdefault(trace.adapter, []).append(trace.counts[-1] / trace.last_s)
    speeds = [sum(values) / len(values) for values in speed.values()]
    return {
        "adapters": len(first),
        "ttft_s": extent([sum(values) / len(values) for values in first.values()]),
        "request_tokens_per_s": extent(speeds),
        "jain_index": fairness_index(speeds),
    }


def peak_rss_bytes() -> int:
    """The most memory that this process ever held, and those of its session, where tensor parallelism makes others."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return own + sum(_peak(member) for member in _session_members() if member != os.getpid())


def _session_members() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(name)) == os.getsid(0):
                found.append(int(name))
    # Only the leader of a session may count its members as its own.
    return found if os.getsid(0) == os.getpid() else []


def _peak(process: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{process}/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


@dataclass
class Neighbours:
    """How many cores other processes kept busy meanwhile; a benchmark beside them is noise."""

    started: tuple[float, float, float] | None = None

    def start(self) -> None:
        """Begins to count."""
        self.started = _cpu_seconds()

    def busy_cores(self) -> float | None:
        """Cores that others used since `start`; None where the system does not tell."""
        now = _cpu_seconds()
        if self.started is None or now is None or now[0] <= self.started[0]:
            return None
        wall, machine, own = (later - earlier for later, earlier in zip(now, self.started, strict=True))
        return max(0.0, (machine - own) / wall)


def _cpu_seconds() -> tuple[float, float, float] | None:
    """Wall clock, busy time of all cores, and busy time of this process, in seconds."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            fields = [int(part) for part in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _wait, interrupts, soft, _steal = fields
    busy = (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), busy, time.process_time()

"""A run's clock, the choice of adapters, and prompts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from preft.bench.measure import Delivered, Neighbours, drive, metrics, peak_rss_bytes
from preft.bench.workload import Popularity, make_prompts, run_seed
from preft.errors import EngineError, UsageError


class FakeEngine:
    """Two prompt steps, one for each request, then steps that give every request a token."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.have, self.adapters = tokens, [], []  # type: ignore[var-annotated]
        self.blind = False

    def submit(self, prompt: Sequence[int], adapter: int | None, max_tokens: int) -> str:
        self.have.append(0)
        self.adapters.append(adapter)
        return str(len(self.have) - 1)

    def step(self) -> list[Delivered]:
        waiting = [index for index, have in enumerate(self.have) if not have]
        moved = waiting[:1] or range(len(self.have))
        for index in moved:
            self.have[index] += 1
        return [Delivered(str(index), self.have[index], self.have[index] == self.tokens) for index in moved]

    def has_unfinished(self) -> bool:
        return any(have < self.tokens for have in self.have)

    def adapter_s(self) -> float | None:
        """Half a second in each of the two prompt steps, a quarter in each later one."""
        if self.blind:
            return None
        steps = max(sum(self.have) - 2, 0) // 2 if all(self.have) else 0
        return 0.5 * sum(have > 0 for have in self.have) + 0.25 * steps


def ticking(step: float = 1.0) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += step


def run(
    tokens: int, *, wanted: int | None = None, with_adapters: bool = True, blind: bool = False
) -> tuple[FakeEngine, dict[str, object]]:
    engine, clock = FakeEngine(tokens), ticking()
    engine.blind = blind
    traces, steps = drive(
        engine,
        [[1], [2]],
        [0, 1],
        with_adapters=with_adapters,
        output_len=wanted or tokens,
        clock=lambda: next(clock),
    )
    return engine, metrics(traces, steps)


def test_the_numbers_of_a_run() -> None:
    """First tokens at 1 s and 2 s, then both get one at 3, 4 and 5 s."""
    engine, found = run(4)
    assert engine.adapters == [0, 1]
    assert found["seconds"] == 5
    assert found["output_tokens"] == 8
    assert found["output_tokens_per_s"] == 8 / 5
    assert (found["prefill_s"], found["decode_s"]) == (2, 3)
    assert found["decode_tokens_per_s"] == 6 / 3
    assert found["ttft_s"] == {"p50": 1.5, "p95": pytest.approx(1.95), "p99": pytest.approx(1.99)}
    assert found["tpot_s"]["p50"] == pytest.approx((4 / 3 + 1) / 2)  # type: ignore[index]
    assert found["itl_s"]["p50"] == 1  # type: ignore[index]
    fair = found["fairness"]
    assert fair["adapters"] == 2  # type: ignore[index]
    assert fair["ttft_s"] == {"min": 1, "median": 1.5, "max": 2}  # type: ignore[index]


def test_the_share_of_adapter_kernels() -> None:
    """Two prompt steps of a second, half of each in kernels; three later ones, a quarter of each."""
    found = run(4)[1]["adapter_kernels"]
    assert found == {
        "seconds": 1.75,
        "share": 1.75 / 5,
        "prefill_seconds": 1.0,
        "prefill_share": 0.5,
        "decode_seconds": 0.75,
        "decode_share": 0.25,
    }
    assert run(4, blind=True)[1]["adapter_kernels"] is None
    assert run(1)[1]["adapter_kernels"]["decode_share"] is None  # type: ignore[index]


def test_base_names_no_adapter() -> None:
    assert run(2, with_adapters=False)[0].adapters == [None, None]


def test_one_output_token_leaves_decode_undefined() -> None:
    found = run(1)[1]
    assert found["decode_tokens_per_s"] is None
    assert found["tpot_s"]["p50"] is None  # type: ignore[index]
    assert found["itl_s"]["p99"] is None  # type: ignore[index]
    assert found["decode_s"] == 0
    assert found["output_tokens_per_s"] == 1


def test_runs_of_unequal_length_are_refused() -> None:
    with pytest.raises(EngineError, match=r"2 of 2, one with 3 tokens"):
        run(3, wanted=4)


def test_popularity() -> None:
    assert Popularity.parse("distinct").choose(5, 2, seed=1) == [0, 1, 0, 1, 0]
    uniform = Counter(Popularity.parse("uniform").choose(9000, 3, seed=1))
    assert all(2700 < uniform[index] < 3300 for index in range(3))
    zipf = Counter(Popularity.parse("zipf:1").choose(11_000, 3, seed=1))  # 6/11, 3/11, 2/11
    assert [zipf[index] / 1000 for index in range(3)] == pytest.approx([6, 3, 2], rel=0.1)
    assert Popularity.parse("uniform").choose(20, 9, seed=2) == Popularity.parse("uniform").choose(20, 9, seed=2)
    assert Popularity.parse("zipf:2.5").choose(1, 1, seed=0) == [0]
    weights = Counter(Popularity.parse("weights:70/20/10").choose(10_000, 3, seed=1))
    assert [weights[index] / 1000 for index in range(3)] == pytest.approx([7, 2, 1], rel=0.1)
    with pytest.raises(UsageError, match="got: 3 weights for 4 adapters"):
        Popularity.parse("weights:70/20/10").require_adapters(4)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "zipf",
        "zipf:",
        "zipf:0",
        "zipf:-1",
        "zipf:x",
        "zipf:nan",
        "uniform:1",
        "Distinct",
        "weights:",
        "weights:1/0",
        "weights:1/x",
        "weights",
    ],
)
def test_bad_popularity_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="accepted: distinct, uniform, zipf:A"):
        Popularity.parse(text)


def test_no_two_runs_share_a_prompt() -> None:
    seeds = {run_seed(0, repeat, run) for repeat in range(20) for run in range(20)}
    assert len(seeds) == 400
    prompts = [tuple(prompt) for seed in (1, 2) for prompt in make_prompts(4, 16, 1000, seed=seed)]
    assert len(set(prompts)) == 8
    assert all(3 <= token < 1000 for prompt in prompts for token in prompt)
    assert make_prompts(1, 4, 2, seed=1) == [[1, 1, 1, 1]]


def test_own_work_is_not_a_neighbours() -> None:
    neighbours = Neighbours()
    assert neighbours.busy_cores() is None
    neighbours.start()
    until = time.perf_counter() + 0.05
    while time.perf_counter() < until:
        pass
    busy = neighbours.busy_cores()
    assert busy is None or busy >= 0
    assert peak_rss_bytes() > 1_000_000

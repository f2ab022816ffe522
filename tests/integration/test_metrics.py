"""What `/metrics` of a real server says after a known sequence of requests, to the last token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from preft.serve.backend.memory_plan import describe_plan
from tests.helpers.engines import BLOCK, prompt_of, save_all
from tests.helpers.serving import TOKENS, Server, running_server
from tests.helpers.tiny import random_adapter

pytestmark = pytest.mark.engine

CACHE_GIB = 0.0003
"""Room for one of the adapters and not for two."""
LENGTH, BOUNDARY = 40, 10
SETTLE_S = 20
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("adapters")
    save_all(root, {name: random_adapter(tiny_llama, seed=i, rank=8) for i, name in enumerate("abc")})
    options = ["--adapter-cache-gib", str(CACHE_GIB), "--adapter-metrics", "--adapter-metrics-limit", "2"]
    # At this level vLLM's own logger of statistics is on as well, and must not stumble over preft's.
    folder = tmp_path_factory.mktemp("server")
    with running_server(tiny_llama, root, folder, *options, VLLM_LOGGING_LEVEL="INFO") as server:
        yield server


def read(server: Server) -> Samples:
    status, text = server.ask("GET", "/metrics")
    assert status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("preft_") and not sample.name.endswith("_created")
    }


def read_when(server: Server, is_there: Callable[[Samples], bool]) -> Samples:
    """The server counts a step a moment after it has answered."""
    deadline = time.monotonic() + SETTLE_S
    while not is_there(samples := read(server)):
        assert time.monotonic() < deadline, samples
        time.sleep(0.1)
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"preft_{name}", tuple(sorted(labels.items()))]


def test_counts_are_exact(server: Server) -> None:
    prompt, blocks = prompt_of(1, LENGTH), LENGTH // BLOCK * BLOCK
    assert 0 < blocks < LENGTH
    before = read(server)
    assert value(before, "steps_total", adapted="true") == value(before, "adapted_tokens_total") == 0

    server.tokens("a", prompt)
    server.tokens("a", prompt)
    server.tokens("b", prompt, vllm_xargs={"preft_prompt_len": BOUNDARY})
    server.tokens("c", prompt)
    server.tokens("base", prompt)
    after = read_when(server, lambda samples: sum(_steps(samples)) >= 5 * TOKENS)

    # One step for each prompt, which yields the first token, and one for each further token.
    assert _steps(after) == (4, 5 * TOKENS - 4)
    assert value(after, "adapted_tokens_total") == LENGTH + (LENGTH - blocks) + BOUNDARY + LENGTH
    assert value(after, "adapter_load_seconds_count") == 3
    assert value(after, "adapter_load_seconds_sum") > 0
    assert value(after, "adapter_load_failures_total") == 0
    assert value(after, "adapter_evictions_total") == 2
    assert value(after, "adapters_resident") == 1
    assert value(after, "adapters_waiting") == value(after, "requests_waiting_for_slot") == 0
    assert value(after, "slots_used") == 0


def _steps(samples: Samples) -> tuple[float, float]:
    return value(samples, "steps_total", adapted="true"), value(samples, "steps_total", adapted="false")


def test_names_are_counted_up_to_the_limit(server: Server) -> None:
    after = read(server)
    counted = {
        name: [
            value(after, f"adapter_{what}_total", adapter=name)
            for what in ("requests", "prompt_tokens", "cached_prompt_tokens")
        ]
        for name in ("a", "b", "other")
    }
    assert counted == {"a": [2, 2 * LENGTH, BLOCK], "b": [1, LENGTH, 0], "other": [1, LENGTH, 0]}
    assert ("preft_adapter_requests_total", (("adapter", "c"),)) not in after


def test_memory_is_told_as_planned_and_as_used(server: Server) -> None:
    after = read(server)
    plan = server.ask("GET", "/v1/preft/health")[1]["memory"]
    worker = server.ask("GET", "/v1/preft/status")[1]["workers"][0]

    assert value(after, "adapter_planned_bytes") == plan["adapter_cache_bytes"] == int(CACHE_GIB * 2**30)
    assert 0 < value(after, "adapter_bytes") == worker["adapter_bytes"] <= plan["adapter_cache_bytes"]
    assert value(after, "slots") == plan["slots"] == 2
    assert value(after, "slot_bytes") == plan["slot_bytes"]
    assert plan["kv_cache_bytes"] == 2**28
    assert f"memory: {describe_plan(plan)}" in server.log.read_text()


def test_vllms_own_metrics_are_there_too(server: Server) -> None:
    _, text = server.ask("GET", "/metrics")
    assert 'vllm:num_requests_running{engine="0"' in text
    # One series without names, where vLLM alone would make one of each set of names that ever ran together.
    info = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert len(info) == 1
    assert 'running_lora_adapters="",waiting_lora_adapters=""' in info[0]
    assert "AssertionError" not in server.log.read_text()

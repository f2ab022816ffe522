"""A client process for load tests: `python -m preft.serve.load_client`, built on vLLM's own serving benchmark.

Reads one load a line on standard input and answers one line on standard output, until its input ends. vLLM's code
sends, streams and times the requests and spaces their arrivals; which model each request names is decided by whoever
writes the load, since vLLM's own choice knows neither weights nor a report for each adapter.

A load is `{"url", "rate", "burstiness", "seed", "requests": [{"model", "prompt", "output_len", "at"}]}`: `rate` in
requests/s, or null for arrivals `at` so many seconds. An answer is `{"requests": [...]}` in their order.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

LONGEST_S = 6 * 3600.0


async def send_load(load: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Sends the requests of one load as they are due, and waits for all of them.

    Args:
        load: See above.

    Returns:
        For each request seconds from the load's start until it was sent, time to the first token, gaps between
        pieces of the answer, and whole time; its output tokens; and why it failed, or None.
    """
    import aiohttp
    import numpy as np
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_completions
    from vllm.benchmarks.serve import get_request

    samples = [
        SampleRequest(
            item["prompt"], len(item["prompt"]), item["output_len"], request_id=f"{index}", timestamp=item["at"]
        )
        for index, item in enumerate(load["requests"])
    ]
    np.random.seed(load["seed"])
    tasks: dict[int, asyncio.Task[Any]] = {}
    timeout, connector = aiohttp.ClientTimeout(total=LONGEST_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        started = time.perf_counter()
        rate = load["rate"]
        async for sample, _ in get_request(samples, rate or 0.0, load["burstiness"], self_timed=rate is None):
            index = int(sample.request_id or 0)
            item = load["requests"][index]
            asked = RequestFuncInput(
                prompt=item["prompt"],
                api_url=load["url"],
                prompt_len=len(item["prompt"]),
                output_len=item["output_len"],
                model=item["model"],
                ignore_eos=True,
                extra_body={"temperature": 0.0},
            )
            tasks[index] = asyncio.create_task(async_request_openai_completions(asked, session))
        outputs = await asyncio.gather(*(tasks[index] for index in range(len(samples))))
    return [
        {
            "sent_s": output.start_time - started,
            "ttft_s": output.ttft,
            "itl_s": list(output.itl),
            "latency_s": output.latency,
            "output_tokens": output.output_tokens,
            "error": None if output.success else (output.error.strip().splitlines() or ["no reason given"])[-1],
        }
        for output in outputs
    ]


def main() -> None:
    """Answers loads until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever vLLM prints is no answer
    for line in sys.stdin:
        found = asyncio.run(send_load(json.loads(line)))
        print(json.dumps({"requests": found}), file=answers, flush=True)


if __name__ == "__main__":
    main()

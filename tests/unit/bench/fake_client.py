"""Stands in for the load client: answers each load with times made up from its rate.

fake_client.py CAPACITY [die=N] [fail=RATE] [stop=N]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

capacity, actions = float(sys.argv[1]), dict(part.split("=") for part in sys.argv[2:])
for number, line in enumerate(sys.stdin):
    load = json.loads(line)
    if actions.get("die") == str(number):
        print("out of luck", file=sys.stderr)
        sys.exit(1)
    if actions.get("stop") == str(number):
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    rate = load["rate"]
    print(f"{len(load['requests'])} requests at {rate}", file=sys.stderr, flush=True)
    busy = 1.0 if rate is None or rate > 1e4 else 1.0 / max(0.01, 1 - rate / capacity)
    answers = []
    for index, item in enumerate(load["requests"]):
        slow = 2.0 if item["model"] == "direftp-1" else 1.0
        failed = actions.get("fail") == str(rate) and index == 0
        answers.append(
            {
                "sent_s": item["at"] if rate is None else index / rate,
                "ttft_s": 0.1 * busy * slow,
                "itl_s": [0.02] * (item["output_len"] - 1),
                "latency_s": 0.1 * busy * slow + 0.02 * (item["output_len"] - 1),
                "output_tokens": item["output_len"],
                "error": "refused" if failed else None,
            }
        )
    print(json.dumps({"requests": answers}), flush=True)

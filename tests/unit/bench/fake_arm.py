"""Stands in for an arm's process: reads the job, notes that it ran, answers with figures made up from it.

fake_arm.py FOLDER [fail=LABEL] [hang=LABEL] [crash=LABEL] [short=LABEL] [slow=LABEL]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

SPEEDS = {"base": 100.0, "base-compiled": 125.0, "stock-lora": 50.0, "lora": 60.0, "lorap": 90.0, "direftp": 95.0}


def figures(speed: float, state: str) -> dict[str, object]:
    ends = {"min": 1.0, "median": 2.0, "max": 3.0}
    shares = {"p50": 0.01, "p95": 0.02, "p99": 0.03}
    return {
        "state": state,
        "seconds": 1.0,
        "output_tokens": int(speed),
        "output_tokens_per_s": speed,
        "requests_per_s": 1.0,
        "prefill_s": 0.25,
        "decode_s": 0.75,
        "decode_tokens_per_s": speed,
        "ttft_s": shares,
        "tpot_s": shares,
        "itl_s": shares,
        "fairness": {"adapters": 2, "ttft_s": ends, "request_tokens_per_s": ends, "jain_index": 0.9},
        "other_busy_cores": 0.0,
        "adapter_kernels": {"share": 0.1, "prefill_share": 0.2, "decode_share": 0.0},
        "energy": {"joules": 10.0, "joules_per_output_token": 0.5, "reason": None},
    }


def main() -> None:
    folder, actions = Path(sys.argv[1]), dict(part.split("=") for part in sys.argv[2:])
    job = json.load(sys.stdin)
    label = job["label"]
    with (folder / "ran.jsonl").open("a") as file:
        file.write(json.dumps({**job, "pid": os.getpid()}) + "\n")
    print("not a row", flush=True)
    print(json.dumps({"engine": {"eager": True}}), flush=True)
    print(f"the log of {label}", file=sys.stderr, flush=True)
    if actions.get("fail") == label:
        print(json.dumps({"error": {"type": "EngineError", "message": "no such luck"}}), flush=True)
        sys.exit(1)
    if actions.get("hang") == label:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    speed = SPEEDS[job["arm"]] * (1 + 0.01 * job["repeat"]) * (1 - 0.0001 * job["adapters"])
    for run in range(1 + job["warm_runs"]):
        if actions.get("crash") == label and run == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if actions.get("slow") == label and run == 1:
            time.sleep(60)
        if actions.get("short") == label and run == 1:
            break
        print(json.dumps({"run": figures(speed if run else speed / 2, "warm" if run else "cold")}), flush=True)
    print(json.dumps({"end": {"peak_rss_bytes": 123_000_000, "peak_gpu_bytes": None}}), flush=True)


if __name__ == "__main__":
    main()

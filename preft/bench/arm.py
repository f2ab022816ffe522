"""One arm in a process of its own: `python -m preft.bench.arm`, a job on standard input, JSON lines on standard output.

The first run is cold: the engine has never seen an adapter. The others are warm. A line is written as soon as its run
has ended, so that what was measured survives whatever comes next. Lines are `{"engine": ...}`, `{"run": ...}`,
`{"end": ...}`, or `{"error": ...}`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from preft.bench.energy import EnergyMeter
from preft.bench.facts import UNADAPTED
from preft.bench.job import ArmJob
from preft.bench.measure import Neighbours, Stepper, drive, metrics, peak_rss_bytes
from preft.bench.workload import Popularity, make_prompts, run_seed
from preft.errors import PreftError
from preft.provenance import versions


def run_job(job: ArmJob, engine: Stepper) -> Iterator[dict[str, Any]]:
    """The runs of a job on an engine that is ready: one cold, the others warm."""
    popularity, meter = Popularity.parse(job.popularity), EnergyMeter.open()
    for run in range(1 + job.warm_runs):
        seed = run_seed(job.seed, job.repeat, run)
        prompts = make_prompts(job.requests, job.input_len, job.vocab_size, seed=seed)
        choices = popularity.choose(job.requests, job.adapters, seed=seed)
        neighbours, before = Neighbours(), meter.joules()
        neighbours.start()
        adapted = job.arm not in UNADAPTED
        traces, steps = drive(engine, prompts, choices, with_adapters=adapted, output_len=job.output_len)
        beside = {
            "other_busy_cores": neighbours.busy_cores(),
            "energy": meter.facts(before, job.requests * job.output_len),
        }
        yield {"run": {"state": "warm" if run else "cold", **metrics(traces, steps), **beside}}


def memory_facts() -> dict[str, Any]:
    """Peak memory of this process, on the host and on a GPU where there is one."""
    torch = sys.modules.get("torch")
    gpu = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "peak_rss_bytes": peak_rss_bytes(),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if gpu and torch is not None else None,
    }


def work(job: ArmJob, write: Callable[[dict[str, Any]], None]) -> None:
    """Opens the arm's engine and measures it."""
    from preft.bench.engines import open_arm

    engine = open_arm(job)
    write({"engine": {**engine.facts(), "versions": versions()}})
    for line in run_job(job, engine):
        write(line)
    write({"end": memory_facts()})


def main() -> int:
    """Reads the job, measures, and returns the exit status."""
    # Compiled libraries print to descriptor 1 as they please; the lines go to a copy of it that only we know.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def write(document: dict[str, Any]) -> None:
        print(json.dumps(document), file=lines, flush=True)

    try:
        work(ArmJob.from_dict(json.load(sys.stdin)), write)
    except PreftError as error:
        write({"error": error.to_dict()})
        return error.exit_code
    except Exception as error:
        import traceback

        traceback.print_exc()
        write({"error": {"type": type(error).__name__, "message": f"{error}".strip() or type(error).__name__}})
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # An engine's threads may outlive it and hold the interpreter's end.
    os._exit(status)

"""Is the all-token baseline a fair one: how near does it come to what bytes and arithmetic allow on this machine?

    python benchmarks/lora_floor.py out/sweep             # beside the floor; a minute
    python benchmarks/lora_floor.py out/sweep --profile   # and where a step's time goes; two minutes more

Reads a result with the arms `base` and `lora`, and measures memory bandwidth here, so run it on the machine of the
result while nothing else runs. Exit status 1 if a point is below --least of its floor.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from preft.bench.facts import read_facts
from preft.bench.floor import floors
from preft.bench.rows import read_rows
from preft.models.locate import locate_model
from preft.serve.settings import bind_all_cores

LEAST = 0.7
PROFILED_TOKENS = 12


def profile(result: Path, setup: dict[str, Any], adapters: int) -> str:
    """The operators of a few all-token decode steps, by their own time."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    from preft.bench.adapters import make_adapters
    from preft.bench.engines import open_arm
    from preft.bench.runner import make_job
    from preft.bench.spec import BenchSpec, Point
    from preft.bench.workload import make_prompts

    folder = locate_model(setup["model"])
    rank = int(setup["ranks"][0])
    kept = {key: setup[key] for key in ("slots", "direft_rank", "input_len", "dtype", "seed", "mode", "targets")}
    spec = BenchSpec(
        setup["model"],
        result / "profile",
        arms=("lora",),
        adapters=(adapters,),
        ranks=((rank,),),
        output_len=PROFILED_TOKENS,
        adapter_dir=Path(setup["adapter_dir"]),
        **kept,
    )
    facts = read_facts(folder, setup["dtype"], setup["targets"])
    job = make_job(spec, folder, facts, "lora", 0, Point(adapters, (rank,)), make_adapters(spec, folder))
    engine = open_arm(job)
    for index, prompt in enumerate(make_prompts(job.requests, job.input_len, job.vocab_size, seed=1)):
        engine.submit(prompt, index % adapters, job.output_len)
    started: set[str] = set()
    while len(started) < job.requests:
        started |= {item.id for item in engine.step()}
    with profiler(activities=[ProfilerActivity.CPU]) as found:
        while engine.has_unfinished():
            engine.step()
    return str(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=15))


def main() -> None:
    """Compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="folder of `preft bench throughput` or of benchmarks/sweep.py")
    parser.add_argument("--least", type=float, default=LEAST, help="share of the floor to reach")
    parser.add_argument("--profile", type=int, nargs="?", const=64, metavar="ADAPTERS", help="profile decode steps")
    options = parser.parse_args()
    bind_all_cores()
    rows = read_rows(options.result)
    setup = rows[0]["setup"]
    facts = read_facts(locate_model(setup["model"]), setup["dtype"], setup["targets"])
    found = floors(rows, facts)
    for item in found:
        print(json.dumps(item.to_dict()))
    for item in found:
        verdict = "ok" if item.share_of_floor >= options.least else f"BELOW {options.least:g}"
        kernels = "not measured" if item.kernel_share_of_floor is None else f"{item.kernel_share_of_floor:.2f}"
        print(
            f"{item.adapters} adapters of rank {item.lora_rank}: {item.share_of_floor:.2f} of the floor ({verdict}); "
            f"{item.measured_s:.1f} s against {item.floor_s:.1f}; its kernels alone: {kernels} of theirs; "
            f"{item.bandwidth / 1e9:.1f} GB/s, {item.flops / 1e9:.0f} GFLOP/s"
        )
    if options.profile:
        print(profile(options.result, setup, options.profile))
    raise SystemExit(any(item.share_of_floor < options.least for item in found))


if __name__ == "__main__":
    main()

"""Measures preft's kernels on one GPU in about three minutes and says which promises hold.

    python benchmarks/gpu_check.py --out gpu-check.json

Needs PyTorch 2.11 or newer with its Triton (3.6 or newer) and one GPU; neither vLLM nor a model. Prints a table of
every measurement beside its floor, then the gates with pass or fail; writes all of it as JSON; exits 1 if one fails.
What is measured and why: docs/concepts/kernels.md.

    TRITON_INTERPRET=1 python benchmarks/gpu_check.py --dry-run --out dry.json

walks the same path on a CPU with tiny sizes. Its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from preft_kernels.block_delta import block_delta_
from preft_kernels.lora_rows import SPLIT, lora_rows_
from preft_kernels.reference import lora_rows_reference
from preft_kernels.rows import Segment
from preft_kernels.segments import EMPTY_PLAN, PlanBuffer, RowPlan, plan_rows
from preft_kernels.tables import BlockTables
from preft_kernels.tolerances import error_bound
from preft_kernels.tuning import BlockDeltaConfig, block_delta_config, candidates

FLOOR_RATIO, SMALL_US, ADAPTER_RATIO = 1.5, 25.0, 1.35
"""Gates: of the floor at many rows, at few rows in microseconds, and of 64 adapters against one."""


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        widths: Of the stream.
        ranks: Of the tables.
        rows: Of a large batch.
        few_rows: Of a small one.
        adapters: Counts for the block update.
        decode: Rows of a decode step, each under an adapter of its own.
        linear: For the all-token baseline: input width and slices of a layer's linear modules.
        copy_bytes: For the bandwidth.
        grids: Numbers of programs that leave at once.
        gate_width: Width that the gates are about.
        gate_adapters: Count that the third gate compares with one.
    """

    widths: tuple[int, ...] = (896, 4096, 8192)
    ranks: tuple[int, ...] = (16, 64)
    rows: int = 8192
    few_rows: int = 256
    adapters: tuple[int, ...] = (1, 16, 64, 512)
    decode: tuple[int, ...] = (64, 128, 256, 512)
    linear: tuple[tuple[int, tuple[int, ...]], ...] = (
        (4096, (4096, 1024, 1024)),
        (4096, (4096,)),
        (4096, (14336, 14336)),
        (14336, (4096,)),
    )
    copy_bytes: int = 1 << 30
    grids: tuple[int, ...] = (65, 65_000, 650_000, 6_500_000)
    gate_width: int = 4096
    gate_adapters: int = 64


TINY = Sizes((64,), (4,), 70, 20, (1, 3), (4,), ((48, (32, 16)),), 1 << 16, (3, 30), 64, 3)


class Gpu:
    """Runs and times work on the GPU: captured in a graph, so that launching from Python is not what is measured."""

    name = "cuda"
    dtype = torch.bfloat16
    repeats, inner = 12, 10

    def capture(self, work: Callable[[], object], inner: int = 1) -> Callable[[], None]:
        """A function that replays `inner` runs of `work`, recorded once."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(inner):
                work()
        return graph.replay

    def microseconds(self, work: Callable[[], object]) -> float:
        """Median time of one run of `work`."""
        replay = self.capture(work, self.inner)
        replay()
        times = []
        for _ in range(self.repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1000 / self.inner)
        return statistics.median(times)

    def describe(self) -> dict[str, Any]:
        """The machine."""
        properties = torch.cuda.get_device_properties(0)
        return {"gpu": properties.name, "multiprocessors": properties.multi_processor_count}


class Dry(Gpu):
    """The same calls in Triton's interpreter."""

    name = "cpu"
    # The interpreter's products of bfloat16 are wrong.
    dtype = torch.float16

    def capture(self, work: Callable[[], object], inner: int = 1) -> Callable[[], None]:
        """Runs `work` as it is."""
        return lambda: [work() for _ in range(inner)] and None

    def microseconds(self, work: Callable[[], object]) -> float:
        """One run."""
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e6

    def describe(self) -> dict[str, Any]:
        """Not a GPU."""
        return {"gpu": None, "note": "dry run in Triton's interpreter; times mean nothing"}


@dataclass
class Report:
    """What was found.

    Attributes:
        machine: Where.
        bandwidth: Bytes a second of a copy, read and written.
        rows: Measurements.
        gates: (name, measured, limit, passed).
        cut: Measurements left out for time.
    """

    machine: dict[str, Any]
    bandwidth: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    gates: list[dict[str, Any]] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)

    def add(self, what: str, us: float, floor_bytes: float | None = None, **facts: Any) -> dict[str, Any]:
        """Notes one timing and prints it beside its floor."""
        row: dict[str, Any] = {"what": what, "us": us, **facts}
        text = " ".join(f"{key} {value}" for key, value in facts.items())
        if floor_bytes is not None:
            row["floor_us"] = floor_bytes / self.bandwidth * 1e6
            row["ratio"] = us / row["floor_us"]
            text += f" | floor {row['floor_us']:.1f} us, x{row['ratio']:.2f}"
        self.rows.append(row)
        print(f"{what:<26} {us:>10.1f} us  {text}", flush=True)
        return row

    def gate(self, name: str, measured: float | bool, limit: float | None = None) -> None:
        """Notes a gate: at most `limit`, or true."""
        passed = bool(measured <= limit) if limit is not None else bool(measured)
        self.gates.append({"gate": name, "measured": measured, "limit": limit, "passed": passed})


@triton.jit
def leave_kernel(ids_ptr, out_ptr):
    """What an idle program of vLLM's grid does: looks up its adapter and leaves."""
    if tl.load(ids_ptr + tl.program_id(1)) == -1:
        return
    tl.store(out_ptr, 1)


# Batches


def shares(num_rows: int, num_adapters: int) -> list[Segment]:
    """All rows, shared out to adapters in pieces of random length."""
    rng = np.random.default_rng(num_adapters)
    inner = np.arange(1, num_rows)
    cuts = np.sort(rng.choice(inner, min(num_adapters, num_rows) - 1, replace=False))
    edges = [0, *cuts.tolist(), num_rows]
    return [Segment(start, stop - start, slot) for slot, (start, stop) in enumerate(pairwise(edges))]


def make_tables(slots: int, rank: int, width: int, device: Gpu) -> BlockTables:
    """Filled tables; small numbers, since timings add the update to the same stream over and over."""
    tables = BlockTables.allocate(slots, rank, width, device.dtype, device.name)
    for table in (tables.down, tables.up):
        table.normal_(std=0.3 / width**0.5)
    tables.bias.normal_(std=0.01)
    tables.ranks.fill_(rank)
    return tables


def buffer_of(plan: RowPlan, rows: int, slots: int, device: Gpu) -> PlanBuffer:
    """A plan on the device."""
    buffer = PlanBuffer(rows, slots, device.name)
    buffer.upload(plan)
    return buffer


def block_bytes(rows: int, width: int, rank: int, adapters: int, element: int = 2) -> float:
    """What must move: hidden and residual read, hidden written, each adapter's numbers read once."""
    return element * (3 * rows * width + 2 * min(adapters, rows) * rank * width)


# Measurements


def measure_machine(device: Gpu, sizes: Sizes, report: Report) -> None:
    """Bandwidth of a copy, and what programs that leave at once cost."""
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device.name)
    target = torch.empty_like(source)
    us = device.microseconds(lambda: target.copy_(source))
    report.bandwidth = 2 * sizes.copy_bytes / us * 1e6
    report.add("copy", us, gb_per_s=round(report.bandwidth / 1e9))
    groups = 1 if sizes is TINY else 65
    ids = torch.full((groups,), -1, dtype=torch.int32, device=device.name)
    out = torch.zeros(1, dtype=torch.int32, device=device.name)
    for grid in sizes.grids:
        us = device.microseconds(partial(leave_kernel[(grid // groups, groups)], ids, out))
        report.add("programs that leave", us, programs=grid, per_ns=round(grid / us / 1000, 3))


def check_block_delta(device: Gpu, sizes: Sizes, report: Report) -> None:
    """Against float64, five times with the same bits, and base rows as they were."""
    right = True
    for width in sizes.widths:
        for rank in sizes.ranks:
            rows, slots = min(sizes.rows, 1500), 7
            kept = [piece for piece in shares(rows, slots + 2) if piece.slot < slots]
            plan = plan_rows(kept)
            tables = make_tables(slots, rank, width, device)
            hidden = torch.randn(rows, width, device=device.name).to(device.dtype)
            residual = (3 * torch.randn(rows, width, device=device.name)).to(device.dtype)
            wanted, update = exact(hidden, residual, tables, plan)
            for config in {block_delta_config(width, rank, count) for count in (rows, 1 << 20)}:
                ratio, same = compare(hidden, residual, tables, plan, wanted, update, config, device)
                right = right and same and ratio <= 1
                print(f"block_delta width {width} rank {rank} {config}: error {ratio:.2f} of its bound, exact {same}")
    report.gate("block_delta is right, repeats to the bit and leaves base rows alone", right)


def exact(
    hidden: torch.Tensor, residual: torch.Tensor, tables: BlockTables, plan: RowPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs, updates) in float64."""
    slots = torch.from_numpy(plan.slot_of_row(len(hidden))).to(hidden.device)
    stream = hidden.double() + residual.double()
    update = torch.zeros_like(stream)
    for slot in range(tables.num_slots):
        rows = slots == slot
        inner = stream[rows] @ tables.down[slot].double().T + tables.bias[slot].double()
        update[rows] = inner @ tables.up[slot].double()
    return hidden.double() + update, update


def compare(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    tables: BlockTables,
    plan: RowPlan,
    wanted: torch.Tensor,
    update: torch.Tensor,
    config: BlockDeltaConfig,
    device: Gpu,
) -> tuple[float, bool]:
    """(error as a share of its bound, whether repeats and base rows are exact)."""
    buffer = buffer_of(plan, len(hidden), tables.num_slots, device)
    runs = []
    for _ in range(5):
        found = hidden.clone()
        block_delta_(found, residual, tables, buffer, config, num_programs=programs(device, config))
        runs.append(found)
    planned = torch.from_numpy(plan.slot_of_row(len(hidden)) >= 0).to(hidden.device)
    bound = error_bound(update[planned], wanted[planned], hidden.dtype)
    error = float((runs[0].double() - wanted)[planned].norm()) / bound
    same = all(torch.equal(runs[0], run) for run in runs[1:])
    return error, same and torch.equal(runs[0][~planned], hidden[~planned])


def programs(device: Gpu, config: BlockDeltaConfig) -> int | None:
    """The grid: tuned on a GPU, small in the interpreter."""
    return 3 if isinstance(device, Dry) else None


def measure_block_delta(device: Gpu, sizes: Sizes, report: Report, is_over: Callable[[], bool]) -> None:
    """The tuned shape and all candidates against the floor; gates of the tuned one."""
    tuned: dict[tuple[int, int, int, int], float] = {}
    order = sorted(sizes.widths, key=lambda width: width != sizes.gate_width)
    for width in order:
        for rank in sizes.ranks:
            for rows in (sizes.rows, sizes.few_rows):
                for adapters in sizes.adapters:
                    if is_over():
                        report.cut.append(f"block_delta width {width} rank {rank} rows {rows} adapters {adapters}")
                        continue
                    row = time_block_delta(device, report, width, rank, rows, adapters)
                    tuned[width, rank, rows, adapters] = row["us"]
    width, rank, most = sizes.gate_width, sizes.ranks[0], sizes.gate_adapters
    floor = block_bytes(sizes.rows, width, rank, 1) / report.bandwidth * 1e6
    one, many = tuned[width, rank, sizes.rows, 1], tuned[width, rank, sizes.rows, most]
    report.gate(f"block_delta at {sizes.rows} rows, of its floor", one / floor, FLOOR_RATIO)
    report.gate(f"block_delta at {sizes.few_rows} rows, in us", tuned[width, rank, sizes.few_rows, 1], SMALL_US)
    report.gate(f"block_delta with {most} adapters, of one", many / one, ADAPTER_RATIO)


def time_block_delta(device: Gpu, report: Report, width: int, rank: int, rows: int, adapters: int) -> dict[str, Any]:
    """Times one size; four streams in turn, since the second pass over one would find it in the cache."""
    streams = [[torch.zeros(rows, width, dtype=device.dtype, device=device.name) for _ in range(2)] for _ in range(4)]
    tables = make_tables(adapters, rank, width, device)
    buffer = buffer_of(plan_rows(shares(rows, adapters)), rows, adapters, device)

    def run(config: BlockDeltaConfig) -> float:
        def work() -> None:
            for hidden, residual in streams:
                block_delta_(hidden, residual, tables, buffer, config, programs(device, config))

        return device.microseconds(work) / len(streams)

    tuned = block_delta_config(width, rank, rows)
    others = [] if isinstance(device, Dry) else [shape for shape in candidates(width, rank) if shape != tuned]
    times = {shape: run(shape) for shape in (tuned, *others)}
    best = min(times, key=lambda shape: times[shape])
    facts = {"width": width, "rank": rank, "rows": rows, "adapters": adapters}
    best_shape = f"{best.rows}x{best.columns_in}, {best.programs_per_sm} a multiprocessor, {times[best]:.1f} us"
    return report.add("block_delta", times[tuned], block_bytes(rows, width, rank, adapters), **facts, best=best_shape)


def measure_eager_loop(device: Gpu, sizes: Sizes, report: Report) -> None:
    """What one writes first: each adapter over the whole batch, masked."""
    width, rank, rows = sizes.gate_width, sizes.ranks[0], sizes.rows
    for adapters in (count for count in sizes.adapters if count <= 64):
        tables = make_tables(adapters, rank, width, device)
        slots = torch.from_numpy(plan_rows(shares(rows, adapters)).slot_of_row(rows)).to(device.name)
        hidden, residual = (torch.zeros(rows, width, dtype=device.dtype, device=device.name) for _ in range(2))
        us = device.microseconds(partial(eager_loop, hidden, residual, tables, slots))
        report.add("eager loop", us, width=width, rank=rank, rows=rows, adapters=adapters)


def eager_loop(hidden: torch.Tensor, residual: torch.Tensor, tables: BlockTables, slots: torch.Tensor) -> None:
    """The update, adapter by adapter; `slots` is [T]."""
    stream = hidden + residual
    for slot in range(tables.num_slots):
        inner = torch.addmm(tables.bias[slot], stream, tables.down[slot].T)
        hidden.add_(torch.where((slots == slot)[:, None], inner @ tables.up[slot], 0))


def measure_lora_grids(device: Gpu, sizes: Sizes, report: Report) -> None:
    """What vLLM's grid costs beside one that fits, by programs that leave at once. Rank 16, all linear modules.

    From vLLM 0.32: shrink (split 8, 32 rows, 16 ranks), expand (64 rows, 64 or 128 columns), each by slices and slots.
    """
    rows, active = sizes.rows, 16
    ids = torch.full((1,), -1, dtype=torch.int32, device=device.name)
    out = torch.zeros(1, dtype=torch.int32, device=device.name)
    for slots in (8, 64, 512):
        for name, rows_of_group, groups in (("vLLM", rows, slots + 1), ("tight", max(128, rows // active), active + 1)):
            count = 0
            for _, slices in sizes.linear:
                block = 64 if len(slices) > 1 else 128
                down = 8 * -(-rows_of_group // 32)
                up = -(-rows_of_group // 64) * -(-max(slices) // block)
                count += (down + up) * len(slices) * min(groups, slots + 1)
            grid = min(count, 50) if isinstance(device, Dry) else count
            us = device.microseconds(partial(leave_kernel[(grid, 1)], ids, out))
            report.add("LoRA grid of a layer", us, grid=name, slots=slots, programs=count)


def measure_decode(device: Gpu, sizes: Sizes, report: Report, is_over: Callable[[], bool]) -> None:
    """All-token LoRA in decode: one row an adapter. What prompt-only adapters never pay."""
    right = True
    for rank in (8, 16) if sizes is not TINY else (4,):
        for count in sizes.decode:
            if is_over():
                report.cut.append(f"all-token rows {count} rank {rank}")
                continue
            calls, moved = [], 0.0
            for width, wide in sizes.linear:
                downs = [torch.randn(count, rank, width, device=device.name).to(device.dtype) * 0.01 for _ in wide]
                ups = [torch.randn(count, n, rank, device=device.name).to(device.dtype) * 0.01 for n in wide]
                x = torch.randn(count, width, device=device.name).to(device.dtype)
                y = torch.zeros(count, sum(wide), dtype=device.dtype, device=device.name)
                ids = torch.arange(count, dtype=torch.int32, device=device.name)
                scales = torch.ones(count, device=device.name)
                scratch = torch.empty(count, SPLIT, len(wide), rank, device=device.name)
                calls.append((y, x, downs, ups, scales, ids, ids, scratch))
                moved += x.nbytes + 2 * y.nbytes + sum(t.nbytes for t in (*downs, *ups))
            right = right and rows_are_right(calls[0])
            us = device.microseconds(lambda calls=calls: [lora_rows_(*call) for call in calls])
            report.add("all-token rows of a layer", us, moved, rank=rank, adapters=count)
    report.gate("all-token rows are right", right)


def rows_are_right(call: Sequence[Any]) -> bool:
    """One module against the specification."""
    y, x, downs, ups, scales, ids, _, scratch = call
    found, wanted = y.clone(), torch.zeros_like(y, dtype=torch.float32)
    lora_rows_(found, x, downs, ups, scales, ids, ids, scratch)
    plan = plan_rows([Segment(row, 1, row) for row in range(len(ids))])
    lora_rows_reference(wanted, x, downs, ups, scales, plan)
    bound = error_bound(wanted.double(), wanted.double(), y.dtype)
    return float((found.double() - wanted.double()).norm()) <= bound


def check_replay(device: Gpu, sizes: Sizes, report: Report) -> None:
    """One graph, replayed over plans that change: none, one row, some, all, none again."""
    width, rank, rows, slots = sizes.gate_width, sizes.ranks[0], min(sizes.rows, 2048), 5
    tables = make_tables(slots, rank, width, device)
    hidden, residual = (torch.randn(rows, width, device=device.name).to(device.dtype) for _ in range(2))
    kept = hidden.clone()
    buffer = PlanBuffer(rows, slots, device.name)
    config = block_delta_config(width, rank, rows)
    replay = device.capture(lambda: block_delta_(hidden, residual, tables, buffer, config, programs(device, config)))
    right = True
    some = [Segment(3, 5, 4), Segment(rows // 2, rows // 4, 1)]
    for segments in ([], [Segment(rows - 1, 1, 2)], some, shares(rows, slots), []):
        plan = plan_rows(segments) if segments else EMPTY_PLAN
        hidden.copy_(kept)
        buffer.upload(plan)
        replay()
        wanted, update = exact(kept, residual, tables, plan)
        planned = torch.from_numpy(plan.slot_of_row(rows) >= 0).to(device.name)
        right = right and torch.equal(hidden[~planned], kept[~planned])
        if segments:
            bound = error_bound(update[planned], wanted[planned], hidden.dtype)
            right = right and float((hidden.double() - wanted)[planned].norm()) <= bound
    report.gate("one graph replays over any number of rows", right)


def run(device: Gpu, sizes: Sizes, budget_s: float) -> Report:
    """All measurements, the gated ones first; others are left out once the time is over."""
    start = time.monotonic()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    report = Report({**device.describe(), **versions})
    print(json.dumps(report.machine))

    def is_over() -> bool:
        return time.monotonic() - start > budget_s

    measure_machine(device, sizes, report)
    check_block_delta(device, sizes, report)
    check_replay(device, sizes, report)
    measure_block_delta(device, sizes, report, is_over)
    measure_eager_loop(device, sizes, report)
    measure_lora_grids(device, sizes, report)
    measure_decode(device, sizes, report, is_over)
    report.machine["seconds"] = round(time.monotonic() - start, 1)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, prints, writes; 1 if a gate fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="JSON file to write")
    parser.add_argument("--budget-s", type=float, default=200.0, help="leave the rest out after this many seconds")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU; needs TRITON_INTERPRET=1")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no GPU that PyTorch can use; `--dry-run` needs none")
    report = run(Dry(), TINY, 1e9) if options.dry_run else run(Gpu(), Sizes(), options.budget_s)
    print()
    for gate in report.gates:
        limit = "" if gate["limit"] is None else f" (at most {gate['limit']})"
        measured = gate["measured"] if isinstance(gate["measured"], bool) else f"{gate['measured']:.2f}"
        print(f"{'pass' if gate['passed'] else 'FAIL'}  {gate['gate']}: {measured}{limit}")
    if report.cut:
        print(f"{len(report.cut)} measurements left out after {options.budget_s:.0f} s")
    options.out.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    # In a dry run only what is right or wrong counts, not what is fast.
    decisive = [gate for gate in report.gates if gate["limit"] is None or not options.dry_run]
    return 0 if all(gate["passed"] for gate in decisive) else 1


if __name__ == "__main__":
    sys.exit(main())

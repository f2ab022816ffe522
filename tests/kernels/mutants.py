"""Breaks the kernel and the plan on purpose and runs the small batches on each: every mutant must be found out.

    TRITON_INTERPRET=1 python -m tests.kernels.mutants

prints one JSON object: mutant to `killed`, `refused` (by the plan's own checks), `crashed`, `invalid` or `survived`.
Each mutant runs in a process of its own, forked after the imports: a wrong address ends the interpreter without a word.

One mutant cannot be found here and is not in the list: storing the repeated rows of a ragged tile too. The interpreter
runs one operation after the other, so they store what is already there; a GPU may store them in any order. The plan
keeps rows unique, and `benchmarks/gpu_check.py` repeats launches and compares bits.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType

MUTANTS = {
    "block_delta": {
        "bias dropped": ("inner += bias.to(tl.float32)[None, :]", "inner += 0.0 * tl.sum(bias.to(tl.float32) * 0)"),
        "bias of slot 0": ("bias_ptr + slot * RANK + rank_at", "bias_ptr + rank_at"),
        "residual dropped": ("        if HAS_RESIDUAL:", "        if False:"),
        "down of slot 0": ("down_ptr + slot * (RANK * WIDTH)", "down_ptr"),
        "up of slot 0": ("up_ptr + slot * (RANK * WIDTH)", "up_ptr"),
        "ranks beyond the slot's": ("rank_ok = rank_at < rank", "rank_ok = rank_at < RANK"),
        "one rank short": ("rank_ok = rank_at < rank", "rank_ok = rank_at < rank - 1"),
        "one row short": ("row_ok = row_at < length", "row_ok = row_at < length - 1"),
        "one row long": (
            "row = tl.load(rows_ptr + first + tl.minimum(row_at, length - 1)).to(tl.int64)",
            "row_ok = row_at < length + 1\n            row = tl.load(rows_ptr + first + row_at).to(tl.int64)",
        ),
        "second part starts at the first": ("tiles_ptr + tile * 3 + 1) + part * ROWS", "tiles_ptr + tile * 3 + 1)"),
        "second part as long as the tile": ("tiles_ptr + tile * 3 + 2) - part * ROWS", "tiles_ptr + tile * 3 + 2)"),
        "second parts never": ("num_tiles * PARTS, tl.num_programs(0)", "num_tiles, tl.num_programs(0)"),
        "tiles skipped": ("tl.num_programs(0)):", "tl.num_programs(0) + 1):"),
        "last columns of the input left out": (
            "tl.range(0, WIDTH, COLUMNS_IN",
            "tl.range(0, WIDTH - 1, COLUMNS_IN * 2",
        ),
        "last columns of the output left out": (
            "tl.range(0, WIDTH, COLUMNS_OUT",
            "tl.range(0, WIDTH - COLUMNS_OUT, COLUMNS_OUT",
        ),
        "columns beyond the width": ("column_ok = column < WIDTH", "column_ok = column < WIDTH + 1"),
        "base dropped": ("total = base.to(tl.float32) + tl.dot", "total = 0.0 * base.to(tl.float32) + tl.dot"),
        "wrong stride": ("row[:, None] * hidden_stride", "row[:, None] * WIDTH"),
        "row taken for its place": (
            "row = tl.load(rows_ptr + first + tl.minimum(row_at, length - 1)).to(tl.int64)",
            "row = (first + tl.minimum(row_at, length - 1)).to(tl.int64)",
        ),
        "inner product not rounded, nor cleared": ("inner = tl.zeros", "inner = 1.0 + tl.zeros"),
    },
    "segments": {
        "tiles overlap": ("place * tile_rows, slot_rows", "place * (tile_rows - 1), slot_rows"),
        "slots by order of rows": ("slots[heads][owner]", "np.arange(len(heads))[owner]"),
        "rows shifted": ("np.arange(lengths.sum())", "np.arange(1, lengths.sum() + 1)"),
        "count not written": ("host[0], host[1] = plan.num_tiles, plan.num_rows", "host[1] = plan.num_rows"),
        "rows cut off": ("used = self._rows_at + plan.num_rows", "used = self._rows_at"),
        "tiles cut off": ("host[_HEADER : _HEADER + plan.tiles.size] = plan.tiles.reshape(-1)", "pass"),
    },
}
FATES = {0: "survived", 1: "killed", 2: "refused", 3: "invalid"}


def load(name: str, old: str | None, new: str) -> ModuleType:
    """A module of `preft_kernels`, changed in one place."""
    source = Path(importlib.util.find_spec(f"preft_kernels.{name}").origin).read_text(encoding="utf-8")  # type: ignore[union-attr,arg-type]
    if old is not None:
        if old not in source:
            raise KeyError(f"the mutant no longer applies: {old}")
        source = source.replace(old, new)
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"preft_kernels.{name}", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[f"preft_kernels.{name}"] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def fate(name: str, old: str | None, new: str) -> str:
    """What becomes of one mutant; `survived` if every batch passes."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os._exit(_passes(name, old, new))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return FATES.get(status, "crashed")


def _passes(name: str, old: str | None, new: str) -> int:
    from tests.kernels import cases

    try:
        module = load(name, old, new)
        if name == "segments":
            cases.plan_rows, cases.PlanBuffer = module.plan_rows, module.PlanBuffer
        from preft_kernels.block_delta import block_delta_
        from preft_kernels.tuning import BlockDeltaConfig

        config = BlockDeltaConfig(rows=16, columns_in=32, columns_out=32)
        for case in cases.SMALL:
            cases.check(partial(block_delta_, config=config, num_programs=3), case)
    except AssertionError:
        return 1
    except ValueError:
        return 2
    except Exception:
        return 3
    return 0


def main() -> None:
    """Prints the fate of every mutant, and of the unchanged code."""
    from tests.kernels.interpreter import repair

    repair()
    import preft_kernels.block_delta  # noqa: F401  before forking

    fates = {"unchanged": fate("block_delta", None, ""), "unchanged plan": fate("segments", None, "")}
    for name, mutants in MUTANTS.items():
        for title, (old, new) in mutants.items():
            fates[title] = fate(name, old, new)
    print(json.dumps(fates))


if __name__ == "__main__":
    main()

"""Compiles kernels for GPUs that are not here and reads the machine code, with the tools in Triton's own wheel.

`triton.compile` does not reject what a chip cannot run: shared memory beyond its limit, registers spilled to memory,
narrow accesses. So the code itself is read. Alignment must be stated by hand, as the just-in-time compiler finds it at
the first call; without it one would test code that nobody runs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that one program may have."""

_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]*)", re.M)


@dataclass(frozen=True)
class Code:
    """What was compiled.

    Attributes:
        target: One of `TARGETS`.
        shared: Bytes of shared memory.
        registers: Of a thread.
        stack: Bytes of a thread's stack.
        spills: Accesses to spilled registers.
        matrix: Matrix instructions.
        accesses: Global memory instructions and how often each occurs.
    """

    target: str
    shared: int
    registers: int
    stack: int
    spills: int
    matrix: int
    accesses: Mapping[str, int]

    def has_wide(self, kind: str) -> bool:
        """Whether any `load` or `store` moves 128 bits at once; 64 bits for stores of AMD's matrix units.

        Their results lie four adjacent values to a thread, and 64 threads store 512 adjacent bytes together.
        """
        if self.target.startswith("gfx"):
            widths = ("dwordx4",) if kind == "load" else ("dwordx4", "dwordx2")
            return any(f"{kind}_{width}" in name for name in self.accesses for width in widths)
        starts = ("LDG", "LDGSTS") if kind == "load" else ("STG",)
        return any(name.startswith(starts) and ".128" in name for name in self.accesses)

    def has_narrow_store(self) -> bool:
        """Whether any store moves 16 bits at once."""
        return any(("STG" in name and "U16" in name) or "store_short" in name for name in self.accesses)


def compile_for(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    target: str,
    *,
    aligned: Sequence[str],
    warps: int = 4,
    stages: int = 3,
) -> Code:
    """Compiles one kernel and reads its code.

    Args:
        kernel: A `triton.jit` function.
        types: Triton type of each run-time argument.
        constants: Compile-time arguments.
        target: One of `TARGETS`.
        aligned: Run-time arguments that are multiples of 16.
        warps: Of a program.
        stages: Of the load pipeline.
    """
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        constexprs=dict(constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=TARGETS[target], options={"num_warps": warps, "num_stages": stages})
    shared = compiled.metadata.shared
    if target.startswith("gfx"):
        return _read_amd(compiled.asm["amdgcn"], target, shared)
    return _read_nvidia(compiled.asm["cubin"], target, shared)


def _read_nvidia(cubin: bytes, target: str, shared: int) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    operations = Counter(_SASS.findall(sass))
    assert sum(operations.values()) > 50, "the disassembly was not understood"
    return Code(
        target,
        shared,
        int(found[1]),
        int(found[2]),
        sum(count for name, count in operations.items() if name.startswith(("STL", "LDL"))),
        sum(count for name, count in operations.items() if name.split(".")[0] in ("HMMA", "HGMMA", "UTCHMMA")),
        {name: count for name, count in operations.items() if name.startswith(("LDG", "STG", "RED", "ATOM"))},
    )


def _read_amd(assembly: str, target: str, shared: int) -> Code:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert found is not None, f"no {name} in the assembly"
        return int(found[1])

    accesses = Counter(re.findall(r"(?:global|buffer)_(?:load|store|atomic)_\w+", assembly))
    return Code(
        target,
        shared,
        number("vgpr_count"),
        number("private_segment_fixed_size"),
        # Scalar registers that spill go to vector registers, not to memory.
        number("vgpr_spill_count"),
        len(re.findall("v_mfma", assembly)),
        accesses,
    )


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout

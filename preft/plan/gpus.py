"""GPUs as a roofline sees them: memory, bandwidth and matrix arithmetic, from the vendors' data sheets."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from preft.errors import UsageError

DTYPES = ("bfloat16", "float16", "fp8", "float32")
WEIGHT_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1, "float32": 4}
STATE_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 2, "float32": 4}
"""Bytes of one number of KV cache, activations and adapters; under `fp8` only the weights are stored in one byte."""

_SPEC = re.compile(r"(?P<name>[a-z0-9][a-z0-9._-]*?)(?:x(?P<count>[0-9]{1,4}))?", re.ASCII)


@dataclass(frozen=True)
class Gpu:
    """One kind of accelerator.

    Attributes:
        name: What to call it.
        memory_bytes: Capacity.
        bandwidth: Peak of its memory in bytes/s.
        flops: Peak of dense 16-bit matrix arithmetic in FLOP/s.
        flops_fp8: The same in fp8, or None where it has none.
        flops_fp32: The same in float32, or None where it is not in the table.
        source: Where the numbers are from.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    flops_fp8: float | None = None
    flops_fp32: float | None = None
    source: str = "vendor's data sheet, dense (no sparsity)"

    def flops_for(self, dtype: str) -> float:
        """Peak arithmetic for a type of weights. Hardware without fp8 computes fp8 weights in 16 bits.

        Raises:
            UsageError: The table has no figure for it.
        """
        if dtype == "float32":
            if self.flops_fp32 is None:
                raise UsageError(
                    f"There is no float32 figure for `{self.name}`",
                    hint="give it with `--tflops`, or plan in bfloat16",
                )
            return self.flops_fp32
        if dtype == "fp8":
            return self.flops_fp8 or self.flops
        return self.flops


@dataclass(frozen=True)
class Machine:
    """GPUs that work on one copy of the model by tensor parallelism.

    Attributes:
        gpu: Which.
        count: How many.
    """

    gpu: Gpu
    count: int

    @property
    def label(self) -> str:
        """Such as `h100x4`."""
        return f"{self.gpu.name}x{self.count}"


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80e9, 2.039e12, 312e12),
        Gpu("h100", 80e9, 3.35e12, 989e12, 1979e12),
        Gpu("h200", 141e9, 4.8e12, 989e12, 1979e12),
        Gpu("b200", 180e9, 8.0e12, 2250e12, 4500e12),
        Gpu("mi300x", 192e9, 5.3e12, 1307e12, 2615e12),
    )
}
"""Known GPUs: A100 80 GB SXM, H100 SXM, H200 SXM, B200 (HGX), MI300X."""

_ALIASES = {"mi300": "mi300x"}


def parse_machine(
    text: str,
    *,
    bandwidth_gbs: float | None = None,
    tflops: float | None = None,
    memory_gb: float | None = None,
) -> Machine:
    """Reads `NAME` or `NAMExN`.

    Args:
        text: A known GPU, or any name if the three figures are given.
        bandwidth_gbs: Memory bandwidth in GB/s that replaces the table's.
        tflops: Dense matrix arithmetic in TFLOP/s that replaces the table's for every type.
        memory_gb: Memory in GB that replaces the table's.

    Raises:
        UsageError: The GPU is unknown, or a figure is not positive.
    """
    for flag, value in (("--bandwidth-gbs", bandwidth_gbs), ("--tflops", tflops), ("--memory-gb", memory_gb)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"`{flag}` is not valid", got=f"{value}", accepted="a number above 0")
    match = _SPEC.fullmatch(text.strip().casefold())
    if match is None:
        raise UsageError("`--gpu` cannot be understood", got=f"`{text}`", accepted="NAME or NAMExN, such as h100x4")
    name, count = match["name"], int(match["count"] or 1)
    name = _ALIASES.get(name, name)
    if count < 1:
        raise UsageError("`--gpu` names no GPU at all", got=f"`{text}`", accepted="at least x1")
    given = {
        "bandwidth": bandwidth_gbs and bandwidth_gbs * 1e9,
        "memory_bytes": memory_gb and memory_gb * 1e9,
        "flops": tflops and tflops * 1e12,
        "flops_fp8": tflops and tflops * 1e12,
        "flops_fp32": tflops and tflops * 1e12,
    }
    changes = {key: value for key, value in given.items() if value}
    if name in GPUS:
        source = "data sheet with the given figures in place" if changes else GPUS[name].source
        return Machine(replace(GPUS[name], **changes, source=source), count)  # type: ignore[arg-type]
    if bandwidth_gbs and tflops and memory_gb:
        return Machine(Gpu(name, **changes, source="given"), count)  # type: ignore[arg-type]
    near = difflib.get_close_matches(name, GPUS, n=1)
    raise UsageError(
        f"The GPU `{name}` is not known",
        accepted=", ".join(GPUS),
        hint=(f"did you mean `{near[0]}`? " if near else "")
        + "for another one give --bandwidth-gbs, --tflops and --memory-gb",
    )

"""What differs on GPUs in how an engine is set up."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from preft.errors import UsageError
from preft_kernels.tuning import MAX_RANK

LORA_RANKS = (1, 8, 16, 32, 64, 128)
"""Ranks that vLLM allocates its stacks for, up to the kernels' largest; a smaller adapter is padded."""

CODE_KEY = "preft_code"


def gpu_arguments(slots: int, max_rank: int) -> dict[str, Any]:
    """VLLM arguments that replace the CPU's.

    Args:
        slots: Adapters that one step may hold: device memory for each.
        max_rank: Largest rank accepted.

    Raises:
        UsageError: The kernels do not serve this rank.
    """
    rank = next((rank for rank in LORA_RANKS if rank >= max_rank), None)
    if rank is None:
        raise UsageError(
            "Adapters of this rank are not served on GPUs",
            got=str(max_rank),
            accepted=f"up to {MAX_RANK}",
            hint="set `--max-rank` to the largest rank in use: every slot takes device memory for it",
        )
    return {"max_loras": slots, "max_lora_rank": rank, "max_cpu_loras": slots, "enforce_eager": False}


def code_hash() -> str:
    """Digest of the code that compiled models have calls into.

    vLLM keys compiled code by its settings, `additional_config` among them, and not by worker classes. With this in
    it, code compiled without our operations, or for others, is never loaded.
    """
    import preft_kernels

    digest = hashlib.sha256()
    roots = (Path(__file__).parents[1], Path(preft_kernels.__file__).parent)
    for path in sorted(path for root in roots for path in root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]

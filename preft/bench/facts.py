"""What a benchmark must know of a model and a machine before it starts anything."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft.errors import UnsupportedError, UsageError
from preft.models.structure import ModelStructure, ModuleInfo, ModuleKind

UNADAPTED = ("base", "base-compiled", "base-preft", "base-preft-compiled")
"""Arms whose requests name no adapter: stock vLLM, the same compiled whatever the mode, and preft's own engine."""
ALL, ATTENTION = "all", "attention"
_COMPILED = "-compiled"


def plain_arm(arm: str) -> str:
    """The arm of our engine that a compiled one is the compiled form of; any other arm itself."""
    return arm if arm == "base-compiled" else arm.removesuffix(_COMPILED)


def is_compiled(arm: str) -> bool:
    """Whether an arm compiles the model whatever the mode."""
    return arm.endswith(_COMPILED)


@dataclass(frozen=True)
class ModelFacts:
    """What the checks need of a model.

    Attributes:
        max_length: Longest prompt plus output.
        vocab_size: Token ids are below it.
        hidden_size: Width of the residual stream.
        num_blocks: Decoder blocks.
        kv_values_per_token: Numbers that the KV cache holds for one token.
        weight_values: Values of all weights.
        linear_widths: Input plus output width, summed over the linears that LoRA acts on.
        value_bytes: Bytes of one number of weights and KV cache.
    """

    max_length: int | None
    vocab_size: int
    hidden_size: int
    num_blocks: int
    kv_values_per_token: int
    weight_values: int
    linear_widths: int
    value_bytes: int

    def adapter_bytes(self, arm: str, rank: float, direft_rank: int) -> int:
        """Bytes of one adapter in bfloat16; of a mean one at a mean rank."""
        if arm in UNADAPTED:
            return 0
        if plain_arm(arm) == "direftp":
            return 2 * direft_rank * (2 * self.hidden_size + 1) * self.num_blocks
        return int(2 * rank * self.linear_widths)


def lora_modules(structure: ModelStructure, targets: str = ALL) -> list[ModuleInfo]:
    """The linears of the decoder's blocks that the LoRA arms act on, sorted by path.

    Args:
        structure: The model.
        targets: `all`, `attention`, or the last parts of module names, such as `q_proj,v_proj`.

    Raises:
        UnsupportedError: The model has no linears there.
        UsageError: A name is no linear of the model.
    """
    prefixes = tuple(f"{block}." for block in structure.blocks)
    found = [
        info
        for path, info in structure.modules.items()
        if info.kind == ModuleKind.LINEAR and path.startswith(prefixes) and ".experts." not in path
    ]
    if not found:
        raise UnsupportedError("The model has no linear modules that LoRA could act on", got=structure.model_class)
    found.sort(key=lambda info: info.path)
    if targets == ALL:
        return found
    if targets == ATTENTION:
        chosen = [info for info in found if "attn" in info.path or "attention" in info.path]
    else:
        names = targets.split(",")
        present = {info.path.rpartition(".")[2] for info in found}
        unknown = [name for name in names if name not in present]
        if unknown:
            accepted = f"{ALL}, {ATTENTION}, or of {', '.join(sorted(present))}"
            raise UsageError("`--targets` is not valid", got=", ".join(unknown) or "none", accepted=accepted)
        chosen = [info for info in found if info.path.rpartition(".")[2] in names]
    if not chosen:
        raise UnsupportedError("The model has no such linear modules", got=targets)
    return chosen


def read_facts(folder: Path, dtype: str, targets: str = ALL) -> ModelFacts:
    """Reads what the checks need from a checkpoint, without its weights.

    Args:
        folder: The checkpoint.
        dtype: Of weights and activations.
        targets: See `lora_modules`.

    Raises:
        PreftError: It cannot be read, or is not a model that generates text.
    """
    from preft.adapters.baseconfig import read_base_config
    from preft.models.structure import build_meta_model, structure_of

    config = read_base_config(folder).get_text_config()
    model = build_meta_model(folder)
    structure = structure_of(model)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    stored = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    used = stored if dtype == "auto" else dtype
    return ModelFacts(
        max_length=getattr(config, "max_position_embeddings", None),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_blocks=len(structure.blocks),
        kv_values_per_token=2 * len(structure.blocks) * kv_heads * head_dim,
        weight_values=sum(parameter.numel() for parameter in model.parameters()),
        linear_widths=sum(item.in_features + item.out_features for item in lora_modules(structure, targets)),
        value_bytes=4 if used == "float32" else 2,
    )


def available_memory() -> int:
    """Bytes of host memory that new processes can have; what a container allows, where it allows less."""
    with open("/proc/meminfo", encoding="ascii") as file:
        found: Mapping[str, str] = dict(line.split(":", 1) for line in file)
    available = int(found["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        most, used = ((group / f"memory.{name}").read_text(encoding="ascii").strip() for name in ("max", "current"))
        inactive = re.search(
            r"^inactive_file (\d+)$", (group / "memory.stat").read_text(encoding="ascii"), re.MULTILINE
        )
    except OSError:
        return available
    if not most.isdigit():
        return available
    # Pages of files that nobody needs are given up before memory runs out.
    return min(available, int(most) - int(used) + (int(inactive[1]) if inactive else 0))


def room_for_adapters(folder: Path) -> int:
    """Bytes that generated adapters may take in a folder that exists: free ones, and those already there."""
    kept = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return shutil.disk_usage(folder).free + kept


def machine_facts() -> dict[str, Any]:
    """The machine that the rows were measured on."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    lines = (line for line in text.splitlines() if line.startswith("model name"))
    return next(lines, ":").partition(":")[2].strip() or platform.machine()

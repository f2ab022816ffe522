"""Adapters of the user's own in place of generated ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from preft.adapters.store import load_adapter
from preft.bench.spec import BenchSpec
from preft.errors import FileError, UsageError

PROMPT_ONLY = ("lorap", "direftp")


def given_adapters(spec: BenchSpec, arm: str) -> list[Path]:
    """An arm's adapters out of the folder that `--given` names: its subfolders, by name.

    Raises:
        FileError: The folder cannot be read.
        UsageError: There are too few, two are the same, or one is not what the arm measures.
    """
    folder, count = spec.given[arm], max(spec.adapters)
    try:
        found = sorted(path for path in folder.iterdir() if path.is_dir())[:count]
    except OSError as error:
        raise FileError(f"`{folder}` cannot be read", got=error.strerror, accepted="a folder of adapters") from None
    if len(found) < count:
        raise UsageError(f"`{folder}` holds too few adapters", got=f"{len(found)}", accepted=f"at least {count}")
    seen: dict[str, Path] = {}
    for path in found:
        digest = _check(path, arm)
        if digest in seen:
            raise UsageError(
                "Two given adapters hold the same numbers, which hides what distinct ones cost",
                got=f"`{seen[digest]}` and `{path}`",
                accepted="distinct adapters",
            )
        seen[digest] = path
    return found


def given_rank(arm: str, paths: Sequence[Path]) -> int:
    """The largest rank among given adapters."""
    if arm != "stock-lora":
        return max(load_adapter(path).manifest.max_rank for path in paths)
    ranks: list[int] = []
    for path in paths:
        config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        ranks += [config["r"], *(config.get("rank_pattern") or {}).values()]
    return max(ranks)


def _check(path: Path, arm: str) -> str:
    """The digest of an adapter that the arm can serve."""
    if arm == "stock-lora":
        file = path / "adapter_model.safetensors"
        try:
            return hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as error:
            raise FileError(f"`{file}` cannot be read", got=error.strerror, accepted="a PEFT LoRA folder") from None
    adapter = load_adapter(path)
    if adapter.manifest.positions.is_prompt_only != (arm in PROMPT_ONLY):
        wanted = "prompt tokens only" if arm in PROMPT_ONLY else "every token"
        raise UsageError(
            f"`{path}` is not what the arm `{arm}` measures",
            got=adapter.manifest.label,
            accepted=f"adapters that act on {wanted}",
        )
    return adapter.digest

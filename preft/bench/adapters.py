"""Adapters to measure with: one set of random numbers, in the form that each arm reads, kept between runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preft.adapters.store import atomic_folder, save_adapter
from preft.bench.facts import ALL, lora_modules
from preft.bench.given import given_adapters
from preft.bench.spec import BenchSpec
from preft.config.progress import Progress, stage
from preft.models.structure import ModelStructure

if TYPE_CHECKING:
    from preft.adapters.manifest import Manifest

STRENGTH = 0.02
"""Standard deviation of the values: small enough that no activation overflows in 16 bits."""
SCALE = 2.0


AdapterPaths = dict[tuple[str, tuple[int, ...]], list[Path]]
"""Paths by arm and the LoRA ranks of a point."""


def adapter_folder(root: Path, arm: str, rank: int, seed: int, base: str, targets: str = ALL) -> Path:
    """Where the adapters of one arm lie. Its name holds all that their numbers depend on."""
    suffix = "" if targets == ALL or arm == "direftp" else f"-{targets.replace(',', '-')}"
    return root / f"{base}-seed{seed}" / f"{arm}-r{rank}{suffix}"


def adapter_paths(folder: Path, count: int) -> list[Path]:
    """Paths of an arm's adapters."""
    return [folder / f"a{index:04}" for index in range(count)]


def make_adapters(spec: BenchSpec, model: Path, *, progress: Progress | None = None) -> AdapterPaths:
    """Writes the adapters of every arm and rank, those that are not there yet, and finds the given ones.

    Raises:
        FileError: They cannot be written.
    """
    from preft.adapters.fingerprint import fingerprint_base
    from preft.models.structure import read_structure

    base, structure = fingerprint_base(model), read_structure(model)
    weights = json.dumps(base.weights, sort_keys=True)
    name = f"{base.architecture_sha256[:8]}{_short_hash(weights)}"
    count, kinds = max(spec.adapters), [arm for arm in spec.adapted if arm not in spec.given]
    found: AdapterPaths = {
        (arm, ranks): paths for arm in spec.given for paths in [given_adapters(spec, arm)] for ranks in spec.ranks
    }
    with stage(progress, "Making adapters", count * len(kinds) * len(spec.ranks)):
        for arm in kinds:
            for ranks in spec.ranks:
                found[arm, ranks] = [Path()] * count
                own = (spec.direft_rank,) if arm == "direftp" else ranks
                for place, rank in enumerate(own):
                    folder = adapter_folder(spec.generated, arm, rank, spec.seed, name, spec.targets)
                    manifest = _manifest(arm, rank, structure, base, spec.targets)
                    for index in range(place, count, len(own)):
                        path = adapter_paths(folder, count)[index]
                        found[arm, ranks][index] = path
                        if not path.exists():
                            _write(path, arm, manifest, seed=spec.seed * 1_000_003 + index)
                        if progress is not None:
                            progress.advance()
    return found


def _manifest(arm: str, rank: int, structure: ModelStructure, base: Any, targets: str) -> Manifest:
    from preft.adapters.manifest import Manifest
    from preft.positions import ALL, PROMPT
    from preft.types import Site, SiteKind

    if arm == "direftp":
        width = structure.hidden_size
        sites = [Site(path, SiteKind.BLOCK, rank, width, width, 1.0, has_bias=True) for path in structure.blocks]
    else:
        sites = [
            Site(info.path, SiteKind.LINEAR, rank, info.in_features, info.out_features, SCALE, has_bias=False)
            for info in lora_modules(structure, targets)
        ]
    policy = PROMPT if arm in ("lorap", "direftp") else ALL
    return Manifest(policy, "bfloat16", tuple(sorted(sites, key=lambda site: (site.path, site.kind))), base)


def _write(path: Path, arm: str, manifest: Manifest, *, seed: int) -> None:
    import torch

    from preft.adapters.adapter import Adapter, expected_shapes

    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (torch.randn(shape, generator=generator) * STRENGTH).to(torch.bfloat16)
        for name, shape in expected_shapes(manifest).items()
    }
    if arm == "stock-lora":
        _write_peft(path, tensors, manifest)
    else:
        save_adapter(Adapter.build(manifest, tensors), path)


def _write_peft(path: Path, tensors: dict[str, Any], manifest: Manifest) -> None:
    """The same numbers as a PEFT checkpoint, for stock vLLM."""
    from safetensors.torch import save_file

    rank = manifest.max_rank
    parts = {"down": "lora_A", "up": "lora_B"}
    named = {
        f"base_model.model.{path}.{parts[part]}.weight": tensor
        for name, tensor in tensors.items()
        for path, _, part in [name.rpartition(".")]
    }
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": SCALE * rank,
        "target_modules": sorted({site.path.rpartition(".")[2] for site in manifest.sites}),
        "bias": "none",
    }
    with atomic_folder(path) as partial:
        save_file(named, partial / "adapter_model.safetensors")
        (partial / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _short_hash(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:8]

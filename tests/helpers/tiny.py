"""Tiny random models and adapters, built in code: 4 heads, 2 KV heads, no download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from preft.adapters.adapter import Adapter, expected_shapes
from preft.adapters.fingerprint import fingerprint_base
from preft.adapters.manifest import Manifest
from preft.positions import Policy
from preft.types import Site, SiteKind

ALL_LINEAR = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    # Wide enough that logits of different tokens are far apart, so greedy outputs do not hang on rounding.
    "initializer_range": 0.15,
}


def build_tiny(folder: Path, family: str = "llama", *, seed: int = 0, **overrides: object) -> Path:
    """Writes a tiny random checkpoint of a model family (`llama`, `qwen2`, ...) in float32 and returns the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = {**TINY, **overrides}
    if family == "qwen2":
        settings.pop("head_dim", None)
    config = AutoConfig.for_model(family, **settings)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def linear_sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """Path of every linear module of a checkpoint, with (in_features, out_features)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def random_adapter(
    base: Path,
    *,
    seed: int,
    rank: int | Sequence[int] = 8,
    targets: Sequence[str] = ALL_LINEAR,
    blocks: Sequence[int] = (),
    positions: str = "prompt",
    scale: float = 2.0,
    strength: float = 0.2,
    dtype: torch.dtype = torch.float32,
) -> Adapter:
    """A random adapter that moves the logits: linear sites ending in `targets`, block sites at layers `blocks`.

    Args:
        base: Checkpoint folder.
        seed: Of the values.
        rank: One rank, or several that the sites take in turn.
        targets: Suffixes of linear module paths.
        blocks: Layer numbers.
        positions: Position policy.
        scale: Of the linear sites.
        strength: Standard deviation of the values.
        dtype: Of the tensors.
    """
    from transformers import AutoConfig

    hidden = AutoConfig.from_pretrained(base).hidden_size
    ranks = [rank] if isinstance(rank, int) else list(rank)
    sites = [
        Site(path, SiteKind.LINEAR, ranks[index % len(ranks)], sizes[0], sizes[1], scale, has_bias=False)
        for index, (path, sizes) in enumerate(
            item for item in linear_sizes(base).items() if item[0].endswith(tuple(targets) or ("\0",))
        )
    ]
    sites += [
        Site(f"model.layers.{layer}", SiteKind.BLOCK, ranks[index % len(ranks)], hidden, hidden, 1.0, has_bias=True)
        for index, layer in enumerate(blocks)
    ]
    manifest = Manifest(
        positions=Policy.parse(positions),
        dtype=str(dtype).removeprefix("torch."),
        sites=tuple(sorted(sites, key=lambda site: (site.path, site.kind))),
        base=fingerprint_base(base),
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (torch.randn(shape, generator=generator) * strength).to(dtype)
        for name, shape in expected_shapes(manifest).items()
    }
    return Adapter.build(manifest, tensors)

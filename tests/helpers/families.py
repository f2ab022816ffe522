"""Tiny random checkpoints of many model families, and adapters for whatever modules they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from preft.adapters.adapter import Adapter, expected_shapes
from preft.adapters.fingerprint import fingerprint_base
from preft.adapters.manifest import Manifest
from preft.models.structure import ModuleKind, read_structure
from preft.positions import Policy
from preft.types import Site, SiteKind

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NO_HEAD_DIM: Mapping[str, Any] = {"head_dim": ...}
TIED: Mapping[str, Any] = {"tie_word_embeddings": True}


@dataclass(frozen=True)
class Family:
    """How to build one model family, and where its adapters can sit.

    Attributes:
        model_type: As Transformers names it.
        decoder_layer: vLLM's class of its blocks, with its module.
        settings: Of the configuration, beside `SIZES`; `...` leaves one out.
        refused: Parts of linear module names that take no site.
    """

    model_type: str
    decoder_layer: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    refused: Sequence[str] = ()


def build_family(family: Family, folder: Path, *, seed: int = 0) -> Path:
    """Writes a tiny random checkpoint in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = {key: value for key, value in {**SIZES, **family.settings}.items() if value is not ...}
    config = AutoConfig.for_model(family.model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        # Norms and biases are initialised to 1 and 0, where a mistake in either would not show.
        if parameter.dim() == 1:
            parameter.data += torch.randn(parameter.shape) * (0.05 if "norm" in name or "ln_" in name else 0.1)
    if config.tie_word_embeddings:
        # Else the head, being the embedding, answers every token with itself whatever an adapter adds.
        model.get_input_embeddings().weight.data *= 0.2
    model.save_pretrained(folder)
    return folder


def family_adapter(
    base: Path,
    family: Family,
    *,
    seed: int,
    linear: bool = False,
    blocks: bool = False,
    targets: Sequence[str] | None = None,
    rank: int = 8,
    positions: str = "prompt",
    strength: float = 0.1,
) -> Adapter:
    """A random adapter on every linear module inside the blocks that takes a site, on every block, or on both.

    Args:
        base: Checkpoint folder.
        family: Which.
        seed: Of the values.
        linear: Whether it has linear sites.
        blocks: Whether it has block sites.
        targets: Parts of the names of its linear modules; all that the engine serves by default.
        rank: Of every site.
        positions: Position policy.
        strength: Standard deviation of the values.
    """
    structure = read_structure(base)
    sites = []
    if linear:
        sites += [
            Site(path, SiteKind.LINEAR, rank, info.in_features, info.out_features, 2.0, has_bias=False)
            for path, info in structure.modules.items()
            if path.startswith(tuple(f"{block}." for block in structure.blocks))
            and info.kind is not ModuleKind.EMBEDDING
            and (
                any(part in path for part in targets)
                if targets is not None
                else not any(part in path for part in family.refused)
            )
        ]
    if blocks:
        width = structure.hidden_size
        sites += [Site(path, SiteKind.BLOCK, rank, width, width, 1.0, has_bias=True) for path in structure.blocks]
    manifest = Manifest(
        positions=Policy.parse(positions),
        dtype="float32",
        sites=tuple(sorted(sites, key=lambda site: (site.path, site.kind))),
        base=fingerprint_base(base),
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * strength for name, shape in expected_shapes(manifest).items()
    }
    return Adapter.build(manifest, tensors)


_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

_BLOOM = {**TIED, "head_dim": ..., "num_key_value_heads": ..., "intermediate_size": ...}
_GRANITE_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": ...}
_GPT2 = {"n_inner": 192, "head_dim": ..., "num_key_value_heads": ..., "intermediate_size": ...}
_OPT = {
    "ffn_dim": 192,
    "word_embed_proj_dim": 128,
    "init_std": 0.15,
    "head_dim": ...,
    "num_key_value_heads": ...,
    "intermediate_size": ...,
    "initializer_range": ...,
}
_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": ..., "num_key_value_heads": ...}
_GRANITE = {
    "residual_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
    "head_dim": ...,
}
_GEMMA = {**TIED, "query_pre_attn_scalar": 32}
_SHARED_EXPERT = {**_MOE, "head_dim": ..., "shared_expert_intermediate_size": 96}

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "llama.LlamaDecoderLayer"),
    "mistral": Family("mistral", "mistral.MistralDecoderLayer"),
    "qwen2": Family("qwen2", "qwen2.Qwen2DecoderLayer", NO_HEAD_DIM),
    "qwen3": Family("qwen3", "qwen3.Qwen3DecoderLayer"),
    "gemma": Family("gemma", "gemma.GemmaDecoderLayer", TIED),
    "gemma2": Family("gemma2", "gemma2.Gemma2DecoderLayer", _GEMMA),
    "gemma3": Family("gemma3_text", "gemma3.Gemma3DecoderLayer", _GEMMA),
    "phi3": Family("phi3", "llama.LlamaDecoderLayer", NO_HEAD_DIM),
    "cohere": Family("cohere", "commandr.CohereDecoderLayer", {**TIED, "logit_scale": 1.0, "head_dim": ...}),
    "cohere2": Family("cohere2", "commandr.CohereDecoderLayer", {**TIED, "logit_scale": 1.0}),
    "granite": Family("granite", "granite.GraniteDecoderLayer", _GRANITE),
    "glm4": Family("glm4", "glm4.Glm4DecoderLayer"),
    "nemotron": Family("nemotron", "nemotron.NemotronDecoderLayer"),
    "opt": Family("opt", "opt.OPTDecoderLayer", _OPT),
    "apertus": Family("apertus", "apertus.ApertusDecoderLayer"),
    "exaone4": Family("exaone4", "exaone4.Exaone4DecoderLayer", {"sliding_window": 64, "sliding_window_pattern": 4}),
    "granitemoe": Family("granitemoe", "granitemoe.GraniteMoeDecoderLayer", _GRANITE_MOE),
    "qwen2_moe": Family("qwen2_moe", "qwen2_moe.Qwen2MoeDecoderLayer", _SHARED_EXPERT, refused=("shared_expert_gate",)),
    "qwen3_moe": Family("qwen3_moe", "qwen3_moe.Qwen3MoeDecoderLayer", _MOE),
    "mixtral": Family("mixtral", "mixtral.MixtralDecoderLayer", {"num_local_experts": 4}),
    "gpt_oss": Family("gpt_oss", "gpt_oss.TransformerBlock", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "stablelm": Family("stablelm", "stablelm.StablelmDecoderLayer", NO_HEAD_DIM),
    "falcon": Family("falcon", "falcon.FalconDecoderLayer", _FALCON, refused=("query_key_value",)),
    "gpt2": Family("gpt2", "gpt2.GPT2Block", _GPT2),
}

BLOOM = Family("bloom", "bloom.BloomBlock", _BLOOM)
"""A model that vLLM has no LoRA support for, with decoder layers that preft does not know."""
OLMO2 = Family("olmo2", "transformers.models.olmo2.modeling_olmo2.Olmo2DecoderLayer", NO_HEAD_DIM)
"""A model that vLLM runs through Transformers' own modules."""

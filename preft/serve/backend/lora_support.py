"""Which linear modules of a model take adapters, beyond what vLLM itself says of it.

vLLM serves LoRA on models that declare it. Some of the others need nothing but the declaration, and are listed here
with the names that their fused modules stand for. Of a mixture of experts, every linear module that all tokens pass
takes adapters; the experts and their router do not, since they see neither all tokens nor their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.models import supports_lora

if TYPE_CHECKING:
    from torch import nn

FUSED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "StablelmForCausalLM": {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]},
    "GPT2LMHeadModel": {"c_attn": ["c_attn"]},
    "FalconForCausalLM": {},
    "Glm4ForCausalLM": {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_up_proj"]},
}
"""Models of which vLLM declares nothing, or other names than the checkpoint's modules have: fused module to those."""

REARRANGED: Mapping[str, Sequence[str]] = {"FalconForCausalLM": ["query_key_value"]}
"""Modules whose rows vLLM reorders when it loads them, so that an update by the checkpoint's order would be wrong."""

_ROUTERS = ("gate", "router", "shared_expert_gate")


def declare_lora(model: nn.Module) -> None:
    """Gives a model the attributes that vLLM's managers ask for, where it lacks them or they name other modules.

    Which of its linear modules take sites is decided by `unserved_modules`.
    """
    fused = FUSED.get(type(model).__name__)
    if fused is not None:
        model.packed_modules_mapping = {name: list(parts) for name, parts in fused.items()}  # type: ignore[assignment]
    if supports_lora(model):
        return
    model.supports_lora = True  # type: ignore[assignment]
    model.embedding_modules = {}  # type: ignore[assignment]
    if not hasattr(model, "packed_modules_mapping"):
        model.packed_modules_mapping = {}  # type: ignore[assignment]
    model.is_3d_moe_weight = model.is_non_gated_moe = False  # type: ignore[assignment]
    model.lora_skip_prefixes = []  # type: ignore[assignment]
    model.lora_manager = None  # type: ignore[assignment]
    model.preft_undeclared = True  # type: ignore[assignment]


def unserved_modules(model: nn.Module) -> set[str]:
    """Last names of the modules that vLLM would wrap and preft does not."""
    unserved = set(REARRANGED.get(type(model).__name__, ()))
    experts = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, MoERunner)}
    return unserved | experts | set(_ROUTERS if experts else ())


def linear_refusal(model: nn.Module, path: str) -> str | None:
    """Why a linear module takes no site, or None if no reason is known."""
    name, undeclared = type(model).__name__, getattr(model, "preft_undeclared", False)
    if undeclared and (name not in FUSED or path.endswith("lm_head")):
        return f"vLLM has no LoRA support for `{name}`" + (", nor preft for its head" if name in FUSED else "")
    if path.rpartition(".")[2] in REARRANGED.get(name, ()):
        return f"vLLM reorders the rows of this module of `{name}` when it loads them"
    if ".experts" in path or path.rpartition(".")[2] in _ROUTERS:
        return "it belongs to a mixture's experts or their router, which do not see all tokens in their order"
    return None


def has_linear_sites(model: nn.Module) -> bool:
    """Whether any linear module of the model takes adapters."""
    return not getattr(model, "preft_undeclared", False) or type(model).__name__ in FUSED

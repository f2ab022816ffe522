"""TRL's trainers, unmodified, with adapters by position.

    config = prompt_only_config(rank=8)
    trainer = SFTTrainer(model, peft_config=config, train_dataset=prompts_and_completions, ...)
    make_prompt_only(trainer)
    trainer.train()
    save_adapter(adapter_of(trainer.model, base), "out/lorap")

A step that is forgotten is an error at the first forward pass, never an adapter that acts on every token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig
from torch import nn

from preft.adapters.adapter import Adapter
from preft.adapters.fingerprint import BaseFingerprint
from preft.adapters.manifest import Manifest
from preft.data.collate import IGNORED
from preft.errors import BoundaryUnknownError, UnsupportedError, UsageError
from preft.positions import PROMPT, Policy
from preft.tuners.gate import PositionGate
from preft.tuners.layers import GatedLinear
from preft.tuners.masks import batch_mask
from preft.types import Site, SiteKind

PLAIN_INITS = ("gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights`, beside true and false, that leave the base weights as they are."""


def prompt_only_config(
    rank: int, *, alpha: float | None = None, targets: Sequence[str] | str = "all-linear", **settings: Any
) -> LoraConfig:
    """A configuration of PEFT's whose layers act by position.

    Args:
        rank: Of every site.
        alpha: Scale times rank; None for `2 * rank`.
        targets: PEFT's `target_modules`.
        settings: Further fields of `LoraConfig`; a variant that cannot act by position is refused when layers are made.

    Raises:
        UnsupportedError: A field would change the base weights, or train what the adapter's format does not hold.
    """
    init = settings.get("init_lora_weights", True)
    if not isinstance(init, bool) and init not in PLAIN_INITS:
        raise UnsupportedError(
            "The initialisation may change the base weights, and the adapter would be one of the changed base",
            got=f"`init_lora_weights` {init!r}",
            accepted=", ".join(["true", "false", *(f"`{name}`" for name in PLAIN_INITS)]),
        )
    if settings.get("lora_bias") or settings.get("bias", "none") != "none":
        name = "lora_bias" if settings.get("lora_bias") else "bias"
        raise UnsupportedError(
            "A linear site has no bias", got=f"`{name}` {settings[name]!r}", accepted=f"nothing for `{name}`"
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,  # type: ignore[arg-type]
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
        **settings,
    )
    config._register_custom_module({nn.Linear: GatedLinear})
    return config


def make_prompt_only(trainer: Any, policy: Policy = PROMPT) -> None:
    """Tells a trainer's model where prompts end: binds the gate, and adds masks to its batches.

    Args:
        trainer: A trainer whose model was made with `prompt_only_config` and whose examples have a prompt and one
            completion; their labels say where the completion begins.
        policy: Position policy.

    Raises:
        UsageError: The model carries no adapter by position.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not _gated(model):
        raise UsageError(
            "The trainer's model carries no adapter by position", hint="pass `peft_config=prompt_only_config(...)`"
        )
    PositionGate(model.get_base_model(), dict.fromkeys(model.peft_config, policy)).bind()
    trainer.data_collator = MaskingCollator(trainer.data_collator, policy)


class MaskingCollator:
    """Adds `preft_mask` to the batches of another collator.

    Args:
        inner: Makes batches with `labels` and an `attention_mask`.
        policy: Position policy.
    """

    def __init__(self, inner: Callable[[list[Any]], Mapping[str, Any]], policy: Policy) -> None:
        self.inner, self.policy = inner, policy

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        """Makes one batch.

        Raises:
            BoundaryUnknownError: The labels of a row do not tell one prompt from one completion.
        """
        batch = dict(self.inner(examples))
        attention = batch.get("attention_mask")
        if attention is None or attention.dim() != 2:
            raise BoundaryUnknownError(
                "The batch has no attention mask of rows and columns", hint="leave packing and `padding_free` off"
            )
        boundaries = [_boundary(row, real.bool()) for row, real in zip(batch["labels"], attention, strict=True)]
        batch["preft_mask"] = batch_mask(self.policy, boundaries, attention)
        return batch


def adapter_of(
    model: Any,
    base: BaseFingerprint,
    *,
    policy: Policy = PROMPT,
    name: str = "default",
    provenance: Mapping[str, Any] | None = None,
    chat_template_sha256: str | None = None,
) -> Adapter:
    """The adapter of a model that was made with `prompt_only_config`, in float32.

    Args:
        model: A `PeftModel`.
        base: Fingerprint of its base model.
        policy: Position policy that it was trained under.
        name: Of the adapter in the model.
        provenance: Where it comes from.
        chat_template_sha256: Digest of the chat template it was trained with, or None.

    Raises:
        UsageError: The model carries no adapter by position of this name.
        UnsupportedError: Something besides linear modules was trained.
    """
    layers = {path: layer for path, layer in _gated(model.get_base_model()).items() if name in layer.lora_A}
    if not layers:
        raise UsageError(f"The model carries no adapter by position named `{name}`")
    inside = tuple(f"{path}." for path in layers)
    others = [
        path
        for path, parameter in model.get_base_model().named_parameters()
        if parameter.requires_grad and not path.startswith(inside)
    ]
    if others:
        raise UnsupportedError("Something besides the adapter was trained", got=f"`{others[0]}`")
    sites, tensors = [], {}
    for path, layer in sorted(layers.items()):
        down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
        sites.append(
            Site(path, SiteKind.LINEAR, down.shape[0], down.shape[1], up.shape[0], layer.scaling[name], has_bias=False)
        )
        tensors[f"{path}.down"], tensors[f"{path}.up"] = (_plain(weight) for weight in (down, up))
    manifest = Manifest(
        positions=policy,
        dtype="float32",
        sites=tuple(sites),
        base=base,
        chat_template_sha256=chat_template_sha256,
        provenance=dict(provenance or {}),
    )
    return Adapter.build(manifest, tensors)


def _gated(model: nn.Module) -> dict[str, GatedLinear]:
    return {path: module for path, module in model.named_modules() if isinstance(module, GatedLinear)}


def _plain(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().to("cpu", torch.float32, copy=True).contiguous()


def _boundary(labels: torch.Tensor, real: torch.Tensor) -> int:
    learnt = (labels != IGNORED)[real]
    first = int(learnt.long().argmax())
    if not bool(learnt.any()) or first == 0:
        raise BoundaryUnknownError(
            "A row has no prompt or no completion by its labels",
            hint="give rows with `prompt` and `completion`, and keep the loss on completions only",
        )
    if not bool(learnt[first:].all()):
        raise BoundaryUnknownError(
            "A row has several completions by its labels, which one boundary cannot describe",
            hint="expand a conversation to one row an answer, as `preft train sft` does",
        )
    return first

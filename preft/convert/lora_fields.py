"""Every field of PEFT's LoRA configuration, and what conversion does about it.

A field is honoured (it decides sites, ranks or scales), irrelevant (it changes no number at inference), or refused
when its value would change numbers in a way that a low-rank update of linear modules does not compute. A field that
has no row is refused: it may come from a newer PEFT and mean anything.

Source: huggingface/peft v0.21, `tuners/lora/config.py`, `tuners/lora/layer.py`, `tuners/lora/variants.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from preft.errors import UnsupportedError


class Effect(StrEnum):
    """What a field does to a conversion."""

    HONOURED = "honoured"
    IRRELEVANT = "irrelevant"
    REFUSED = "refused"


@dataclass(frozen=True)
class FieldRow:
    """One field of the configuration.

    Attributes:
        name: Its name in `adapter_config.json`.
        effect: Honoured, irrelevant, or refused when `refuses` says so.
        why: What the field does, for people.
        refuses: Whether a value cannot be converted; None where every value can.
        instead: What to do with an adapter that is refused.
    """

    name: str
    effect: Effect
    why: str
    refuses: Callable[[Any], bool] | None = None
    instead: str | None = None


_RESIDUAL_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that subtract the new adapter from the base weights, so the adapter alone says nothing."""
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")

_MERGE = "merge the adapter into its base with PEFT and serve the merged model, or train it again as plain LoRA"
_RESAVE = (
    "save it again with PEFT as `save_pretrained(folder, path_initial_model_for_weight_conversion=...)`, which "
    "rewrites it as a plain LoRA of the original base"
)
_TRAINING_ONLY = (
    "at inference it computes a plain LoRA: remove this field and the tensors that belong to it, then convert"
)
_GENERATORS = (None, "CAUSAL_LM")


def _changes_base(value: Any) -> bool:
    """Whether an `init_lora_weights` is not known to leave the base as it is."""
    return not (value is None or isinstance(value, bool) or (isinstance(value, str) and value.lower() in _PLAIN_INITS))


def _honoured(name: str, why: str) -> FieldRow:
    return FieldRow(name, Effect.HONOURED, why)


def _irrelevant(name: str, why: str) -> FieldRow:
    return FieldRow(name, Effect.IRRELEVANT, why)


def _refused(name: str, why: str, instead: str, refuses: Callable[[Any], bool] = bool) -> FieldRow:
    return FieldRow(name, Effect.REFUSED, why, refuses, instead)


_ROWS = (
    _refused(
        "peft_type",
        "only LoRA has the form of a low-rank update",
        "train the adapter as LoRA",
        lambda value: value != "LORA",
    ),
    _refused(
        "task_type",
        "an adapter that acts on prompts belongs to a model that generates text",
        "if the base does generate text, set `task_type` to `CAUSAL_LM`",
        lambda value: value not in _GENERATORS,
    ),
    _honoured("base_model_name_or_path", "names the base where the user does not"),
    _honoured("revision", "names the base's revision where the user does not name the base"),
    _irrelevant("auto_mapping", "names classes for PEFT's own loader; nothing is imported because of it"),
    _irrelevant("peft_version", "who wrote it"),
    _irrelevant("inference_mode", "freezes parameters"),
    _irrelevant("runtime_config", "never saved by PEFT"),
    _honoured("r", "rank of sites that no pattern names"),
    _honoured("lora_alpha", "scale of sites that no pattern names, times their rank"),
    _honoured("rank_pattern", "rank by module name"),
    _honoured("alpha_pattern", "alpha by module name"),
    _honoured("use_rslora", "scale is alpha / sqrt(rank)"),
    _honoured("target_modules", "which modules are wrapped"),
    _honoured("exclude_modules", "which modules are not wrapped"),
    _honoured("layers_to_transform", "in which layers modules are wrapped"),
    _honoured("layers_pattern", "how layers are numbered"),
    _honoured("fan_in_fan_out", "layout of the base's weight; the update acts on activations and does not see it"),
    _honoured("bias", "trained biases would be tensors of their own; those are refused where they occur"),
    _honoured("ensure_weight_tying", "ties the updates of a tied head and embedding; refused where it takes effect"),
    _irrelevant("lora_dropout", "off at inference"),
    _refused(
        "init_lora_weights",
        f"an initialisation such as {', '.join(_RESIDUAL_INITS)} changes the base weights, and only the changed base "
        "fits the adapter",
        _RESAVE,
        _changes_base,
    ),
    _irrelevant("loftq_config", "parameters of `init_lora_weights`, which decides"),
    _irrelevant("eva_config", "parameters of `init_lora_weights`, which decides; ranks are in `rank_pattern`"),
    _irrelevant("corda_config", "parameters of `init_lora_weights`, which decides"),
    _irrelevant("lora_ga_config", "parameters of `init_lora_weights`, which decides"),
    _refused("use_dora", "DoRA rescales the base weight's columns, which is not a low-rank update", _MERGE),
    _refused("use_qalora", "QALoRA pools the input in groups before the update", _MERGE),
    _irrelevant("qalora_group_size", "parameter of `use_qalora`, which decides"),
    _refused("use_bdlora", "BD-LoRA stores block-diagonal factors, not low-rank matrices", _MERGE),
    _refused("kasa_config", "KaSA truncates the base weights and puts a diagonal between the factors", _MERGE),
    _refused("arrow_config", "Arrow routes tokens through several adapters", "convert the task adapters one by one"),
    _refused("velora_config", "VeLoRA stores tensors for its backward pass", _TRAINING_ONLY),
    _refused("monteclora_config", "MonteCLoRA stores the parameters of its sampler", _TRAINING_ONLY),
    _refused(
        "alora_invocation_tokens",
        "activated LoRA switches on at an invocation string and stays on: the opposite of prefill-only",
        "serve it with a server that supports aLoRA",
    ),
    _refused("layer_replication", "it makes another model out of the base by repeating layers", _MERGE),
    _refused("lora_bias", "it adds a bias to the second factor", "train again with `lora_bias=False`"),
    _refused(
        "modules_to_save",
        "it replaces whole modules of the base",
        "train again without it, or save the changed model as a base of its own",
    ),
    _refused(
        "trainable_token_indices",
        "it replaces rows of the embedding",
        "train again without it, or save the changed model as a base of its own",
    ),
    _refused(
        "target_parameters",
        "it updates parameters that are not linear modules, such as fused experts",
        "train again with `target_modules` alone",
    ),
    _refused("megatron_config", "it belongs to Megatron's parallel layers", "export it from Megatron as plain LoRA"),
    _irrelevant("megatron_core", "parameter of `megatron_config`, which decides"),
    # Written by PEFT before 0.3 and gone since.
    _refused("enable_lora", "it updates parts of a fused linear module", "train again with `target_modules` alone"),
    _irrelevant("merge_weights", "how old versions of PEFT evaluated it"),
)

LORA_FIELDS: Mapping[str, FieldRow] = {row.name: row for row in _ROWS}


def require_supported(config: Mapping[str, Any]) -> None:
    """Checks that every field of an `adapter_config.json` is known and convertible.

    Raises:
        UnsupportedError: A field is unknown, or has a value that is refused. The first one decides the message, and
            the others are named.
    """
    refused = [row for row in _ROWS if row.name in config and row.refuses is not None and row.refuses(config[row.name])]
    if refused:
        first, *others = refused
        also = f"; also refused: {', '.join(f'`{row.name}`' for row in others)}" if others else ""
        raise UnsupportedError(
            f"This adapter's `{first.name}` cannot be converted: {first.why}",
            got=f"`{first.name}`: {_short(config[first.name])}{also}",
            accepted=_accepted(first),
            hint=first.instead,
        )
    unknown = sorted(set(config) - set(LORA_FIELDS))
    if unknown:
        raise UnsupportedError(
            "The adapter's configuration has fields that this version does not know",
            got=", ".join(f"`{name}`: {_short(config[name])}" for name in unknown),
            accepted="the fields of PEFT's LoraConfig up to 0.21",
            hint="upgrade preft; or remove a field from adapter_config.json if you know that it changes no number",
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _accepted(row: FieldRow) -> str:
    special = {
        "peft_type": "`LORA`",
        "task_type": "`CAUSAL_LM` or null",
        "init_lora_weights": f"true, false, {', '.join(f'`{name}`' for name in _PLAIN_INITS)}",
    }
    return special.get(row.name, f"no `{row.name}`")

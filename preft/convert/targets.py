"""Which modules PEFT would wrap, at which rank and scale: PEFT itself is asked, on a model without weights.

Pattern matching, `all-linear`, per-layer selection and the conversions that PEFT applies for its own old checkpoints
are subtle and change between releases. Asking the installed PEFT cannot disagree with it.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

from preft.convert.settings import LoraSettings
from preft.errors import AdapterError
from preft.models.structure import ModelStructure


@dataclass(frozen=True)
class Wrapped:
    """A module that PEFT wraps.

    Attributes:
        rank: Of the update.
        scale: What PEFT multiplies the update by.
        layer: Name of PEFT's class for the wrapped module.
    """

    rank: int
    scale: float
    layer: str


def wrapped_modules(settings: LoraSettings, model: Any) -> tuple[dict[str, Wrapped], list[str]]:
    """The modules that PEFT would wrap in a model, by path, and what PEFT warns about its patterns.

    Args:
        settings: The configuration.
        model: A model on the meta device; it is changed.

    Raises:
        AdapterError: PEFT refuses the configuration for this model.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora.layer import LoraLayer

    def listed(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = LoraConfig(
                r=settings.r,
                lora_alpha=settings.lora_alpha,
                target_modules=listed(settings.target_modules),
                exclude_modules=listed(settings.exclude_modules),
                layers_to_transform=listed(settings.layers_to_transform),
                layers_pattern=listed(settings.layers_pattern),
                rank_pattern=dict(settings.rank_pattern),
                alpha_pattern=dict(settings.alpha_pattern),
                use_rslora=settings.use_rslora,
                fan_in_fan_out=settings.fan_in_fan_out,
                init_lora_weights=False,
            )
            inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, re.error) as error:
        raise AdapterError(
            "PEFT cannot apply the adapter's configuration to the base model",
            got=str(error).splitlines()[0][:300] if str(error) else type(error).__name__,
            accepted="a configuration whose `target_modules` name modules of the base",
            hint="name the base that the adapter was trained on: `--base MODEL`",
        ) from None
    found = {
        path: Wrapped(module.r["default"], float(module.scaling["default"]), type(module).__name__)
        for path, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    remarks = [str(warning.message) for warning in caught if "_pattern keys did not match" in str(warning.message)]
    return found, remarks


def under_source_names(model: Any, structure: ModelStructure, source_blocks: str, head: str | None) -> Any:
    """The base's blocks and head under the paths that a checkpoint of another class has for them.

    Patterns in a configuration were written for those paths, so PEFT must see them.

    Args:
        model: The base on the meta device.
        structure: Its structure.
        source_blocks: Path of the block list in the checkpoint.
        head: Path of the head in the checkpoint, or None to leave it out.
    """
    import torch

    root = torch.nn.Module()
    _place(root, source_blocks, model.get_submodule(structure.block_list))
    if head is not None and structure.head is not None:
        _place(root, head, model.get_submodule(structure.head))
    return root


def default_targets(model: Any) -> tuple[str, ...] | str | None:
    """What PEFT targets in a model where the configuration names nothing."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    found = DEFAULTS.get(model.config.get_text_config().model_type)
    return tuple(found) if isinstance(found, list | set | tuple) else found


def _place(root: Any, path: str, module: Any) -> None:
    import torch

    *parents, last = path.split(".")
    for part in parents:
        if part not in dict(root.named_children()):
            root.add_module(part, torch.nn.Module())
        root = root.get_submodule(part)
    root.add_module(last, module)

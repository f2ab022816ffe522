"""PEFT LoRA folders written by the real PEFT, its own forward pass, and an independent one for our adapters."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from preft.adapters.adapter import Adapter

TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def load_base(base: Path) -> Any:
    """The base model in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def make_peft(base: Path, folder: Path, *, seed: int = 0, strength: float = 0.1, **config: Any) -> Path:
    """Saves a random PEFT LoRA of a base model with the real PEFT; both factors are non-zero."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load_base(base), LoraConfig(**settings))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * strength
        model.save_pretrained(folder)
    return folder


def peft_logits(base: Path, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits of PEFT's own forward pass."""
    from peft import PeftModel

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(load_base(base), folder).eval()(ids).logits


def peft_sites(base: Path, folder: Path) -> dict[str, tuple[int, float]]:
    """Module path to (rank, scale) as the real PEFT has them after loading a folder."""
    from peft import PeftModel
    from peft.tuners.lora.layer import LoraLayer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(load_base(base), folder)
    return {
        path.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for path, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def site_logits(base: Path, adapter: Adapter, ids: torch.Tensor) -> torch.Tensor:
    """Logits with y += scale * up(down(x)) hooked onto every site: all tokens adapted, independent of PEFT."""
    model = load_base(base)
    for site in adapter.manifest.sites:
        numbers = adapter.site_tensors(site)
        down, up = numbers.down.float(), numbers.up.float()

        def hook(
            module: Any, inputs: Any, output: Any, down: Any = down, up: Any = up, scale: float = site.scale
        ) -> Any:
            return output + scale * ((inputs[0] @ down.T) @ up.T)

        model.get_submodule(site.path).register_forward_hook(hook)
    with torch.inference_mode():
        return model(ids).logits


def base_logits(base: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the base alone."""
    with torch.inference_mode():
        return load_base(base)(ids).logits


def edit_config(folder: Path, **changes: Any) -> Path:
    """Sets keys of a folder's configuration; the value `...` removes a key."""
    path = folder / CONFIG
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))
    return folder


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor] | None]) -> Path:
    """Rewrites a folder's tensors: `edit` changes the dictionary in place or returns another."""
    tensors = load_file(folder / TENSORS)
    save_file(dict(edit(tensors) or tensors), folder / TENSORS)
    return folder

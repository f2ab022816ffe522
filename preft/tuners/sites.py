"""From an adapter's sites to a model's modules: every site must resolve, and fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from transformers.pytorch_utils import Conv1D

from preft.adapters.adapter import Adapter
from preft.adapters.fingerprint import BaseFingerprint, architecture_of
from preft.errors import AdapterError, UnsupportedError
from preft.tuners.layers import GatedLinear
from preft.types import Site, SiteKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN = 4
_QUANTISERS = ("bitsandbytes",)


def decoder_blocks(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The decoder blocks of a causal language model, by module path, in order.

    Raises:
        UnsupportedError: They cannot be told apart from other modules.
    """
    num_blocks = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    prefix = next((path for path, module in model.named_modules() if module is decoder), "")
    for path, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_blocks:
            full = ".".join(part for part in (prefix, path) if part)
            return {f"{full}.{index}": block for index, block in enumerate(module)}
    raise UnsupportedError(
        "The model's decoder blocks cannot be found",
        got=type(model).__name__,
        accepted=f"a causal language model with one list of {num_blocks} blocks",
    )


def module_sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in_features, out_features) of a linear module, or None if it is not one that can be adapted."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return module.weight.shape[0], module.weight.shape[1]
    return None


def require_fits(model: PreTrainedModel, adapter: Adapter) -> None:
    """Checks that an adapter was made for this model's architecture and that every site resolves.

    Raises:
        BaseMismatchError: The architecture differs.
        AdapterError: A site does not exist in the model or has another shape; the message names the first ones.
        UnsupportedError: The model is quantised or not a decoder-only language model.
    """
    _require_supported(model)
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    adapter.manifest.base.require_same(BaseFingerprint(name, architecture_of(model.config), None))
    blocks = decoder_blocks(model)
    problems = [problem for site in adapter.manifest.sites if (problem := _problem(model, blocks, site)) is not None]
    if problems:
        shown = "; ".join(problems[:_SHOWN])
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise AdapterError(
            f"{len(problems)} of the adapter's {len(adapter.manifest.sites)} sites do not fit the model",
            got=shown + more,
            accepted="linear modules inside decoder blocks, the output head, and decoder blocks",
        )


def _require_supported(model: PreTrainedModel) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError("An encoder-decoder model", accepted="a decoder-only causal language model")
    method = getattr(model, "quantization_method", None)
    # Its modules are linear modules still, of the same sizes, and only their weights are held otherwise.
    if getattr(model, "is_quantized", False) and str(getattr(method, "value", method)) not in _QUANTISERS:
        raise UnsupportedError(
            "A quantised base under a position-gated adapter in Transformers",
            got=str(getattr(method, "value", method)),
            accepted="a base in float32, bfloat16 or float16, or one that bitsandbytes holds in 4 or 8 bits",
            hint="load the model unquantised",
        )


def _problem(model: PreTrainedModel, blocks: dict[str, nn.Module], site: Site) -> str | None:
    """Why a site does not fit, or None."""
    if ".experts." in site.path:
        return f"`{site.path}`: inside a mixture's experts, which do not see the tokens in their order"
    try:
        module = model.get_submodule(site.path)
    except AttributeError:
        return f"`{site.path}`: no such module"
    if site.kind is SiteKind.BLOCK:
        hidden = model.config.get_text_config().hidden_size
        if site.path not in blocks:
            return f"`{site.path}`: not a decoder block"
        return None if site.in_features == hidden else f"`{site.path}`: width {site.in_features}, model has {hidden}"
    module = module.get_base_layer() if isinstance(module, GatedLinear) else module
    sizes = module_sizes(module)
    if sizes is None:
        return f"`{site.path}`: a {type(module).__name__}, not a linear module"
    if sizes != (site.in_features, site.out_features):
        return f"`{site.path}`: {site.in_features} -> {site.out_features}, model has {sizes[0]} -> {sizes[1]}"
    inside = site.path.startswith(tuple(f"{path}." for path in blocks))
    if not inside and model.get_submodule(site.path) is not model.get_output_embeddings():
        return f"`{site.path}`: outside the decoder blocks"
    return None

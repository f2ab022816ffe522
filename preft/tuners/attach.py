"""Puts trained adapters on a Hugging Face model, so that they act by position.

The base weights are never touched: with no adapter in use the model's outputs are those of the pristine model, bit for
bit, and after `detach` it is the pristine model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from preft.adapters.adapter import Adapter, SiteTensors
from preft.errors import AdapterError, UnknownAdapterError, UnsupportedError, UsageError
from preft.positions import Policy
from preft.tuners.gate import PositionGate
from preft.tuners.layers import GatedBlock, GatedLayer, GatedLinear, merge_refused
from preft.tuners.sites import require_fits
from preft.types import Site, SiteKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HANDLE = "preft_attached"
_BLOCK_CHILD = "preft_block"


def attach(model: PreTrainedModel, adapter: Adapter, *, name: str = "default") -> AttachedModel:
    """Attaches an adapter to a causal language model and puts it in use.

    The model then takes `preft_boundary` or `preft_mask` as keyword arguments of a forward pass, and `preft_boundary`
    as one of `generate`, where the whole prompt is the default. See `preft.tuners.gate`.

    Args:
        model: The model the adapter was made for. It is changed in place; `AttachedModel.detach` undoes that.
        adapter: A trained adapter.
        name: What to call it; another adapter may be attached under another name.

    Returns:
        The handle of the model's adapters; one and the same for all adapters of a model.

    Raises:
        UsageError: The name is taken or not usable as a module name.
        AdapterError: The adapter does not fit the model.
        UnsupportedError: The model cannot be adapted by position, or carries adapters of PEFT's own.
    """
    handle: AttachedModel | None = model.__dict__.get(_HANDLE)
    if handle is None:
        handle = AttachedModel(model)
    handle.add(adapter, name=name)
    return handle


class AttachedModel:
    """The adapters of one model.

    Attributes:
        model: The model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise UnsupportedError(
                "The model already carries PEFT adapters, which act on every token",
                got=type(model).__name__,
                accepted="a plain Transformers model",
                hint="unload them first, and convert them with `preft convert` if they are to act on prompts only",
            )
        self.model = model
        self._gate = PositionGate(model)
        self._adapters: dict[str, Adapter] = {}
        self._active: str | None = None

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The attached adapters by name."""
        return dict(self._adapters)

    @property
    def active(self) -> str | None:
        """Name of the adapter in use, or None for base."""
        return self._active

    @property
    def policies(self) -> Mapping[str, Policy]:
        """Position policy of each attached adapter."""
        return dict(self._gate.policies)

    def add(self, adapter: Adapter, *, name: str) -> None:
        """Attaches another adapter and puts it in use; see `attach`."""
        if not name or "." in name or name in self._adapters:
            raise UsageError(
                "The adapter cannot be attached under this name",
                got=f"`{name}`" + (", which is taken" if name in self._adapters else ""),
                accepted="a name that is free and holds no dot",
            )
        require_attachable(self.model, adapter)
        for site in adapter.manifest.sites:
            _add_site(self.model, site, adapter.site_tensors(site), name)
        self._adapters[name] = adapter
        self._gate.policies[name] = adapter.manifest.positions
        self._gate.bind()
        self.model.__dict__[_HANDLE] = self
        self.model.__dict__["save_pretrained"] = self._refuse_save
        self.use(name)

    def use(self, name: str | None) -> None:
        """Puts an adapter in use.

        Args:
            name: Its name, or None for the base model.

        Raises:
            UnknownAdapterError: No adapter of that name is attached.
        """
        if name is not None and name not in self._adapters:
            raise UnknownAdapterError(
                f"No adapter named `{name}` is attached",
                accepted=", ".join(f"`{known}`" for known in sorted(self._adapters)) or "none",
            )
        for layer in _layers(self.model).values():
            # PEFT's own `enable_adapters` would make the adapter trainable.
            BaseTunerLayer.set_adapter(layer, [] if name is None else name, inference_mode=True)
            layer._disable_adapters = name is None
        self._active = name

    def detach(self, name: str | None = None) -> None:
        """Removes one adapter, or all of them, after which the model is what it was before.

        Args:
            name: Which one, or None for all.

        Raises:
            UnknownAdapterError: No adapter of that name is attached.
        """
        if name is not None and name in self._adapters and len(self._adapters) > 1:
            if self._active == name:
                self.use(None)
            for layer in _layers(self.model).values():
                _forget(layer, name)
            del self._adapters[name], self._gate.policies[name]
            return
        if name is not None and name not in self._adapters:
            raise UnknownAdapterError(f"No adapter named `{name}` is attached")
        self._gate.unbind()
        for path, layer in _layers(self.model).items():
            parent, _, child = path.rpartition(".")
            if isinstance(layer, GatedLinear):
                setattr(self.model.get_submodule(parent), child, layer.get_base_layer())
            else:
                delattr(self.model.get_submodule(parent), child)
        self._adapters, self._active = {}, None
        self._gate.policies.clear()
        for own in (_HANDLE, "save_pretrained"):
            self.model.__dict__.pop(own, None)

    def _refuse_save(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            "A model with attached adapters cannot be saved as a checkpoint",
            got="weights under the names of wrapped layers, which would not load again",
            hint="detach the adapters first; an adapter is saved with `save_adapter`",
        )

    def merge(self) -> NoReturn:
        """Refuses: merged weights would act on generated tokens too."""
        raise merge_refused()

    def merge_and_unload(self) -> NoReturn:
        """Refuses: merged weights would act on generated tokens too."""
        raise merge_refused()


def _layers(model: nn.Module) -> dict[str, GatedLayer]:
    return {path: module for path, module in model.named_modules() if isinstance(module, GatedLinear | GatedBlock)}


def _forget(layer: GatedLayer, name: str) -> None:
    """Deletes an adapter from a layer; PEFT's `delete_adapter` would put another one in use."""
    for attribute in (*layer.adapter_layer_names, *layer.other_param_names, "lora_variant"):
        container = getattr(layer, attribute, None)
        if container is not None and name in container:
            del container[name]


def require_attachable(model: PreTrainedModel, adapter: Adapter) -> None:
    """Checks that an adapter can be attached to a model, without changing it.

    Raises:
        AdapterError: A site does not fit, or a value overflows in the model's number type.
        UnsupportedError: The model cannot be adapted by position.
    """
    require_fits(model, adapter)
    dtype = model.dtype
    for tensor_name, tensor in adapter.tensors.items():
        if not bool(tensor.to(dtype).isfinite().all()):
            raise AdapterError(
                f"Tensor `{tensor_name}` does not fit the model's number type",
                got=f"values up to {tensor.abs().max().item():.3g}",
                accepted=f"the range of {str(dtype).removeprefix('torch.')}",
                hint="load the model in float32 or bfloat16",
            )


def _add_site(model: PreTrainedModel, site: Site, tensors: SiteTensors, name: str) -> None:
    if site.kind is SiteKind.BLOCK:
        block = model.get_submodule(site.path)
        layer = getattr(block, _BLOCK_CHILD, None)
        if not isinstance(layer, GatedBlock):
            layer = GatedBlock(site.in_features)
            block.add_module(_BLOCK_CHILD, layer)
        reference = next(block.parameters())
        layer.add_adapter(name, _linear(tensors.down, tensors.bias, reference), _linear(tensors.up, None, reference))
        return
    _add_linear(model, site, tensors, name)


def _add_linear(model: PreTrainedModel, site: Site, tensors: SiteTensors, name: str) -> None:
    target: Any = model.get_submodule(site.path)
    base = target.get_base_layer() if isinstance(target, GatedLinear) else target
    config = LoraConfig(
        r=site.rank,
        lora_alpha=site.rank,
        init_lora_weights=False,
        inference_mode=True,
        fan_in_fan_out=not isinstance(base, nn.Linear),
    )
    if isinstance(target, GatedLinear):
        layer = target
        layer.update_layer(name, site.rank, lora_alpha=site.rank, config=config)
    else:
        layer = GatedLinear(base, name, config, r=site.rank, lora_alpha=site.rank)
        parent, _, child = site.path.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    layer.scaling[name] = site.scale
    layer.lora_A[name] = _linear(tensors.down, tensors.bias, base.weight)
    layer.lora_B[name] = _linear(tensors.up, None, base.weight)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None, reference: torch.Tensor) -> nn.Linear:
    """A frozen linear module with these values, in the number type and on the device of `reference`."""
    with torch.device("meta"):
        module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    module.weight = _frozen(weight, reference)
    if bias is not None:
        module.bias = _frozen(bias, reference)
    return module


def _frozen(tensor: torch.Tensor, reference: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().to(reference.device, reference.dtype, copy=True), requires_grad=False)

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
    handle = attached(model)
    handle.add(adapter, name=name)
    return handle


def attached(model: PreTrainedModel) -> AttachedModel:
    """The handle of a model's adapters; a new one if it has none yet.

    Raises:
        UnsupportedError: The model carries adapters of PEFT's own, or cannot be adapted by position.
    """
    handle: AttachedModel | None = model.__dict__.get(_HANDLE)
    return AttachedModel(model) if handle is None else handle


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
        self._trainable: set[str] = set()
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

    @property
    def trainable(self) -> frozenset[str]:
        """Names of the adapters whose values are being trained; `adapters` holds what they started from."""
        return frozenset(self._trainable)

    def add(self, adapter: Adapter, *, name: str, trainable: bool = False) -> None:
        """Attaches another adapter and puts it in use; see `attach`.

        Args:
            adapter: Its values.
            name: What to call it.
            trainable: Hold its values in float32 whatever the model's number type, and let them take gradients while
                the adapter is in use.
        """
        if not name or "." in name or name in self._adapters:
            raise UsageError(
                "The adapter cannot be attached under this name",
                got=f"`{name}`" + (", which is taken" if name in self._adapters else ""),
                accepted="a name that is free and holds no dot",
            )
        require_attachable(self.model, adapter)
        dtype = torch.float32 if trainable else self.model.dtype
        for site in adapter.manifest.sites:
            _add_site(self.model, site, adapter.site_tensors(site), name, dtype)
        self._adapters[name] = adapter
        if trainable:
            self._trainable.add(name)
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
            # PEFT's own `enable_adapters` would make every adapter trainable.
            frozen = name not in self._trainable
            BaseTunerLayer.set_adapter(layer, [] if name is None else name, inference_mode=frozen)
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
            self._trainable.discard(name)
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
        self._adapters, self._trainable, self._active = {}, set(), None
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


def _add_site(model: PreTrainedModel, site: Site, tensors: SiteTensors, name: str, dtype: torch.dtype) -> None:
    if site.kind is SiteKind.BLOCK:
        block = model.get_submodule(site.path)
        layer = getattr(block, _BLOCK_CHILD, None)
        if not isinstance(layer, GatedBlock):
            layer = GatedBlock(site.in_features)
            block.add_module(_BLOCK_CHILD, layer)
        device = next(block.parameters()).device
        down, up = _linear(tensors.down, tensors.bias, device, dtype), _linear(tensors.up, None, device, dtype)
        layer.add_adapter(name, down, up)
        return
    _add_linear(model, site, tensors, name, dtype)


def _add_linear(model: PreTrainedModel, site: Site, tensors: SiteTensors, name: str, dtype: torch.dtype) -> None:
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
    layer.lora_A[name] = _linear(tensors.down, tensors.bias, base.weight.device, dtype)
    layer.lora_B[name] = _linear(tensors.up, None, base.weight.device, dtype)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device, dtype: torch.dtype) -> nn.Linear:
    """A frozen linear module with these values."""
    with torch.device("meta"):
        module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    module.weight = _frozen(weight, device, dtype)
    if bias is not None:
        module.bias = _frozen(bias, device, dtype)
    return module


def _frozen(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(tensor.detach().to(device, dtype, copy=True), requires_grad=False)

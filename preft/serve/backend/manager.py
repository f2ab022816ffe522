"""vLLM's adapter managers, reduced to what the CPU backend needs of them: wrapping the model's modules.

vLLM's manager copies each adapter into padded stacks, one per slot and module. Here a slot is a reference to packed
numbers, so activation costs nothing and the stacks stay empty. What is kept is the wrapping, since it knows every
parallel linear layer of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY, LRUCacheLoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from preft.errors import UnsupportedError
from preft.serve.backend import compiled
from preft.serve.backend.decoder_layers import Residual, residual_of, unknown_layer
from preft.serve.backend.lora_support import declare_lora, has_linear_sites, linear_refusal, unserved_modules
from preft.serve.backend.options import BackendOptions
from preft.serve.backend.packing import ModuleInfo
from preft.serve.backend.sites import (
    BlockSite,
    LinearSite,
    LogitsSite,
    StepState,
    install_block_site,
    skip_without_rows,
)
from preft.types import SiteKind
from preft_kernels.stacks import StackCache

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

_HEAD = "lm_head"


class PreftModelManager(LRUCacheLoRAModelManager):
    """Wraps the modules that take adapters and gives each its own site.

    Attributes:
        state: Shared by all sites; the runner sets the rows before each forward pass.
        infos: The modules, by index.
    """

    state: StepState
    infos: tuple[ModuleInfo, ...]
    supported_lora_modules: list[str]
    _linear_site: type[LinearSite]
    _block_site: type[BlockSite]

    def __init__(self, *args: Any, vllm_config: VllmConfig, **kwargs: Any) -> None:
        self._preft_options = BackendOptions.from_config(vllm_config.additional_config)  # type: ignore[arg-type]
        super().__init__(*args, vllm_config=vllm_config, **kwargs)

    def _init_punica_wrapper(self, max_num_batched_tokens: int, vllm_config: VllmConfig) -> None:
        self.supports_mm = False
        self.punica_wrapper_mapping = {DEFAULT_LANGUAGE_WRAPPER_KEY: _Unwired()}

    def _create_lora_modules(self) -> None:
        skipped = set(self.model.embedding_modules) - ({_HEAD} if self._preft_options.lm_head else set())
        skipped |= unserved_modules(self.model)
        wrapped = self.supported_lora_modules if has_linear_sites(self.model) else []
        self.supported_lora_modules = [name for name in wrapped if name not in skipped]
        super()._create_lora_modules()
        self.state = StepState(stacks=StackCache(self._preft_options.stack_bytes))
        self._linear_site, self._block_site = LinearSite, BlockSite
        if self._preft_options.compiled:
            self._linear_site, self._block_site = compiled.CompiledLinearSite, compiled.CompiledBlockSite
            compiled.bind(self.state)
        infos: list[ModuleInfo] = []
        for name, module in self.modules.items():
            if name.endswith(_HEAD):
                infos.append(self._wire_head(len(infos), name))
            else:
                infos.append(self._wire_linear(len(infos), name, module))
        for name, layer in list(self.model.named_modules()):
            residual = residual_of(type(layer))
            if residual is not None:
                infos.append(self._wire_block(len(infos), name, layer, residual))
        if not infos:
            raise UnsupportedError(
                f"No module of `{type(self.model).__name__}` takes adapters",
                got="a model without LoRA support in vLLM, and with decoder layers that preft does not know",
                hint="serve adapters on it with `--engine hf`",
            )
        self.infos = tuple(infos)

    def _wire_linear(self, index: int, name: str, module: Any) -> ModuleInfo:
        parts = tuple(self.packed_modules.get(name, (name,)))
        widths = tuple(module.output_slices) if len(parts) > 1 else (_full_output(module),)
        if len(parts) > 1:
            widths = _full_slices(module, widths)
        self._connect(index, module)
        return ModuleInfo(index, name, SiteKind.LINEAR, parts, _full_input(module), widths, module)

    def _connect(self, index: int, module: Any) -> None:
        """Gives a module that vLLM wrapped what it asks for its update."""
        module.set_mapping(self._linear_site(self.state, index))
        if not self._preft_options.compiled:
            skip_without_rows(module, self.state)

    def _wire_head(self, index: int, name: str) -> ModuleInfo:
        processor = next(found for found in self.model.modules() if isinstance(found, LogitsProcessorWithLoRA))
        processor.set_mapping(LogitsSite(self.state, index))
        sizes = (processor.hidden_size, processor.base_layer.org_vocab_size)
        return ModuleInfo(index, name, SiteKind.LINEAR, (name,), sizes[0], (sizes[1],), None)

    def _wire_block(self, index: int, name: str, layer: nn.Module, residual: Residual) -> ModuleInfo:
        install_block_site(layer, self._block_site(self.state, index, residual))
        hidden = self.model.config.get_text_config().hidden_size
        return ModuleInfo(index, name, SiteKind.BLOCK, (name,), hidden, (hidden,), None)

    def renamer(self) -> Callable[[str], str]:
        """From a module path in the Hugging Face model to the one in vLLM's."""
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        if mapper is None:
            return lambda path: path
        renames = mapper.get_rename_mapper()
        return lambda path: renames._map_name(path) or path

    def why_refused(self, path: str, kind: SiteKind) -> str | None:
        """Why a module of the running model takes no site of a kind, or None if there is no such module."""
        if kind is SiteKind.LINEAR:
            return linear_refusal(self.model, path)
        module = dict(self.model.named_modules()).get(path)
        return unknown_layer(type(module)) if module is not None else None


class PreftWorkerManager(LRUCacheWorkerLoRAManager):
    """vLLM's worker-side manager, with every stock way to load an adapter closed."""

    _manager_cls = PreftModelManager

    def create_lora_manager(self, model: nn.Module, vllm_config: VllmConfig) -> Any:
        """Wraps a model, also one that vLLM does not list for LoRA."""
        declare_lora(model)
        return super().create_lora_manager(model, vllm_config)

    @property
    def model_manager(self) -> PreftModelManager:
        """The manager of the wrapped model."""
        manager: PreftModelManager = self._adapter_manager
        return manager

    def _load_adapter(self, lora_request: LoRARequest) -> Any:
        raise UnsupportedError(
            "vLLM's own LoRA loading is closed in a preft engine", hint="register the adapter with preft"
        )

    def add_adapter(self, adapter_request: Any) -> bool:
        """Refuses: adapters enter by the scheduler's orders only."""
        self._load_adapter(adapter_request)
        return False

    def set_active_adapters(self, requests: Iterable[Any], mapping: Any | None) -> None:
        """Refuses a step that vLLM mapped by request instead of by position."""
        if list(requests):
            self._load_adapter(next(iter(requests)))


class _Unwired:
    """Stands in while modules are wrapped; a module that kept it would fail loudly at its first use."""


def _full_input(module: Any) -> int:
    """Width of a module's whole input: a row-parallel module holds a slice of it on each rank."""
    base = module.base_layer
    return int(getattr(base, "input_size", module.input_size))


def _full_output(module: Any) -> int:
    base = module.base_layer
    return int(base.output_size)


def _full_slices(module: Any, local: tuple[int, ...]) -> tuple[int, ...]:
    """Whole widths of a fused module's parts. Query heads are split over ranks; KV heads may be replicated."""
    base = module.base_layer
    if hasattr(base, "total_num_kv_heads"):
        kv_width = base.total_num_kv_heads * base.head_size
        return (base.total_num_heads * base.head_size, kv_width, kv_width)
    return tuple(int(size) for size in getattr(base, "output_sizes", local))


def tensor_dtype(vllm_config: VllmConfig) -> torch.dtype:
    """Type in which adapters are used: the engine's LoRA type, which follows the model's."""
    assert vllm_config.lora_config is not None
    dtype: torch.dtype = vllm_config.lora_config.lora_dtype
    return dtype

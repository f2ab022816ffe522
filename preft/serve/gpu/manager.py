"""vLLM's adapter managers on GPUs: its padded stacks for linear sites, tables of ours for block sites."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY

from preft.errors import EngineError, UnsupportedError
from preft.serve.backend.manager import PreftModelManager, PreftWorkerManager, tensor_dtype
from preft.serve.backend.packing import ModuleInfo
from preft.serve.backend.sites import PackedAdapter, install_block_site
from preft.serve.gpu.block_op import BlockState, GraphBlockSite
from preft.serve.gpu.punica import PreftPunicaGPU
from preft.serve.gpu.step import NO_STEP, Step
from preft.types import SiteKind
from preft_kernels.packed import PackedSite
from preft_kernels.segments import PlanBuffer
from preft_kernels.tables import BlockTables

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from preft.serve.backend.decoder_layers import Residual


class PreftGPUModelManager(PreftModelManager):
    """Wraps the modules that take adapters; slots are device memory.

    Attributes:
        punica: Serves the linear sites.
        blocks: What the block sites share.
        tables: By module index, the tables of block sites.
    """

    punica: PreftPunicaGPU
    blocks: BlockState
    tables: dict[int, BlockTables]

    def __init__(self, *args: Any, vllm_config: VllmConfig, **kwargs: Any) -> None:
        self._preft_dtype = tensor_dtype(vllm_config)
        super().__init__(*args, vllm_config=vllm_config, **kwargs)

    def _init_punica_wrapper(self, max_num_batched_tokens: int, vllm_config: VllmConfig) -> None:
        if self._preft_options.lm_head:
            raise UnsupportedError("Adapters at the head are not served on GPUs yet", hint="start without `--lm-head`")
        self.supports_mm = False
        self.tables = {}
        self.blocks = BlockState(PlanBuffer(max_num_batched_tokens, self.lora_slots, self.device))
        self.punica = PreftPunicaGPU(
            max_num_batched_tokens, self.max_num_seqs, self.device, lora_config=self.lora_config
        )
        self.punica_wrapper_mapping = {DEFAULT_LANGUAGE_WRAPPER_KEY: self.punica}

    def _connect(self, index: int, module: Any) -> None:
        """Always through vLLM's wrapper: which rows are adapted is on the device, and a graph keeps every branch."""
        module.set_mapping(self.punica)

    def _wire_block(self, index: int, name: str, layer: nn.Module, residual: Residual) -> ModuleInfo:
        width = self.model.config.get_text_config().hidden_size
        tables = BlockTables.allocate(
            self.lora_slots, self._preft_options.max_rank, width, self._preft_dtype, self.device
        )
        install_block_site(layer, GraphBlockSite(self.blocks, name, tables, residual))  # type: ignore[arg-type]
        self.tables[index] = tables
        return ModuleInfo(index, name, SiteKind.BLOCK, (name,), width, (width,), None)

    def set_step(self, step: Step, *, launch: bool | None = None) -> None:
        """Sets what the next forward pass works on.

        Args:
            step: Decided rows.
            launch: Whether kernels are launched; by default if the step has adapters.
        """
        launch = bool(step.num_adapters) if launch is None else launch
        self.punica.set_step(step, launch=launch)
        if launch:
            self.blocks.plan.upload(step.plan)
        self.blocks.launch = launch

    def fill_slot(self, adapter: PackedAdapter, slot: int) -> None:
        """Copies an adapter's numbers into a slot of every module, and empties the slot where it has none."""
        if slot >= self.lora_slots:
            raise EngineError("There is no slot of this number", got=str(slot), accepted=f"below {self.lora_slots}")
        for info in self.infos:
            site = adapter.sites[info.index]
            if info.kind is SiteKind.BLOCK:
                fill_block(self.tables[info.index], slot, site)
            else:
                fill_linear(info.module, slot, site)

    def close(self) -> None:
        """Frees the sites' names for another engine in this process."""
        self.set_step(NO_STEP)
        self.blocks.is_closed = True


class PreftGPUWorkerManager(PreftWorkerManager):
    """vLLM's worker-side manager, over ours for GPUs."""

    _manager_cls = PreftGPUModelManager

    @property
    def model_manager(self) -> PreftGPUModelManager:
        """The manager of the wrapped model."""
        manager: PreftGPUModelManager = self._adapter_manager  # type: ignore[assignment]
        return manager


def fill_block(tables: BlockTables, slot: int, site: PackedSite | None) -> None:
    """Copies one block site into a slot of its tables, or empties the slot."""
    if site is None:
        tables.clear(slot)
        return
    (part,) = site.parts
    tables.set(slot, site.down_t.t(), site.bias, part.up_t)


def fill_linear(module: Any, slot: int, site: PackedSite | None) -> None:
    """Copies one linear site into a slot of vLLM's stacks, or empties the slot.

    vLLM's kernels read every slot at the stacks' own rank, so what lies beyond the adapter's must be zero.

    Args:
        module: vLLM's wrapped module, with `lora_a_stacked` [slots, 1, rank, K] and `lora_b_stacked` [slots, 1, N,
            rank] for each slice.
        slot: Its number.
        site: The adapter's numbers here, sliced for this rank.

    Raises:
        EngineError: A part's columns are not a slice of the module, or it has a bias, which vLLM's kernels do not add.
    """
    module.reset_lora(slot)
    if site is None:
        return
    if site.bias is not None:
        raise EngineError("A linear site with a bias is not served on GPUs")
    starts = {sum(module.output_slices[:place]): place for place in range(len(module.output_slices))}
    for part in site.parts:
        place = starts.get(part.column)
        if place is None or part.up_t.shape[1] != module.output_slices[place]:
            raise EngineError(
                "A part of an adapter is not a slice of its module",
                got=f"columns {part.column} to {part.column_stop}",
                accepted=f"slices of {tuple(module.output_slices)}",
            )
        down = site.down_t[:, part.rank_start : part.rank_stop].t()
        rank = down.shape[0]
        module.lora_a_stacked[place][slot, 0, :rank].copy_(down, non_blocking=True)
        module.lora_b_stacked[place][slot, 0, :, :rank].copy_(part.up_t.t(), non_blocking=True)

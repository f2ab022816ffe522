"""The two adapted layers: a LoRA layer of PEFT's and a decoder block's update, both gated by position.

Both are tuner layers in PEFT's sense, so that its `set_adapter` and `disable_adapter` act on them as on its own. A
layer asks its gate (see `preft.tuners.gate`) which tokens of the running forward pass are adapted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from preft.errors import BoundaryUnknownError, UnsupportedError
from preft.tuners.masks import StepMask

if TYPE_CHECKING:
    from peft import LoraConfig


class Gate(Protocol):
    """What a layer asks; see `preft.tuners.gate`."""

    def step(self, *, is_head: bool) -> StepMask:
        """Which tokens of the running forward pass are adapted."""


def merge_refused() -> UnsupportedError:
    """The error of every attempt to merge."""
    return UnsupportedError(
        "A prefill-only adapter cannot be merged into the base weights",
        got="a request to merge",
        accepted="the adapter beside an unchanged base",
        hint="merged weights would act on generated tokens too; for an all-token adapter that is what you want: "
        "`preft export ADAPTER DST --format peft --as-all-token`, then merge with PEFT",
    )


class GatedVariant(LoraVariant):
    """LoRA that acts on the adapted tokens only."""

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        """Adds nothing to the layer."""

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        """Refuses."""
        raise merge_refused()

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: torch.Tensor) -> None:
        """Refuses."""
        raise merge_refused()

    @staticmethod
    def unmerge(module: Any, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        """Refuses."""
        raise merge_refused()

    @staticmethod
    def forward(module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """`result`, plus the update at adapted tokens; no adapted token, no matrix product."""
        step: StepMask = module.current_step()
        if not step.any:
            return result
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        low = step.only(down(module.lora_dropout[active_adapter](x)))
        delta: torch.Tensor = up(low) * module.scaling[active_adapter]
        return result + delta


class GatedLinear(LoraLinear):
    """A PEFT LoRA layer over `nn.Linear` or `Conv1D` that acts by position.

    Attributes:
        preft_gate: Decides which tokens are adapted; set by `PositionGate.bind`.
        preft_is_head: Whether the layer stands outside the decoder blocks, as the output head does.
    """

    preft_gate: Gate | None = None
    preft_is_head: bool = False

    def resolve_lora_variant(self, *, config: LoraConfig, **kwargs: Any) -> LoraVariant:
        """The gated variant; a configuration that asks for another one is refused."""
        other = super().resolve_lora_variant(config=config, **kwargs)
        if other is not None:
            raise UnsupportedError(
                "This LoRA variant cannot act by position",
                got=type(other).__name__,
                accepted="plain LoRA",
                hint="leave the variant's options out of the configuration",
            )
        return GatedVariant()

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuses: merged weights would act on generated tokens too."""
        raise merge_refused()

    def current_step(self) -> StepMask:
        """Which tokens of the running forward pass are adapted."""
        return _gate_of(self).step(is_head=self.preft_is_head)


class GatedBlock(nn.Module, BaseTunerLayer):
    """The update of a decoder block's output: `h + up(down(h))` at adapted tokens, `down` with a bias.

    It lives inside the block as a child module and acts through a forward hook, so gradient checkpointing recomputes
    it together with the block.

    Args:
        features: Width of the residual stream.
    """

    adapter_layer_names = ("preft_down", "preft_up")
    other_param_names = ()

    preft_gate: Gate | None = None
    preft_is_head: bool = False

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features
        self.preft_down = nn.ModuleDict()
        self.preft_up = nn.ModuleDict()
        self.merged_adapters: list[str] = []

    def add_adapter(self, name: str, down: nn.Module, up: nn.Module) -> None:
        """Adds an adapter.

        Args:
            name: Its name.
            down: Maps [..., features] to [..., R], bias included.
            up: Maps [..., R] to [..., features].
        """
        self.preft_down[name] = down
        self.preft_up[name] = up

    def get_base_layer(self) -> nn.Module:
        """Refuses: the update wraps nothing."""
        raise UnsupportedError("A block's update has no base layer of its own")

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuses: a block's update cannot be folded into any weight."""
        raise merge_refused()

    def unmerge(self) -> None:
        """Does nothing, since nothing was merged."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The block's output [B, T, D] with the active adapter's update."""
        names = [name for name in adapters_in_use(self) if name in self.preft_down]
        if not names:
            return hidden
        step = _gate_of(self).step(is_head=False)
        if not step.any:
            return hidden
        result = hidden
        for name in names:
            down, up = self.preft_down[name], self.preft_up[name]
            result = result + up(step.only(down(hidden.to(next(down.parameters()).dtype))))
        return result.to(hidden.dtype)

    def on_block_output(self, _block: nn.Module, _args: Any, output: Any) -> Any:
        """Forward hook of the block."""
        if isinstance(output, tuple):
            return (self(output[0]), *output[1:])
        return self(output)


GatedLayer = GatedLinear | GatedBlock


def adapters_in_use(layer: GatedLayer) -> list[str]:
    """Names of the adapters that the layer would apply."""
    return [] if layer._disable_adapters else list(BaseTunerLayer.active_adapters.fget(layer))


def _gate_of(layer: GatedLayer) -> Gate:
    if layer.preft_gate is None:
        raise BoundaryUnknownError(
            "An adapted layer has no gate, so nothing can tell it which tokens are adapted",
            hint="call `PositionGate(model).bind()` after adding layers",
        )
    return layer.preft_gate

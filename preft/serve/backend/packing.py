"""From an adapter file to what this worker's modules use: renamed, sliced for this rank, joined, scaled, cast.

Strict: every site of the manifest must land on exactly one part of one module, with exactly its shape. Runs on the
loader's thread, never inside a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from preft.adapters.adapter import Adapter
from preft.errors import AdapterError
from preft.serve.backend.sites import PackedAdapter
from preft.types import Site, SiteKind
from preft_kernels.packed import PackedSite, UpPart

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModuleInfo:
    """One module of the running model that takes adapters.

    Attributes:
        index: Its place in `PackedAdapter.sites`.
        name: Its path in vLLM's model.
        kind: Linear (the head included) or block.
        parts: Paths of the checkpoint's modules that it fuses, in output order; itself where it fuses none.
        in_features: Width of its whole input, over all ranks.
        out_features: Width of each part's whole output, over all ranks.
        module: The wrapped module, for slicing to this rank; None for blocks and the head, which are whole on each.
    """

    index: int
    name: str
    kind: SiteKind
    parts: tuple[str, ...]
    in_features: int
    out_features: tuple[int, ...]
    module: nn.Module | None


class Packer:
    """Packs adapters for one model on one rank.

    Args:
        modules: The modules that take adapters.
        rename: From a path in the Hugging Face model to the path in vLLM's model.
        dtype: Of the numbers in use.
        max_rank: Largest rank accepted.
        why_refused: Why a module, by its path in vLLM's model, takes no site of a kind; None if nothing is known.
    """

    def __init__(
        self,
        modules: Sequence[ModuleInfo],
        rename: Callable[[str], str],
        dtype: torch.dtype,
        max_rank: int,
        why_refused: Callable[[str, SiteKind], str | None] = lambda _path, _kind: None,
    ) -> None:
        self.modules = tuple(modules)
        self.dtype = dtype
        self.max_rank = max_rank
        self._rename = rename
        self._why_refused = why_refused
        self._where = {
            (part, module.kind): (module, position) for module in modules for position, part in enumerate(module.parts)
        }

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """Packs one adapter.

        Raises:
            AdapterError: A site has no module here, another shape than its module, too large a rank, or numbers that
                overflow in the engine's number type.
        """
        manifest = adapter.manifest
        manifest.require_rank(self.max_rank)
        by_module: dict[int, dict[int, Site]] = {}
        for site in manifest.sites:
            module, position = self._resolve(site)
            by_module.setdefault(module.index, {})[position] = site
        sites: list[PackedSite | None] = [None] * len(self.modules)
        for index, members in by_module.items():
            sites[index] = self._pack_module(adapter, self.modules[index], members)
        return PackedAdapter(adapter.digest, tuple(sites), sum(site.num_bytes for site in sites if site is not None))

    def _resolve(self, site: Site) -> tuple[ModuleInfo, int]:
        found = self._where.get((self._rename(site.path), site.kind))
        if found is None:
            reason = self._why_refused(self._rename(site.path), site.kind)
            if reason is not None:
                raise AdapterError(
                    f"The running model takes no {site.kind} site at `{site.path}`",
                    got=reason,
                    accepted=_examples(self.modules),
                    hint="serve it with `--engine hf`, or train an adapter without sites there",
                )
            is_head = site.path.endswith("lm_head")
            raise AdapterError(
                f"The running model has no module for the site `{site.path}`",
                got=f"a {site.kind} site",
                accepted=None if is_head else _examples(self.modules),
                hint="start the engine with `--lm-head`, so that the head takes adapters"
                if is_head
                else "the model may not support adapters there; see `preft inspect`",
            )
        module, position = found
        expected = (module.in_features, module.out_features[position])
        if (site.in_features, site.out_features) != expected:
            raise AdapterError(
                f"The site `{site.path}` does not fit the running model",
                got=f"{site.in_features} -> {site.out_features}",
                accepted=f"{expected[0]} -> {expected[1]}",
            )
        return found

    def _overflow(self, site: Site, largest: float) -> AdapterError:
        return AdapterError(
            f"The numbers of the site `{site.path}` do not fit the engine's number type",
            got=f"values up to {largest:.3g}, scale included",
            accepted=f"the range of {str(self.dtype).removeprefix('torch.')}",
            hint="start the engine with `--dtype bfloat16` or `--dtype float32`",
        )

    def _pack_module(self, adapter: Adapter, module: ModuleInfo, members: dict[int, Site]) -> PackedSite:
        downs: list[torch.Tensor] = []
        biases: list[torch.Tensor] = []
        parts: list[UpPart] = []
        columns = _local_columns(module)
        rank_start = 0
        for position in sorted(members):
            site = members[position]
            numbers = adapter.site_tensors(site)
            # Scaled in float32 before the cast, so that rounding happens once.
            down, up = numbers.down.float(), numbers.up.float() * site.scale
            down, up = _slice_for_rank(module, position, down, up)
            downs.append(down)
            if numbers.bias is not None:
                biases.append(numbers.bias.float())
            up_t = up.t().to(self.dtype).contiguous()
            if not bool(up_t.isfinite().all()) or not bool(down.to(self.dtype).isfinite().all()):
                raise self._overflow(site, max(float(down.abs().max()), float(up.abs().max())))
            parts.append(UpPart(columns[position], rank_start, up_t))
            rank_start += site.rank
        down_t = torch.cat(downs).t().to(self.dtype).contiguous()
        bias = torch.cat(biases).to(self.dtype) if biases else None
        return PackedSite.build(down_t, bias, parts)


def _local_columns(module: ModuleInfo) -> list[int]:
    """First output column of each part on this rank."""
    widths: Sequence[int] = module.out_features
    if module.module is not None and len(module.parts) > 1:
        widths = module.module.output_slices  # type: ignore[assignment]
    return [sum(widths[:position]) for position in range(len(module.parts))]


def _slice_for_rank(
    module: ModuleInfo, position: int, down: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of one site, by the wrapped module's own slicing."""
    wrapped: Any = module.module
    if wrapped is None or wrapped.tp_size == 1:
        return down, up
    if len(module.parts) == 1:
        return wrapped.slice_lora_a(down), wrapped.slice_lora_b(up)
    only_down = [down if place == position else None for place in range(len(module.parts))]
    only_up = [up if place == position else None for place in range(len(module.parts))]
    return wrapped.slice_lora_a(only_down)[position], wrapped.slice_lora_b(only_up)[position]


def _examples(modules: Sequence[ModuleInfo], limit: int = 8) -> str:
    linear = [part for module in modules for part in module.parts if module.kind is SiteKind.LINEAR]
    names = dict.fromkeys(part.rpartition(".")[2] for part in linear)
    blocks = "decoder blocks" if any(module.kind is SiteKind.BLOCK for module in modules) else ""
    named = "modules named " + ", ".join(list(names)[:limit]) if names else ""
    return " and ".join(part for part in (named, blocks) if part) or "no module of this model"

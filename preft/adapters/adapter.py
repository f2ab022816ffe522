"""An adapter in memory: a manifest, its tensors, and the proof that they belong together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from preft.adapters.digest import adapter_digest
from preft.adapters.manifest import Manifest
from preft.errors import AdapterError
from preft.types import Site, SiteKind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SiteTensors:
    """The numbers of one site.

    Attributes:
        down: [rank, in_features].
        up: [out_features, rank].
        bias: [rank], or None.
    """

    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor | None

    def is_zero(self) -> bool:
        """Whether the update is zero whatever it reads."""
        constant = self.bias is not None and bool(self.bias.any())
        return not bool(self.up.any()) or not (bool(self.down.any()) or constant)


@dataclass(frozen=True)
class Adapter:
    """A validated adapter. Build one with `Adapter.build`, read one with `preft.adapters.store.load_adapter`.

    Attributes:
        manifest: What it is; `manifest.digest` is its identity.
        tensors: CPU tensors named `<site>.down`, `<site>.up`, `<site>.bias`; see `tensor_prefix`.
    """

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def build(cls, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> Adapter:
        """Checks that manifest and tensors agree exactly and computes the digest.

        Raises:
            AdapterError: A tensor is missing, unknown, of the wrong shape or type, or not finite.
        """
        _require_exact(manifest, tensors)
        digest = adapter_digest(manifest, tensors)
        return cls(replace(manifest, digest=digest), dict(tensors))

    @property
    def digest(self) -> str:
        """SHA-256 identity, 64 hexadecimal characters."""
        return self.manifest.digest

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def site_tensors(self, site: Site) -> SiteTensors:
        """The numbers of one of the manifest's sites."""
        prefix = tensor_prefix(site)
        return SiteTensors(
            self.tensors[f"{prefix}.down"], self.tensors[f"{prefix}.up"], self.tensors.get(f"{prefix}.bias")
        )

    def moves_nothing(self) -> bool:
        """Whether every update is exactly zero, as in an adapter that was never trained."""
        return all(site.scale == 0.0 or self.site_tensors(site).is_zero() for site in self.manifest.sites)


def tensor_prefix(site: Site) -> str:
    """Name prefix of a site's tensors: its path, plus `.block` for a block so that no two sites can collide."""
    return f"{site.path}.block" if site.kind is SiteKind.BLOCK else site.path


def expected_shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Every tensor name that the manifest calls for, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for site in manifest.sites:
        prefix = tensor_prefix(site)
        shapes[f"{prefix}.down"] = (site.rank, site.in_features)
        shapes[f"{prefix}.up"] = (site.out_features, site.rank)
        if site.has_bias:
            shapes[f"{prefix}.bias"] = (site.rank,)
    return shapes


def _require_exact(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    shapes = expected_shapes(manifest)
    missing, unknown = sorted(set(shapes) - set(tensors)), sorted(set(tensors) - set(shapes))
    if missing or unknown:
        parts = [f"missing {_first(missing)}"] * bool(missing) + [f"unknown {_first(unknown)}"] * bool(unknown)
        raise AdapterError("The adapter's tensors are not those its manifest lists", got="; ".join(parts))
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != shapes[name]:
            raise AdapterError(
                f"Tensor `{name}` has the wrong shape", got=str(tuple(tensor.shape)), accepted=str(shapes[name])
            )
        if dtype != manifest.dtype:
            raise AdapterError(f"Tensor `{name}` has the wrong dtype", got=dtype, accepted=manifest.dtype)
        bad = tensor.numel() - int(tensor.isfinite().sum())
        if bad:
            raise AdapterError(f"Tensor `{name}` holds values that are not finite", got=f"{bad} of {tensor.numel()}")


def _first(names: list[str], limit: int = 4) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"

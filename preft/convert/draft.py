"""What a reader of a foreign format hands over, and the base model it reads against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preft.adapters.fingerprint import BaseFingerprint
from preft.types import Site

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Base:
    """The base model of a conversion.

    Attributes:
        name: As the user or the adapter's configuration names it.
        folder: Its checkpoint.
        fingerprint: Its identity.
    """

    name: str
    folder: Path
    fingerprint: BaseFingerprint


@dataclass(frozen=True)
class Draft:
    """An adapter that has been read and checked against its base, but has no manifest yet.

    Attributes:
        sites: Sorted by path and kind.
        tensors: By the names that a manifest of these sites calls for, all of one type.
        notes: What was resolved or left out, for people.
        warnings: What the user should look at.
        facts: For the provenance.
    """

    sites: tuple[Site, ...]
    tensors: Mapping[str, torch.Tensor]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """Type of every tensor, as manifests spell it."""
        return str(next(iter(self.tensors.values())).dtype).removeprefix("torch.")

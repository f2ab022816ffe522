"""Copies of the base's embedding or head inside a PEFT checkpoint.

PEFT saves them whenever the configuration targets a head or an embedding, or when the vocabulary was resized. A copy
that equals the base's own is dropped; one that differs means that the adapter brings its own embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from preft.convert.draft import Base
from preft.convert.names import clean
from preft.errors import UnsupportedError
from preft.models.structure import ModelStructure

if TYPE_CHECKING:
    import torch

_LAYERS = ("lm_head", "embed_out", "embed_tokens", "wte", "embed_in", "word_embeddings", "output")


def is_saved_layer(raw: str) -> bool:
    """Whether a tensor's name is that of a copied embedding or head."""
    return _layer(raw) is not None


def require_unchanged(
    saved: Sequence[str], tensors: Mapping[str, torch.Tensor], structure: ModelStructure, base: Base
) -> list[str]:
    """Checks that every copy equals the base's own weight, and says that it was left out.

    Raises:
        UnsupportedError: A copy differs from the base's, or cannot be compared with it.
    """
    notes = []
    for raw in saved:
        own = _own_weight(_layer(raw) or "", structure, base)
        copy = tensors[raw]
        if own is None or own.shape != copy.shape or not _equal(own, copy):
            raise UnsupportedError(
                f"The adapter brings its own embedding or head, `{raw}`",
                got=f"shape {tuple(copy.shape)}, "
                + ("which the base has no weight to compare with" if own is None else "not the base's values"),
                accepted=f"the weights of `{base.name}`" + (f", shape {tuple(own.shape)}" if own is not None else ""),
                hint="save the changed model as a base of its own, or train again without resizing the vocabulary",
            )
        notes.append(f"`{raw}` equals the base's own weight and is left out")
    return notes


def _layer(raw: str) -> str | None:
    """The layer that a copy is of, such as `lm_head`, or None."""
    path = clean(raw).removesuffix(".weight").removesuffix(".base_layer")
    name = path.rpartition(".")[2]
    return name if raw.endswith(".weight") and name in _LAYERS else None


def _equal(own: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether one is the other up to the type that either was saved in."""
    import torch

    return torch.equal(own.to(copy.dtype), copy) or torch.equal(own, copy.to(own.dtype))


def _own_weight(layer: str, structure: ModelStructure, base: Base) -> torch.Tensor | None:
    """The base's weight of a layer, read from its files; a tied head is looked up as the embedding."""
    from safetensors import safe_open

    is_head = structure.head is not None and structure.head.rpartition(".")[2] == layer
    wanted = [layer]
    if structure.tied and is_head and structure.embedding is not None:
        wanted.append(structure.embedding.rpartition(".")[2])
    for name in wanted:
        for file in sorted(base.folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as handle:
                found = [key for key in handle.keys() if f".{key}".endswith(f".{name}.weight")]  # noqa: SIM118
                if len(found) == 1:
                    weight: torch.Tensor = handle.get_tensor(found[0])
                    return weight
    return None

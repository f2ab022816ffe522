"""pyreft checkpoints to block sites: DiReFT, LoReFT and their free and constant relatives.

pyreft records neither the positions nor the activation that a checkpoint was trained with. The positions must be
named; a linear activation is assumed, which is pyreft's own default, and the report says so.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from preft.adapters.adapter import tensor_prefix
from preft.convert.draft import Base, Draft
from preft.convert.pyreft_config import Intervention, read_interventions
from preft.convert.pyreft_tensors import Update, read_update
from preft.convert.weights import read_pickle
from preft.errors import AdapterError, BaseMismatchError, UnsupportedError
from preft.models.structure import ModelStructure, read_structure
from preft.types import Site, SiteKind

if TYPE_CHECKING:
    import torch

POSITIONS_REASON = (
    "pyreft trains on some prompt positions, such as the first and last few, and its checkpoints do not record which"
)
_MODEL_NAME = "pytorch_model.bin"


@dataclass(frozen=True)
class PyreftCheckpoint:
    """A pyreft checkpoint, read as far as it can be without its base.

    Attributes:
        folder: Where it lies.
        interventions: What it holds.
    """

    folder: Path
    interventions: tuple[Intervention, ...]


def read_pyreft(folder: Path) -> PyreftCheckpoint:
    """Reads what a checkpoint holds.

    Raises:
        FileError: A file is missing or cannot be read.
        AdapterError: It is damaged.
        UnsupportedError: It changes the base's own weights, or has an intervention that is not a low-rank update of
            a block's output.
    """
    interventions = read_interventions(folder)
    changed = read_pickle(folder / _MODEL_NAME) if (folder / _MODEL_NAME).is_file() else {}
    if changed:
        raise UnsupportedError(
            "The checkpoint changes weights of the base model itself",
            got=f"{len(changed)} tensors in `{_MODEL_NAME}`, such as `{next(iter(changed))}`",
            accepted="interventions alone",
            hint="save the changed model as a base of its own, and remove the file",
        )
    return PyreftCheckpoint(folder, interventions)


def convert_pyreft(checkpoint: PyreftCheckpoint, base: Base) -> Draft:
    """Converts a checkpoint against its base: one block site for each intervention.

    Raises:
        AdapterError: A file is damaged, or does not agree with the configuration.
        BaseMismatchError: The checkpoint was made for another base.
        UnsupportedError: The base has no list of decoder blocks.
    """
    structure = read_structure(base.folder)
    updates: dict[str, Update] = {}
    for intervention in checkpoint.interventions:
        path = _block_path(intervention, structure, base.name)
        updates[path] = read_update(intervention, structure.hidden_size, base.name)
    dtype = _common_dtype(list(updates.values()))
    sites: list[Site] = []
    tensors: dict[str, torch.Tensor] = {}
    for path, update in sorted(updates.items()):
        rank, width = update.down.shape
        site = Site(path, SiteKind.BLOCK, rank, width, width, 1.0, has_bias=update.bias is not None)
        sites.append(site)
        prefix = tensor_prefix(site)
        tensors[f"{prefix}.down"] = update.down.to(dtype).contiguous()
        tensors[f"{prefix}.up"] = update.up.to(dtype).contiguous()
        if update.bias is not None:
            tensors[f"{prefix}.bias"] = update.bias.to(dtype)
    return Draft(
        tuple(sites),
        tensors,
        notes=_notes(updates, dtype),
        warnings=_warnings(updates),
        facts={
            "format": "pyreft",
            "interventions": dict(Counter(found.kind.value for found in checkpoint.interventions)),
            "assumed_activation": "linear",
        },
    )


def _block_path(intervention: Intervention, structure: ModelStructure, base: str) -> str:
    if intervention.blocks not in (None, structure.block_list):
        raise AdapterError(
            "The checkpoint has an intervention on a module that is not a decoder block of the base",
            got=f"`{intervention.blocks}[{intervention.layer}]`",
            accepted=f"`{structure.block_list}[N]`",
            hint="name the base that it was trained on: `--base MODEL`",
        )
    if intervention.layer >= len(structure.blocks):
        raise BaseMismatchError(
            "The checkpoint was made for a base with more layers",
            got=f"an intervention on layer {intervention.layer}",
            accepted=f"0 to {len(structure.blocks) - 1}, as `{base}` has",
            hint="name the base that it was trained on: `--base MODEL`",
        )
    return structure.blocks[intervention.layer]


def _common_dtype(updates: list[Update]) -> torch.dtype:
    """The narrowest type that holds every number exactly; float32 where one was worked out."""
    import torch

    if any(update.is_computed for update in updates):
        return torch.float32
    parts = [part for update in updates for part in (update.down, update.up, update.bias) if part is not None]
    return functools.reduce(torch.promote_types, (part.dtype for part in parts))


def _notes(updates: dict[str, Update], dtype: torch.dtype) -> tuple[str, ...]:
    notes = [
        "a linear activation is assumed: pyreft checkpoints do not record `act_fn`, and linear is its default",
        "the positions are those that were given: pyreft checkpoints do not record them",
    ]
    held = str(dtype).removeprefix("torch.")
    narrow = sorted({update.source_dtype for update in updates.values()} - {held})
    if narrow:
        notes.append(
            f"the learned source is {' and '.join(narrow)} in the checkpoint and held as {held}; pyreft also computes "
            "with it in that type, preft in the model's"
        )
    return tuple(notes)


def _warnings(updates: dict[str, Update]) -> tuple[str, ...]:
    dead = {path: int((update.up == 0).all(0).sum()) for path, update in updates.items()}
    count, total = sum(dead.values()), sum(update.up.shape[1] for update in updates.values())
    if not count:
        return ()
    example = next(path for path, found in dead.items() if found)
    return (
        f"{count} of {total} directions of R are zero, such as in `{example}`, so they move nothing: weight decay on "
        "pyreft's orthogonal parametrisation does that without any error; train again with `weight_decay=0`",
    )

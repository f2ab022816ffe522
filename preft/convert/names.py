"""Tensor names in a PEFT checkpoint, and how they map to the modules of a base model.

PEFT writes `base_model.model.<module path>.lora_A.weight`. Frameworks around it add to that: a doubled prefix, a
wrapper's name inside the path, the adapter's name as an infix, or the path of the same decoder inside another class
(`language_model.` for a text model, or the reverse). What can mean only one module is resolved and reported; the rest
is refused, since a tensor that matches nothing would silently change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from preft.errors import AdapterError, UnsupportedError
from preft.models.structure import ModelStructure

PEFT_PREFIX = "base_model.model."
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_FACTOR = re.compile(r"(?P<path>.+)\.(?P<factor>lora_[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
_DECODER_HEADS = (
    "",
    "model.",
    "model.model.",
    "language_model.",
    "language_model.model.",
    "model.language_model.",
    "model.language_model.model.",
    "text_model.",
    "text_model.model.",
    "model.text_model.",
    "transformer.",
    "decoder.",
    "model.decoder.",
    "gpt_neox.",
    "backbone.",
)
"""What may stand before a decoder's list of blocks in classes that wrap the same decoder."""


@dataclass(frozen=True)
class TensorName:
    """A factor's name, taken apart.

    Attributes:
        raw: The name in the file.
        path: Module path as PEFT matched it, without prefixes and wrappers.
        factor: `lora_A` or `lora_B`.
        adapter: The adapter's name where it is part of the tensor's, else None.
    """

    raw: str
    path: str
    factor: str
    adapter: str | None


def parse_factor(raw: str) -> TensorName | None:
    """Takes a factor's name apart; None if it names something else."""
    match = _FACTOR.fullmatch(raw)
    return TensorName(raw, clean(match["path"]), match["factor"], match["adapter"]) if match else None


def clean(path: str) -> str:
    """A module path without PEFT's prefix, however often it is there, and without the names of wrappers."""
    path = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
    while path.startswith((PEFT_PREFIX, "module.")):
        path = path.removeprefix(PEFT_PREFIX).removeprefix("module.")
    return path


@dataclass(frozen=True)
class PathMap:
    """How the paths in a checkpoint became paths in the base.

    Attributes:
        paths: Path in the checkpoint to path in the base.
        source_blocks: Path of the block list as the checkpoint has it, or None if it is the base's own.
        source_head: Path of the output head as the checkpoint has it, or None if it names none.
    """

    paths: Mapping[str, str]
    source_blocks: str | None
    source_head: str | None


def map_paths(names: Sequence[TensorName], structure: ModelStructure, base: str) -> PathMap:
    """Finds the base's module for every path.

    Raises:
        AdapterError: A path is not in the base and nothing unambiguous can be made of it.
        UnsupportedError: It belongs to something that cannot carry a site.
    """
    raw_of = {name.path: name.raw for name in reversed(names)}
    if all(path in structure.modules for path in raw_of):
        head = structure.head if structure.head in raw_of else None
        return PathMap({path: path for path in raw_of}, None, head)
    _, _, list_name = structure.block_list.rpartition(".")
    block = re.compile(rf"(?P<front>(?:[^.]+\.)*?){list_name}\.(?P<rest>\d+\..+)")
    mapped: dict[str, str] = {}
    fronts: set[str] = set()
    source_head = None
    for path in raw_of:
        match = block.fullmatch(path)
        place = f"{structure.block_list}.{match['rest']}" if match else ""
        if match and match["front"] in _DECODER_HEADS and place in structure.modules:
            mapped[path] = place
            fronts.add(match["front"])
        elif structure.head is not None and _is_head(path, structure.head):
            mapped[path], source_head = structure.head, path
    unresolved = [raw_of[path] for path in raw_of if path not in mapped]
    if unresolved:
        raise _unresolved(unresolved, structure, base)
    if len(fronts) > 1:
        raise AdapterError(
            "The adapter's tensors name one decoder in several ways, so they cannot be told apart",
            got=", ".join(sorted(f"`{front}{list_name}`" for front in fronts)),
            accepted=f"one prefix throughout, such as `{structure.block_list}`",
        )
    return PathMap(mapped, f"{fronts.pop()}{list_name}" if fronts else None, source_head)


def _is_head(path: str, head: str) -> bool:
    front, _, last = path.rpartition(".")
    return last == head.rpartition(".")[2] and (f"{front}." if front else "") in _DECODER_HEADS


def _unresolved(raw: Sequence[str], structure: ModelStructure, base: str) -> AdapterError | UnsupportedError:
    listed = first_names(raw)
    if any(".experts." in name for name in raw):
        return UnsupportedError(
            "The adapter has tensors for single experts of a mixture, which are not supported",
            got=listed,
            accepted="sites in attention and in linear modules that every token passes",
            hint="train again without the experts among `target_modules`",
        )
    example = next((path for path in structure.modules if path.startswith(f"{structure.blocks[0]}.")), "")
    return AdapterError(
        "The adapter has tensors for modules that the base model does not have",
        got=listed,
        accepted=f"modules of `{base}`, {len(structure.blocks)} blocks such as `{example}`",
        hint="name the base that the adapter was trained on: `--base MODEL`",
    )


def first_names(names: Sequence[str], limit: int = 3) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(f"`{name}`" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"

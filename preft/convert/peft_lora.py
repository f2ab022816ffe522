"""PEFT LoRA folders: every tensor accounted for, every site at exactly the rank and scale that PEFT gives it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preft.adapters.jsonfile import parse_json_object
from preft.convert import saved_layers
from preft.convert.draft import Base, Draft
from preft.convert.lora_fields import require_supported
from preft.convert.names import PEFT_PREFIX, PathMap, TensorName, clean, first_names, map_paths, parse_factor
from preft.convert.settings import LoraSettings
from preft.convert.targets import Wrapped, default_targets, under_source_names, wrapped_modules
from preft.convert.weights import PICKLE_NAME, read_weights
from preft.errors import AdapterError, BaseMismatchError, FileError, UnsupportedError
from preft.models.structure import ModelStructure, ModuleKind, build_meta_model, structure_of
from preft.types import Site, SiteKind

if TYPE_CHECKING:
    import torch

CONFIG_NAME = "adapter_config.json"
_MAX_CONFIG_BYTES = 64 << 20
_VARIANT_TENSORS = {
    "lora_embedding_": "LoRA on an embedding, which has no linear input",
    "lora_magnitude_vector": "DoRA, which rescales the base weights",
    "lora_velora": "VeLoRA's training state; remove these tensors and `velora_config`",
    "lora_monteclora": "MonteCLoRA's training state; remove these tensors and `monteclora_config`",
    "lora_diag": "KaSA, which truncates the base weights",
    "modules_to_save": "whole modules that replace the base's",
    "trainable_tokens_": "rows that replace the embedding's",
}


@dataclass(frozen=True)
class PeftLora:
    """A PEFT LoRA folder, read but not yet matched to a base.

    Attributes:
        folder: Where it lies.
        config: The parsed `adapter_config.json`.
        settings: The part of it that decides sites, ranks and scales.
        tensors: By the names in the file.
        file: Name of the file that held them.
    """

    folder: Path
    config: Mapping[str, Any]
    settings: LoraSettings
    tensors: Mapping[str, torch.Tensor]
    file: str

    @property
    def named_base(self) -> str | None:
        """The base that the configuration names, with its revision, or None."""
        name, revision = self.config.get("base_model_name_or_path"), self.config.get("revision")
        if not isinstance(name, str) or not name:
            return None
        return f"{name}@{revision}" if isinstance(revision, str) and revision and not Path(name).is_dir() else name


def read_peft_lora(folder: Path) -> PeftLora:
    """Reads a PEFT LoRA folder and refuses what its configuration makes inconvertible.

    Raises:
        FileError: A file is missing or cannot be read.
        AdapterError: A file is damaged.
        UnsupportedError: The configuration has a field that is refused or unknown.
    """
    path = folder / CONFIG_NAME
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_CONFIG_BYTES)
    except OSError as error:
        raise FileError(f"`{path}` cannot be read", got=error.strerror or str(error)) from None
    config = parse_json_object(data, str(path))
    if "peft_type" not in config:
        raise AdapterError(
            f"`{path}` is not a PEFT configuration", got="no `peft_type`", accepted="`peft_type`: `LORA`"
        )
    require_supported(config)
    settings = LoraSettings.from_config(config, str(path))
    tensors, file = read_weights(folder)
    return PeftLora(folder, config, settings, tensors, file)


def convert_peft_lora(source: PeftLora, base: Base) -> Draft:
    """Matches a PEFT LoRA to its base.

    Raises:
        AdapterError: Tensors, configuration and base do not agree exactly.
        BaseMismatchError: The shapes are those of another base.
        UnsupportedError: A site lies where none is supported.
    """
    model = build_meta_model(base.folder)
    structure = structure_of(model)
    factors, saved = _sort_names(source.tensors)
    notes = saved_layers.require_unchanged(saved, source.tensors, structure, base)
    if not factors:
        raise AdapterError(
            "The adapter has no LoRA tensors, so it would do nothing",
            got=first_names(list(source.tensors)) or "an empty file",
            accepted="tensors named `...lora_A.weight` and `...lora_B.weight`",
        )
    path_map = map_paths(factors, structure, base.name)
    pairs = _pair(factors, path_map)
    _require_language_linear(pairs, structure)
    wrapped, remarks = _wrapped(source.settings, model, structure, path_map)
    _require_tied_head_alone(source.settings, pairs, structure)
    _require_same_sites(pairs, wrapped, source.settings)
    sites = tuple(_site(path, pairs[path], wrapped[path], source.tensors, structure, base) for path in sorted(pairs))
    dtype = _common_dtype(source.tensors, factors)
    tensors = {}
    for site in sites:
        for part, factor in (("down", "lora_A"), ("up", "lora_B")):
            tensors[f"{site.path}.{part}"] = source.tensors[pairs[site.path][factor].raw].to(dtype).contiguous()
    return Draft(
        sites=sites,
        tensors=tensors,
        notes=(*notes, *_notes(source, factors, path_map, structure)),
        warnings=tuple(remarks),
        facts={"format": "peft-lora", "peft_version": source.config.get("peft_version"), "file": source.file},
    )


Pair = Mapping[str, TensorName]


def _sort_names(tensors: Mapping[str, Any]) -> tuple[list[TensorName], list[str]]:
    """The factors, and copies of base modules that PEFT saved beside them; anything else is refused."""
    factors, saved, unknown = [], [], []
    for raw in sorted(tensors):
        factor = parse_factor(raw)
        if factor is not None:
            factors.append(factor)
        elif saved_layers.is_saved_layer(raw):
            saved.append(raw)
        else:
            unknown.append(raw)
    for raw in unknown:
        reason = next((reason for part, reason in _VARIANT_TENSORS.items() if part in raw), None)
        if reason is not None:
            raise UnsupportedError(f"The adapter holds `{raw}`: {reason}", accepted="`lora_A` and `lora_B` tensors")
        if raw.endswith(".bias"):
            raise UnsupportedError(
                f"The adapter holds a trained bias, `{raw}`",
                got=f"{sum(name.endswith('.bias') for name in unknown)} bias tensors",
                accepted="`lora_A` and `lora_B` tensors",
                hint="train again with `bias='none'` and `lora_bias=False`",
            )
    if unknown:
        raise AdapterError(
            "The adapter has tensors that are not understood",
            got=first_names(unknown),
            accepted="`<module>.lora_A.weight` and `<module>.lora_B.weight`",
        )
    adapters = sorted({name.adapter for name in factors if name.adapter is not None})
    if len(adapters) > 1 or (adapters and any(name.adapter is None for name in factors)):
        raise AdapterError(
            "The adapter's tensors carry the names of several adapters",
            got=", ".join(f"`{name}`" for name in adapters),
            accepted="one adapter to a file",
        )
    return factors, saved


def _pair(factors: Sequence[TensorName], path_map: PathMap) -> dict[str, dict[str, TensorName]]:
    """Factors by the base's module path; each module has both, once."""
    pairs: dict[str, dict[str, TensorName]] = {}
    for name in factors:
        slot = pairs.setdefault(path_map.paths[name.path], {})
        if name.factor in slot:
            raise AdapterError(
                "Two tensors stand for the same factor of one module",
                got=f"`{slot[name.factor].raw}` and `{name.raw}`",
                accepted="one `lora_A` and one `lora_B` a module",
            )
        slot[name.factor] = name
    for path, slot in pairs.items():
        for missing, other in (("lora_A", "lora_B"), ("lora_B", "lora_A")):
            if missing not in slot:
                raise AdapterError(
                    f"The adapter has no `{missing}` for `{path}`",
                    got=f"`{slot[other].raw}` alone",
                    accepted="both factors of each module",
                    hint="the file is incomplete; save the adapter again",
                )
    return pairs


def _require_language_linear(pairs: Mapping[str, Pair], structure: ModelStructure) -> None:
    for path, pair in pairs.items():
        raw = pair["lora_A"].raw
        if not structure.is_language(path):
            raise UnsupportedError(
                "The adapter has sites outside the language model, which are not supported",
                got=f"`{raw}`",
                accepted=f"modules below `{structure.decoder}`",
                hint="train again with the vision or audio modules in `exclude_modules`",
            )
        if ".experts." in path:
            raise UnsupportedError(
                "The adapter has sites in single experts of a mixture, which are not supported",
                got=f"`{raw}`",
                accepted="sites in attention and in linear modules that every token passes",
                hint="train again without the experts among `target_modules`",
            )
        if structure.modules[path].kind is ModuleKind.EMBEDDING:
            raise UnsupportedError(f"`{raw}` is LoRA on an embedding", accepted="linear modules")


def _wrapped(
    settings: LoraSettings, model: Any, structure: ModelStructure, path_map: PathMap
) -> tuple[dict[str, Wrapped], list[str]]:
    """What PEFT would wrap, by the base's paths."""
    source = path_map.source_blocks
    own_head = path_map.source_head in (None, structure.head)
    if source is None and own_head:
        return wrapped_modules(settings, model)
    source = source or structure.block_list
    if settings.target_modules is None:
        settings = replace(settings, target_modules=default_targets(model))
    head = None if settings.is_all_linear else (path_map.source_head or structure.head)
    found, remarks = wrapped_modules(settings, under_source_names(model, structure, source, head))
    back = {
        (structure.head or "") if path == head else f"{structure.block_list}{path.removeprefix(source)}": wrapped
        for path, wrapped in found.items()
    }
    return back, remarks


def _require_tied_head_alone(settings: LoraSettings, pairs: Mapping[str, Pair], structure: ModelStructure) -> None:
    if settings.ensure_weight_tying and structure.tied and structure.head is not None and structure.head in pairs:
        raise UnsupportedError(
            "This adapter's `ensure_weight_tying` ties the update of the head to the embedding of a tied base",
            got=f"`{pairs[structure.head]['lora_A'].raw}`",
            accepted="`ensure_weight_tying`: false, or no site on the head",
            hint="train again without the head among `target_modules`",
        )


def _require_same_sites(pairs: Mapping[str, Pair], wrapped: Mapping[str, Wrapped], settings: LoraSettings) -> None:
    """PEFT would leave modules at zero, or tensors unused, with no more than a warning; neither can be meant."""
    targets = settings.target_modules
    asked = targets if isinstance(targets, str) else f"{len(targets)} names" if targets else "PEFT's default"
    missing = sorted(set(wrapped) - set(pairs))
    if missing:
        raise AdapterError(
            "The adapter's configuration wraps modules that it has no tensors for",
            got=f"no tensors for {first_names(missing)}",
            accepted=f"tensors for all {len(wrapped)} modules that `target_modules` ({asked}) matches in the base",
            hint="the file is incomplete, or the adapter was trained on another base: `--base MODEL`",
        )
    extra = sorted(set(pairs) - set(wrapped))
    if extra:
        raise AdapterError(
            "The adapter has tensors for modules that its configuration does not wrap",
            got=first_names([pairs[path]["lora_A"].raw for path in extra]),
            accepted=f"tensors for the {len(wrapped)} modules that `target_modules` ({asked}) matches in the base",
            hint="PEFT would ignore these tensors; correct adapter_config.json",
        )


def _site(
    path: str,
    pair: Pair,
    wrapped: Wrapped,
    tensors: Mapping[str, torch.Tensor],
    structure: ModelStructure,
    base: Base,
) -> Site:
    """One site, after checking its tensors' shapes against the configuration and the base."""
    info = structure.modules[path]
    down, up = (tuple(tensors[pair[factor].raw].shape) for factor in ("lora_A", "lora_B"))
    for factor, shape, width, axis in (("lora_A", down, info.in_features, 1), ("lora_B", up, info.out_features, 0)):
        raw = pair[factor].raw
        if len(shape) != 2:
            raise AdapterError(f"Tensor `{raw}` is not a matrix", got=f"shape {shape}", accepted="two dimensions")
        if shape[axis] != width:
            raise BaseMismatchError(
                "The adapter was made for a base of another shape",
                got=f"`{raw}` of shape {shape}",
                accepted=f"width {width}, as `{path}` of `{base.name}` has",
                hint="name the base that the adapter was trained on: `--base MODEL`",
            )
        if shape[1 - axis] != wrapped.rank:
            raise AdapterError(
                f"Tensor `{raw}` has another rank than the configuration gives its module",
                got=f"rank {shape[1 - axis]}",
                accepted=f"rank {wrapped.rank}, by `r` and `rank_pattern`",
                hint="correct adapter_config.json: with the wrong rank the scale would be wrong too",
            )
    return Site(path, SiteKind.LINEAR, wrapped.rank, info.in_features, info.out_features, wrapped.scale, has_bias=False)


def _common_dtype(tensors: Mapping[str, torch.Tensor], factors: Sequence[TensorName]) -> torch.dtype:
    """The narrowest type that holds every factor exactly."""
    import torch

    return functools.reduce(torch.promote_types, (tensors[name.raw].dtype for name in factors))


def _notes(source: PeftLora, factors: Sequence[TensorName], path_map: PathMap, structure: ModelStructure) -> list[str]:
    notes = []
    if source.file == PICKLE_NAME:
        notes.append(f"read `{PICKLE_NAME}` as plain tensors; nothing in it was run")
    odd = [name for name in factors if name.raw.partition(f".{name.factor}.")[0] != PEFT_PREFIX + name.path]
    if odd:
        example = odd[0]
        written = example.raw.partition(f".{example.factor}.")[0]
        notes.append(f"tensor prefixes resolved: `{written}` is read as `{clean(written)}`")
    moved = [(path, place) for path, place in path_map.paths.items() if path != place]
    if moved:
        notes.append(f"module paths resolved: `{moved[0][0]}` is `{moved[0][1]}` in the base")
    adapters = {name.adapter for name in factors} - {None}
    if adapters:
        notes.append(f"tensor names carry the adapter's name `{adapters.pop()}`, which was removed")
    dtypes = sorted({str(source.tensors[name.raw].dtype).removeprefix("torch.") for name in factors})
    if len(dtypes) > 1:
        held = str(_common_dtype(source.tensors, factors)).removeprefix("torch.")
        notes.append(f"tensors of {' and '.join(dtypes)} are held as {held}, which is exact")
    conv = any(structure.modules[path].kind is ModuleKind.CONV1D for path in path_map.paths.values())
    if conv:
        notes.append("the base stores these weights transposed (Conv1D); the update acts on activations, unchanged")
    return notes

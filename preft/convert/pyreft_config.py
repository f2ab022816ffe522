"""The `config.json` beside a pyreft checkpoint: which interventions it holds, and where they sit.

pyreft's own loader imports whatever class the file names. Here a name is only ever compared with a short list; what is
not on it is refused, and so is every setting that would change the computation.

Source: stanfordnlp/pyvene `IntervenableModel.save` and `RepresentationConfig`, pyvene 0.1.0 to 0.1.8.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from preft.adapters.jsonfile import parse_json_object
from preft.errors import AdapterError, FileError, UnsupportedError

CONFIG_NAME = "config.json"
TENSOR_FILES = "intkey_*.bin"
MODULE = "pyreft.interventions"
BLOCK_OUTPUT = "block_output"

_REPRESENTATION = (
    "layer",
    "component",
    "unit",
    "max_number_of_units",
    "low_rank_dimension",
    "intervention_type",
    "intervention",
    "subspace_partition",
    "group_key",
    "intervention_link_key",
)
"""The leading fields of a representation. Later ones differ between releases; they mean sources, which pyreft lacks."""
_SHARED = "intervention_link_key"
"""Interventions with one key share their weights; each file holds them in full."""
_IRRELEVANT = frozenset(
    {
        "sorted_keys",
        "intervention_dimensions",
        "intervention_constant_sources",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "architectures",
        "_name_or_path",
        "dropout",
        "add_bias",
    }
)
"""Settings that change no number at inference, or that the tensors themselves show."""
_STRING_COMPONENT = re.compile(r"(?P<blocks>[A-Za-z_][\w.]*)\[(?P<index>\d{1,5})\]\.output")


class InterventionKind(StrEnum):
    """The intervention classes of pyreft that are a low-rank update of the residual stream."""

    DIREFT = "DireftIntervention"
    """h + R^T (W h + b), R orthogonal."""
    NODIREFT = "NodireftIntervention"
    """h + V^T (W h + b), V free."""
    LOREFT = "LoreftIntervention"
    """h + R^T (W h + b - R h), R orthogonal."""
    NOREFT = "NoreftIntervention"
    """h + V^T (W h + b - V h - c), V free."""
    CONSREFT = "ConsreftIntervention"
    """h + R^T (b - R h), R orthogonal."""
    LOBIREFT = "LobireftIntervention"
    """h + R^T b, R orthogonal."""


@dataclass(frozen=True)
class Intervention:
    """One intervention of a checkpoint.

    Attributes:
        kind: Its class.
        layer: Number of the decoder block whose output it changes.
        blocks: Path of the list of blocks where the configuration names the module itself, else None.
        rank: What the configuration says, or None.
        file: The file that holds its tensors.
    """

    kind: InterventionKind
    layer: int
    blocks: str | None
    rank: int | None
    file: Path


def read_interventions(folder: Path) -> tuple[Intervention, ...]:
    """Reads the configuration of a pyreft checkpoint and finds each intervention's file.

    Raises:
        FileError: The configuration or a tensor file is missing or cannot be read.
        AdapterError: The configuration is damaged, or does not agree with the files.
        UnsupportedError: It asks for something that is not a low-rank update of a block's output.
    """
    config = _read_config(folder)
    _require_known(config)
    representations, classes = config.get("representations"), config.get("intervention_types")
    if not isinstance(representations, list) or not isinstance(classes, list) or not representations:
        raise AdapterError(
            f"`{CONFIG_NAME}` lists no interventions",
            got=f"keys {sorted(config)[:8]}",
            accepted="`representations` and `intervention_types`, as `ReftModel.save` writes them",
        )
    if len(representations) != len(classes):
        raise AdapterError(
            f"`{CONFIG_NAME}` lists interventions and their classes in different numbers",
            got=f"{len(representations)} representations, {len(classes)} intervention types",
        )
    files = {path.name: path for path in sorted(folder.glob(TENSOR_FILES))}
    found = tuple(
        _intervention(_fields(representation), _kind(name), files)
        for representation, name in zip(representations, classes, strict=True)
    )
    _require_one_per_layer(found)
    unlisted = sorted(set(files) - {intervention.file.name for intervention in found})
    if unlisted:
        raise AdapterError(
            f"The checkpoint holds tensor files that `{CONFIG_NAME}` does not list", got=f"`{unlisted[0]}`"
        )
    return found


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    try:
        return parse_json_object(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise FileError(
            f"The pyreft checkpoint `{folder}` has no `{CONFIG_NAME}`, so nothing says what its tensors mean",
            accepted="a folder that `ReftModel.save` wrote",
            hint="pyreft's trainer writes tensors alone; load them in pyreft and call `save` on the model",
        ) from None
    except OSError as error:
        raise FileError(f"`{path}` cannot be read", got=error.strerror or str(error)) from None


def _require_known(config: Mapping[str, Any]) -> None:
    if config.get("mode", "parallel") != "parallel":
        raise UnsupportedError(
            "The checkpoint's interventions do not run in parallel", got=f"mode {config['mode']!r}"[:80]
        )
    activation = config.get("act_fn")
    if activation not in (None, "linear"):
        raise UnsupportedError(
            "The checkpoint's interventions have a non-linear activation",
            got=f"`act_fn` {activation!r}"[:80],
            accepted="`linear`: a low-rank update has none",
        )
    known = {"representations", "intervention_types", "mode", "act_fn", *_IRRELEVANT}
    unknown = sorted(set(config) - known)
    if unknown:
        raise UnsupportedError(
            f"`{CONFIG_NAME}` has settings that pyreft does not write, so what they change is not known",
            got=", ".join(f"`{key}`" for key in unknown[:4]),
            accepted="a checkpoint as `ReftModel.save` writes it",
            hint="remove a setting from the file if it changes nothing",
        )


def _kind(name: object) -> InterventionKind:
    """The intervention class of a name. Nothing is imported."""
    for kind in InterventionKind:
        if name in (f"<class '{MODULE}.{kind.value}'>", f"{MODULE}.{kind.value}"):
            return kind
    raise UnsupportedError(
        "The checkpoint names an intervention class that is not converted, and that is never imported",
        got=f"`{name!s}`"[:120],
        accepted=", ".join(kind.value for kind in InterventionKind) + f" of `{MODULE}`",
    )


def _fields(representation: object) -> dict[str, Any]:
    """A representation's settings by name; a null one is left out."""
    if isinstance(representation, Mapping):
        named = {str(key): value for key, value in representation.items()}
    elif isinstance(representation, list):
        later = [f"field {index}" for index in range(len(_REPRESENTATION), len(representation))]
        named = dict(zip([*_REPRESENTATION, *later], representation, strict=False))
    else:
        raise AdapterError(f"`{CONFIG_NAME}` has a representation that is not valid", got=repr(representation)[:80])
    return {key: value for key, value in named.items() if value is not None}


def _intervention(fields: dict[str, Any], kind: InterventionKind, files: Mapping[str, Path]) -> Intervention:
    layer, rank, units = (
        _count(fields.pop(key, None), key) for key in ("layer", "low_rank_dimension", "max_number_of_units")
    )
    component, unit = fields.pop("component", BLOCK_OUTPUT), fields.pop("unit", "pos")
    fields.pop(_SHARED, None)
    if fields:
        key, value = next(iter(fields.items()))
        raise UnsupportedError(
            f"The checkpoint has an intervention with a `{key}`, which is not supported",
            got=repr(value)[:80],
            accepted="interventions on whole positions, without subspaces, groups or sources",
        )
    if unit != "pos":
        raise UnsupportedError(
            "The checkpoint has an intervention on something other than positions",
            got=f"unit {unit!r}"[:80],
            accepted="unit `pos`",
        )
    match = _STRING_COMPONENT.fullmatch(component) if isinstance(component, str) else None
    if component != BLOCK_OUTPUT and match is None:
        raise UnsupportedError(
            "The checkpoint has an intervention on a component other than a block's output",
            got=f"`{component!s}`"[:80],
            accepted=f"`{BLOCK_OUTPUT}`",
            hint="train again on block outputs",
        )
    if match is None and layer is None:
        raise AdapterError(f"`{CONFIG_NAME}` has an intervention without a layer", got=f"component `{component}`")
    file = _file(layer, str(component), units, files)
    if match is not None:
        return Intervention(kind, int(match["index"]), match["blocks"], rank, file)
    assert layer is not None
    return Intervention(kind, layer, None, rank, file)


def _count(value: object, key: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise AdapterError(f"`{CONFIG_NAME}` has a `{key}` that is not valid", got=repr(value)[:80])
    return value


def _file(layer: int | None, component: str, units: int | None, files: Mapping[str, Path]) -> Path:
    """The tensor file of an intervention, by the names that pyvene has used over time."""
    names = []
    for separator in ("_", "."):
        part = component.replace(".", separator)
        for word in ("comp", "repr"):
            parts = [word, part, "unit", "pos", "nunit", str(units if units is not None else 1)]
            if "." not in component:
                parts = ["layer", str(layer), *parts]
            names.append(f"intkey_{separator.join(parts)}#0.bin")
    present = [name for name in names if name in files]
    if not present:
        raise FileError(
            f"The pyreft checkpoint has no tensors for the intervention on layer {layer} (`{component}`)",
            got=", ".join(f"`{name}`" for name in list(files)[:3]) or "no tensor file",
            accepted=f"`{names[0]}`",
        )
    return files[present[0]]


def _require_one_per_layer(found: Sequence[Intervention]) -> None:
    layer, count = Counter(intervention.layer for intervention in found).most_common(1)[0]
    if count > 1:
        raise UnsupportedError(
            "The checkpoint has several interventions on one layer, which cannot be told apart",
            got=f"{count} interventions on layer {layer}",
            accepted="one intervention a layer",
            hint="pyreft trains one for the first and one for the last positions unless `share_weights` is set, and "
            "the checkpoint does not record which is which; train again with `share_weights=True`",
        )

"""Settings as frozen dataclasses: filled from layers of plain values, checked, and each with the layer it came from.

A nested dataclass is a section; a field's dotted path is its key. Nothing unknown is passed over.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from preft.errors import UsageError

T = TypeVar("T")

DEFAULT = "default"


def setting(
    *, default: Any = dataclasses.MISSING, least: float | None = None, most: float | None = None, choices: Any = None
) -> Any:
    """A field with limits.

    Args:
        default: Its default; without one it must be given.
        least: Smallest number accepted.
        most: Largest number accepted.
        choices: The values accepted, or None for any of the type.
    """
    return dataclasses.field(default=default, metadata={"least": least, "most": most, "choices": choices})


@dataclass(frozen=True)
class Layer:
    """Settings from one place.

    Attributes:
        origin: Names the place in messages and provenance, such as `recipe sft.yaml` or `--set`.
        values: Nested plain values.
    """

    origin: str
    values: Mapping[str, Any]


def resolve(schema: type[T], layers: Sequence[Layer]) -> tuple[T, dict[str, str]]:
    """Fills a schema; a later layer wins over an earlier one, key by key.

    Args:
        schema: A frozen dataclass whose fields are sections or made by `setting`.
        layers: From the weakest to the strongest.

    Returns:
        The settings, and the origin of each by dotted key.

    Raises:
        UsageError: A key is unknown or missing, or a value is of the wrong type or out of range.
    """
    known = dict(_fields(schema))
    given: dict[str, Any] = {}
    origins = dict.fromkeys(known, DEFAULT)
    for layer in layers:
        for key, value in _flatten(layer, layer.values, known):
            given[key], origins[key] = value, layer.origin
    values = {}
    for key, (kind, field) in known.items():
        if key in given:
            values[key] = _checked(key, given[key], kind, field, origins[key])
        elif field.default is dataclasses.MISSING:
            raise UsageError(f"The recipe does not say `{key}`", hint=f"add it to the recipe, or `--set {key}=...`")
        else:
            values[key] = field.default
    return _build(schema, "", values), origins


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A recipe with the origin of every value.

    Attributes:
        recipe: The settings.
        origins: Origin of each by dotted key.
    """

    recipe: T
    origins: dict[str, str]

    def table(self) -> list[dict[str, Any]]:
        """One row a key: its value and its origin."""
        values = flat(self.recipe)
        return [{"key": key, "value": values[key], "origin": origin} for key, origin in self.origins.items()]


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """The values of settings by dotted key."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        key = f"{prefix}{field.name}"
        found.update(flat(value, f"{key}.") if dataclasses.is_dataclass(value) else {key: value})
    return found


def nested(key: str, value: Any) -> dict[str, Any]:
    """`{"a": {"b": value}}` of `a.b`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return typing.cast("dict[str, Any]", value)


def _fields(schema: type, prefix: str = "") -> Iterator[tuple[str, tuple[Any, dataclasses.Field]]]:
    kinds = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind = kinds[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _fields(typing.cast(type, kind), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", (kind, field)


def _flatten(
    layer: Layer, values: Mapping[str, Any], known: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        is_section = any(other.startswith(f"{key}.") for other in known)
        if key in known:
            yield key, value
        elif is_section and isinstance(value, Mapping):
            yield from _flatten(layer, value, known, f"{key}.")
        elif is_section:
            inside = ", ".join(f"`{other}`" for other in known if other.startswith(f"{key}."))
            raise UsageError(f"`{key}` is a section ({layer.origin})", got=repr(value)[:60], accepted=inside)
        else:
            raise _unknown(key, known, layer.origin)


def _unknown(key: str, known: Mapping[str, Any], origin: str) -> UsageError:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    last = key.rpartition(".")[2]
    near = near or [other for other in known if other.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(last, [other.rpartition(".")[2] for other in known], n=1, cutoff=0.7)
    return UsageError(
        f"Unknown key: `{key}` ({origin})",
        accepted=None if near else ", ".join(f"`{other}`" for other in known),
        hint=f"did you mean `{near[0]}`?" if near else None,
    )


def _checked(key: str, value: Any, kind: Any, field: dataclasses.Field, origin: str) -> Any:
    if value is None and not _allows_none(kind) and field.default is not dataclasses.MISSING:
        raise _wrong(key, value, kind, field, origin)
    converted = _convert(value, kind)
    if converted is _BAD or not _within(converted, field.metadata):
        raise _wrong(key, value, kind, field, origin)
    return converted


_BAD = object()


def _convert(value: Any, kind: Any) -> Any:
    """`value` as `kind`, or `_BAD`. YAML reads `1e-3` as a text, so a text that is a number passes for one."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        tried = (_convert(value, argument) for argument in arguments)
        return next((found for found in tried if found is not _BAD), _BAD)
    if kind is types.NoneType:
        return None if value is None else _BAD
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return _BAD
        items = tuple(_convert(item, arguments[0]) for item in value)
        return _BAD if _BAD in items else items
    if kind is bool or isinstance(value, bool):
        return value if kind is bool and isinstance(value, bool) else _BAD
    if kind is float:
        try:
            number = float(value) if isinstance(value, int | float | str) else math.nan
        except ValueError:
            return _BAD
        return number if math.isfinite(number) else _BAD
    return value if isinstance(value, kind) else _BAD


def _within(value: Any, limits: Mapping[str, Any]) -> bool:
    choices, least, most = limits.get("choices"), limits.get("least"), limits.get("most")
    if value is None:
        return True
    if choices is not None:
        return all(item in choices for item in value) if isinstance(value, tuple) else value in choices
    numbers = value if isinstance(value, tuple) else (value,)
    if least is not None and any(number < least for number in numbers):
        return False
    return most is None or all(number <= most for number in numbers)


def _allows_none(kind: Any) -> bool:
    return types.NoneType in typing.get_args(kind)


def _wrong(key: str, value: Any, kind: Any, field: dataclasses.Field, origin: str) -> UsageError:
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false", types.NoneType: "null"}
    kinds = [argument for argument in (typing.get_args(kind) or (kind,)) if argument is not Ellipsis]
    if typing.get_origin(kind) is tuple:
        accepted = f"a list of {typing.get_args(kind)[0].__name__} values"
    else:
        accepted = " or ".join(
            names.get(one, f"a list of {typing.get_args(one)[0].__name__} values" if typing.get_args(one) else str(one))
            for one in kinds
        )
    limits = field.metadata
    if limits.get("choices") is not None:
        accepted = ", ".join(f"`{choice}`" for choice in limits["choices"])
    elif limits.get("least") is not None:
        accepted += f" from {limits['least']:g}" + (f" to {limits['most']:g}" if limits.get("most") is not None else "")
    return UsageError(f"`{key}` is not valid ({origin})", got=repr(value)[:80], accepted=accepted)


def _build(schema: type[T], prefix: str, values: Mapping[str, Any]) -> T:
    kinds = typing.get_type_hints(schema)
    arguments = {}
    for field in dataclasses.fields(typing.cast(Any, schema)):
        kind = kinds[field.name]
        key = f"{prefix}{field.name}"
        is_section = dataclasses.is_dataclass(kind)
        arguments[field.name] = _build(typing.cast(type, kind), f"{key}.", values) if is_section else values[key]
    return schema(**arguments)

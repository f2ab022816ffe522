"""The honoured part of a PEFT LoRA configuration, with PEFT's defaults and checked types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from preft.errors import AdapterError

DEFAULT_RANK = 8
DEFAULT_ALPHA = 8


@dataclass(frozen=True)
class LoraSettings:
    """What decides sites, ranks and scales. Names and defaults are PEFT's; an old file lacks the newer fields."""

    r: int
    lora_alpha: float
    target_modules: str | tuple[str, ...] | None
    exclude_modules: str | tuple[str, ...] | None
    layers_to_transform: int | tuple[int, ...] | None
    layers_pattern: str | tuple[str, ...] | None
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    fan_in_fan_out: bool
    ensure_weight_tying: bool

    @property
    def is_all_linear(self) -> bool:
        """Whether every linear module but the head is wrapped."""
        return isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> LoraSettings:
        """Reads the settings out of an `adapter_config.json`.

        Args:
            config: The parsed file, already checked against the table of fields.
            name: What to call the file in errors.

        Raises:
            AdapterError: A value has a type or size that PEFT could not have written.
        """
        read = _Reader(config, name)
        return cls(
            r=read.rank("r", config.get("r", DEFAULT_RANK)),
            lora_alpha=read.number("lora_alpha", config.get("lora_alpha", DEFAULT_ALPHA)),
            target_modules=read.names("target_modules"),
            exclude_modules=read.names("exclude_modules"),
            layers_to_transform=read.layers("layers_to_transform"),
            layers_pattern=read.names("layers_pattern"),
            rank_pattern={key: read.rank(f"rank_pattern.{key}", v) for key, v in read.pattern("rank_pattern")},
            alpha_pattern={key: read.number(f"alpha_pattern.{key}", v) for key, v in read.pattern("alpha_pattern")},
            use_rslora=read.flag("use_rslora"),
            fan_in_fan_out=read.flag("fan_in_fan_out"),
            ensure_weight_tying=read.flag("ensure_weight_tying"),
        )


class _Reader:
    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def _wrong(self, key: str, value: Any, accepted: str) -> AdapterError:
        return AdapterError(f"`{self._name}` has a `{key}` that is not valid", got=repr(value)[:80], accepted=accepted)

    def rank(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._wrong(key, value, "a positive integer")
        return value

    def number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        return value

    def flag(self, key: str) -> bool:
        value = self._config.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return bool(value)

    def names(self, key: str) -> str | tuple[str, ...] | None:
        value = self._config.get(key)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            return tuple(value)
        raise self._wrong(key, value, "a string or a list of strings")

    def layers(self, key: str) -> int | tuple[int, ...] | None:
        value = self._config.get(key)
        entries: list[Any] = value if isinstance(value, list) else [value]
        if value is None:
            return None
        if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries):
            raise self._wrong(key, value, "an integer or a list of integers")
        return tuple(entries) if isinstance(value, list) else int(entries[0])

    def pattern(self, key: str) -> list[tuple[str, Any]]:
        value = self._config.get(key) or {}
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object from module names to numbers")
        return list(value.items())

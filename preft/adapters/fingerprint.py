"""Which base model an adapter was made for.

Two levels. The **architecture** is a canonical subset of the configuration; it decides shapes and arithmetic, so a
mismatch can never be overridden. The **weights** are digests of a few tensors, read from the checkpoint's files; a
mismatch is refused unless the user takes it upon himself, as quantised and re-saved bases need.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preft.adapters.baseconfig import read_base_config
from preft.errors import BaseMismatchError, FileError

_ARCHITECTURE_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "vocab_size",
)
_ROWS = 16


@dataclass(frozen=True)
class BaseFingerprint:
    """Identity of a base model.

    Attributes:
        model: Name or path as the user gave it; for people, never compared.
        architecture: Canonical configuration values; compared exactly.
        weights: Tensor name to SHA-256 of its values in float32, or None where no safetensors file could be read.
        mismatch_allowed: The adapter was made although the weights did not match; recorded, and honoured at load.
    """

    model: str
    architecture: Mapping[str, Any]
    weights: Mapping[str, str] | None = field(default=None)
    mismatch_allowed: bool = False

    @property
    def architecture_sha256(self) -> str:
        """SHA-256 over the canonical JSON of `architecture`."""
        text = json.dumps(dict(self.architecture), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def require_same(self, base: BaseFingerprint, *, allow_weights: bool = False) -> None:
        """Checks that `base` is the model this fingerprint was taken from.

        Args:
            base: Fingerprint of the model at hand.
            allow_weights: Accept other weights under the same architecture.

        Raises:
            BaseMismatchError: The architecture differs, or the weights do and `allow_weights` is false.
        """
        keys = sorted({*self.architecture, *base.architecture})
        differing = [key for key in keys if self.architecture.get(key) != base.architecture.get(key)]
        if differing:
            raise BaseMismatchError(
                "The adapter was made for another architecture",
                got=", ".join(f"{key} {base.architecture.get(key)!r}" for key in differing) + f" in `{base.model}`",
                accepted=", ".join(f"{key} {self.architecture.get(key)!r}" for key in differing)
                + f" as in `{self.model}`",
                hint="name the base model that the adapter was trained on",
            )
        if allow_weights or self.mismatch_allowed or self.weights is None or base.weights is None:
            return
        shared = sorted(set(self.weights) & set(base.weights))
        differing = [key for key in shared if self.weights[key] != base.weights[key]]
        if differing or not shared:
            raise BaseMismatchError(
                "The base model has the right shape but other weights than the adapter was made for",
                got=f"`{base.model}`, differing in {', '.join(f'`{key}`' for key in differing) or 'every tensor name'}",
                accepted=f"the weights of `{self.model}`",
                hint="use that base, or pass `--allow-base-mismatch` if this is the same model quantised or re-saved",
            )


def architecture_of(config: Any) -> dict[str, Any]:
    """The canonical subset of a Transformers configuration (its language part, for a composite model)."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {name: getattr(text, name, None) for name in _ARCHITECTURE_FIELDS}
    heads, hidden = found["num_attention_heads"], found["hidden_size"]
    found["num_key_value_heads"] = found["num_key_value_heads"] or heads
    found["head_dim"] = getattr(text, "head_dim", None) or (hidden // heads if hidden and heads else None)
    rope = getattr(text, "rope_parameters", None) or {}
    found["rope_theta"] = rope.get("rope_theta", getattr(text, "rope_theta", None))
    found["tie_word_embeddings"] = bool(
        getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
    )
    return {key: value for key, value in sorted(found.items()) if value is not None}


def fingerprint_base(folder: Path, *, model: str | None = None) -> BaseFingerprint:
    """Takes the fingerprint of a Hugging Face checkpoint folder.

    Args:
        folder: Folder that holds `config.json` and, usually, safetensors files.
        model: Name to record; the folder itself by default.

    Raises:
        FileError: `config.json` is missing or cannot be understood.
    """
    config = read_base_config(folder)
    return BaseFingerprint(model or str(folder), architecture_of(config), digest_weights(folder))


def digest_weights(folder: Path) -> dict[str, str] | None:
    """Digests of one tensor of each kind, such as one layer's `q_proj.weight`; of a matrix, the first few rows.

    No kind is left out: a base with a merged LoRA differs from the plain one in a few kinds of matrix alone.
    Values are hashed in float32, so a checkpoint re-saved in a wider type keeps its digests.

    Returns:
        Tensor name to SHA-256, or None if the folder holds no safetensors file.

    Raises:
        FileError: A safetensors file is damaged.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    where: dict[str, Path] = {}
    dimensions: dict[str, int] = {}
    digests: dict[str, str] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - a safe_open handle is not a mapping
                    where[name] = file
                    dimensions[name] = len(tensors.get_slice(name).get_shape())
        for name in _chosen(dimensions):
            with safe_open(where[name], framework="pt") as tensors:
                part = tensors.get_slice(name)
                values = part[:_ROWS] if dimensions[name] == 2 else part[:]
            digests[name] = hashlib.sha256(values.to(torch.float32).contiguous().numpy().tobytes()).hexdigest()
    except (SafetensorError, OSError) as error:
        raise FileError("The base model's weights cannot be read", got=f"`{folder}`: {error}") from None
    return digests or None


def _chosen(dimensions: Mapping[str, int]) -> list[str]:
    """The tensors whose digests identify a checkpoint: of each kind of vector and matrix, the middle one by name."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(name for name, count in dimensions.items() if count in (1, 2)):
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return sorted(names[len(names) // 2] for names in kinds.values())

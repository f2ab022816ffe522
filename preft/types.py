"""Frozen value types that every layer shares: sites and the names of adapter kinds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SiteKind(StrEnum):
    """Where in the model a low-rank update sits."""

    LINEAR = "linear"
    """A linear module: the update reads its input and adds to its output."""
    BLOCK = "block"
    """A decoder block's output: the update reads the residual stream and adds to it."""


@dataclass(frozen=True, order=True)
class Site:
    """One place in the model and the shape of the low-rank update there.

        y += scale * up(down(x) + bias)

    Attributes:
        path: Module path in the Hugging Face causal language model, e.g. `model.layers.0.self_attn.q_proj` or,
            for a block, `model.layers.0`.
        kind: `linear` or `block`.
        rank: Rows of `down`, columns of `up`.
        in_features: Columns of `down`.
        out_features: Rows of `up`; equals `in_features` for a block.
        scale: Multiplies the update; resolved once, when the adapter is made. 1 for a block.
        has_bias: Whether a bias of `rank` values is added after `down`.
    """

    path: str
    kind: SiteKind
    rank: int
    in_features: int
    out_features: int
    scale: float
    has_bias: bool

    @property
    def num_parameters(self) -> int:
        """Values in `down`, `up` and `bias` together."""
        return self.rank * (self.in_features + self.out_features + int(self.has_bias))


def adapter_kind(sites: tuple[Site, ...]) -> str:
    """`lora` if every site is linear, `direft` if every site is a block, else `mixed`."""
    kinds = {site.kind for site in sites}
    if kinds == {SiteKind.LINEAR}:
        return "lora"
    return "direft" if kinds == {SiteKind.BLOCK} else "mixed"


def adapter_label(kind: str, *, prompt_only: bool) -> str:
    """The field's name for a kind of adapter: `LoRA`, `LoRAP`, `DiReFT`, `DiReFTP`, `LoRA+DiReFT(P)`."""
    name = {"lora": "LoRA", "direft": "DiReFT", "mixed": "LoRA+DiReFT"}[kind]
    if not prompt_only:
        return name
    return f"{name}(P)" if kind == "mixed" else f"{name}P"

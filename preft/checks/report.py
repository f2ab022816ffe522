"""What `preft check` finds, as values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class SiteDelta:
    """How much one site moves.

    Attributes:
        site: Module path.
        kind: `linear` or `block`.
        rank: Rank of the update.
        delta_norm: Norm of the update over the adapted tokens, relative to the norm of the base output there.
    """

    site: str
    kind: str
    rank: int
    delta_norm: float


@dataclass(frozen=True)
class LogitGap:
    """How far the next-token prediction at the last prompt token is from the base's.

    Attributes:
        max_abs: Largest change of a logit, over all prompts.
        kl_nats: Mean over the prompts of KL(adapted || base), in nats.
        tokens_differing: Generated tokens that differ from the base's.
        num_tokens: Generated tokens compared.
    """

    max_abs: float
    kl_nats: float
    tokens_differing: int
    num_tokens: int


@dataclass(frozen=True)
class DecodeProof:
    """What runs in a decode step.

    Attributes:
        prefill_products: Adapter matrix products in a prefill step.
        decode_products: Adapter matrix products in a decode step.
        equals_base: Whether a decode step's logits are, bit for bit, those of the base over the same cache; None for
            an all-token adapter, which acts there by its policy.
    """

    prefill_products: int
    decode_products: int
    equals_base: bool | None


@dataclass(frozen=True)
class ParityRow:
    """One request in both engines.

    Attributes:
        request: What was asked.
        equal: Whether all tokens are equal.
        first_difference: The first step that differs, or None.
        top2_gap: The reference's top-2 logit gap at that step, or None.
        error: What the engine answered instead of tokens, or None.
    """

    request: str
    equal: bool
    first_difference: int | None = None
    top2_gap: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class CheckReport:
    """The verdict on one adapter.

    Attributes:
        adapter: The folder.
        base: The base model, as it was named.
        digest: The adapter's identity.
        label: Its kind, such as `LoRAP`.
        positions: Its position policy.
        passed: Whether every check was passed.
        reasons: Why not; empty if passed.
        gap: Distance from the base at the last prompt token.
        decode: What runs in decode.
        sites: How much each site moves.
        parity: The comparison with an engine, or None if none was made.
    """

    adapter: str
    base: str
    digest: str
    label: str
    positions: str
    passed: bool
    reasons: tuple[str, ...]
    gap: LogitGap
    decode: DecodeProof
    sites: tuple[SiteDelta, ...]
    parity: tuple[ParityRow, ...] | None

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `preft check --json`."""
        document = asdict(self)
        document["reasons"] = list(self.reasons)
        document["sites"] = [asdict(site) for site in self.sites]
        document["parity"] = None if self.parity is None else [asdict(row) for row in self.parity]
        return document

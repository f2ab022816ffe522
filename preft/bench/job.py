"""What one process of one arm is told: read from its standard input, so that nothing is lost in quoting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from preft.errors import UsageError


@dataclass(frozen=True)
class ArmJob:
    """One process of one arm.

    Attributes:
        label: Name of the arm in rows.
        arm: What it is; see `preft.bench.spec.ARMS`.
        repeat: Which repeat, from 0.
        model: Checkpoint folder.
        adapter_paths: Adapters in the arm's form; empty for base.
        adapters: Distinct adapters that requests choose among; for base, those that they would.
        slots: Adapters that one step may hold.
        rank: Largest of the adapters.
        lora_rank: Of the point of the sweep; `8+64` where adapters differ.
        input_len: Prompt tokens a request.
        output_len: Output tokens a request.
        requests: Requests a run.
        vocab_size: Token ids are below it.
        mode: `eager` or `default`.
        warm_runs: Runs after the cold one.
        popularity: How requests choose adapters.
        dtype: Type of weights and activations.
        seed: Of prompts and choices.
        max_num_seqs: Requests that run at once.
        kv_cache_gib: Size of the KV cache.
        adapter_cache_gib: Host memory for adapters.
        tp: Workers that share the model.
    """

    label: str
    arm: str
    repeat: int
    model: str
    adapter_paths: tuple[str, ...]
    adapters: int
    slots: int
    rank: int
    lora_rank: int | str
    input_len: int
    output_len: int
    requests: int
    vocab_size: int
    mode: str
    warm_runs: int
    popularity: str
    dtype: str
    seed: int
    max_num_seqs: int
    kv_cache_gib: float
    adapter_cache_gib: float
    tp: int = 1

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ArmJob:
        """Reads a job.

        Raises:
            UsageError: A key is missing or not known.
        """
        known = {item.name for item in fields(cls)}
        if set(document) != known:
            wrong = sorted(set(document) ^ known)
            raise UsageError(
                "The arm's job has the wrong keys", got=", ".join(wrong), accepted=", ".join(sorted(known))
            )
        return cls(**{**document, "adapter_paths": tuple(document["adapter_paths"])})

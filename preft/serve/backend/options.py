"""Settings of the backend, as they travel in vLLM's `additional_config`.

They are always set: vLLM hashes `additional_config` into its compile-cache key, and a compiled artifact of a stock
engine, loaded into ours, would silently run without sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from preft.errors import UsageError

KEY = "preft"


@dataclass(frozen=True)
class BackendOptions:
    """Settings that scheduler and worker share.

    Attributes:
        version: Of preft; both sides must agree.
        slots: Adapters that one step may hold.
        max_rank: Largest rank that is accepted.
        cache_bytes: Host memory for adapters.
        patience_s: Seconds that a request waits for a slot before later ones are held back for it.
        lm_head: Whether adapters may have an `lm_head` site.
        allow_base_mismatch: Accept adapters made for other weights of the same architecture.
        server: Whether a front end in another process takes the scheduler's counts.
        adapter_metrics: Adapters that metrics count by name at most; 0 counts none by name.
        compiled: Whether the forward pass is compiled.
    """

    version: str
    slots: int
    max_rank: int
    cache_bytes: int
    patience_s: float = 1.0
    lm_head: bool = False
    allow_base_mismatch: bool = False
    server: bool = False
    adapter_metrics: int = 0
    compiled: bool = False

    @property
    def stack_bytes(self) -> int:
        """Memory for the joined numbers of adapters that decode together, beside `cache_bytes`; see `StackCache`."""
        return self.cache_bytes // 2

    def to_config(self) -> dict[str, Any]:
        """The value for vLLM's `additional_config`."""
        return {KEY: asdict(self)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> BackendOptions:
        """Reads the settings back.

        Raises:
            UsageError: They are missing or not ours: the engine was not started by preft.
        """
        document = (config or {}).get(KEY) if isinstance(config, Mapping) else None
        names = {field.name for field in fields(cls)}
        if not isinstance(document, Mapping) or set(document) != names:
            raise UsageError(
                "The engine was started with preft's classes but without preft's settings",
                hint="start it through `preft serve`, `preft generate` or `preft.serve.engine.Engine`",
            )
        return cls(**document)

"""How an adapter is named inside the engine.

vLLM carries an adapter through the engine as a `LoRARequest` of name, integer id and path, and compares them by name.
Two versions under one name would collapse, and ids from several front ends would collide. So the path carries a
reference that holds the adapter's whole identity, and the scheduler allocates the ids.

Stock vLLM given such a path finds no adapter there and refuses.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preft.errors import AdapterError
from preft.positions import Policy

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_SCHEME = "preft-adapter"


@dataclass(frozen=True)
class AdapterReference:
    """Identity of an adapter and where its files are.

    Attributes:
        digest: SHA-256 identity, 64 hexadecimal characters.
        policy: Which positions it acts on.
        folder: Where to read it; empty for one that was pushed from memory.
    """

    digest: str
    policy: Policy
    folder: str

    def encode(self) -> str:
        """The text that travels in `LoRARequest.lora_path`."""
        return f"{_SCHEME}:{self.digest}:{self.policy}:{self.folder}"

    @classmethod
    def decode(cls, text: str) -> AdapterReference:
        """Reads what `encode` wrote.

        Raises:
            AdapterError: The text is not a reference, as with an adapter that was given to vLLM directly.
        """
        scheme, _, rest = text.partition(":")
        digest, _, rest = rest.partition(":")
        policy, colon, folder = rest.partition(":")
        if scheme != _SCHEME or not colon or len(digest) != 64:
            raise AdapterError(
                "The adapter was not registered with preft",
                got=f"the path `{text[:120]}`",
                hint="register it with preft; vLLM's own LoRA arguments are not served by this engine",
            )
        return cls(digest, Policy.parse(policy), folder)

    def to_lora_request(self, name: str) -> LoRARequest:
        """The request object that vLLM's front end carries; the scheduler replaces its integer id."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, zlib.crc32(self.digest.encode()) % 0x7FFFFFFE + 1, self.encode())

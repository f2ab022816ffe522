"""The identity of an adapter: one digest over everything that changes outputs.

SHA-256 over the canonical manifest fields (kind, policy, sites with rank, scale and bias, dtype, base fingerprint)
followed by every tensor's name and bytes. Slots, cache keys, metrics and weight sync all go by it, never by a name
or a path: two names with equal weights share one slot, and a name with new weights is a new adapter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from preft.adapters.manifest import Manifest

if TYPE_CHECKING:
    import torch


def adapter_digest(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> str:
    """Computes the digest as 64 hexadecimal characters.

    Args:
        manifest: Its provenance, model name and recorded digest do not matter.
        tensors: CPU tensors by name, all of `manifest.dtype`.
    """
    import torch

    document = manifest.to_dict()
    canonical = {key: document[key] for key in ("format", "kind", "positions", "dtype", "sites")}
    canonical["base"] = {"architecture": manifest.base.architecture_sha256, "weights": manifest.base.weights}
    state = hashlib.sha256(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().reshape(-1)
        state.update(f"\0{name}\0{tuple(tensors[name].shape)}\0".encode())
        state.update(tensor.view(torch.uint8).numpy().data)
    return state.hexdigest()

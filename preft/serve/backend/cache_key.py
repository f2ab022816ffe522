"""Prefix-cache identity of a block: its tokens, and at which of its positions which adapter acted.

Two blocks of equal tokens hold equal keys and values only if the same adapter acted at the same positions in them
and before them. A block's own key is therefore (digest, adapted spans relative to the block); what came before is in
the parent's hash. A block past the boundary has no key of its own: it hangs on an adapted parent, so it never passes
for base, and is shared by equal continuations. In the next turn the same tokens are prompt, hence adapted, hence
another key: a block that decode filled can never pass for adapted prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, get_mm_features_in_window, hash_block_tokens

from preft.positions import Span, clip

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

_TAG = "preft"


def adapter_key(digest: str, spans: Sequence[Span], start: int, stop: int) -> tuple[Any, ...]:
    """The part of a block's key that an adapter adds; empty if none of its positions is adapted.

    Args:
        digest: The adapter's identity.
        spans: Adapted absolute positions of the request.
        start: First position of the block.
        stop: One past its last position.
    """
    inside = clip(spans, start, stop)
    return ((_TAG, digest, inside),) if inside else ()


class _WithoutAdapter:
    """A view of a request for vLLM's key functions, under which it has no LoRA; salts and images stay."""

    __slots__ = ("_request",)
    lora_request = None

    def __init__(self, request: Request) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def build_block_hasher(
    block_size: int, hash_function: Callable[[Any], bytes], digest: str, spans: Sequence[Span]
) -> Callable[[Request], list[BlockHash]]:
    """The hasher that replaces vLLM's on an adapted request.

    Args:
        block_size: Tokens to a block.
        hash_function: The engine's prefix-caching hash.
        digest: The adapter's identity.
        spans: Adapted absolute positions.

    Returns:
        A function from a request to the hashes of its full blocks that are not hashed yet.
    """

    def hash_new_blocks(request: Request) -> list[BlockHash]:
        start = len(request.block_hashes) * block_size
        if start + block_size > request.num_tokens:
            return []
        view = _WithoutAdapter(request)
        image_index = _first_image(request, start, block_size)
        parent = request.block_hashes[-1] if request.block_hashes else None
        hashes: list[BlockHash] = []
        while (stop := start + block_size) <= request.num_tokens:
            other, image_index = generate_block_hash_extra_keys(view, start, stop, image_index)
            keys = (*adapter_key(digest, spans, start, stop), *(other or ()))
            parent = hash_block_tokens(hash_function, parent, request.all_token_ids[start:stop], keys or None)
            hashes.append(parent)
            start = stop
        return hashes

    return hash_new_blocks


def _first_image(request: Request, start: int, block_size: int) -> int:
    """Index of the first multimodal feature that can reach the block at `start`, as vLLM's own hasher finds it."""
    features = request.mm_features
    if start == 0 or not features:
        return 0
    last = features[-1].mm_position
    if last.offset + last.length <= start:
        return 0
    index, _ = get_mm_features_in_window(features, start, start + block_size)
    return int(index)

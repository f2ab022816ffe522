"""What a manifest means in a sentence, where a user could be surprised by it."""

from __future__ import annotations

from preft.adapters.manifest import Manifest

HEAD_NAMES = ("lm_head", "embed_out")


def head_note(manifest: Manifest) -> str | None:
    """What a site on the output head can do under the adapter's policy, or None where there is nothing to say."""
    heads = [site.path for site in manifest.sites if site.path.rpartition(".")[2] in HEAD_NAMES]
    if not heads or not manifest.positions.is_prompt_only:
        return None
    return (
        f"`{heads[0]}` is the output head: it can touch only the logits of prompt positions, so of the output at most "
        "token 1"
    )

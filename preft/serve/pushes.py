"""What the workers answered to a push: one adapter, whole on every rank, or an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import preft.errors
from preft.errors import EngineError, PreftError


def require_pushed(digest: str, answers: Sequence[Mapping[str, Any]]) -> int:
    """Checks that every rank holds the same adapter.

    Args:
        digest: What was pushed.
        answers: Each rank's outcome.

    Returns:
        Bytes that it takes on the rank where it takes most.

    Raises:
        PreftError: A rank refused it.
        EngineError: A rank holds something else, or none answered.
    """
    for answer in answers:
        if "error" in answer:
            raise rebuilt_error(answer["error"])
    if not answers or any(answer["digest"] != digest for answer in answers):
        raise EngineError("A pushed adapter did not arrive as it was sent", got=repr(list(answers))[:200])
    return max(int(answer["bytes"]) for answer in answers)


def rebuilt_error(parts: Mapping[str, str]) -> PreftError:
    """An error of ours, from the parts that `PreftError.to_dict` made of it in another process."""
    kind = getattr(preft.errors, parts["type"], PreftError)
    if not (isinstance(kind, type) and issubclass(kind, PreftError)):
        kind = PreftError
    return kind(parts["message"], got=parts.get("got"), accepted=parts.get("accepted"), hint=parts.get("hint"))

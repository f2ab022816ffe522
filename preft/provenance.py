"""Where an artefact comes from: the tool, the time, the libraries, and what it was made of.

Provenance is for people. It never enters a digest, and nothing is decided by it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import Any

LIBRARIES = ("torch", "transformers", "peft", "safetensors")


def provenance(action: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Describes one act of making.

    Args:
        action: `convert`, `train`, and the like.
        facts: What it was made of; values must be JSON.

    Returns:
        A JSON object; `created` honours SOURCE_DATE_EPOCH, so that builds can be reproduced.
    """
    return {"action": action, "created": _now(), "versions": versions(), **facts}


def versions() -> dict[str, str]:
    """Versions of `preft`, Python and the libraries that compute numbers, for those that are installed."""
    found = {"preft": _version("preft"), "python": platform.python_version()}
    found.update({name: _version(name) for name in LIBRARIES})
    return {name: version for name, version in found.items() if version}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _now() -> str:
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    moment = (
        datetime.datetime.fromtimestamp(int(epoch), datetime.UTC)
        if epoch.isdigit()
        else datetime.datetime.now(datetime.UTC)
    )
    return moment.replace(microsecond=0).isoformat()

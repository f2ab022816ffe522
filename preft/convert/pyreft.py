"""pyreft checkpoints: the place where their reader belongs. This version refuses them by name."""

from __future__ import annotations

from pathlib import Path

from preft.convert.draft import Base, Draft
from preft.errors import UnsupportedError


def convert_pyreft(folder: Path, base: Base) -> Draft:
    """Reads a pyreft checkpoint against its base.

    Raises:
        UnsupportedError: Always, in this version.
    """
    raise refused(folder)


def refused(folder: Path) -> UnsupportedError:
    """The error that says why a pyreft checkpoint is not read."""
    return UnsupportedError(
        f"`{folder}` is a pyreft checkpoint, which this version does not convert yet",
        got="pyreft interventions (`intkey_*.bin`)",
        accepted="a PEFT LoRA folder",
        hint="upgrade preft when pyreft conversion is released",
    )

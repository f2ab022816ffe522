"""Adapter names, and the folders they stand for.

A name is what a client writes in a request's `model` field, so it can never be a path: it is checked against a small
alphabet, and a folder is looked up by it only inside one root.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from preft.adapters.manifest import MANIFEST_NAME
from preft.errors import FileError, UnknownAdapterError, UsageError

MAX_NAME_LENGTH = 128
_PEFT_CONFIG = "adapter_config.json"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_ACCEPTED = f"1 to {MAX_NAME_LENGTH} characters from A-Z a-z 0-9 . _ -, the first and last a letter or digit, no `..`"


def require_name(name: str, *, reserved: Collection[str] = ()) -> str:
    """Checks an adapter name and returns it.

    Args:
        name: The name.
        reserved: Names that mean something else, such as the base model's.

    Raises:
        UsageError: The name is not acceptable or is reserved.
    """
    valid = isinstance(name, str) and len(name) <= MAX_NAME_LENGTH and _NAME.fullmatch(name) and ".." not in name
    if not valid:
        raise UsageError(
            "The adapter name is not valid",
            got=ascii(name)[:80],
            accepted=_ACCEPTED,
            hint="choose another name; below `--adapters` it is the folder's, so rename that",
        )
    if name.casefold() in {other.casefold() for other in reserved}:
        raise UsageError(f"The name `{name}` is reserved for the base model", hint="give the adapter another name")
    return name


def split_name_path(text: str) -> tuple[str, Path]:
    """Reads `NAME=PATH` as flags give it.

    Raises:
        UsageError: There is no `=`, or the name is not acceptable, or the path is empty.
    """
    name, equals, path = text.partition("=")
    if not equals or not path:
        raise UsageError(
            "An adapter is given as NAME=PATH", got=f"`{text}`", accepted="for example `alice=adapters/alice`"
        )
    return require_name(name), Path(path)


def scan_root(root: Path | str) -> dict[str, Path]:
    """Finds the adapters directly below a folder: subfolders that hold a manifest, by folder name.

    PEFT adapters are found too, so that whoever reads them says that they are to be converted first.

    Links are not followed out of the root: a subfolder whose real path lies outside is refused.

    Raises:
        FileError: The root cannot be read, or a subfolder leaves it.
        UsageError: The root is itself an adapter, a subfolder's name is not a valid adapter name, or two names
            differ only in case.
    """
    root = Path(root)
    if _is_adapter(root):
        raise UsageError(
            f"The adapter root `{root}` is itself an adapter",
            accepted="a folder whose subfolders are adapters",
            hint=f"name its parent, or this one alone: `--adapter NAME={root}`",
        )
    try:
        root.resolve(strict=True)
        # Hidden ones are what a write that was cut short has left.
        folders = sorted(entry for entry in root.iterdir() if _is_adapter(entry) and not entry.name.startswith("."))
    except OSError as error:
        raise FileError(
            f"The adapter root `{root}` cannot be read",
            got=error.strerror or str(error),
            accepted="a folder whose subfolders are adapters",
        ) from None
    found: dict[str, Path] = {}
    for folder in folders:
        name = require_name(folder.name)
        require_inside(folder, root)
        require_no_twin(name, found)
        found[name] = folder
    return found


def require_no_twin(name: str, others: Iterable[str]) -> None:
    """Refuses a name that another one differs from only in case: one would be taken for the other.

    Raises:
        UsageError: There is such a name.
    """
    twin = next((other for other in others if other != name and other.casefold() == name.casefold()), None)
    if twin is not None:
        raise UsageError(f"Two adapter names differ only in case: `{twin}` and `{name}`")


def _is_adapter(folder: Path) -> bool:
    return any((folder / name).exists() for name in (MANIFEST_NAME, _PEFT_CONFIG))


def require_inside(folder: Path, root: Path) -> None:
    """Refuses a folder that lies elsewhere, whatever its path says.

    Raises:
        FileError: It is a link that leaves the root.
    """
    if not is_inside(folder, root):
        raise FileError(f"The adapter folder `{folder}` is a link that leaves the root `{root}`")


def is_inside(path: Path, root: Path) -> bool:
    """Whether the real path of `path` lies below the real path of `root`."""
    real = os.path.realpath(path)
    return os.path.commonpath([real, os.path.realpath(root)]) == os.path.realpath(root) and real != str(root)


def unknown_adapter(name: str, known: Iterable[str]) -> UnknownAdapterError:
    """The error for a name that is not registered, naming the nearest ones that are."""
    names, name = sorted(known), name[:MAX_NAME_LENGTH]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    listed = ", ".join(f"`{other}`" for other in (near or names[:5]))
    return UnknownAdapterError(
        f"There is no adapter named `{name[:80]}`",
        accepted=(f"nearest: {listed}" if near else f"{listed}{' ...' if len(names) > 5 else ''}") if names else "none",
        hint="register it, or correct the name; an unknown name is never answered by the base model",
    )

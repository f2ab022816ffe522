"""Rows of a data set that the `datasets` library reads: an id on the hub, or a folder of its files.

    org/name            the split `train`
    org/name:test       another split, or part of one: `org/name:train[:1000]`
    org/name/config     a configuration of it
    org/name@revision   a commit, a tag or a branch

The library runs no code of a data set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft.errors import FileError, UnsupportedError, UsageError

_ID = re.compile(
    r"(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?(:(?P<split>[\w.]+(\[[^\]]*\])?))?"
)
_FILE_ENDINGS = (".jsonl", ".json", ".ndjson")


@dataclass(frozen=True)
class DatasetName:
    """A data set, or a part of one.

    Attributes:
        name: Id on the hub, or a folder.
        config: Configuration, or None for the only one.
        revision: Commit, tag or branch, or None for the newest.
        split: As `datasets` reads it, such as `train` or `test[:100]`.
    """

    name: str
    config: str | None
    revision: str | None
    split: str


def parse_dataset_name(text: str) -> DatasetName | None:
    """Reads the name of a data set; None for what names a file.

    Raises:
        UsageError: It names neither.
    """
    path = Path(text)
    if path.is_file() or text.endswith(_FILE_ENDINGS):
        return None
    folder, colon, split = text.rpartition(":")
    if path.is_dir():
        return DatasetName(text, None, None, "train")
    if colon and Path(folder).is_dir():
        return DatasetName(folder, None, None, split)
    found = _ID.fullmatch(text)
    if found is None:
        raise UsageError(
            f"`{text}` names no training data",
            accepted="a file of JSON lines, a folder that `datasets` reads, or a data set ORG/NAME[@REVISION][:SPLIT]",
        )
    return DatasetName(found["name"], found["config"], found["revision"], found["split"] or "train")


def dataset_rows(source: DatasetName) -> Iterator[Mapping[str, Any]]:
    """The rows of a data set, in order.

    Raises:
        UnsupportedError: The `datasets` library is not installed.
        FileError: The data set cannot be read.
    """
    try:
        import datasets
    except ImportError:
        raise UnsupportedError(
            f"`{source.name}` is a data set, and the `datasets` library is not installed",
            accepted="a file of JSON lines",
            hint="pip install 'preft[train]'",
        ) from None
    path = Path(source.name)
    try:
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            held = datasets.load_from_disk(source.name)
            found = held[source.split] if isinstance(held, datasets.DatasetDict) else held
        else:
            found = datasets.load_dataset(source.name, source.config, split=source.split, revision=source.revision)
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        offline = isinstance(error, ConnectionError) or "offline" in str(error).lower()
        raise FileError(
            f"The data set `{source.name}` (split `{source.split}`) cannot be read",
            got=" ".join(str(error).split())[:200] or type(error).__name__,
            accepted="a folder that `datasets` reads, a cached data set, or the hub",
            hint="the hub cannot be reached: give a file of JSON lines, or a folder"
            if offline
            else "see its page on the hub for its configurations (ORG/NAME/CONFIG) and splits (ORG/NAME:SPLIT)",
        ) from None
    yield from found

"""What a folder holds: a PEFT LoRA, a pyreft checkpoint, an adapter of ours, or something else."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from preft.adapters.manifest import MANIFEST_NAME
from preft.config.progress import Progress
from preft.convert.peft_lora import CONFIG_NAME
from preft.convert.pyreft_config import TENSOR_FILES
from preft.convert.weights import PICKLE_NAME, SAFETENSORS_NAME
from preft.errors import AdapterError, FileError, UsageError
from preft.models.locate import download


class SourceKind(StrEnum):
    """The formats that conversion tells apart."""

    PEFT = "peft"
    PYREFT = "pyreft"


def locate_source(source: str, *, progress: Progress | None = None) -> Path:
    """Finds the folder of an adapter: itself, or a hub id's files in the hub's cache.

    Raises:
        FileError: It is a file, or does not exist here or on the hub.
    """
    path = Path(source).expanduser()
    if not source or "\0" in source:
        raise UsageError("The adapter to convert is not named", got=ascii(source), accepted="a folder or a hub id")
    if path.is_dir():
        return path
    if path.exists():
        raise FileError(
            f"The adapter `{source}` is a file",
            accepted=f"the folder that holds `{CONFIG_NAME}` and `{SAFETENSORS_NAME}`",
        )
    if path.is_absolute() or source.startswith((".", "~")) or source.partition("@")[0].count("/") > 1:
        raise FileError(f"The adapter folder `{source}` does not exist", accepted="a folder or a hub id `org/name`")
    folder = download(
        source, what="adapter", patterns=[CONFIG_NAME, SAFETENSORS_NAME], needs=CONFIG_NAME, progress=progress
    )
    if not (folder / SAFETENSORS_NAME).exists():
        folder = download(
            source, what="adapter", patterns=[CONFIG_NAME, PICKLE_NAME], needs=PICKLE_NAME, progress=progress
        )
    return folder


def detect(folder: Path) -> SourceKind:
    """Tells what a folder holds.

    Raises:
        AdapterError: It is an adapter of ours already.
        FileError: It is nothing that can be converted.
    """
    if (folder / MANIFEST_NAME).exists():
        raise AdapterError(
            f"`{folder}` is a preft adapter already",
            got=f"`{MANIFEST_NAME}`",
            accepted="a PEFT LoRA folder or a pyreft checkpoint",
            hint=f"look at it with `preft inspect {folder}`",
        )
    if (folder / CONFIG_NAME).exists():
        return SourceKind.PEFT
    if any(folder.glob(TENSOR_FILES)):
        return SourceKind.PYREFT
    there = sorted(entry.name for entry in folder.iterdir())
    inside = [name for name in there if (folder / name / CONFIG_NAME).exists()]
    if "config.json" in there:
        found = "a model checkpoint"
    else:
        found = ", ".join(f"`{name}`" for name in there[:6]) or "an empty folder"
    raise FileError(
        f"`{folder}` is not an adapter that can be converted",
        got=found,
        accepted=f"a folder with `{CONFIG_NAME}` and `{SAFETENSORS_NAME}`, or with `{TENSOR_FILES}` of pyreft",
        hint=f"it holds adapters in subfolders; name one, such as `{folder / inside[-1]}`" if inside else None,
    )

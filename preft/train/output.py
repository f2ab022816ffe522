"""The folder that a run writes to: checked before any work, cleared, and filled so that a reader sees whole files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from preft.adapters.adapter import Adapter
from preft.adapters.manifest import MANIFEST_NAME, TENSORS_NAME
from preft.adapters.store import save_adapter
from preft.errors import FileError, UsageError
from preft.train.curves import CURVES_NAME
from preft.train.page import PAGE_NAME
from preft.train.trainer import last_checkpoint

CHECKPOINTS = "checkpoints"
METRICS_NAME = "metrics.jsonl"
SCORES_NAME = "eval.jsonl"
RUN_NAME = "run.json"
_RUN_FILES = (METRICS_NAME, SCORES_NAME, RUN_NAME, CURVES_NAME, PAGE_NAME)
_ADAPTER_FILES = (MANIFEST_NAME, TENSORS_NAME, "README.md")


def require_output(output: Path, *, resume: bool, force: bool, own: Collection[str] = ()) -> Path | None:
    """Checks the output folder before any work, and finds the checkpoint to resume from.

    Args:
        output: The folder.
        resume: Whether an earlier run goes on.
        force: Whether an earlier run is replaced.
        own: Further files that a run of this kind writes.

    Raises:
        UsageError: The folder is taken, or there is nothing to resume.
    """
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UsageError(f"The output `{output}` is not a folder", accepted="a path that does not exist yet")
    present = {path.name for path in output.iterdir()} if output.is_dir() else set()
    known = {CHECKPOINTS, *_RUN_FILES, *_ADAPTER_FILES, *own}
    others = sorted(name for name in present - known if not name.endswith(".partial"))
    if others:
        raise UsageError(
            f"The output `{output}` holds files that no run wrote", got=f"`{others[0]}`", hint="choose another folder"
        )
    if resume:
        if force:
            raise UsageError("`--resume` and `--force` exclude each other", accepted="one of them")
        found = last_checkpoint(output / CHECKPOINTS)
        if found is None:
            raise UsageError(
                f"There is no checkpoint to resume from in `{output / CHECKPOINTS}`",
                hint="checkpoints are written where `train.save_every` is set",
            )
        return found
    if present and not force:
        raise UsageError(
            f"The output `{output}` holds an earlier run",
            hint="choose another folder, `--resume` it, or replace it with `--force`",
        )
    return None


def prepare(output: Path, *, fresh: bool, own: Collection[str] = ()) -> None:
    """Makes the folder ready: removes what a killed run left half written, and what an earlier run wrote if `fresh`.

    Args:
        output: The folder.
        fresh: Whether nothing of an earlier run is needed.
        own: Further files that a run of this kind writes.

    Raises:
        FileError: It cannot be written.
    """
    if fresh:
        for name in (CHECKPOINTS, *_RUN_FILES, *own):
            path = output / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for partial in (*output.glob(".*.partial"), *output.glob(f"{CHECKPOINTS}/.*.partial")):
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
    try:
        (output / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"`{output}` cannot be written", got=error.strerror) from None


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes a file of JSON, whole or not at all."""
    _write_whole(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file of JSON lines, whole or not at all."""
    _write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def place_adapter(adapter: Adapter, folder: Path, *, readme: str) -> None:
    """Puts an adapter into a folder that holds other files of the run.

    The manifest comes last, and an older one goes first: a reader finds a whole adapter or none.
    """
    with tempfile.TemporaryDirectory(prefix=".adapter.", suffix=".partial", dir=folder) as name:
        partial = Path(name) / "adapter"
        save_adapter(adapter, partial, readme=readme)
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        for file in (TENSORS_NAME, "README.md", MANIFEST_NAME):
            os.replace(partial / file, folder / file)

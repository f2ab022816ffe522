"""Checkpoints of a run of GRPO, each written beside its place and moved there when it is complete."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from preft.errors import FileError
from preft.train.trainer import RUN_NAME, STATE_NAME, require_same_run
from preft.tuners.attach import AttachedModel
from preft.tuners.trainable import adapter_state, load_adapter_state

OPTIMIZER_NAME = "optimizer.pt"


def save_checkpoint(
    folder: Path,
    step: int,
    handle: AttachedModel,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Writes one checkpoint, and removes the oldest beyond `keep`.

    Args:
        folder: Of the checkpoints.
        step: Steps that are done.
        handle: The adapter in use is saved.
        optimizer: Its optimiser.
        run: What the run is; a checkpoint of another run is not resumed from.
        keep: How many are kept.

    Raises:
        FileError: It cannot be written; earlier ones are intact.
    """
    staging, target = folder / f".step-{step}.partial", folder / f"checkpoint-{step}"
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        save_file(adapter_state(handle, str(handle.active)), staging / STATE_NAME)
        torch.save(optimizer.state_dict(), staging / OPTIMIZER_NAME)
        (staging / RUN_NAME).write_text(json.dumps(run), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        os.rename(staging, target)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise FileError(
            f"The checkpoint of step {step} cannot be written",
            got=getattr(error, "strerror", None) or str(error)[:200],
            hint="earlier checkpoints are intact; make room, then `--resume`",
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    for old in found[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load_checkpoint(
    checkpoint: Path, handle: AttachedModel, optimizer: torch.optim.Optimizer, run: Mapping[str, Any]
) -> int:
    """Puts a checkpoint back.

    Returns:
        Steps that were done.

    Raises:
        FileError: It cannot be read.
        UsageError: It belongs to another run.
        AdapterError: Its adapter is another one.
    """
    require_same_run(checkpoint, run)
    try:
        state = load_file(checkpoint / STATE_NAME)
        momenta = torch.load(checkpoint / OPTIMIZER_NAME, weights_only=True, map_location="cpu")
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise FileError(f"The checkpoint `{checkpoint}` cannot be read", got=str(error)[:200]) from None
    load_adapter_state(handle, state, str(handle.active))
    optimizer.load_state_dict(momenta)
    return int(checkpoint.name.rpartition("-")[2])

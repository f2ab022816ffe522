"""Reading a PEFT checkpoint's tensors: safetensors, or a pickle that is only ever read as plain tensors."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING

from preft.adapters.store import parse_safetensors
from preft.errors import AdapterError, FileError

if TYPE_CHECKING:
    import torch

SAFETENSORS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"


def read_weights(folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Reads the tensors of a PEFT checkpoint folder.

    Returns:
        The tensors by name, and the name of the file they came from. Safetensors win where both files lie.

    Raises:
        FileError: There is no such file, or it cannot be read.
        AdapterError: It is damaged, holds anything but tensors, or a tensor is of another type or not finite.
    """
    name = SAFETENSORS_NAME if (folder / SAFETENSORS_NAME).exists() else PICKLE_NAME
    path = folder / name
    if not path.exists():
        there = sorted(entry.name for entry in folder.iterdir())
        raise FileError(
            f"The adapter `{folder}` has no weights",
            got=", ".join(f"`{entry}`" for entry in there[:6]) or "an empty folder",
            accepted=f"`{SAFETENSORS_NAME}` or `{PICKLE_NAME}`",
        )
    try:
        tensors = parse_safetensors(path.read_bytes(), str(path)) if name == SAFETENSORS_NAME else read_pickle(path)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"`{path}` cannot be read", got=error.strerror or str(error)) from None
    for tensor_name, tensor in tensors.items():
        require_numbers(tensor_name, tensor)
    return tensors, name


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Reads a dictionary of tensors from a `.bin` file. Nothing in the file is ever run or imported.

    Raises:
        AdapterError: It is damaged, calls for code, or holds anything but tensors.
    """
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise AdapterError(
            f"`{path}` is not a plain dictionary of tensors, so it is not read",
            got=str(error).splitlines()[0][:160],
            accepted="tensors alone; a pickle that calls for code is never run",
            hint="save the adapter again with PEFT as safetensors",
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise AdapterError(
            f"`{path}` is damaged", got=str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        ) from None
    if not isinstance(loaded, dict):
        raise AdapterError(f"`{path}` holds no dictionary of tensors", got=type(loaded).__name__)
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise AdapterError(f"`{path}` holds something other than tensors", got=f"{name!r}: {type(value).__name__}")
    return {name: value.detach().contiguous().clone() for name, value in loaded.items()}


def require_numbers(name: str, tensor: torch.Tensor) -> None:
    """Checks that a tensor is of a type that is supported, and finite.

    Raises:
        AdapterError: It is not; the message counts the values.
    """
    import torch

    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise AdapterError(
            f"Tensor `{name}` has an unsupported type",
            got=f"{str(tensor.dtype).removeprefix('torch.')}, {tensor.numel()} values",
            accepted="float32, float16 or bfloat16",
        )
    bad = tensor.numel() - int(tensor.isfinite().sum())
    if bad:
        raise AdapterError(f"Tensor `{name}` holds values that are not finite", got=f"{bad} of {tensor.numel()}")

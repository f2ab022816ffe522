"""Adapters on disk: one folder with `preft.json` and `preft.safetensors`.

A load opens the folder once and its files relative to that descriptor, without following links, reads each file once
into memory, and parses and hashes those very bytes; nothing that happens to the path meanwhile can make the checked
bytes differ from the used ones. A save is atomic: the whole folder appears, or nothing does.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from preft.adapters.adapter import Adapter, expected_shapes
from preft.adapters.jsonfile import parse_json_object
from preft.adapters.manifest import MANIFEST_NAME, TENSORS_NAME, Manifest
from preft.errors import AdapterError, FileError, UsageError

if TYPE_CHECKING:
    import torch

MAX_MANIFEST_BYTES = 64 << 20
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 100_000


def load_adapter(folder: Path | str, *, expected_digest: str | None = None, within: Path | None = None) -> Adapter:
    """Reads and validates an adapter folder.

    Args:
        folder: The folder; it may be reached through links, the files in it may not be links.
        expected_digest: Digest that it was registered under; a difference is an error.
        within: A folder that the adapter must really lie in, whatever links lead to it.

    Raises:
        FileError: The folder or a file in it cannot be read, or it lies outside `within`.
        AdapterError: The contents are not a valid adapter, or not the expected one.
    """
    folder = Path(folder)
    descriptor = _open_folder(folder) if within is None else _open_within(folder, within)
    try:
        manifest = _parse_manifest(_read_at(descriptor, MANIFEST_NAME, folder, MAX_MANIFEST_BYTES), str(folder))
        tensor_bytes = _read_at(descriptor, TENSORS_NAME, folder, _most_bytes(manifest))
    finally:
        os.close(descriptor)
    return _from_parts(manifest, tensor_bytes, str(folder), expected_digest)


def adapter_from_bytes(
    manifest_bytes: bytes, tensor_bytes: bytes, *, name: str, expected_digest: str | None = None
) -> Adapter:
    """Validates an adapter held in memory, such as one pushed to a server.

    Args:
        manifest_bytes: Contents of `preft.json`.
        tensor_bytes: Contents of `preft.safetensors`.
        name: What to call it in errors.
        expected_digest: Digest that it must have, or None.

    Raises:
        AdapterError: The contents are not a valid adapter, or not the expected one.
    """
    return _from_parts(_parse_manifest(manifest_bytes, name), tensor_bytes, name, expected_digest)


def _parse_manifest(data: bytes, name: str) -> Manifest:
    return Manifest.from_dict(parse_json_object(data, f"{name}/{MANIFEST_NAME}"))


def _most_bytes(manifest: Manifest) -> int:
    """Bytes that a file with the manifest's tensors may have: a larger one is not read at all."""
    numbers = sum(math.prod(shape) for shape in expected_shapes(manifest).values())
    return numbers * (4 if manifest.dtype == "float32" else 2) + MAX_HEADER_BYTES + 8


def _from_parts(manifest: Manifest, tensor_bytes: bytes, name: str, expected_digest: str | None) -> Adapter:
    adapter = Adapter.build(manifest, parse_safetensors(tensor_bytes, f"{name}/{TENSORS_NAME}"))
    for recorded, where in ((manifest.digest, "its manifest records"), (expected_digest, "it was registered with")):
        if recorded is not None and recorded != adapter.digest:
            raise AdapterError(
                f"The adapter `{name}` has not the digest that {where}",
                got=adapter.digest,
                accepted=str(recorded),
                hint="the files were changed or damaged after they were written; convert or copy the adapter again",
            )
    return adapter


def adapter_to_bytes(adapter: Adapter) -> tuple[bytes, bytes]:
    """The contents of the two files that `save_adapter` would write: `preft.json`, `preft.safetensors`."""
    from safetensors.torch import save

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors.items()}
    return adapter.manifest.to_json().encode(), save(tensors)


def save_adapter(adapter: Adapter, folder: Path | str, *, readme: str | None = None, force: bool = False) -> None:
    """Writes an adapter folder, whole or not at all.

    Args:
        adapter: What to write.
        folder: Where; it must not exist or be empty, unless `force`.
        readme: Text of a model card to write beside it.
        force: Replace what is there. Only an adapter folder or an empty folder is ever replaced.

    Raises:
        UsageError: `folder` exists and is not empty, and `force` does not apply.
        FileError: It cannot be written.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    require_writable_target(folder, force=force)
    with atomic_folder(folder) as partial:
        save_file({name: tensor.contiguous() for name, tensor in adapter.tensors.items()}, partial / TENSORS_NAME)
        (partial / MANIFEST_NAME).write_text(adapter.manifest.to_json(), encoding="utf-8")
        if readme is not None:
            (partial / "README.md").write_text(readme, encoding="utf-8")


def require_writable_target(
    folder: Path, *, force: bool, marker: str = MANIFEST_NAME, what: str = "a preft adapter"
) -> None:
    """Checks, before any work is done, that `folder` may be written.

    Args:
        folder: Where something is to be written.
        force: Replace what is there.
        marker: A file that must be there for `force` to replace the folder.
        what: What a folder with the marker is, for the message.

    Raises:
        UsageError: It is a file, or not empty without `force`, or not ours to replace.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not folder.is_dir():
        raise UsageError(f"The target `{folder}` is not a folder", accepted="a path that does not exist yet")
    if not any(folder.iterdir()):
        return
    if not force:
        raise UsageError(
            f"The target `{folder}` exists and is not empty", hint="choose another folder, or pass `--force`"
        )
    if not (folder / marker).exists():
        raise UsageError(
            f"The target `{folder}` is not {what}, so `--force` does not replace it",
            hint="choose another folder, or remove it yourself",
        )


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yields a sibling folder that becomes `folder` on success and vanishes on any failure, Ctrl-C included."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    except OSError as error:
        raise _cannot_write(folder, error) from None
    try:
        yield partial
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(partial, 0o777 & ~umask)
        for file in partial.iterdir():
            os.chmod(file, 0o666 & ~umask)
            _flush(file)
        _swap_in(partial, folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, FileError):
            raise _cannot_write(folder, error) from None
        if type(error).__name__ == "SafetensorError":
            raise _cannot_write(folder, error) from None
        raise


def _flush(file: Path) -> None:
    """Sees a file onto the disk: a network file system tells only now that it is full, and a rename may overtake it."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap_in(partial: Path, folder: Path) -> None:
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".old", dir=folder.parent))
        os.rename(folder, old / "replaced")
        try:
            os.rename(partial, folder)
        except OSError:
            os.rename(old / "replaced", folder)
            raise
        finally:
            shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(partial, folder)


def _cannot_write(folder: Path, error: BaseException) -> FileError:
    reason = getattr(error, "strerror", None) or str(error)
    return FileError(f"`{folder}` cannot be written", got=reason, hint="nothing was left behind")


def _open_folder(folder: Path) -> int:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except NotADirectoryError:
        raise FileError(f"`{folder}` is not a folder", accepted="the folder of a preft adapter") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(
            f"The adapter folder `{folder}` cannot be opened",
            got=reason,
            hint="name the folder that `preft convert` or `preft train` wrote",
        ) from None


def _open_within(folder: Path, root: Path) -> int:
    """Opens a folder by its real path below a root, one part after the other, so that no link can lead out."""
    try:
        real_root, real = os.path.realpath(root, strict=True), os.path.realpath(folder, strict=True)
        parts = Path(real).relative_to(real_root).parts
        if not parts:
            raise ValueError("the root itself")
        descriptor = os.open(real_root, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it lies elsewhere"
        raise FileError(f"There is no adapter folder `{folder.name}` below the adapter root", got=reason) from None
    try:
        for part in parts:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
    except OSError as error:
        os.close(descriptor)
        raise FileError(f"The adapter folder `{folder.name}` cannot be opened", got=error.strerror) from None
    return descriptor


def _read_at(descriptor: int, name: str, folder: Path, limit: int) -> bytes:
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
    except FileNotFoundError:
        peft = _exists_at(descriptor, "adapter_config.json")
        raise FileError(
            f"`{folder}` is not a preft adapter: it has no `{name}`",
            got="a PEFT adapter" if peft else None,
            hint=f"convert it first: `preft convert {folder} DST`"
            if peft
            else "name the folder that `preft convert` or `preft train` wrote",
        ) from None
    except OSError as error:
        reason = "a symbolic link" if error.errno == 40 else error.strerror
        raise FileError(f"`{folder / name}` cannot be opened", got=reason, accepted="a regular file") from None
    with os.fdopen(file, "rb") as stream:
        info = os.fstat(stream.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise FileError(f"`{folder / name}` is not a regular file")
        if info.st_size > limit:
            raise FileError(f"`{folder / name}` is too large", got=f"{info.st_size} bytes", accepted=f"{limit} at most")
        try:
            return stream.read(info.st_size)
        except MemoryError:
            raise FileError(f"`{folder / name}` does not fit in memory", got=f"{info.st_size} bytes") from None


def _exists_at(descriptor: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=descriptor)
    except OSError:
        return False
    return True


def parse_safetensors(data: bytes, name: str) -> dict[str, torch.Tensor]:
    """Parses a safetensors buffer after checking its header strictly.

    Raises:
        AdapterError: Truncated, not safetensors, a tensor named twice, too many tensors, or a type that is not float.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    if len(data) < 8:
        raise AdapterError(f"`{name}` is truncated", got=f"{len(data)} bytes", accepted="a safetensors file")
    (header_bytes,) = struct.unpack("<Q", data[:8])
    if header_bytes > min(MAX_HEADER_BYTES, len(data) - 8):
        raise AdapterError(
            f"`{name}` is truncated or not a safetensors file",
            got=f"a header of {header_bytes} bytes in a file of {len(data)}",
        )
    header = parse_json_object(data[8 : 8 + header_bytes].rstrip(b" "), f"{name} (header)")
    entries = {key: value for key, value in header.items() if key != "__metadata__"}
    if len(entries) > MAX_TENSORS:
        raise AdapterError(f"`{name}` holds too many tensors", got=str(len(entries)), accepted=f"{MAX_TENSORS} at most")
    for tensor_name, entry in entries.items():
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        if dtype not in ("F32", "F16", "BF16"):
            raise AdapterError(
                f"Tensor `{tensor_name}` in `{name}` has an unsupported type",
                got=json.dumps(dtype),
                accepted="F32, F16 or BF16",
            )
    try:
        tensors: dict[str, torch.Tensor] = load(data)
        return tensors
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise AdapterError(f"`{name}` is not a valid safetensors file", got=str(error)) from None

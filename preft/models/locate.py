"""From what a user writes for a model to a checkpoint folder on this machine.

A model is a folder, the name of the embedded model, or a hub id `org/name[@revision]`. The embedded model is written
to the user's cache on first use; two processes that want it at once get it once. Nothing here loads a model, and no
code that a repository holds is ever downloaded.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from preft.config.progress import Progress, stage
from preft.errors import FileError, UsageError
from preft.models.smollm2 import HUB_ID, MODEL_NAME, fetch_smollm2

ACCEPTED = f"a checkpoint folder, `{MODEL_NAME}`, or a hub id `org/name[@revision]`"

_CHECKPOINT_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_ELSEWHERE = ["original/*", "onnx/*", "openvino/*", "consolidated*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?(?:@[\w./-]+)?", re.ASCII)


def cache_dir() -> Path:
    """Where `preft` writes models for itself: `$PREFT_CACHE`, `$XDG_CACHE_HOME/preft`, or `~/.cache/preft`."""
    if own := os.environ.get("PREFT_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "preft"


def locate_model(model: str, *, progress: Progress | None = None) -> Path:
    """Finds the checkpoint folder of a model, fetching it where that is needed.

    Args:
        model: A folder, the embedded model's name or hub id in any case, or `org/name[@revision]`.
        progress: Receives the stages of a fetch, or None.

    Returns:
        A folder that holds `config.json`.

    Raises:
        UsageError: `model` is none of these.
        FileError: The folder is no checkpoint, or the hub does not have it or cannot be reached.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return _require_checkpoint(path)
    if model and path.exists():
        raise FileError(f"The model `{model}` is a file", accepted=ACCEPTED)
    if is_embedded(model):
        return _embedded(progress)
    if path.is_absolute() or model.startswith((".", "~")) or model.partition("@")[0].count("/") > 1:
        raise FileError(f"The model folder `{model}` does not exist", accepted=ACCEPTED)
    if not _HUB_ID.fullmatch(model):
        raise UsageError("The model cannot be understood", got=ascii(model)[:80], accepted=ACCEPTED)
    return download(model, what="model", patterns=_CHECKPOINT_FILES, needs="config.json", progress=progress)


def find_local_model(model: str) -> Path | None:
    """The checkpoint folder of a model if it is already on this machine; fetches nothing and never fails."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    path = Path(model).expanduser()
    if model and path.is_dir():
        return path if (path / "config.json").is_file() else None
    if is_embedded(model):
        path = cache_dir() / "models" / MODEL_NAME
        return path if (path / "config.json").is_file() else None
    if not _HUB_ID.fullmatch(model):
        return None
    repository, _, revision = model.partition("@")
    try:
        config = try_to_load_from_cache(repository, "config.json", revision=revision or None)
    except (HFValidationError, ValueError, OSError):
        return None
    return Path(config).parent if isinstance(config, str) else None


def is_embedded(model: str) -> bool:
    """Whether a name means the embedded model."""
    return model.casefold() in (MODEL_NAME, HUB_ID.casefold())


def download(source: str, *, what: str, patterns: list[str], needs: str, progress: Progress | None = None) -> Path:
    """Brings a hub repository's matching files into the hub's own cache.

    Args:
        source: `org/name[@revision]`.
        what: What it is to be, for errors: `model` or `adapter`.
        patterns: File names to bring; code and pickles only if they are named here.
        needs: A file that must be among them.
        progress: Receives one stage, or None.

    Raises:
        FileError: The repository, the revision or the needed file does not exist, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, _, revision = source.partition("@")
    try:
        with stage(progress, f"Fetching {source}"):
            folder = Path(
                snapshot_download(
                    repository, revision=revision or None, allow_patterns=patterns, ignore_patterns=_ELSEWHERE
                )
            )
    except RevisionNotFoundError:
        raise FileError(f"The hub's `{repository}` has no revision `{revision}`") from None
    except GatedRepoError:
        raise FileError(
            f"The {what} `{repository}` is gated", hint="accept its terms on the hub, then `hf auth login`"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise FileError(
            f"There is no {what} `{source}`",
            got="neither a folder here nor a repository on the hub",
            hint="check the spelling; a private repository needs `hf auth login`",
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise FileError(
            f"The {what} `{source}` is not on this machine and the hub cannot be reached",
            got=_first_line(error),
            hint="name a local folder, or try again with a network",
        ) from None
    if not (folder / needs).is_file():
        raise FileError(f"The hub's `{source}` is not a {what}", got=f"no `{needs}` in it", accepted=f"a {what}")
    return folder


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _require_checkpoint(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    adapter = next((name for name in ("preft.json", "adapter_config.json") if (folder / name).exists()), None)
    raise FileError(
        f"The folder `{folder}` is not a model checkpoint",
        got=f"an adapter (`{adapter}`)" if adapter else "no `config.json` in it",
        accepted=ACCEPTED,
    )


def _embedded(progress: Progress | None) -> Path:
    """The cached checkpoint. It appears whole or not at all, so its presence is enough."""
    folder = cache_dir() / "models" / MODEL_NAME
    if (folder / "config.json").is_file():
        return folder
    with _locked(folder.parent / f"{MODEL_NAME}.lock"):
        if not (folder / "config.json").is_file():
            fetch_smollm2(folder, progress=progress)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an advisory lock that the kernel drops with the process, so a killed one leaves nothing to clean up."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise FileError(
            f"The model cache `{path.parent}` cannot be written",
            got=error.strerror,
            hint="set PREFT_CACHE to a folder of yours",
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

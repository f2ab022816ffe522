"""Adapters as model names: what vLLM's front end finds when it looks a request's `model` up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vllm.exceptions import VLLMClientError, VLLMNotFoundError

from preft.adapters.catalog import unknown_adapter
from preft.errors import PreftError
from preft.serve.http.notes import current_note
from preft.serve.registry import AdapterRegistry, Registered, Unavailable

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


def one_line(error: PreftError) -> str:
    """An error's text for a JSON body."""
    parts = [error.what]
    details = [f"{name}: {text}" for name, text in (("got", error.got), ("accepted", error.accepted)) if text]
    if details:
        parts.append(f"({'; '.join(details)})")
    return " ".join(parts) + (f". Hint: {error.hint}" if error.hint else "")


def raise_for_client(error: PreftError) -> NoReturn:
    """Raises vLLM's form of an error that a client has caused, so that its handlers answer with the right status."""
    kind = VLLMNotFoundError if error.http_status == 404 else VLLMClientError
    raise kind(one_line(error)) from error


class AdapterNames(Mapping[str, "LoRARequest"]):
    """Stands in for the dictionary of LoRA requests in vLLM's front end.

    A name is resolved once a request, when it arrives, so a replaced adapter serves its new digest to new requests and
    none sees two versions. Looking up a name that is unknown, unavailable or not for the request's key raises the error
    that the client is to see.

    Nothing is listed: vLLM walks the values to find an adapter named like a kind of content (`text`, `image`) and
    would apply it to the base model's requests.

    Args:
        registry: The adapters.
        is_base: Whether a name means the base model.
        redact: Takes server paths out of an error.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        is_base: Callable[[str], bool],
        redact: Callable[[str, PreftError], PreftError],
    ) -> None:
        self._registry = registry
        self._is_base = is_base
        self._redact = redact

    def find(self, name: object) -> Registered | None:
        """The adapter that a request's `model` means, or None for the base model.

        Raises:
            VLLMClientError: Neither, or an adapter that cannot be served.
        """
        note = current_note()
        if note is not None and isinstance(name, str):
            note.model = name
        if name is None or name == "" or (isinstance(name, str) and self._is_base(name)):
            return None
        if note is not None and note.entry is not None and note.entry.name == name:
            return note.entry
        try:
            may_use = note.may_use if note is not None else lambda _name: True
            if not may_use(str(name)) or self._registry.get(str(name)) is None:
                # Whether the name is another's or nobody's, the key's own names are all that it is told.
                raise unknown_adapter(str(name), filter(may_use, (one.name for one in self._registry.entries())))
            entry = self._registry.resolve(str(name))
        except PreftError as error:
            raise_for_client(self._redact(str(name), error))
        if note is not None:
            note.entry = entry
        return entry

    def __contains__(self, name: object) -> bool:
        return self.find(name) is not None

    def __getitem__(self, name: str) -> LoRARequest:
        entry = self.find(name)
        if entry is None:
            raise KeyError(name)
        return entry.reference.to_lora_request(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def list_models(
    registry: AdapterRegistry,
    names: tuple[str, ...],
    *,
    created: int,
    max_model_len: int,
    may_use: Callable[[str], bool] = lambda _name: True,
) -> dict[str, Any]:
    """The body of `/v1/models`: the base model's names and every adapter that can be served and used; no path."""

    def card(name: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "preft" if parent else "vllm",
            "root": parent or name,
            "parent": parent,
            "max_model_len": max_model_len,
        }

    adapters = [entry.name for entry in registry.entries() if isinstance(entry, Registered) and may_use(entry.name)]
    return {
        "object": "list",
        "data": [*(card(name, None) for name in names), *(card(name, names[0]) for name in adapters)],
    }


class Redactor:
    """Takes the folders of adapters out of errors that clients see.

    Args:
        folders: Adapter folders by name, as given.
        root: The folder of adapters, or None.
    """

    def __init__(self, folders: Mapping[str, str], root: Path | None = None) -> None:
        # What links led to at first too: an error may name that after they have been changed.
        self._folders = {name: {folder, str(Path(folder).resolve())} for name, folder in folders.items()}
        apart = (path for paths in self._folders.values() for path in paths if root is None or not _below(path, root))
        self._all_folders = sorted(set(apart), key=len, reverse=True)
        self._roots = sorted({f"{root}/", f"{root.resolve()}/"}, key=len, reverse=True) if root is not None else []

    def __call__(self, name: str, error: PreftError) -> PreftError:
        """The error with the adapter's folder replaced by its name."""

        def clean(text: str | None) -> str | None:
            return self.text(name, text) if text else text

        return type(error)(
            clean(error.what) or "", got=clean(error.got), accepted=clean(error.accepted), hint=clean(error.hint)
        )

    def text(self, name: str, text: str) -> str:
        """A text with the adapter's folder replaced by its name, and the root left out.

        Two names may mean one adapter in two folders, and the reason of a failure may be about the other's. So every
        folder is taken for the one of this name; without a name, what lies below the root is left as it is.
        """
        folders = self._folders.get(name, set())
        for path in sorted(folders | {str(Path(folder).resolve()) for folder in folders}, key=len, reverse=True):
            text = text.replace(path, name)
        for path in self._all_folders:
            text = text.replace(path, name or "the adapter's folder")
        for path in self._roots:
            text = re.sub(re.escape(path) + r"[^/`\s]+", lambda _: name, text) if name else text.replace(path, "")
        return text


def _below(path: str, root: Path) -> bool:
    return any(Path(path).is_relative_to(one) for one in (root, root.resolve()))


def describe(entry: Registered | Unavailable, redact: Redactor) -> dict[str, Any]:
    """One adapter for the adapters route."""
    if isinstance(entry, Registered):
        return entry.to_dict()
    return Unavailable(entry.name, redact(entry.name, entry.error)).to_dict()

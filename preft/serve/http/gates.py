"""What stands before vLLM's routes: a note of each request, the API keys on every route, and routes that stay closed.

vLLM asks for its key on some path prefixes only. Outside them it tells which model names exist (`/tokenize`) and which
adapters are in use (`/metrics`). Where keys are set, one is asked for everywhere but on the routes that a load balancer
probes. Routes are closed here and not by other routes, since some of vLLM's are mounted after every plugin's.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from preft.serve.http.notes import Note, Notes, current_note
from preft.serve.http.plan import EVERYTHING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/preft"})
"""Routes that say nothing of models, adapters or clients."""
WHOLE_KEY_PATHS = ("/metrics", "/v1/preft/status", "/start_profile", "/stop_profile", "/fault_tolerance")
"""Routes that tell of every adapter or act on the whole server, so that a key for some adapters does not open them.

vLLM answers any path that begins with `/metrics`, so what begins with one of these counts as it.
"""

CLOSED_PATHS = {
    "/v1/load_lora_adapter": "vLLM's own LoRA loading would serve adapters on every token",
    "/v1/unload_lora_adapter": "vLLM's own LoRA loading would serve adapters on every token",
    # Its wrapper replaces the request's `model` by a header's value, or by nothing: the base model would answer.
    "/invocations": "it drops the request's `model`, so the base model would answer for any adapter; use `/v1`",
    "/scale_elastic_ep": "preft serves one engine",
}
"""Routes of vLLM's that stay closed, and why."""
KEPT_BODY_BYTES = 64 << 20


class NoteMiddleware:
    """Makes the note of each request and keeps it until the answer is out.

    Args:
        app: What is guarded.
        notes: Where notes are kept.
    """

    def __init__(self, app: ASGIApp, notes: Notes) -> None:
        self._app = app
        self._notes = notes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        note = Note(scope.get("method", "WEBSOCKET"), request_path(scope))
        is_json = Headers(scope=scope).get("content-type", "application/json").lower().startswith("application/json")

        async def listen() -> Message:
            message = await receive()
            if is_json and message["type"] == "http.request" and len(note.body) < KEPT_BODY_BYTES:
                note.body += message.get("body", b"")
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
            await send(message)

        with self._notes.open(note):
            await self._app(scope, listen, answer)


class ClosedMiddleware:
    """Answers 403 on the closed routes.

    Args:
        app: What is guarded.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it."""
        reason = CLOSED_PATHS.get(request_path(scope)) if scope["type"] == "http" else None
        if reason is None:
            await self._app(scope, receive, send)
        else:
            await forbidden(f"This route is closed: {reason}")(scope, receive, send)


class KeyMiddleware:
    """Answers 401 to a request without a key, and notes what its key may use.

    Args:
        app: What is guarded.
        keys: Keys that open everything.
        limited: Further keys, with the adapters that each may use or `*`.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], limited: Mapping[str, Sequence[str] | str] | None = None
    ) -> None:
        self._app = app
        self._keys: list[tuple[bytes, frozenset[str] | None]] = [(_digest(key), None) for key in keys]
        for key, names in (limited or {}).items():
            self._keys.append((_digest(key), None if names == EVERYTHING else frozenset(names)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it."""
        # vLLM's CORS layer lies outside of this one and answers preflights itself. Any other OPTIONS needs the key:
        # its metrics answer every method.
        kind, path = scope["type"], request_path(scope) if scope["type"] in ("http", "websocket") else ""
        if kind not in ("http", "websocket") or (kind == "http" and path in OPEN_PATHS):
            await self._app(scope, receive, send)
            return
        is_known, allowed = self._find(Headers(scope=scope))
        if not is_known:
            await self._refuse(scope, receive, send)
        elif allowed is not None and path.startswith(WHOLE_KEY_PATHS):
            await forbidden("This route concerns the whole server, and the key is for some adapters")(
                scope, receive, send
            )
        else:
            note = current_note()
            if note is not None:
                note.allowed = allowed
            await self._app(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)

    def _find(self, headers: Headers) -> tuple[bool, frozenset[str] | None]:
        scheme, _, key = (headers.get("Authorization") or "").partition(" ")
        if scheme.lower() != "bearer":
            return False, None
        given = _digest(key)
        # Every key is compared, so that the time tells nothing.
        found = [allowed for digest, allowed in self._keys if secrets.compare_digest(given, digest)]
        return bool(found), found[0] if found else None


def is_same_secret(given: str | None, expected: str) -> bool:
    """Whether a secret was given rightly, in a time that tells nothing of it."""
    return given is not None and secrets.compare_digest(_digest(given), _digest(expected))


def forbidden(message: str) -> JSONResponse:
    """A 403 with its reason."""
    error = {"message": message, "type": "Forbidden", "code": HTTPStatus.FORBIDDEN}
    return JSONResponse({"error": error}, status_code=HTTPStatus.FORBIDDEN)


def request_path(scope: Scope) -> str:
    """The path of a request's URL below where the server is mounted, as its router takes it."""
    path: str = scope["path"]
    below = path.removeprefix(scope.get("root_path", ""))
    return below if below.startswith("/") or not below else path


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

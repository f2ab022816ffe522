"""What stands before vLLM's routes: the API key on every one of them, and a refusal for those that stay closed.

vLLM asks for its key on some path prefixes only. Outside them it tells which model names exist (`/tokenize`) and which
adapters are in use (`/metrics`). Where a key is set, it is asked for everywhere but on the routes that a load balancer
probes. Routes are closed here and not by other routes, since some of vLLM's are mounted after every plugin's.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health", "/ping", "/version"})
"""Routes that say nothing of models, adapters or clients."""

CLOSED_PATHS = {
    "/v1/load_lora_adapter": "vLLM's own LoRA loading would serve adapters on every token",
    "/v1/unload_lora_adapter": "vLLM's own LoRA loading would serve adapters on every token",
    # Its wrapper replaces the request's `model` by a header's value, or by nothing: the base model would answer.
    "/invocations": "it drops the request's `model`, so the base model would answer for any adapter; use `/v1`",
    "/scale_elastic_ep": "preft serves one engine",
}
"""Routes of vLLM's that stay closed, and why."""


class ClosedMiddleware:
    """Answers 403 on the closed routes.

    Args:
        app: What is guarded.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it."""
        reason = CLOSED_PATHS.get(_path(scope)) if scope["type"] == "http" else None
        if reason is None:
            await self._app(scope, receive, send)
            return
        error = {"message": f"This route is closed: {reason}", "type": "Forbidden", "code": HTTPStatus.FORBIDDEN}
        await JSONResponse({"error": error}, status_code=HTTPStatus.FORBIDDEN)(scope, receive, send)


class KeyMiddleware:
    """Answers 401 to a request without the key.

    Args:
        app: What is guarded.
        keys: Accepted keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it."""
        kind = scope["type"]
        no_client = kind not in ("http", "websocket") or scope.get("method") == "OPTIONS"
        if no_client or self._is_open(scope) or self._has_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["type"] == "http" and _path(scope) in OPEN_PATHS

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = (headers.get("Authorization") or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        given = _digest(key)
        # Every key is compared, so that the time tells nothing.
        return sum(secrets.compare_digest(given, digest) for digest in self._digests) > 0


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()

"""The API key, on every route.

vLLM asks for its key on some path prefixes only. Outside them it answers inference (`/invocations`), tells which
model names exist (`/tokenize`) and which adapters are in use (`/metrics`). Where a key is set, this asks for it
everywhere but on the routes that a load balancer probes.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health", "/ping", "/version"})
"""Routes that say nothing of models, adapters or clients."""


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
        path: str = scope["path"]
        return scope["type"] == "http" and path.removeprefix(scope.get("root_path", "")) in OPEN_PATHS

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = (headers.get("Authorization") or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        given = _digest(key)
        # Every key is compared, so that the time tells nothing.
        return sum(secrets.compare_digest(given, digest) for digest in self._digests) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()

"""The routes that change adapters, behind a key of their own: without one configured there are no changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.types import Message

from preft.errors import EngineError, FileError, PreftError, RequestError
from preft.serve.http.gates import forbidden, is_same_secret
from preft.serve.http.operations import Upload
from preft.serve.registry import Registered

ADMIN_HEADER = "X-Preft-Admin-Key"
_MAX_JSON_BYTES = 64 << 10
_MAX_MANIFEST_BYTES = 64 << 20


class TooLargeError(RequestError):
    """A body above the server's limit."""

    http_status = 413


async def add_adapter(request: Request) -> JSONResponse:
    """POST /v1/preft/adapters: a new name, from a folder below the root or from the body."""
    return await _guarded(request, _add)


async def put_adapter(request: Request) -> JSONResponse:
    """PUT /v1/preft/adapters/{name}: what a name means from now on."""
    return await _guarded(request, _put)


async def remove_adapter(request: Request) -> JSONResponse:
    """DELETE /v1/preft/adapters/{name}?mode=refuse|drain: forgets a name."""
    return await _guarded(request, _remove)


async def _guarded(request: Request, act: Any) -> JSONResponse:
    front = request.app.state.preft
    expected = front.plan.admin_key
    if expected is None:
        return forbidden(
            "Adapters cannot be changed over HTTP: the server was started without an admin key; see `--admin-key-file`"
        )
    if not is_same_secret(request.headers.get(ADMIN_HEADER), expected):
        error = {"message": f"`{ADMIN_HEADER}` is missing or wrong", "type": "Unauthorized", "code": 401}
        return JSONResponse({"error": error}, status_code=HTTPStatus.UNAUTHORIZED)
    try:
        answer: JSONResponse = await act(request, front)
        return answer
    except PreftError as error:
        name = request.path_params.get("name", "")
        return error_response(front.redact(name, error))


async def _add(request: Request, front: Any) -> JSONResponse:
    if _is_form(request):
        fields, upload = await _read_form(request, front.plan.max_push_bytes, {"name", "persist"})
        name, persist = _text(fields, "name"), _flag(fields, "persist")
        entry = await front.operations.push(name, upload, persist=persist, replace=False)
    else:
        fields = await _read_json(request, {"name", "folder"})
        name, folder = _text(fields, "name"), fields.get("folder")
        entry = await front.operations.load(name, _optional_text(folder, "folder"), replace=False)
    return JSONResponse(entry.to_dict(), status_code=HTTPStatus.CREATED)


async def _put(request: Request, front: Any) -> JSONResponse:
    name = request.path_params["name"]
    is_new = not isinstance(front.registry.get(name), Registered)
    if _is_form(request):
        fields, upload = await _read_form(request, front.plan.max_push_bytes, {"persist"})
        entry = await front.operations.push(name, upload, persist=_flag(fields, "persist"), replace=True)
    else:
        fields = await _read_json(request, {"folder"})
        entry = await front.operations.load(name, _optional_text(fields.get("folder"), "folder"), replace=True)
    return JSONResponse(entry.to_dict(), status_code=HTTPStatus.CREATED if is_new else HTTPStatus.OK)


async def _remove(request: Request, front: Any) -> JSONResponse:
    unknown = sorted(set(request.query_params) - {"mode"})
    mode = request.query_params.get("mode", "refuse")
    if unknown or mode not in ("refuse", "drain"):
        raise RequestError(
            "The query is not valid", got=str(request.url.query)[:200], accepted="`mode=refuse` or `mode=drain`"
        )
    name = request.path_params["name"]
    count = await front.operations.unload(name, drain=mode == "drain")
    return JSONResponse({"name": name, "removed": True, "requests": count})


def error_response(error: PreftError) -> JSONResponse:
    """An error of ours as the OpenAI form of a body, with its parts."""
    status = HTTPStatus(error.http_status)
    if isinstance(error, FileError) and "cannot be written" in error.what:
        status = HTTPStatus.INSUFFICIENT_STORAGE
    if isinstance(error, EngineError):
        status = HTTPStatus.SERVICE_UNAVAILABLE
    return JSONResponse({"error": {**error.to_dict(), "code": status}}, status_code=status)


def _is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").lower().startswith("multipart/form-data")


async def _read_json(request: Request, known: set[str]) -> Mapping[str, Any]:
    body = await _limited(request, _MAX_JSON_BYTES).body()
    try:
        document = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        raise RequestError("The body is not JSON", accepted="an object, or a multipart form with the files") from None
    if not isinstance(document, dict):
        raise RequestError("The body is not a JSON object", got=type(document).__name__)
    _require_known(set(document), known)
    return document


async def _read_form(request: Request, limit: int, known: set[str]) -> tuple[Mapping[str, Any], Upload]:
    """The fields of a form, and the two files in it."""
    try:
        async with _limited(request, limit).form(max_files=2, max_fields=len(known), max_part_size=4096) as form:
            names = [name for name, _ in form.multi_items()]
            if len(names) != len(set(names)):
                raise RequestError("A field of the form is given twice")
            files = {name: value for name, value in form.items() if isinstance(value, UploadFile)}
            fields = {name: value for name, value in form.items() if not isinstance(value, UploadFile)}
            _require_known(set(fields), known)
            if set(files) != {"manifest", "tensors"}:
                raise RequestError(
                    "The form does not hold an adapter",
                    got=", ".join(sorted(name[:80] for name in files)) or "no file",
                    accepted="two files: `manifest` (preft.json) and `tensors` (preft.safetensors)",
                )
            if (files["manifest"].size or 0) > _MAX_MANIFEST_BYTES:
                raise TooLargeError("The manifest is too large", accepted=f"{_MAX_MANIFEST_BYTES} bytes at most")
            return fields, Upload(await files["manifest"].read(), await files["tensors"].read())
    except OSError as error:
        raise FileError(
            "The body cannot be written to the server's temporary folder", got=error.strerror, hint="see `TMPDIR`"
        ) from None
    except HTTPException as error:
        raise RequestError("The form cannot be read", got=str(error.detail)[:200]) from None


def _limited(request: Request, limit: int) -> Request:
    """The request with a body that ends with an error once it is longer than the limit."""
    too_large = TooLargeError(
        "The body is too large", accepted=f"{limit} bytes at most", hint="see `--max-push-mib`, or load from a folder"
    )
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    received = 0

    async def receive() -> Message:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise too_large
        return message

    return Request(request.scope, receive)


def _require_known(given: set[str], known: set[str]) -> None:
    unknown = sorted(given - known)
    if unknown:
        raise RequestError(
            "A field is not known", got=", ".join(name[:80] for name in unknown), accepted=", ".join(sorted(known))
        )


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise RequestError(f"The field `{name}` is missing or is not text", got=repr(value)[:80])
    return value


def _optional_text(value: object, name: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"The field `{name}` is not text", got=repr(value)[:80])
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, "false")
    if value not in ("true", "false"):
        raise RequestError(f"The field `{name}` is not valid", got=repr(value)[:80], accepted="`true` or `false`")
    return bool(value == "true")

"""The plugin that vLLM's server loads: preft's routes, adapters as model names, checks of requests.

It runs in the server's front end only. Any failure here ends the start: a server that came up without one of its
parts would answer with the wrong weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from preft.adapters.fingerprint import fingerprint_base
from preft.errors import EngineError
from preft.positions import Policy
from preft.serve.backend import guard
from preft.serve.backend.options import BackendOptions
from preft.serve.backend.stat_logger import install_stat_logger
from preft.serve.http import status_page
from preft.serve.http.admin import add_adapter, put_adapter, remove_adapter
from preft.serve.http.checks import install_checks
from preft.serve.http.gates import ClosedMiddleware, KeyMiddleware, NoteMiddleware
from preft.serve.http.names import AdapterNames, Redactor, describe, list_models
from preft.serve.http.notes import Notes, current_note
from preft.serve.http.operations import Operations
from preft.serve.http.outputs import observe_outputs
from preft.serve.http.plan import ServePlan, take_plan
from preft.serve.http.watch import Signature, Watch, sign
from preft.serve.registry import AdapterRegistry, Registered
from preft.serve.settings import GIB, EngineSettings
from preft.version import __version__

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

_WORKERS_S = 10.0


@dataclass
class FrontEnd:
    """What the routes answer from.

    Attributes:
        plan: What the parent asked for.
        options: The engine's settings.
        engine: vLLM's client of the engine.
        registry: The adapters.
        operations: What may be done to them.
        redact: Takes server paths out of errors.
        canaries: Each worker's canary result, taken when it started.
        memory: What the engine's first worker takes of the machine's memory, by purpose.
        max_model_len: Longest prompt plus output.
        created: When the server started, in seconds since the epoch.
    """

    plan: ServePlan
    options: BackendOptions
    engine: EngineClient
    registry: AdapterRegistry
    operations: Operations
    redact: Redactor
    canaries: list[Mapping[str, Any]]
    memory: Mapping[str, int]
    max_model_len: int
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs."""
        return not self.engine.errored


class PreftEndpoints:
    """The object that vLLM's `vllm.endpoint_plugins` interface asks for."""

    name = "preft"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes, replaces those of vLLM's that would leak or mislead, and closes the rest without a key.

        Raises:
            EngineError: A part of vLLM that preft relies on has changed.
        """
        guard.require_http_seams()
        plan = take_plan()
        app.state.preft_plan = plan
        app.state.preft_notes = notes = Notes(plan.access_log)
        app.add_api_route("/v1/models", show_models, methods=["GET"])
        app.add_api_route(status_page.PATH, show_page, methods=["GET"], include_in_schema=False)
        app.add_api_route("/v1/preft/health", show_health, methods=["GET"])
        app.add_api_route("/v1/preft/adapters", show_adapters, methods=["GET"])
        app.add_api_route("/v1/preft/status", show_status, methods=["GET"])
        app.add_api_route("/v1/preft/adapters", add_adapter, methods=["POST"])
        app.add_api_route("/v1/preft/adapters/{name:path}", put_adapter, methods=["PUT"])
        app.add_api_route("/v1/preft/adapters/{name:path}", remove_adapter, methods=["DELETE"])
        app.add_middleware(ClosedMiddleware)
        keys = _keys(app.state.args)
        if keys or plan.keys:
            # The parent's own key, by which it asks for health where every other key is for some adapters.
            app.add_middleware(KeyMiddleware, keys=[*keys, plan.instance_key], limited=plan.keys)
        app.add_middleware(NoteMiddleware, notes=notes)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Registers the adapters and installs names and checks.

        Raises:
            PreftError: The engine is not preft's, a worker has not passed its canary, or the plan cannot be served.
        """
        if engine_client is None:
            raise EngineError("preft's endpoints need an engine")
        plan: ServePlan = state.preft_plan
        options = BackendOptions.from_config(engine_client.vllm_config.additional_config)
        _require_arguments(args, plan)
        workers = await engine_client.collective_rpc("preft_status")
        canaries, memory = require_canaries(workers), workers[0]["memory"]
        models: Any = state.openai_serving_models
        if models.lora_requests:
            raise EngineError("vLLM holds LoRA adapters that preft did not register")
        root = Path(plan.root) if plan.root is not None else None
        redact = Redactor(plan.adapters, root)
        signatures = await asyncio.to_thread(_signatures, plan)
        registry = await asyncio.to_thread(_register, plan, options, Path(engine_client.model_config.model))
        names = AdapterNames(registry, models.is_base_model, redact)
        models.lora_requests = names

        def find_policy(model: object) -> Policy | None:
            entry = names.find(model)
            return entry.reference.policy if entry is not None else None

        install_checks(engine_client.input_processor, state.online_renderer, find_policy)
        operations = Operations(registry, engine_client, state.preft_notes, root)
        observe_outputs(engine_client, operations, redact)
        install_stat_logger(engine_client, options, memory["slot_bytes"])
        state.preft = FrontEnd(
            plan,
            options,
            engine_client,
            registry,
            operations,
            redact,
            canaries,
            memory,
            engine_client.model_config.max_model_len,
        )
        if plan.watch and root is not None:
            fixed = frozenset(plan.adapters) - frozenset(signatures)
            state.preft_watch = asyncio.create_task(Watch(operations, root, fixed, signatures).run())


def require_canaries(workers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The canary result of every worker.

    Args:
        workers: Each worker's status.

    Raises:
        EngineError: A worker has none, or its adapter did not move the model.
    """
    canaries = []
    for worker in workers:
        canary = worker.get("canary")
        if not canary or not canary["restored"] or not canary["moved"] > 0:
            raise EngineError("A worker has not passed its canary", got=repr(canary))
        canaries.append(canary)
    if not canaries:
        raise EngineError("No worker answered for its canary")
    return canaries


def _register(plan: ServePlan, options: BackendOptions, folder: Path) -> AdapterRegistry:
    settings = EngineSettings(
        slots=options.slots,
        max_rank=options.max_rank,
        adapter_cache_gib=options.cache_bytes / GIB,
        lm_head=options.lm_head,
        allow_base_mismatch=options.allow_base_mismatch,
    )
    registry = AdapterRegistry(fingerprint_base(folder, model=plan.model), settings, reserved=plan.names)
    registry.register_all({name: Path(path) for name, path in plan.adapters.items()})
    return registry


def _signatures(plan: ServePlan) -> dict[str, Signature]:
    """Of the adapters that come from the watched folder."""
    return {name: sign(Path(path)) for name, path in plan.adapters.items() if str(Path(path).parent) == plan.root}


def _require_arguments(args: Namespace, plan: ServePlan) -> None:
    """Checks that vLLM understood its command line as it was meant."""
    expected = {"served_model_name": list(plan.names), "lora_modules": None, "model_tag": None, "api_key": None}
    for name, value in expected.items():
        found = getattr(args, name, None)
        if found != value:
            shown = "a key" if name == "api_key" else repr(found)
            raise EngineError(
                f"vLLM's option `--{name.replace('_', '-')}` is not what preft set",
                got=shown,
                hint="look at the options after `--`",
            )


def _keys(args: Namespace) -> list[str]:
    from vllm import envs

    return [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]


def _front(request: Request) -> FrontEnd:
    front: FrontEnd = request.app.state.preft
    return front


async def show_page(request: Request) -> Response:
    """GET /preft: the status page, if it is wanted; it holds no data itself."""
    if not _front(request).plan.status_page:
        return JSONResponse({"detail": "Not Found"}, status_code=HTTPStatus.NOT_FOUND)
    return status_page.answer()


async def show_models(request: Request) -> JSONResponse:
    """GET /v1/models: the base model and the adapters that can be served."""
    front = _front(request)
    return JSONResponse(
        list_models(
            front.registry,
            front.plan.names,
            created=front.created,
            max_model_len=front.max_model_len,
            may_use=_may_use,
        )
    )


def _may_use(name: str) -> bool:
    note = current_note()
    return note is None or note.may_use(name)


async def show_health(request: Request) -> JSONResponse:
    """GET /v1/preft/health: what was proved at start, and whether the engine runs; never a forward pass."""
    front = _front(request)
    body = {
        "status": "ok" if front.is_alive else "dead",
        "instance": front.plan.instance,
        "version": __version__,
        "canary": front.canaries,
        "memory": front.memory,
    }
    return JSONResponse(body, status_code=HTTPStatus.OK if front.is_alive else HTTPStatus.SERVICE_UNAVAILABLE)


async def show_adapters(request: Request) -> JSONResponse:
    """GET /v1/preft/adapters: every adapter, with the reason of each that cannot be served."""
    front = _front(request)
    listed = [
        {**describe(entry, front.redact), "requests": front.operations.requests(entry.name)}
        for entry in front.registry.entries()
        if _may_use(entry.name)
    ]
    return JSONResponse({"adapters": listed})


async def show_status(request: Request) -> JSONResponse:
    """GET /v1/preft/status: settings, counts, and what each worker has done and holds."""
    front = _front(request)
    entries = front.registry.entries()
    available = sum(isinstance(entry, Registered) for entry in entries)
    body: dict[str, Any] = {
        "version": __version__,
        "names": list(front.plan.names),
        "options": asdict(front.options),
        "adapters": {"available": available, "unavailable": len(entries) - available},
    }
    try:
        if not front.is_alive:
            raise ConnectionError("the engine is dead")
        call = front.engine.collective_rpc("preft_status")
        body["workers"] = await asyncio.wait_for(call, timeout=_WORKERS_S)
    except Exception as error:
        body["workers"], body["error"] = [], f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return JSONResponse(body, status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    return JSONResponse(body)

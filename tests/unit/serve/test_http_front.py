"""Names, checks and keys of the front end, on stand-ins: no engine is started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMClientError, VLLMNotFoundError

from preft import save_adapter
from preft.adapters.fingerprint import fingerprint_base
from preft.adapters.store import load_adapter
from preft.errors import EngineError, PreftError, RequestError, UnsupportedError, UsageError
from preft.positions import ALL, PROMPT, Policy
from preft.serve.backend import guard
from preft.serve.backend.reference import AdapterReference
from preft.serve.http import checks, endpoint
from preft.serve.http.checks import (
    check_beam_search,
    check_boundary,
    check_engine_request,
    check_fields,
    check_length,
    check_raw_boundary,
)
from preft.serve.http.endpoint import PreftEndpoints, require_canaries
from preft.serve.http.gates import ClosedMiddleware, KeyMiddleware, NoteMiddleware
from preft.serve.http.names import AdapterNames, Redactor, describe, list_models
from preft.serve.http.notes import Note, Notes, current_note
from preft.serve.http.plan import ServePlan
from preft.serve.registry import AdapterRegistry
from preft.serve.settings import EngineSettings
from tests.helpers.tiny import random_adapter


@pytest.fixture
def folders(tiny_llama: Path, tmp_path: Path) -> dict[str, str]:
    for seed, name in enumerate(("alice", "text")):
        save_adapter(random_adapter(tiny_llama, seed=seed, rank=2), tmp_path / name)
    return {name: str(tmp_path / name) for name in ("alice", "text", "gone")}


@pytest.fixture
def registry(tiny_llama: Path, folders: dict[str, str]) -> AdapterRegistry:
    made = AdapterRegistry(fingerprint_base(tiny_llama), EngineSettings(), reserved=("base", "other"))
    made.register_all({name: Path(folder) for name, folder in folders.items()})
    return made


@pytest.fixture
def names(registry: AdapterRegistry, folders: dict[str, str]) -> AdapterNames:
    return AdapterNames(registry, lambda name: name in ("base", "other"), Redactor(folders))


def test_a_name_means_its_adapter_at_the_time_of_asking(
    names: AdapterNames, registry: AdapterRegistry, tiny_llama: Path, folders: dict[str, str]
) -> None:
    assert "alice" in names
    before = names["alice"]
    assert before.lora_name == "alice"
    save_adapter(random_adapter(tiny_llama, seed=9, rank=2), Path(folders["alice"]), force=True)
    registry.register("alice", folders["alice"])
    after = names["alice"]
    digests = [AdapterReference.decode(request.lora_path).digest for request in (before, after)]
    assert digests[0] != digests[1]


@pytest.mark.parametrize("name", ["base", "other", "", None])
def test_the_base_model_is_no_adapter(names: AdapterNames, name: str | None) -> None:
    assert name not in names


def test_an_unknown_name_is_never_the_base_model(names: AdapterNames, registry: AdapterRegistry) -> None:
    for call in (lambda: "alicia" in names, lambda: names["alicia"]):
        with pytest.raises(VLLMNotFoundError, match=r"no adapter named `alicia` \(accepted: nearest: `alice`\)"):
            call()
    registry.remove("alice")
    with pytest.raises(VLLMNotFoundError):
        names["alice"]


def test_an_unavailable_one_says_why_and_not_where(names: AdapterNames, folders: dict[str, str]) -> None:
    with pytest.raises(VLLMClientError, match="The adapter `gone` is not available") as refused:
        names["gone"]
    assert not isinstance(refused.value, VLLMNotFoundError)
    assert str(Path(folders["gone"]).parent) not in str(refused.value)


def test_where_a_link_led_to_is_not_told_after_it_leads_elsewhere(
    tmp_path: Path, tiny_llama: Path, registry: AdapterRegistry
) -> None:
    for version in ("secret-one", "secret-two"):
        save_adapter(random_adapter(tiny_llama, seed=5, rank=2), tmp_path / version)
    link = tmp_path / "link"
    link.symlink_to("secret-one")
    redact = Redactor({"it": str(link)})
    entry = registry.register("it", link)
    link.unlink()
    link.symlink_to("secret-two")
    shutil.rmtree(tmp_path / "secret-one")
    with pytest.raises(PreftError) as caught:
        load_adapter(entry.reference.folder)
    assert "secret-one" in str(caught.value)
    assert str(redact("it", caught.value)).count("secret") == 0
    assert redact.text("it", f"`{tmp_path}/secret-two/preft.json`") == "`it/preft.json`"


def test_the_folder_of_another_name_is_not_told_either(tmp_path: Path) -> None:
    """The workers know adapters by digest, and remember one reason for all names of it."""
    folders = {"bob": str(tmp_path / "root" / "bob"), "carol": str(tmp_path / "elsewhere" / "secret")}
    redact = Redactor(folders, tmp_path / "root")
    for path in (*folders.values(), str(tmp_path / "root" / "alice-v2")):
        assert redact.text("alice", f"`{path}/preft.json` cannot be opened") == "`alice/preft.json` cannot be opened"
    assert redact.text("", f"`{tmp_path}/root/v2/preft.json` is not JSON") == "`v2/preft.json` is not JSON"
    assert redact.text("carol", f"`{folders['carol']}` cannot be opened") == "`carol` cannot be opened"


def test_no_adapter_is_taken_for_a_kind_of_content(names: AdapterNames) -> None:
    """vLLM applies a listed adapter named `text` to base requests with text parts; nothing is listed."""
    from vllm.entrypoints.serve.engine.serving import BaseServing

    models = SimpleNamespace(lora_requests=names, is_base_model=lambda name: name == "base")
    serving: Any = BaseServing.__new__(BaseServing)
    serving.models, serving.request_logger = models, None
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    request: Any = SimpleNamespace(model="base", messages=[message])
    assert serving._maybe_get_adapters(request, supports_default_mm_loras=True) is None
    models.lora_requests = {"text": names["text"]}
    assert serving._maybe_get_adapters(request, supports_default_mm_loras=True) is not None


def test_the_list_holds_names_and_no_path(registry: AdapterRegistry, folders: dict[str, str]) -> None:
    listed = list_models(registry, ("base", "other"), created=1, max_model_len=10)
    assert [(card["id"], card["parent"]) for card in listed["data"]] == [
        ("base", None),
        ("other", None),
        ("alice", "base"),
        ("text", "base"),
    ]
    described = [describe(entry, Redactor(folders)) for entry in registry.entries()]
    assert [entry["available"] for entry in described] == [True, False, True]
    assert str(Path(folders["alice"]).parent) not in str(listed) + str(described)


@pytest.mark.parametrize("boundary", [0, 1, 7])
@pytest.mark.parametrize("policy", [PROMPT, ALL, Policy.parse("f1+l1")])
def test_a_boundary_within_the_prompt_passes(boundary: int, policy: Policy) -> None:
    check_boundary({"preft_prompt_len": boundary, "session_id": "x"}, policy, 7)
    check_boundary(None, policy, 7)
    check_boundary({"prefix": 1}, None, 7)


@pytest.mark.parametrize("boundary", [-1, 8, "3", 2.5, 2.0, True, [1], 1 << 70])
def test_another_boundary_is_refused(boundary: object) -> None:
    with pytest.raises(UsageError, match="boundary of a request is not valid") as refused:
        check_boundary({"preft_prompt_len": boundary}, PROMPT, 7)
    assert "for a prompt of 7 tokens" in str(refused.value)


def test_what_else_a_request_cannot_ask_for() -> None:
    with pytest.raises(RequestError, match="without an adapter"):
        check_boundary({"preft_prompt_len": 0}, None, 7)
    with pytest.raises(RequestError, match="`preft_promt_len` is not known"):
        check_boundary({"preft_promt_len": 1}, PROMPT, 7)
    with pytest.raises(UnsupportedError, match="Beam search"):
        check_beam_search(PROMPT)
    check_beam_search(ALL)
    check_beam_search(None)


def test_the_length_of_a_prompt() -> None:
    check_length(1, 10)
    check_length(9, 10)
    for length, text in ((0, "prompt is empty"), (10, "got: 10 tokens"), (11, "accepted: at most 9")):
        with pytest.raises(RequestError, match=text):
            check_length(length, 10)


def engine_request(policy: Policy | None, **fields: object) -> Any:
    lora = AdapterReference("0" * 64, policy, "/f").to_lora_request("a") if policy else None
    values = {"prompt_token_ids": [1, 2, 3], "prompt_embeds": None, "resumable": False, "arguments": None, **fields}
    params = SimpleNamespace(extra_args=values.pop("arguments"))
    return SimpleNamespace(lora_request=lora, sampling_params=params, **values)


def test_every_request_is_checked_on_its_way_into_the_engine() -> None:
    from vllm.lora.request import LoRARequest

    check_engine_request(engine_request(None))
    check_engine_request(engine_request(PROMPT, arguments={"preft_prompt_len": 3}))
    check_engine_request(engine_request(ALL, resumable=True))
    bad = [
        engine_request(PROMPT, arguments={"preft_prompt_len": 4}),
        engine_request(None, arguments={"preft_prompt_len": 1}),
        engine_request(PROMPT, resumable=True),
    ]
    foreign = engine_request(None)
    foreign.lora_request = LoRARequest("x", 1, "/some/folder")
    for request in (*bad, foreign):
        with pytest.raises(PreftError):
            check_engine_request(request)


def test_a_canary_that_did_not_sing_is_no_proof() -> None:
    good = {"canary": {"num_sites": 3, "moved": 0.5, "restored": True}}
    assert require_canaries([good, good]) == [good["canary"]] * 2
    for workers in ([], [good, {}], [{"canary": {**good["canary"], "moved": 0.0}}], [{"canary": None}]):
        with pytest.raises(EngineError, match="canary"):
            require_canaries(workers)


def test_a_changed_seam_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import FastAPI

    app = FastAPI()
    app.state.args = SimpleNamespace(api_key=None)
    monkeypatch.setattr(endpoint, "take_plan", lambda: ServePlan("m", ("m",), {}))
    PreftEndpoints().attach_router(app)
    monkeypatch.setitem(guard._HTTP_SEAMS, "vllm.v1.engine.input_processor:InputProcessor.process_inputs", ("self",))
    with pytest.raises(EngineError, match=r"InputProcessor\.process_inputs"):
        PreftEndpoints().attach_router(app)


def test_the_plugin_is_registered() -> None:
    from importlib.metadata import entry_points

    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

    (entry,) = [entry for entry in entry_points(group="vllm.endpoint_plugins") if entry.name == "preft"]
    assert entry.load() is PreftEndpoints
    assert isinstance(PreftEndpoints(), EndpointPlugin)


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/health", None, 200),
        ("/ping", None, 200),
        ("/metrics", None, 401),
        ("/invocations", None, 401),
        ("/tokenize", "Bearer wrong", 401),
        ("/v1/models", "Basic one", 401),
        ("/health/..", None, 401),
        ("//health", None, 401),
        ("/metrics", "Bearer one", 200),
        ("/v1/models", "bearer two", 200),
        ("/invocations", "Bearer one", 403),
        ("/v1/load_lora_adapter", "Bearer one", 403),
    ],
)
def test_the_key_guards_every_route(path: str, header: str | None, status: int) -> None:
    assert asyncio.run(answer("http", path, header)) == status


def test_a_socket_without_the_key_is_closed() -> None:
    assert asyncio.run(answer("websocket", "/v1/realtime", None)) == 1008
    assert asyncio.run(answer("websocket", "/health", None)) == 1008
    assert asyncio.run(answer("websocket", "/v1/realtime", "Bearer one")) == 200


async def answer(kind: str, path: str, header: str | None) -> int:
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", header.encode())] if header else []
    scope = {"type": kind, "path": path, "headers": headers, "method": "GET"}
    await KeyMiddleware(ClosedMiddleware(app), ["one", "two"])(scope, None, send)  # type: ignore[arg-type]
    return int(sent[0].get("status") or sent[0]["code"])


def test_a_name_that_differs_from_another_in_case_alone_is_refused(
    registry: AdapterRegistry, folders: dict[str, str]
) -> None:
    with pytest.raises(UsageError, match="only in case"):
        registry.register("Alice", folders["alice"])
    registry.register("alice", folders["alice"])


@pytest.mark.parametrize("key", ["preft_prompt_len", "preft-boundary", "PREFT_PROMPT_LEN", "boundary"])
def test_a_boundary_in_the_wrong_place_is_refused_not_ignored(key: str) -> None:
    with pytest.raises(RequestError, match="is not known") as caught:
        check_fields({"other": 1, key: 3})
    assert "vllm_xargs" in str(caught.value.hint)
    if key not in ("preft_prompt_len", "boundary"):
        with pytest.raises(RequestError, match="is not known"):
            check_boundary({key: 3}, PROMPT, 5)
    check_fields({"other": 1})
    check_fields(None)


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/completions", "some", 200),
        ("/metrics", "some", 403),
        ("/metrics/", "some", 403),
        ("/metricsfoo", "some", 403),
        ("/v1/preft/status", "some", 403),
        ("/start_profile", "some", 403),
        ("/start_profile", "all", 200),
        ("/fault_tolerance/apply", "some", 403),
        ("/metrics", "whole", 200),
        ("/metrics", "all", 200),
        ("/v1/completions", "som", 401),
    ],
)
def test_a_key_for_some_adapters_does_not_open_what_tells_of_all(path: str, key: str, status: int) -> None:
    seen: list[Note] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        note = current_note()
        assert note is not None
        seen.append(note)
        await send({"type": "http.response.start", "status": 200})

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "path": path, "headers": headers, "method": "GET"}
    gate = KeyMiddleware(app, ["whole"], {"some": ["alice"], "all": "*"})
    asyncio.run(NoteMiddleware(gate, Notes())(scope, None, send))  # type: ignore[arg-type]

    assert sent[0]["status"] == status
    for note in seen:
        assert note.may_use("alice")
        assert note.may_use("bob") == (key != "some")
    assert len(seen) == (status == 200)


def test_a_name_that_a_key_may_not_use_is_a_name_that_does_not_exist(names: AdapterNames) -> None:
    notes = Notes()
    with notes.open(Note("POST", "/v1/completions", allowed=frozenset({"text"}))) as note:
        assert "text" in names
        assert note.entry is not None
        for name in ("alice", "nobody"):
            with pytest.raises(VLLMNotFoundError) as caught:
                names.find(name)
            assert "alice" not in str(caught.value).replace(f"named `{name}`", "")


def test_a_name_of_the_keys_own_that_is_gone_tells_of_no_other(names: AdapterNames) -> None:
    with Notes().open(Note("POST", "/v1/completions", allowed=frozenset({"alicia", "text"}))):
        with pytest.raises(VLLMNotFoundError) as caught:
            names.find("alicia")
        assert "`alice`" not in str(caught.value)
        assert "`text`" in str(caught.value)
    with pytest.raises(VLLMNotFoundError, match="nearest: `alice`"):
        names.find("alicia")


def metrics_app() -> Any:
    """vLLM's metrics, mounted as it mounts them, behind preft's keys and inside its CORS layer."""
    import re

    from fastapi import FastAPI
    from prometheus_client import CollectorRegistry, Counter, make_asgi_app
    from starlette.middleware.cors import CORSMiddleware
    from starlette.routing import Mount

    registry = CollectorRegistry()
    Counter("requests", "By adapter.", ["adapter"], registry=registry).labels("a-tenant").inc()
    app = FastAPI()
    mount = Mount("/metrics", make_asgi_app(registry=registry))
    mount.path_regex = re.compile("^/metrics(?P<path>.*)$")
    app.routes.append(mount)
    app.add_middleware(KeyMiddleware, keys=["whole"], limited={"some": ["alice"]})
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    return app


def test_no_method_and_no_spelling_reaches_the_metrics_without_a_whole_key() -> None:
    from starlette.testclient import TestClient

    client = TestClient(metrics_app())
    for key, expected in ((None, 401), ("some", 403), ("whole", 200)):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        for method in ("GET", "HEAD", "OPTIONS", "POST", "DELETE", "FOO"):
            for path in ("/metrics", "/metrics/", "/metrics/x", "/metricsx", "/%6detrics", "/metrics?a=b"):
                answer = client.request(method, path, headers=headers)
                assert (answer.status_code, method, path) == (expected, method, path)
                assert ("a-tenant" in answer.text) == (key == "whole" and method != "HEAD")
    preflight = {"Origin": "http://x", "Access-Control-Request-Method": "GET"}
    answer = client.options("/metrics", headers=preflight)
    assert answer.status_code == 200
    assert "a-tenant" not in answer.text


@pytest.mark.parametrize(
    ("root_path", "path", "status"),
    [
        ("/v", "/v1/load_lora_adapter", 403),
        ("/v", "/v/v1/load_lora_adapter", 403),
        ("/api", "/api/invocations", 403),
        ("/api", "/apiinvocations", 200),
    ],
)
def test_a_closed_route_stays_closed_below_any_root_path(root_path: str, path: str, status: int) -> None:
    from fastapi import FastAPI
    from starlette.testclient import TestClient

    app = FastAPI(root_path=root_path)
    reached: list[str] = []
    for closed in ("/v1/load_lora_adapter", "/invocations"):
        app.add_api_route(closed, lambda: reached.append("closed"), methods=["POST"])
    app.add_api_route("/apiinvocations", lambda: None, methods=["POST"])
    app.add_middleware(ClosedMiddleware)
    assert TestClient(app).post(path).status_code == status
    assert not reached


def test_a_body_is_read_once_however_many_prompts_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it once a prompt let one client stall the front end for all."""
    renderer: Any = checks.PreftOnlineRenderer.__new__(checks.PreftOnlineRenderer)
    renderer.model_config = SimpleNamespace(max_model_len=10)
    renderer.preft_policy = lambda _model: PROMPT
    read: list[int] = []
    loads = json.loads
    monkeypatch.setattr(checks.json, "loads", lambda body: read.append(len(body)) or loads(body))
    monkeypatch.setattr(checks, "extract_prompt_len", lambda _config, prompt: len(prompt))
    request = SimpleNamespace(model="alice", vllm_xargs={"preft_prompt_len": 1}, model_extra=None)
    for given, refusal in ((b"1", contextlib.nullcontext()), (b"true", pytest.raises(VLLMClientError))):
        with Notes().open(Note("POST", "/v1/completions")) as note:
            note.body += b'{"vllm_xargs": {"preft_prompt_len": %s}}' % given
            with refusal:
                renderer._preft_check(request, [[1, 2]] * 5)
    assert len(read) == 2


def test_the_body_is_kept_however_its_type_is_spelt() -> None:
    kept: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        note = current_note()
        assert note is not None
        kept.append(bytes(note.body))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    for spelling in (b"application/json", b"Application/JSON; charset=utf-8", b"multipart/form-data"):
        scope = {"type": "http", "path": "/", "method": "POST", "headers": [(b"content-type", spelling)]}
        asyncio.run(NoteMiddleware(app, Notes())(scope, receive, None))  # type: ignore[arg-type]
    assert kept == [b"{}", b"{}", b""]


def test_a_request_keeps_what_its_name_meant_when_it_came(
    names: AdapterNames, registry: AdapterRegistry, folders: dict[str, str]
) -> None:
    with Notes().open(Note("POST", "/v1/completions")):
        before = names["alice"]
        registry.register("alice", folders["text"])
        assert names["alice"].lora_path == before.lora_path
    assert names["alice"].lora_path != before.lora_path


@pytest.mark.parametrize(
    ("body", "arguments", "is_refused"),
    [
        (b'{"vllm_xargs": {"preft_prompt_len": true}}', {"preft_prompt_len": 1}, True),
        (b'{"vllm_xargs": {"preft_prompt_len": false}}', {"preft_prompt_len": 0}, True),
        (b'{"vllm_xargs": {"preft_prompt_len": 1}}', {"preft_prompt_len": 1}, False),
        (b'{"vllm_xargs": {}}', {}, False),
        (b"", {"preft_prompt_len": 1}, False),
        (b"[", {"preft_prompt_len": 1}, False),
    ],
)
def test_true_is_no_number_of_tokens(body: bytes, arguments: dict[str, object], is_refused: bool) -> None:
    with pytest.raises(PreftError) if is_refused else contextlib.nullcontext():
        check_raw_boundary(arguments, body, 5)

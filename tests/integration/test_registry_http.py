"""Adapters of a running server that come, change and go over HTTP and in a watched folder, and who may do that."""

from __future__ import annotations

import http.client
import json
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preft.adapters.adapter import Adapter
from preft.adapters.store import adapter_to_bytes, save_adapter
from tests.helpers.engines import BLOCK, Oracle, prompt_of, request_of, save_all
from tests.helpers.serving import ANSWER_S, KEY, TOKENS, Server, form, running_server
from tests.helpers.tiny import build_tiny, random_adapter
from tests.helpers.tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.engine

ADMIN = "let-me-in"
ADMIN_HEADERS = {"X-Preft-Admin-Key": ADMIN}
ALICES = "the-key-of-alice"
PATH = "/v1/preft/adapters"
PROMPT = prompt_of(70, 2 * BLOCK + 3)
LONG, READ = 4000, 100
"""Tokens of a request that is still under way after every change, and how many of them are looked at."""


class Canary:
    """Tells when it is unpickled."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.sign,)


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path) -> dict[str, Adapter]:
    return {
        "alice": random_adapter(tiny_llama, seed=1),
        "bob": random_adapter(tiny_llama, seed=2, positions="f2+l3"),
        # In use with every token, so that an answer under way would show a change.
        "first": random_adapter(tiny_llama, seed=3, positions="all"),
        "second": random_adapter(tiny_llama, seed=4, rank=5),
        "third": random_adapter(tiny_llama, seed=5, blocks=(1,)),
    }


@pytest.fixture(scope="module")
def root(adapters: dict[str, Adapter], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters") / "root"
    root.mkdir()
    save_all(root, {name: adapters[name] for name in ("alice", "bob")})
    return root


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def server(tiny_llama: Path, root: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "admin").write_text(ADMIN)
    (folder / "keys").write_text(json.dumps({ALICES: ["alice"]}))
    options = ["--admin-key-file", str(folder / "admin"), "--keys-file", str(folder / "keys"), "--watch"]
    options += ["--access-log", str(log), "--max-push-mib", "2"]
    with running_server(tiny_llama, root, folder, *options, max_model_len=LONG + 2 * len(PROMPT)) as server:
        yield server


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path, adapters: dict[str, Adapter]) -> Oracle:
    return Oracle(tiny_llama, adapters)


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a context that holds a long answer."""
    folder = build_tiny(tmp_path_factory.mktemp("models") / "long-llama", max_position_embeddings=8192)
    write_tiny_tokenizer(folder)
    return folder


def expected(oracle: Oracle, name: str | None, tokens: int = TOKENS) -> tuple[int, ...]:
    return oracle.two_phase(request_of("x", PROMPT, name, tokens=tokens)).tokens


def change(server: Server, method: str, path: str = "", body: object = None, **headers: str) -> tuple[int, Any]:
    """A change by the admin."""
    return server.ask(method, f"{PATH}{path}", body, headers={**ADMIN_HEADERS, **headers})


def push(server: Server, method: str, path: str, adapter: Adapter, **fields: str) -> tuple[int, Any]:
    manifest, tensors = adapter_to_bytes(adapter)
    body, headers = form(fields, {"manifest": manifest, "tensors": tensors})
    return change(server, method, path, body, **headers)


def listed(server: Server, key: str = KEY) -> dict[str, Any]:
    return {entry["name"]: entry for entry in server.ask("GET", PATH, key=key)[1]["adapters"]}


def held(server: Server) -> int:
    return int(server.ask("GET", "/v1/preft/status")[1]["workers"][0]["held_adapters"])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ANSWER_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Streaming:
    """A request that is under way until its rest is read."""

    def __init__(self, server: Server, model: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)
        body = {"model": model, "prompt": list(PROMPT), "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        document = {**body, "stream": True, "return_token_ids": True}
        self._connection.request("POST", "/v1/completions", json.dumps(document), headers)
        self._answer = self._connection.getresponse()
        self._tokens: list[int] = []
        self._read(1)

    def _read(self, count: int) -> None:
        while len(self._tokens) < count:
            line = self._answer.readline()
            assert line, "the answer ended early"
            if line.startswith(b"data: {"):
                self._tokens += json.loads(line[6:])["choices"][0]["token_ids"] or []

    def rest(self) -> tuple[int, ...]:
        """Its first tokens; then the client goes away, while the answer goes on."""
        self._read(READ)
        self._connection.close()
        return tuple(self._tokens[:READ])


def test_an_adapter_is_pushed_replaced_and_unloaded(
    server: Server, oracle: Oracle, adapters: dict[str, Adapter]
) -> None:
    status, made = push(server, "POST", "", adapters["first"], name="pushed")
    assert (status, made["digest"], made["source"]) == (201, adapters["first"].digest, "memory")
    assert "pushed" in server.models()
    assert server.tokens("pushed", PROMPT) == expected(oracle, "first")
    assert push(server, "POST", "", adapters["second"], name="pushed")[0] == 409

    streaming = Streaming(server, "pushed")
    status, made = push(server, "PUT", "/pushed", adapters["second"])
    assert (status, made["version"]) == (200, 2)
    assert held(server) == 2
    assert listed(server)["pushed"]["requests"] == 1
    assert server.tokens("pushed", PROMPT) == expected(oracle, "second")
    status, told = change(server, "DELETE", "/pushed")
    assert (status, told["error"]["got"]) == (409, "1")
    assert change(server, "DELETE", "/pushed?mode=drain") == (200, {"name": "pushed", "removed": True, "requests": 1})
    assert "pushed" not in server.models()
    assert server.complete("pushed", PROMPT)[0] == 404
    assert streaming.rest() == expected(oracle, "first", READ)
    until(lambda: held(server) == 0)


def test_an_adapter_is_loaded_from_below_the_root(
    server: Server, oracle: Oracle, adapters: dict[str, Adapter], root: Path
) -> None:
    assert change(server, "POST", "", {"name": "other", "folder": "bob"})[0] == 201
    assert server.tokens("other", PROMPT) == expected(oracle, "bob")
    assert listed(server)["other"]["source"] == "folder"
    status, told = change(server, "PUT", "/other", {"folder": "nobody"})
    assert status == 400
    assert str(root) not in json.dumps(told)
    assert server.tokens("other", PROMPT) == expected(oracle, "bob")
    assert change(server, "PUT", "/other", {"folder": "alice"})[0] == 200
    assert server.tokens("other", PROMPT) == expected(oracle, "alice")
    assert change(server, "DELETE", "/other")[0] == 200
    assert change(server, "DELETE", "/other")[0] == 404
    assert held(server) == 0


def test_a_push_may_be_kept_in_the_root(
    server: Server, oracle: Oracle, adapters: dict[str, Adapter], root: Path
) -> None:
    assert push(server, "PUT", "/kept", adapters["first"], persist="true")[0] == 201
    streaming = Streaming(server, "kept")
    status, made = push(server, "PUT", "/kept", adapters["third"], persist="true")
    assert (status, made["version"]) == (200, 2)
    assert server.tokens("kept", PROMPT) == expected(oracle, "third")
    assert streaming.rest() == expected(oracle, "first", READ)
    assert sorted(path.name for path in (root / "kept").iterdir()) == ["preft.json", "preft.safetensors"]
    assert not [path for path in root.iterdir() if path.name.startswith(".")]

    (root / "notes").mkdir()
    (root / "notes" / "important.txt").write_text("mine")
    status, told = push(server, "PUT", "/notes", adapters["first"], persist="true")
    assert status == 400
    assert str(root) not in json.dumps(told)
    assert (root / "notes" / "important.txt").read_text() == "mine"
    assert "notes" not in listed(server)
    assert change(server, "DELETE", "/kept")[0] == 200
    assert (root / "kept" / "preft.json").exists()
    time.sleep(1.5)
    assert "kept" not in server.models(), "the watch has brought it back"
    until(lambda: held(server) == 0)


def test_what_cannot_be_served_changes_nothing(
    server: Server, oracle: Oracle, adapters: dict[str, Adapter], tmp_path: Path
) -> None:
    manifest, tensors = adapter_to_bytes(adapters["first"])
    sign = tmp_path / "sign"
    bad = [
        ({"manifest": manifest, "tensors": tensors[:-8]}, 400),
        ({"manifest": manifest, "tensors": tensors[:-8] + b"\0" * 8}, 400),
        ({"manifest": manifest, "tensors": pickle.dumps(Canary(sign))}, 400),
        ({"manifest": pickle.dumps(Canary(sign)), "tensors": tensors}, 400),
        ({"manifest": b"{}", "tensors": tensors}, 400),
        ({"manifest": manifest, "tensors": (1 << 62).to_bytes(8, "little") + b"x"}, 400),
        ({"manifest": manifest}, 400),
        ({"manifest": manifest, "tensors": tensors, "more": b""}, 400),
        ({"manifest": manifest, "tensors": b"\0" * (3 << 20)}, 413),
    ]
    for files, wanted in bad:
        body, headers = form({}, files)
        status, told = change(server, "PUT", "/alice", body, **headers)
        assert status == wanted, told
        assert told["error"]["message"]
    for body, headers in ((b"[1]", {}), (b"{", {}), (b'{"folder": 1}', {}), (b'{"path": "/"}', {}), (b"x" * 9**6, {})):
        assert change(server, "PUT", "/alice", body, **headers)[0] in (400, 413)
    assert (
        change(server, "PUT", "/alice", b"--x\r\nbroken", **{"Content-Type": "multipart/form-data; boundary=x"})[0]
        == 400
    )
    assert not sign.exists()
    pickle.loads(pickle.dumps(Canary(sign)))
    assert sign.exists(), "the canary is dead"
    assert server.tokens("alice", PROMPT) == expected(oracle, "alice")
    assert held(server) == 0


NAMES = [
    "../alice",
    "..",
    ".",
    "/etc",
    "a/b",
    "..%2Falice",
    "%2e%2e",
    "a%00b",
    "x" * 300,
    "аlice",
    "alice ",
    "ALICE",
    "base",
    "Base",
    "alias",
    "-x",
    "a\\b",
    ".hidden",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_never_a_path(server: Server, adapters: dict[str, Adapter], name: str) -> None:
    """In the URL, in the body, as a folder; for loading, pushing, replacing and unloading."""
    from urllib.parse import quote

    before = listed(server).keys()
    assert change(server, "POST", "", {"name": name, "folder": "alice"})[0] == 400
    for folder in (name, f"alice/../{name}") if name != "alias" else ():
        assert change(server, "POST", "", {"name": "fine", "folder": folder})[0] == 400
    url = f"/{quote(name, safe='%')}"
    assert push(server, "PUT", url, adapters["first"], persist="true")[0] in (400, 404, 405, 307)
    assert push(server, "POST", "", adapters["first"], name=name)[0] == 400
    assert change(server, "DELETE", url)[0] in (404, 405, 307)
    assert listed(server).keys() == before


def test_links_do_not_lead_out_of_the_root(
    server: Server, oracle: Oracle, adapters: dict[str, Adapter], root: Path, tmp_path: Path
) -> None:
    save_adapter(adapters["first"], tmp_path / "outside")
    (root / "way-out").symlink_to(tmp_path / "outside")
    (root / "files").mkdir()
    for name in ("preft.json", "preft.safetensors"):
        (root / "files" / name).symlink_to(tmp_path / "outside" / name)
    try:
        for folder in ("way-out", "files"):
            status, told = change(server, "POST", "", {"name": "sneaky", "folder": folder})
            assert status == 400, told
            assert str(tmp_path) not in json.dumps(told)
        assert push(server, "PUT", "/way-out", adapters["second"], persist="true")[0] == 400
        assert "sneaky" not in listed(server)
    finally:
        (root / "way-out").unlink()
        shutil.rmtree(root / "files")
    assert (tmp_path / "outside" / "preft.json").read_bytes() == adapter_to_bytes(adapters["first"])[0]


@pytest.mark.parametrize(("method", "path"), [("POST", ""), ("PUT", "/alice"), ("DELETE", "/alice?mode=drain")])
def test_changes_need_the_admins_key_and_a_clients(server: Server, method: str, path: str) -> None:
    for headers in ({}, {"X-Preft-Admin-Key": ""}, {"X-Preft-Admin-Key": KEY}, {"X-Preft-Admin-Key": f"{ADMIN} "[:-2]}):
        status, told = server.ask(method, f"{PATH}{path}", {"name": "x"}, headers=headers)
        assert status == 401, told
    for key in (None, "wrong", ADMIN):
        assert server.ask(method, f"{PATH}{path}", {"name": "x"}, key, headers=ADMIN_HEADERS)[0] == 401
    assert "alice" in listed(server)
    for pid in Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split():
        for file in ("cmdline", "environ"):
            assert ADMIN.encode() not in Path(f"/proc/{pid}/{file}").read_bytes()


def test_a_key_may_be_for_some_adapters(server: Server, oracle: Oracle) -> None:
    assert server.models(ALICES) == ["base", "alias", "alice"]
    assert list(listed(server, ALICES)) == ["alice"]
    assert server.tokens("alice", PROMPT, key=ALICES) == expected(oracle, "alice")
    assert server.tokens("base", PROMPT, key=ALICES) == expected(oracle, None)
    for path, body in (
        ("/v1/completions", {"model": "bob", "prompt": [5, 6, 7], "max_tokens": 1}),
        ("/v1/chat/completions", {"model": "bob", "messages": [{"role": "user", "content": "hello"}]}),
        ("/tokenize", {"model": "bob", "prompt": "hello"}),
    ):
        status, told = server.ask("POST", path, body, ALICES)
        assert status == 404, path
        assert told == server.ask("POST", path, {**body, "model": "bog"}, ALICES)[1] | {"error": told["error"]}, (
            "another answer than for a name that does not exist"
        )
        assert "`bob` " not in told["error"]["message"].replace("named `bob` ", "")
        assert server.ask("POST", path, body, KEY)[0] == 200
    for path in ("/metrics", "/v1/preft/status"):
        assert server.ask("GET", path, key=ALICES)[0] == 403
    assert server.ask("DELETE", f"{PATH}/bob", key=ALICES)[0] == 401


def test_a_watched_folder_is_taken_up(
    server: Server, oracle: Oracle, adapters: dict[str, Adapter], root: Path, tmp_path: Path
) -> None:
    save_adapter(adapters["first"], root / "watched")
    until(lambda: listed(server).get("watched", {}).get("available", False))
    assert server.tokens("watched", PROMPT) == expected(oracle, "first")

    streaming = Streaming(server, "watched")
    save_adapter(adapters["second"], root / "watched", force=True)
    until(lambda: listed(server)["watched"]["digest"] == adapters["second"].digest)
    assert server.tokens("watched", PROMPT) == expected(oracle, "second")
    assert streaming.rest() == expected(oracle, "first", READ)

    # Half a copy of the next version: the old one is served until the other half is there.
    save_adapter(adapters["third"], tmp_path / "third")
    whole = (tmp_path / "third" / "preft.safetensors").read_bytes()
    streaming = Streaming(server, "watched")
    (root / "watched" / "preft.safetensors").write_bytes(whole[: len(whole) // 2])
    time.sleep(1.5)
    assert listed(server)["watched"]["digest"] == adapters["second"].digest
    assert server.tokens("watched", PROMPT) == expected(oracle, "second")
    shutil.copy(tmp_path / "third" / "preft.json", root / "watched")
    (root / "watched" / "preft.safetensors").write_bytes(whole)
    until(lambda: listed(server)["watched"]["digest"] == adapters["third"].digest)
    assert server.tokens("watched", PROMPT) == expected(oracle, "third")
    assert streaming.rest() == expected(oracle, "second", READ)

    # Half a copy of something new: listed with its reason, not served.
    (root / "half").mkdir()
    shutil.copy(tmp_path / "third" / "preft.json", root / "half")
    until(lambda: "half" in listed(server))
    assert not listed(server)["half"]["available"]
    assert "half" not in server.models()
    assert str(root) not in json.dumps(listed(server))

    for name in ("watched", "half", "kept"):
        shutil.rmtree(root / name, ignore_errors=True)
    until(lambda: not {"watched", "half"} & listed(server).keys())
    assert server.complete("watched", PROMPT)[0] == 404
    assert server.tokens("alice", PROMPT) == expected(oracle, "alice")
    until(lambda: held(server) == 0)


def test_the_log_has_a_line_for_each_request(server: Server, adapters: dict[str, Adapter], log: Path) -> None:
    def line_of(model: str, **fields: object) -> dict[str, Any]:
        server.complete(model, PROMPT, **fields)
        found: list[dict[str, Any]] = []

        def logged() -> bool:
            found[:] = [json.loads(line) for line in log.read_text().splitlines()]
            return found[-1]["model"] == model

        until(logged)
        return found[-1]

    line_of("bob")
    line_of("nobody")
    for stream in (False, True):
        line = line_of("bob", stream=stream, n=2, temperature=1.0)
        assert line["digest"] == adapters["bob"].digest
        assert line["request_id"].startswith("cmpl-")
        counts = {key: line[key] for key in ("prompt_tokens", "adapted_tokens", "output_tokens", "status")}
        assert counts == {"prompt_tokens": len(PROMPT), "adapted_tokens": 5, "output_tokens": 2 * TOKENS, "status": 200}
        assert line["cached_tokens"] >= 2 * BLOCK
        assert line["ms"] > 0
        # Something else in between, so that the same model's next line is a new one.
        line_of("nobody")
    assert line_of("nobody")["status"] == 404
    line = line_of("alias")
    assert (line["digest"], line["adapted_tokens"], line["output_tokens"]) == (None, 0, TOKENS)
    text = log.read_text()
    assert not any(secret in text for secret in (KEY, ADMIN, ALICES))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = (
    "model prompt messages max_tokens vllm_xargs n stop logprobs seed stream temperature prompt_logprobs logit_bias "
    "structured_outputs tools echo name folder use_beam_search"
)
PATHS = (
    "/v1/completions /v1/chat/completions /v1/responses /tokenize /detokenize /v1/models /v1/preft/adapters "
    "/v1/preft/adapters/alice /v1/preft/status /v1/load_lora_adapter /adapters /v1/completions/../preft "
    "/v1/chat/completions/render /inference/v1/generate /v1/embeddings"
)
fields = st.sampled_from(FIELDS.split())
paths = st.sampled_from(PATHS.split())
bodies = st.one_of(
    st.binary(max_size=200),
    values.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(fields, values, max_size=6).map(
        lambda extra: json.dumps({"model": "alice", "prompt": "hello", "max_tokens": 2, **extra}).encode()
    ),
    st.builds(
        lambda at, junk: b'{"model": "bob", "prompt": [5, 6, 7], "max_tokens": 2}'[:at] + junk,
        st.integers(0, 50),
        st.binary(max_size=20),
    ),
)
types = st.sampled_from(["application/json", "text/plain", "multipart/form-data; boundary=x", "application/x-tar", ""])


def test_malformed_requests_hurt_nobody(server: Server, oracle: Oracle, full: bool) -> None:
    wanted = {name: expected(oracle, name) for name in (None, "alice", "bob")}
    answered, failures, over = [0], [], threading.Event()

    def keep_asking() -> None:
        while not over.is_set():
            for name, tokens in wanted.items():
                status, answer = server.complete(name or "base", PROMPT)
                if status != 200 or tuple(answer["choices"][0]["token_ids"]) != tokens:
                    failures.append((name, status, answer))
                answered[0] += 1

    seen: dict[int, int] = {}

    @settings(max_examples=1000 if full else 60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(["POST", "POST", "PUT", "DELETE", "GET", "PATCH"]), paths, bodies, types, st.booleans())
    def fuzz(method: str, path: str, body: bytes, kind: str, as_admin: bool) -> None:
        if (method, path) == ("DELETE", "/v1/preft/adapters/alice") and as_admin:
            return
        headers = {"Content-Type": kind, **({"X-Preft-Admin-Key": ADMIN} if as_admin else {})}
        status, answer = server.ask(method, path, body, headers=headers)
        seen[status] = seen.get(status, 0) + 1
        assert 200 <= status < 600
        if path.startswith("/v1/preft"):
            assert status < 500, answer

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        fuzz()
    finally:
        over.set()
        asking.join()
    assert not failures, failures[:3]
    assert answered[0] > 3
    assert seen.get(400, 0) > 5, f"the requests were not malformed: {seen}"
    assert server.ask("GET", "/v1/preft/health")[0] == 200
    assert {"alice", "bob"} <= set(server.models())

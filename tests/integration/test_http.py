"""One real server on a tiny model, asked over HTTP: answers, refusals, what it tells, what it keeps to itself."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from preft.adapters.adapter import Adapter
from preft.adapters.store import adapter_to_bytes
from preft.data.requests import GenerationResult
from preft.serve.http.status_page import status_page
from tests.helpers.engines import Oracle, prompt_of, request_of, save_all
from tests.helpers.oracle import oracle_prompt_logprobs
from tests.helpers.serving import ANSWER_S, KEY, STOP_S, TOKENS, Server, form, running_server
from tests.helpers.tiny import random_adapter

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path) -> dict[str, Adapter]:
    return {
        "lorap": random_adapter(tiny_llama, seed=1, rank=8),
        "ends": random_adapter(tiny_llama, seed=2, rank=(4, 17), positions="f2+l3"),
        "lora": random_adapter(tiny_llama, seed=3, rank=8, positions="all"),
        "late": random_adapter(tiny_llama, seed=4, rank=8),
    }


@pytest.fixture(scope="module")
def root(adapters: dict[str, Adapter], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    save_all(root, adapters)
    (root / "broken").mkdir()
    (root / "broken" / "preft.json").write_text("{")
    return root


@pytest.fixture(scope="module")
def server(tiny_llama: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tiny_llama, root, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path, adapters: dict[str, Adapter]) -> Oracle:
    return Oracle(tiny_llama, adapters)


def test_it_says_what_it_serves(server: Server) -> None:
    said = server.log.read_text().splitlines()
    assert said[0].startswith("loading ")
    assert said[0].endswith(" with 5 adapters ...")
    assert said[1].startswith(f"ready at http://127.0.0.1:{server.port}/v1 after ")
    assert said[1].endswith("; base model: base, alias")
    assert said[2] == "4 adapters available: ends (LoRAP), late (LoRAP), lora (LoRA), lorap (LoRAP)"
    assert said[3].startswith("warning: adapter `broken` is not available: ")


def test_models_are_the_base_and_the_adapters_without_paths(server: Server, root: Path, tiny_llama: Path) -> None:
    status, listed = server.ask("GET", "/v1/models")
    assert status == 200
    found = [(card["id"], card["parent"], card["root"]) for card in listed["data"]]
    assert found == [
        ("base", None, "base"),
        ("alias", None, "alias"),
        ("ends", "base", "base"),
        ("late", "base", "base"),
        ("lora", "base", "base"),
        ("lorap", "base", "base"),
    ]
    for path in ("/v1/models", "/v1/preft/adapters", "/v1/preft/status", "/v1/preft/health", "/openapi.json"):
        text = json.dumps(server.ask("GET", path)[1])
        assert str(root) not in text
        assert str(tiny_llama) not in text


def test_a_mixed_batch_equals_the_oracles_cold_and_warm(server: Server, oracle: Oracle) -> None:
    models = [None, "lorap", "ends", "lora"]
    requests = [request_of(f"{name}-{i}", prompt_of(i, 49 + 9 * i), name, TOKENS) for i in (0, 1) for name in models]
    boundary = [request_of("part", prompt_of(5, 60), "lorap", TOKENS, boundary=at) for at in (0, 1, 33, 60)]
    requests += boundary
    oracle.require_adapters_matter(requests[:8])

    def result_of(request: Any) -> GenerationResult:
        xargs = {} if request.boundary is None else {"vllm_xargs": {"preft_prompt_len": request.boundary}}
        model = request.adapter or "base"
        status, answer = server.complete(model, request.prompt_token_ids, **xargs)
        assert status == 200, answer
        assert answer["model"] == model
        tokens = tuple(answer["choices"][0]["token_ids"])
        return GenerationResult(request.id, request.adapter, None, request.prompt_token_ids, 0, tokens, "", "length")

    with ThreadPoolExecutor(len(requests)) as pool:
        cold = list(pool.map(result_of, requests))
        warm = list(pool.map(result_of, requests))
    oracle.require_equal(requests, cold)
    assert [result.token_ids for result in warm] == [result.token_ids for result in cold]
    assert len({result.token_ids for result in cold[-4:]}) == 4


def test_a_stream_holds_what_a_whole_answer_holds(server: Server) -> None:
    prompt = prompt_of(7, 50)
    for model in ("base", "lorap", "lora"):
        _, whole = server.complete(model, prompt)
        status, text = server.complete(model, prompt, stream=True)
        assert status == 200
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
        assert len(choices) > 3
        assert [token for choice in choices for token in choice["token_ids"] or []] == whole["choices"][0]["token_ids"]
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]


def test_a_chat_is_the_completion_of_its_rendered_prompt(server: Server) -> None:
    messages = [{"role": "user", "content": "hello there"}]
    texts = set()
    for model in ("base", "lorap", "lora"):
        chat = {"model": model, "messages": messages}
        _, rendered = server.ask("POST", "/tokenize", {**chat, "add_generation_prompt": True})
        body = {**chat, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        status, answer = server.ask("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        _, completed = server.complete(model, rendered["tokens"])
        assert answer["choices"][0]["message"]["content"] == completed["choices"][0]["text"]
        texts.add(completed["choices"][0]["text"])
    assert len(texts) == 3


def test_several_answers_to_one_prompt(server: Server) -> None:
    """Each of them is what a request of its own with the next seed gets."""
    prompt, sampled = prompt_of(8, 40), {"temperature": 1.0, "logprobs": 2}
    status, several = server.complete("lorap", prompt, n=3, seed=7, **sampled)
    assert status == 200, several
    alone = [server.complete("lorap", prompt, seed=7 + i, **sampled)[1]["choices"][0] for i in range(3)]
    answers = [choice["token_ids"] for choice in sorted(several["choices"], key=lambda choice: choice["index"])]
    assert answers == [choice["token_ids"] for choice in alone]
    assert len({tuple(answer) for answer in answers}) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"model": "lorapp"}, 404, "There is no adapter named `lorapp` (accepted: nearest: `lorap`"),
        ({"model": "../lorap"}, 404, "There is no adapter named `../lorap`"),
        ({"model": "broken"}, 400, "The adapter `broken` is not available (got: "),
        ({"vllm_xargs": {"preft_prompt_len": -1}}, 400, "got: -1 for a prompt of 5 tokens"),
        ({"vllm_xargs": {"preft_prompt_len": 6}}, 400, "accepted: an integer from 0 to 5"),
        ({"vllm_xargs": {"preft_prompt_len": "3"}}, 400, "got: '3' for a prompt of 5 tokens"),
        ({"vllm_xargs": {"preft_prompt_len": 2.5}}, 400, "got: 2.5 for a prompt of 5 tokens"),
        ({"vllm_xargs": {"preft_prompt_len": None}}, 400, "preft_prompt_len"),
        ({"vllm_xargs": {"preft_prompt_len": True}}, 400, "got: True for a prompt of 5 tokens"),
        ({"vllm_xargs": {"preft_prompt_len": False}}, 400, "got: False for a prompt of 5 tokens"),
        ({"vllm_xargs": {"preft_promt_len": 3}}, 400, "`preft_promt_len` is not known"),
        ({"vllm_xargs": {"PREFT-prompt-len": 3}}, 400, "`PREFT-prompt-len` is not known"),
        ({"preft_prompt_len": 3}, 400, "The field `preft_prompt_len` is not known"),
        ({"boundary": 3}, 400, "The field `boundary` is not known"),
        ({"model": "base", "vllm_xargs": {"preft_prompt_len": 3}}, 400, "without an adapter"),
        ({"model": "alias", "vllm_xargs": {"preft_prompt_len": 0}}, 400, "without an adapter"),
        ({"prompt": []}, 400, "at least one prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [5] * 400}, 400, "got: 400 tokens; accepted: at most 399"),
        ({"prompt": [5] * 500}, 400, "400"),
    ],
)
def test_a_request_that_cannot_be_served(
    server: Server, fields: dict[str, object], status: int, text: str, stream: bool
) -> None:
    found, answer = server.complete(**{"model": "lorap", "prompt": [5, 6, 7, 8, 9], "stream": stream, **fields})  # type: ignore[arg-type]
    assert found == status, answer
    assert text in answer["error"]["message"]
    assert answer["error"]["code"] == status


def test_beam_search_is_for_adapters_that_act_on_every_token(server: Server) -> None:
    beam = {"use_beam_search": True, "n": 2, "max_tokens": 2}
    for model in ("lorap", "ends"):
        status, answer = server.complete(model, [5, 6, 7], **beam)
        assert status == 400
        assert "Beam search is not served" in answer["error"]["message"]
    messages = [{"role": "user", "content": "hello"}]
    assert server.ask("POST", "/v1/chat/completions", {"model": "lorap", "messages": messages, **beam})[0] == 400
    for model in ("base", "lora"):
        assert server.complete(model, [5, 6, 7], **beam)[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "hello"}]]}),
        ("/v1/responses", {"input": "hello"}),
    ],
)
def test_other_routes_hold_to_the_same_rules(server: Server, path: str, body: dict[str, object]) -> None:
    assert server.ask("POST", path, {**body, "model": "nobody"})[0] == 404
    for boundary in (999, "3"):
        xargs = {"vllm_xargs": {"preft_prompt_len": boundary}}
        status, answer = server.ask("POST", path, {**body, "model": "lorap", **xargs})
        assert status == 400, answer
        assert "boundary of a request is not valid" in answer["error"]["message"]
    assert server.ask("POST", path, {**body, "model": "lorap", "max_tokens": 2})[0] == 200


def test_health_and_status(server: Server, adapters: dict[str, Adapter]) -> None:
    before = server.ask("GET", "/v1/preft/status")[1]["workers"][0]["steps"]
    for _ in range(5):
        status, health = server.ask("GET", "/v1/preft/health")
        assert (status, health["status"]) == (200, "ok")
        assert [canary["restored"] for canary in health["canary"]] == [True]
    status, told = server.ask("GET", "/v1/preft/status")
    assert status == 200
    assert told["options"]["slots"] == 2
    assert told["adapters"] == {"available": 4, "unavailable": 1}
    assert told["workers"][0]["steps"] == before, "a health check ran a forward pass"
    listed = {entry["name"]: entry for entry in server.ask("GET", "/v1/preft/adapters")[1]["adapters"]}
    assert {name: entry["available"] for name, entry in listed.items()} == {
        "lorap": True,
        "ends": True,
        "lora": True,
        "late": True,
        "broken": False,
    }
    assert listed["ends"]["digest"] == adapters["ends"].digest
    assert listed["broken"]["error"]["message"]


@pytest.mark.parametrize("key", [KEY, None])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/adapters"),
        ("DELETE", "/adapters/lorap"),
        ("POST", "/collective_rpc"),
        ("POST", "/invocations"),
    ],
)
def test_vllms_own_ways_to_change_adapters_are_closed(server: Server, method: str, path: str, key: str | None) -> None:
    body = {
        "lora_name": "lorap",
        "lora_path": "/",
        "name": "lorap",
        "src": "/",
        "method": "preft_status",
        "model": "lorap",
        "prompt": "hello",
    }
    assert server.ask(method, path, body, key)[0] in ((403, 404) if key else (401,))
    assert server.complete("lorap", [5, 6, 7])[0] == 200


def test_without_the_key_nothing_is_told(server: Server) -> None:
    body = {"model": "lorap", "prompt": "hello", "max_tokens": 1}
    for method, path in [
        ("GET", "/v1/models"),
        ("GET", "/v1/preft/health"),
        ("GET", "/v1/preft/adapters"),
        ("GET", "/v1/preft/status"),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("GET", "/metrics"),
    ]:
        for key in (None, "wrong"):
            assert server.ask(method, path, body if method == "POST" else None, key)[0] == 401, path
        assert server.ask(method, path, body if method == "POST" else None)[0] == 200, path
    assert server.ask("GET", "/health", key=None)[0] == 200
    status, page = server.ask("GET", "/preft", key=None)
    assert (status, page) == (200, status_page()[0])
    assert not any(name in page for name in ("lorap", "ends", "alias"))
    arguments = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    assert arguments
    assert all(KEY not in Path(f"/proc/{pid}/cmdline").read_text() for pid in arguments)


def test_log_probabilities_of_an_echoed_prompt_in_one_batch(server: Server, oracle: Oracle) -> None:
    requests = [
        request_of(f"{name}", prompt_of(9, 50 + i), name, TOKENS) for i, name in enumerate([None, "lorap", "lora"])
    ]

    def ask(request: Any, **fields: object) -> Any:
        status, answer = server.complete(request.adapter or "base", request.prompt_token_ids, logprobs=0, **fields)
        assert status == 200, answer
        return answer["choices"][0]

    with ThreadPoolExecutor(len(requests)) as pool:
        echoed = list(pool.map(lambda request: ask(request, echo=True), requests))
    for request, choice in zip(requests, echoed, strict=True):
        alone, length = ask(request), len(request.prompt_token_ids)
        expected = oracle_prompt_logprobs(oracle.model, oracle.spec(request), request.prompt_token_ids)
        found = choice["logprobs"]["token_logprobs"]
        assert found[1:length] == pytest.approx(expected, abs=2e-3)
        assert found[length:] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=2e-3)
        assert choice["text"].endswith(alone["text"])


def test_an_answer_ends_at_a_stop_string_or_keeps_to_a_choice(server: Server) -> None:
    prompt = prompt_of(10, 50)
    for model in ("base", "lorap", "lora"):
        whole = server.complete(model, prompt)[1]["choices"][0]["text"]
        stop = whole[3:5]
        for stream in (False, True):
            status, answer = server.complete(model, prompt, stop=[stop], stream=stream)
            assert status == 200, answer
            if stream:
                events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
                text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
            else:
                text = answer["choices"][0]["text"]
            assert text == whole.partition(stop)[0]
        fields = {"structured_outputs": {"choice": ["left", "right"]}, "ignore_eos": False, "max_tokens": 30}
        # A readable prompt: after bytes that are no text, vLLM puts them before the answer.
        status, answer = server.complete(model, "which way is it now", **fields)
        assert status == 200, answer
        assert answer["choices"][0]["text"] in ("left", "right")


def _running(server: Server) -> float:
    text = server.ask("GET", "/metrics")[1]
    lines = [
        line
        for line in text.splitlines()
        if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{"))
    ]
    assert len(lines) >= 2
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.parametrize(("count", "wait_s"), [(1, 0.0), (1, 0.5), (100, 0.3)])
def test_clients_that_go_away_leave_nothing(server: Server, count: int, wait_s: float) -> None:
    before = server.complete("lorap", [5, 6, 7])[1]["choices"]
    connections = []
    for i in range(count):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)
        body = {"model": ("lorap", "ends", "lora", "base")[i % 4], "prompt": prompt_of(i, 90), "max_tokens": 300}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        connection.request("POST", "/v1/completions", json.dumps({**body, "ignore_eos": True, "stream": True}), headers)
        connections.append(connection)
    time.sleep(wait_s)
    for connection in connections:
        connection.close()

    deadline = time.monotonic() + ANSWER_S
    while _running(server):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert server.complete("lorap", [5, 6, 7])[1]["choices"] == before


def test_an_adapter_that_vanishes_fails_alone(server: Server, root: Path) -> None:
    """Registered, but gone when a request first needs it: that client gets an error, the others their answers."""
    before = server.complete("lorap", [5, 6, 7])
    file, aside = root / "late" / "preft.safetensors", root / "aside"
    file.rename(aside)
    status, answer = server.complete("late", [5, 6, 7])
    assert status == 500
    assert answer["error"]["type"] == "InternalServerError"
    assert answer["error"]["message"].startswith("The adapter `late` could not be loaded: ")
    assert "preft.safetensors" in answer["error"]["message"]
    streamed = server.complete("late", [5, 6, 7], stream=True)[1]
    assert "The adapter `late` could not be loaded: " in streamed
    assert str(root) not in f"{answer} {streamed}"
    aside.rename(file)
    assert server.complete("late", [5, 6, 7])[0] == 200
    assert server.complete("lorap", [5, 6, 7])[1]["choices"] == before[1]["choices"]
    assert server.ask("GET", "/v1/preft/health")[0] == 200


def test_it_ends_when_asked(server: Server) -> None:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    assert server.stop() == 0
    assert server.log.read_text().splitlines()[-2:] == ["stopping ...", "stopped"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    with pytest.raises(OSError):
        server.ask("GET", "/health")


@pytest.mark.full
def test_a_killed_engine_ends_the_server_and_a_restart_serves_the_same(
    tiny_llama: Path, root: Path, adapters: dict[str, Adapter], tmp_path: Path
) -> None:
    (tmp_path / "admin").write_text("let-me-in")
    options = ("--admin-key-file", str(tmp_path / "admin"))
    manifest, tensors = adapter_to_bytes(adapters["lora"])
    with running_server(tiny_llama, root, tmp_path, *options) as server:
        before = server.complete("lorap", [5, 6, 7])[1]["choices"]
        for name, persist in (("kept", "true"), ("fleeting", "false")):
            body, headers = form({"persist": persist}, {"manifest": manifest, "tensors": tensors})
            headers["X-Preft-Admin-Key"] = "let-me-in"
            assert server.ask("PUT", f"/v1/preft/adapters/{name}", body, headers=headers)[0] == 201
        served = server.models()
        engine = next(pid for pid in descendants(server.process.pid) if b"EngineCore" in command_of(pid))
        os.kill(engine, signal.SIGKILL)
        assert server.process.wait(timeout=STOP_S) == 1
    said = server.log.read_text()
    assert said.splitlines()[-4:] == [
        "error: The server ended by itself",
        "  got: the engine died without a word; it may have been killed, or have run out of memory",
        "",
        "hint: `--verbose` shows vLLM's whole log",
    ]
    with running_server(tiny_llama, root, tmp_path) as server:
        assert server.models() == [name for name in served if name != "fleeting"]
        assert server.complete("lorap", [5, 6, 7])[1]["choices"] == before
        assert server.tokens("kept", [5, 6, 7]) == server.tokens("lora", [5, 6, 7])


def descendants(pid: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [inner for child in found for inner in descendants(child)]


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()

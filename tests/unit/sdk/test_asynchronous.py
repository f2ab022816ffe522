"""The asynchronous engine: many coroutines, one batch; streams, cancellation, errors that reach who asked."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from preft.data.requests import GenerationRequest, GenerationResult, RequestUpdate
from preft.errors import EngineError, FileError, UnknownAdapterError
from preft.positions import Policy
from preft.sdk.asynchronous import AsyncEngine
from preft.sdk.engine import Engine
from preft.serve.settings import EngineSettings
from tests.helpers.tiny import random_adapter

SETTINGS = EngineSettings(slots=2, dtype="float32", max_model_len=256, kv_cache_gib=0.25)
PROMPTS = ["one two three", "four five", "six"]


def test_it_answers_as_the_synchronous_one(tiny_llama: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=1)
    with Engine(tiny_llama, {"a": adapter}, backend="hf", progress=False) as engine:
        expected = engine.complete(PROMPTS, "a", max_tokens=6, ignore_eos=True)

    async def run() -> list[Any]:
        async with AsyncEngine(tiny_llama, {"a": adapter}, backend="hf") as engine:
            return await asyncio.gather(
                *(engine.complete(prompt, "a", max_tokens=6, ignore_eos=True) for prompt in PROMPTS)
            )

    found = asyncio.run(run())
    assert [one.result.token_ids for one in found] == [one.result.token_ids for one in expected]
    assert [one.adapted for one in found] == [one.adapted for one in expected]


def test_a_boundary_is_honoured(tiny_llama: Path) -> None:
    adapter, prompt = random_adapter(tiny_llama, seed=1), list(range(40, 52))
    settings: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}

    async def run() -> list[Any]:
        async with AsyncEngine(tiny_llama, {"a": adapter}, backend="hf") as engine:
            found = [await engine.complete(prompt, "a", boundary=number, **settings) for number in (0, 4, None)]
            texts = [piece async for piece in engine.stream(prompt, "a", boundary=0, **settings)]
            assert "".join(texts) == found[0].text
            return [*found, await engine.complete(prompt, **settings)]

    none, some, whole, base = asyncio.run(run())
    assert [one.num_adapted for one in (none, some, whole)] == [0, 4, 12]
    assert none.result.token_ids == base.result.token_ids != whole.result.token_ids


def test_errors_reach_who_asked_and_nobody_else(tiny_llama: Path) -> None:
    async def run() -> None:
        async with AsyncEngine(tiny_llama, backend="hf") as engine:
            answers = await asyncio.gather(
                engine.complete("one", max_tokens=2), engine.complete("one", "none"), return_exceptions=True
            )
            assert not isinstance(answers[0], BaseException)
            assert isinstance(answers[1], UnknownAdapterError)
            await engine.push("new", random_adapter(tiny_llama, seed=2))
            assert (await engine.complete("one", "new", max_tokens=2)).positions == "prompt"
            await engine.remove("new")
        with pytest.raises(EngineError, match="not running"):
            await engine.complete("one")
        with pytest.raises(FileError):
            async with AsyncEngine(tiny_llama / "nowhere", backend="hf"):
                pass

    asyncio.run(run())


class FakeBackend:
    """An engine that finishes nothing unless told to, and counts what it is asked."""

    vocab_size = 100

    def __init__(self) -> None:
        self.running: dict[str, GenerationRequest] = {}
        self.aborted: list[str] = []
        self.finishes = False
        self.error: Exception | None = None
        self.serial = 0
        self.closed = threading.Event()

    def submit(self, request: GenerationRequest) -> str:
        self.serial += 1
        self.running[f"{self.serial}"] = request
        return f"{self.serial}"

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def step(self) -> list[RequestUpdate]:
        if self.error is not None:
            raise self.error
        if not self.finishes:
            time.sleep(0.001)
            return []
        done, self.running = self.running, {}
        return [
            RequestUpdate(ticket, 0, "", GenerationResult(found.id, None, None, found.prompt_token_ids, 0))
            for ticket, found in done.items()
        ]

    def abort(self, tickets: Sequence[str]) -> None:
        if self.error is not None:
            raise self.error
        for ticket in tickets:
            self.running.pop(ticket, None)
        self.aborted += tickets


class FakeEngine:
    """What `AsyncEngine` needs of an `Engine`."""

    tokenizer = None

    def __init__(self) -> None:
        self.backend = FakeBackend()

    def close(self) -> None:
        self.backend.closed.set()

    def completion(self, result: GenerationResult, policy: Policy | None) -> GenerationResult:
        return result


def _faked() -> tuple[AsyncEngine, FakeBackend]:
    engine, fake = AsyncEngine("none"), FakeEngine()
    engine._make = lambda: fake  # type: ignore[assignment,return-value]
    return engine, fake.backend


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def test_who_is_cancelled_while_submitting_leaves_nothing_running() -> None:
    async def run() -> None:
        engine, backend = _faked()
        async with engine:
            gate, entered = threading.Event(), threading.Event()
            plain = backend.submit

            def slowly(request: GenerationRequest) -> str:
                entered.set()
                gate.wait(5)
                return plain(request)

            backend.submit = slowly  # type: ignore[method-assign]
            task = asyncio.create_task(engine.complete([1, 2]))
            await _until(entered.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.set()
            await _until(lambda: backend.serial == 1 and not backend.running)
            assert backend.aborted == ["1"]
            assert not engine._waiters

    asyncio.run(run())


@pytest.mark.parametrize("error", [EngineError("broken"), ValueError("not one of ours")])
def test_a_failed_engine_says_so_to_everybody(error: Exception) -> None:
    async def run() -> None:
        engine, backend = _faked()
        async with engine:
            tasks = [asyncio.create_task(engine.complete([1, 2])) for _ in range(2)]
            await _until(lambda: len(backend.running) == 2)
            backend.error = error
            for found in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5):
                assert isinstance(found, EngineError)
                assert str(error) in str(found.got)
            with pytest.raises(EngineError, match="has failed"):
                await engine.complete([1])
        assert backend.closed.is_set()

    asyncio.run(run())


def test_nobody_waits_for_an_engine_that_was_closed() -> None:
    async def run() -> None:
        engine, backend = _faked()
        async with engine:
            running = asyncio.create_task(engine.complete([1, 2]))
            await _until(lambda: bool(backend.running))
            engine._calls.put(None)
            # Asked after the end was: it lies behind it in the queue, or comes when the thread is gone.
            late = [asyncio.create_task(engine.remove("x")) for _ in range(3)]
            for task in (running, *late):
                with pytest.raises(EngineError, match=r"was closed|not running"):
                    await asyncio.wait_for(task, 5)

    asyncio.run(run())


def test_it_starts_again_but_not_twice() -> None:
    async def run() -> None:
        engine, backend = _faked()
        backend.finishes = True
        for _ in range(2):
            async with engine:
                assert (await engine.complete([1, 2])).prompt_token_ids == (1, 2)  # type: ignore[attr-defined]
                with pytest.raises(EngineError, match="running already"):
                    await engine.__aenter__()
            await engine.__aexit__(None, None, None)

    asyncio.run(run())


def test_a_loop_that_was_closed_takes_nobody_else_down() -> None:
    engine, backend = _faked()
    gate, entered = threading.Event(), threading.Event()

    def blocking(_: Any) -> None:
        entered.set()
        gate.wait(5)

    async def first() -> None:
        await engine.__aenter__()
        task = asyncio.create_task(engine._call(blocking))
        await _until(entered.is_set)
        task.cancel()

    async def second() -> None:
        backend.finishes = True
        assert (await asyncio.wait_for(engine.complete([1, 2]), 5)).prompt_token_ids == (1, 2)  # type: ignore[attr-defined]
        await engine.__aexit__(None, None, None)

    asyncio.run(first())
    gate.set()
    asyncio.run(second())


def test_who_is_cancelled_while_it_starts_leaves_no_engine() -> None:
    async def run() -> None:
        engine, fake = AsyncEngine("none"), FakeEngine()
        gate = threading.Event()

        def make() -> Any:
            gate.wait(5)
            return fake

        engine._make = make
        task = asyncio.create_task(engine.__aenter__())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        await _until(fake.backend.closed.is_set)

    asyncio.run(run())


@pytest.mark.engine
def test_vllm_streams_text_as_it_grows(tiny_llama: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=1)

    async def run() -> None:
        async with AsyncEngine(tiny_llama, {"a": adapter}, settings=SETTINGS) as engine:
            whole = await engine.complete(PROMPTS[0], "a", max_tokens=24, ignore_eos=True)
            pieces = [piece async for piece in engine.stream(PROMPTS[0], "a", max_tokens=24, ignore_eos=True)]
            assert "".join(pieces) == whole.text
            assert len(pieces) > 4
            left = engine.stream(PROMPTS[1], max_tokens=200, ignore_eos=True)
            async for _ in left:
                break
            await left.aclose()  # type: ignore[attr-defined]
            for _ in range(100):
                if not engine._engine.backend.has_unfinished:  # type: ignore[union-attr]
                    break
                await asyncio.sleep(0.02)
            assert not engine._waiters
            assert not engine._engine.backend.has_unfinished  # type: ignore[union-attr]
            many = await asyncio.gather(*(engine.complete(prompt, "a", max_tokens=8) for prompt in PROMPTS * 4))
            assert [one.text for one in many] == [one.text for one in many[:3]] * 4

    asyncio.run(run())

"""The asynchronous engine: many coroutines, one batch; streams, cancellation, errors that reach who asked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from preft.errors import EngineError, FileError, UnknownAdapterError
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

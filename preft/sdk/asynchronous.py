"""The engine for asynchronous code: one thread owns it and steps it, coroutines wait for their answers."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from preft.adapters.adapter import Adapter
from preft.data.encode import encode_row
from preft.data.rows import PromptRow
from preft.errors import EngineError, PreftError
from preft.sdk.engine import Engine, Message, generation_defaults
from preft.sdk.results import Completion
from preft.serve.registry import Source
from preft.serve.settings import EngineSettings

_IDLE_S = 0.2
"""Longest wait of an idle thread before it looks whether it should end."""


@dataclass
class _Waiter:
    """Who waits for a request: a queue that receives updates on its own loop."""

    loop: asyncio.AbstractEventLoop
    updates: asyncio.Queue[Any]

    def tell(self, item: Any) -> None:
        with contextlib.suppress(RuntimeError):  # its loop has been closed meanwhile
            self.loop.call_soon_threadsafe(self.updates.put_nowait, item)


class AsyncEngine:
    """The asynchronous twin of `Engine`: requests of many coroutines run in one batch.

    An asynchronous context manager; the engine starts in it and ends with it.

    Args:
        model: As of `Engine`.
        adapters: As of `Engine`.
        settings: As of `Engine`.
        backend: As of `Engine`.

    Example:
        >>> async with AsyncEngine("smollm2-135m-instruct", {"mine": "my-lorap"}) as engine:
        ...     async for piece in engine.stream("The capital of France is", adapter="mine"):
        ...         print(piece, end="")
    """

    def __init__(
        self,
        model: Path | str,
        adapters: Mapping[str, Source] | None = None,
        *,
        backend: str = "vllm",
        settings: EngineSettings | None = None,
    ) -> None:
        self._make: Callable[[], Engine] = lambda: Engine(
            model, adapters, backend=backend, settings=settings, progress=False
        )
        self._engine: Engine | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiters: dict[str, _Waiter] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    async def __aenter__(self) -> AsyncEngine:
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop, started), name="preft-engine", daemon=True)
        self._thread.start()
        await started
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def complete(self, prompt: str | Sequence[int], adapter: str | None = None, **settings: Any) -> Completion:
        """Completes one text; see `Engine.complete`."""
        return await self._answer(_row(prompt, adapter), settings)

    async def chat(self, messages: Sequence[Message], adapter: str | None = None, **settings: Any) -> Completion:
        """Answers one conversation; see `Engine.chat`."""
        return await self._answer(PromptRow("0", 1, adapter, messages=tuple(messages)), settings)

    async def stream(
        self, prompt: str | Sequence[int] | Sequence[Message], adapter: str | None = None, **settings: Any
    ) -> AsyncIterator[str]:
        """Yields the answer's text as it grows. Leaving the loop early ends the request.

        Args:
            prompt: A text, token ids, or a conversation.
            adapter: Name of an adapter, or None for the base model.
            settings: As of `Engine.complete`.

        Raises:
            RequestError: The request failed.
        """
        sent = 0
        async with contextlib.aclosing(self._updates(_row(prompt, adapter), settings)) as updates:
            async for update in updates:
                # What may still change is held back: half a character at the end.
                text = update.text if update.result is not None else update.text.rstrip("\ufffd")
                if len(text) > sent:
                    yield text[sent:]
                    sent = len(text)
                if update.result is not None and update.result.error is not None:
                    raise EngineError("The request failed", got=str(update.result.error.get("message")))

    async def add(self, name: str, source: Source) -> None:
        """Registers an adapter under a new name; see `Engine.add`."""
        await self._call(lambda engine: engine.add(name, source))

    async def replace(self, name: str, source: Source) -> None:
        """Makes a name mean another adapter; see `Engine.replace`."""
        await self._call(lambda engine: engine.replace(name, source))

    async def push(self, name: str, adapter: Adapter) -> None:
        """Adds or replaces an adapter from memory; see `Engine.push`."""
        await self._call(lambda engine: engine.push(name, adapter))

    async def remove(self, name: str) -> None:
        """Forgets an adapter's name; see `Engine.remove`."""
        await self._call(lambda engine: engine.remove(name))

    async def _answer(self, row: PromptRow, settings: Mapping[str, Any]) -> Completion:
        policy = None
        if row.adapter is not None:
            name = row.adapter
            policy = (await self._call(lambda engine: engine.manifest(name))).positions
        async with contextlib.aclosing(self._updates(row, settings)) as updates:
            async for update in updates:
                if update.result is not None:
                    return self._require_engine().completion(update.result, policy)
        raise EngineError("The engine ended before the answer")

    async def _updates(self, row: PromptRow, settings: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        engine = self._require_engine()
        defaults = generation_defaults(settings)
        request = await asyncio.to_thread(
            encode_row, row, engine.tokenizer, defaults, vocab_size=engine.backend.vocab_size
        )
        waiter = _Waiter(asyncio.get_running_loop(), asyncio.Queue())

        def submit(engine: Engine) -> str:
            ticket: str = engine.backend.submit(request)
            self._waiters[ticket] = waiter
            return ticket

        ticket = await self._call(submit)
        finished = False
        try:
            while not finished:
                update = await waiter.updates.get()
                if isinstance(update, BaseException):
                    raise update
                finished = update.result is not None
                yield update
        finally:
            if not finished:
                self._calls.put(lambda: self._abort(ticket))

    async def _call(self, work: Callable[[Engine], Any]) -> Any:
        """Runs something on the engine's thread, between two steps."""
        engine = self._require_engine()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def call() -> None:
            try:
                value = work(engine)
            except BaseException as error:  # every error belongs to who asked
                loop.call_soon_threadsafe(_fail, answer, error)
            else:
                loop.call_soon_threadsafe(_settle, answer, value)

        self._calls.put(call)
        return await answer

    def _require_engine(self) -> Engine:
        if self._failure is not None:
            raise EngineError("The engine has failed", got=str(self._failure), hint="make a new one")
        if self._engine is None or self._thread is None or not self._thread.is_alive():
            raise EngineError("The engine is not running", hint="use it inside `async with`")
        return self._engine

    def _abort(self, ticket: str) -> None:
        self._waiters.pop(ticket, None)
        if self._engine is not None:
            self._engine.backend.abort([ticket])

    def _run(self, loop: asyncio.AbstractEventLoop, started: asyncio.Future[None]) -> None:
        """The engine's thread: starts it, steps it while there is work, ends it."""
        try:
            self._engine = self._make()
        except BaseException as error:  # told to who starts it
            loop.call_soon_threadsafe(_fail, started, error)
            return
        loop.call_soon_threadsafe(_settle, started, None)
        try:
            while self._do_calls():
                self._step()
        finally:
            self._engine.close()
            self._engine = None
            self._tell_all(EngineError("The engine was closed"))

    def _do_calls(self) -> bool:
        """Does what was asked meanwhile; waits for it while there is nothing else to do. False at the end."""
        engine = self._engine
        wait = engine is None or self._failure is not None or not engine.backend.has_unfinished
        while True:
            try:
                call = self._calls.get(block=wait, timeout=_IDLE_S if wait else None)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            wait = False

    def _step(self) -> None:
        engine = self._engine
        if engine is None or self._failure is not None or not engine.backend.has_unfinished:
            return
        try:
            updates = engine.backend.step()
        except PreftError as error:
            self._failure = error
            self._tell_all(error)
            return
        for update in updates:
            waiter = self._waiters.get(update.ticket)
            if update.result is not None:
                self._waiters.pop(update.ticket, None)
            if waiter is not None:
                waiter.tell(update)

    def _tell_all(self, error: BaseException) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            waiter.tell(error)


def _row(prompt: Any, adapter: str | None) -> PromptRow:
    if isinstance(prompt, str):
        return PromptRow("0", 1, adapter, prompt=prompt)
    if prompt and isinstance(prompt[0], Mapping):
        return PromptRow("0", 1, adapter, messages=tuple(prompt))
    return PromptRow("0", 1, adapter, prompt_token_ids=tuple(prompt))


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)

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
from preft.errors import EngineError
from preft.positions import Policy
from preft.sdk.engine import Engine, Message, generation_defaults
from preft.sdk.results import Completion
from preft.serve.registry import Source
from preft.serve.settings import EngineSettings

_IDLE_S = 0.2
"""Longest wait of an idle thread before it looks whether it should end."""


@dataclass(eq=False)
class _Waiter:
    """Who waits for a request: a queue that receives updates on its own loop.

    Attributes:
        policy: Of the adapter that the request was submitted with; None for base, and before.
    """

    loop: asyncio.AbstractEventLoop
    updates: asyncio.Queue[Any]
    policy: Policy | None = None

    def tell(self, item: Any) -> None:
        _on_loop(self.loop, self.updates.put_nowait, item)


@dataclass(frozen=True)
class _Call:
    """What the engine's thread is asked to do between two steps; `answer` is told what came of it."""

    work: Callable[[Engine], Any]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]

    def run(self, engine: Engine) -> None:
        try:
            value = self.work(engine)
        except BaseException as error:  # every error belongs to who asked
            self.fail(error)
        else:
            _on_loop(self.loop, _settle, self.answer, value)

    def fail(self, error: BaseException) -> None:
        _on_loop(self.loop, _fail, self.answer, error)


@dataclass(frozen=True)
class _Abort:
    """Takes a request back, if it was submitted and is not finished."""

    waiter: _Waiter


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
        self._calls: queue.SimpleQueue[_Call | _Abort | None] = queue.SimpleQueue()
        # Held to put a call into the queue, and to end: no call is left behind that nobody will answer.
        self._lock = threading.Lock()
        self._is_over = False
        self._waiters: dict[str, _Waiter] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    async def __aenter__(self) -> AsyncEngine:
        if self._thread is not None and self._thread.is_alive():
            raise EngineError("The engine is running already", hint="`async with` starts it, once at a time")
        self._calls, self._failure, self._is_over = queue.SimpleQueue(), None, False
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop, started), name="preft-engine", daemon=True)
        self._thread.start()
        try:
            await started
        except BaseException:
            # Who is cancelled while the engine starts never comes to `__aexit__`.
            self._calls.put(None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def complete(
        self, prompt: str | Sequence[int], adapter: str | None = None, *, boundary: int | None = None, **settings: Any
    ) -> Completion:
        """Completes one text; see `Engine.complete`."""
        return await self._answer(_row(prompt, adapter, boundary), settings)

    async def chat(self, messages: Sequence[Message], adapter: str | None = None, **settings: Any) -> Completion:
        """Answers one conversation; see `Engine.chat`."""
        return await self._answer(PromptRow("0", 1, adapter, messages=tuple(messages)), settings)

    async def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        adapter: str | None = None,
        *,
        boundary: int | None = None,
        **settings: Any,
    ) -> AsyncIterator[str]:
        """Yields the answer's text as it grows. Leaving the loop early ends the request.

        Args:
            prompt: A text, token ids, or a conversation.
            adapter: Name of an adapter, or None for the base model.
            boundary: As of `Engine.complete`.
            settings: As of `Engine.complete`.

        Raises:
            RequestError: The request failed.
        """
        sent = 0
        waiter = _Waiter(asyncio.get_running_loop(), asyncio.Queue())
        async with contextlib.aclosing(self._updates(_row(prompt, adapter, boundary), settings, waiter)) as updates:
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
        waiter = _Waiter(asyncio.get_running_loop(), asyncio.Queue())
        async with contextlib.aclosing(self._updates(row, settings, waiter)) as updates:
            async for update in updates:
                if update.result is not None:
                    return self._require_engine().completion(update.result, waiter.policy)
        raise EngineError("The engine ended before the answer")

    async def _updates(self, row: PromptRow, settings: Mapping[str, Any], waiter: _Waiter) -> AsyncGenerator[Any, None]:
        engine = self._require_engine()
        defaults = generation_defaults(settings)
        request = await asyncio.to_thread(
            encode_row, row, engine.tokenizer, defaults, vocab_size=engine.backend.vocab_size
        )

        def submit(engine: Engine) -> None:
            # In one call, or the name could mean another adapter in between.
            waiter.policy = None if row.adapter is None else engine.manifest(row.adapter).positions
            self._waiters[engine.backend.submit(request)] = waiter

        finished = False
        try:
            await self._call(submit)
            while not finished:
                update = await waiter.updates.get()
                if isinstance(update, BaseException):
                    raise update
                finished = update.result is not None
                yield update
        finally:
            # Whoever is cancelled while the request is being submitted has submitted it all the same.
            if not finished:
                self._calls.put(_Abort(waiter))

    async def _call(self, work: Callable[[Engine], Any]) -> Any:
        """Runs something on the engine's thread, between two steps."""
        self._require_engine()
        loop = asyncio.get_running_loop()
        call = _Call(work, loop, loop.create_future())
        with self._lock:
            if self._is_over:
                raise _closed()
            self._calls.put(call)
        return await call.answer

    def _require_engine(self) -> Engine:
        if self._failure is not None:
            raise _failed(self._failure)
        if self._engine is None or self._thread is None or not self._thread.is_alive():
            raise EngineError("The engine is not running", hint="use it inside `async with`")
        return self._engine

    def _abort(self, engine: Engine, waiter: _Waiter) -> None:
        tickets = [ticket for ticket, other in self._waiters.items() if other is waiter]
        for ticket in tickets:
            del self._waiters[ticket]
        if tickets and self._failure is None:
            try:
                engine.backend.abort(tickets)
            except Exception as error:  # nobody waits for it, so it is the engine's own
                self._fail_all(error)

    def _run(self, loop: asyncio.AbstractEventLoop, started: asyncio.Future[None]) -> None:
        """The engine's thread: starts it, steps it while there is work, ends it."""
        try:
            engine = self._engine = self._make()
        except BaseException as error:  # told to who starts it
            self._end()
            _on_loop(loop, _fail, started, error)
            return
        _on_loop(loop, _settle, started, None)
        try:
            while self._do_calls(engine):
                self._step(engine)
        finally:
            self._engine = None
            try:
                engine.close()
            finally:
                self._end()

    def _end(self) -> None:
        """Answers everybody who still waits; nobody can ask any more."""
        with self._lock:
            self._is_over = True
            with contextlib.suppress(queue.Empty):
                while True:
                    call = self._calls.get_nowait()
                    if isinstance(call, _Call):
                        call.fail(_closed())
        self._tell_all(_closed())

    def _do_calls(self, engine: Engine) -> bool:
        """Does what was asked meanwhile; waits for it while there is nothing else to do. False at the end."""
        wait = self._failure is not None or not engine.backend.has_unfinished
        while True:
            try:
                call = self._calls.get(block=wait, timeout=_IDLE_S if wait else None)
            except queue.Empty:
                return True
            if call is None:
                return False
            if isinstance(call, _Abort):
                self._abort(engine, call.waiter)
            elif self._failure is not None:
                call.fail(_failed(self._failure))
            else:
                call.run(engine)
            wait = False

    def _step(self, engine: Engine) -> None:
        if self._failure is not None or not engine.backend.has_unfinished:
            return
        try:
            updates = engine.backend.step()
        except Exception as error:  # an engine that cannot step is lost, whatever the reason
            self._fail_all(error)
            return
        for update in updates:
            waiter = self._waiters.get(update.ticket)
            if update.result is not None:
                self._waiters.pop(update.ticket, None)
            if waiter is not None:
                waiter.tell(update)

    def _fail_all(self, error: Exception) -> None:
        self._failure = error
        self._tell_all(_failed(error))

    def _tell_all(self, error: BaseException) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            waiter.tell(error)


def _row(prompt: Any, adapter: str | None, boundary: int | None) -> PromptRow:
    if isinstance(prompt, str):
        return PromptRow("0", 1, adapter, prompt=prompt, boundary=boundary)
    if prompt and isinstance(prompt[0], Mapping):
        return PromptRow("0", 1, adapter, messages=tuple(prompt), boundary=boundary)
    return PromptRow("0", 1, adapter, prompt_token_ids=tuple(prompt), boundary=boundary)


def _closed() -> EngineError:
    return EngineError("The engine was closed", hint="use it inside `async with`")


def _failed(error: BaseException) -> EngineError:
    failure = EngineError("The engine has failed", got=f"{type(error).__name__}: {error}", hint="make a new one")
    failure.__cause__ = error
    return failure


def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
    """Has a loop call something; a loop that was closed meanwhile has nobody left to tell."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)

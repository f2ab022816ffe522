"""The vLLM engine in this process, behind the same interface as the Hugging Face path."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from preft.adapters.adapter import Adapter
from preft.adapters.fingerprint import fingerprint_base
from preft.adapters.manifest import Manifest
from preft.adapters.store import adapter_to_bytes
from preft.config.progress import Progress
from preft.data.encode import has_tokenizer
from preft.data.requests import GenerationRequest, GenerationResult, RequestUpdate
from preft.errors import AdapterError, EngineError, PreftError, RequestError
from preft.models.locate import locate_model
from preft.positions import resolve_boundary
from preft.serve.pushes import require_pushed
from preft.serve.registry import AdapterRegistry, Registered, Source, Unavailable
from preft.serve.request_form import check_request, failed_result, sampling_params, token_logprobs
from preft.serve.settings import EngineSettings, bind_all_cores
from preft.serve.stock import execution_facts

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

_QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class Engine:
    """A vLLM engine with preft's backend, in this process.

    Args:
        model: Checkpoint folder, known name, or hub id.
        adapters: Adapter folders by name. One that cannot be served is listed as unavailable.
        settings: Engine settings.

    Raises:
        PreftError: The model cannot be found, or a setting would make an adapter act wrongly.
        EngineError: vLLM could not start, or another engine is open in this process.
    """

    def __init__(
        self,
        model: Path | str,
        adapters: Mapping[str, Path | str] | None = None,
        *,
        settings: EngineSettings | None = None,
    ) -> None:
        _require_alone()
        self.settings = settings or EngineSettings()
        folder = locate_model(str(model))
        self.registry = AdapterRegistry(fingerprint_base(folder, model=str(model)), self.settings)
        self.unavailable: list[Unavailable] = self.registry.register_all(
            {name: Path(path) for name, path in (adapters or {}).items()}
        )
        self._llm = _start(folder, self.settings)
        self._core: Any = self._llm.llm_engine
        config = self._core.vllm_config.model_config
        self.max_model_len: int = config.max_model_len
        self.vocab_size: int = config.get_vocab_size()
        self._can_detokenize = not config.skip_tokenizer_init
        self._serial = 0
        self._entries: dict[str, tuple[GenerationRequest, Registered | None]] = {}
        self._missed: list[RequestUpdate] = []
        global _open_engine
        _open_engine = weakref.ref(self)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine and frees its memory; it cannot be used afterwards."""
        if self._llm is not None:
            self._core.engine_core.shutdown()
            self._llm = self._core = None

    def add(self, name: str, source: Source) -> Registered:
        """Registers an adapter under a new name.

        Args:
            name: What requests will call it.
            source: Its folder; or an adapter in memory, which then lives in the workers' memory alone.

        Raises:
            UsageError: The name is taken or not acceptable.
            PreftError: The adapter cannot be served.
        """
        self.registry.require_new(name)
        return self._register(name, source)

    def replace(self, name: str, source: Source) -> Registered:
        """Makes a name mean another adapter for later requests; those under way finish under the old one.

        Raises:
            UnknownAdapterError: The name is not registered.
            PreftError: The adapter cannot be served; the name keeps its meaning.
        """
        self.registry.require_known(name)
        return self._register(name, source)

    def push(self, name: str, adapter: Adapter) -> Registered:
        """Adds or replaces an adapter from memory, without any file: what training calls after each update.

        Every rank checks the digest before the name changes its meaning. Nothing is paused, no cache is emptied.

        Raises:
            PreftError: As `replace`.
        """
        return self._register(name, adapter)

    def remove(self, name: str) -> None:
        """Forgets an adapter's name; requests under way finish under it.

        Raises:
            UnknownAdapterError: The name is not registered.
        """
        self.registry.remove(name)
        self._let_go()

    def manifest(self, name: str) -> Manifest:
        """What a name means now.

        Raises:
            UnknownAdapterError: The name is not registered.
            AdapterError: Its adapter cannot be served.
        """
        return self.registry.resolve(name).manifest

    def _register(self, name: str, source: Source) -> Registered:
        self._require_open()
        entry, adapter = self.registry.check(name, source)
        if entry.in_memory:
            self._send(entry.digest, adapter)
        before = self.registry.get(name)
        if isinstance(before, Registered) and not before.in_memory and before.digest in self._digests_in_use():
            # Its folder may hold the new one by now. One that is neither in memory nor on disk fails its requests.
            self.call_workers("preft_hold", before.reference.encode())
            self.call_workers("preft_pushed", before.digest, True)
        self.registry.install(entry)
        self._let_go()
        return entry

    def _send(self, digest: str, adapter: Adapter) -> None:
        manifest, tensors = adapter_to_bytes(adapter)
        self.call_workers("preft_push", digest, manifest, tensors)
        try:
            require_pushed(digest, self.call_workers("preft_pushed", digest, True))
        except PreftError:
            self._let_go_of([digest])
            raise

    def _digests_in_use(self) -> set[str]:
        return {entry.digest for _, entry in self._entries.values() if entry is not None}

    def _let_go(self) -> None:
        """Tells the workers which adapters no name means and no request uses any more."""
        if self.registry.has_retired:
            self._let_go_of(self.registry.take_unused(self._digests_in_use()))

    def _let_go_of(self, digests: Sequence[str]) -> None:
        known = self._digests_in_use() | {
            entry.digest for entry in self.registry.entries() if isinstance(entry, Registered)
        }
        unused = [digest for digest in digests if digest not in known]
        if unused and self._core is not None:
            self.call_workers("preft_release", unused)

    def prefetch(self, names: Sequence[str] | None = None) -> None:
        """Brings adapters into host memory ahead of requests and waits until they are there.

        Args:
            names: Which; all available ones by default.

        Raises:
            UnknownAdapterError: A name is not registered.
            AdapterError: One can no longer be loaded.
        """
        if names is None:
            entries = [entry for entry in self.registry.entries() if isinstance(entry, Registered)]
        else:
            entries = [self.registry.resolve(name) for name in names]
        references = [entry.reference.encode() for entry in entries]
        failed = {
            digest: why for worker in self.call_workers("preft_prefetch", references) for digest, why in worker.items()
        }
        for entry in entries:
            if entry.reference.digest in failed:
                raise AdapterError(
                    f"The adapter `{entry.name}` could not be loaded", got=failed[entry.reference.digest]
                )

    def status(self) -> list[dict[str, Any]]:
        """What each worker has done and holds."""
        status: list[dict[str, Any]] = self.call_workers("preft_status")
        return status

    def call_workers(self, method: str, *args: Any) -> Any:
        """Calls a method on every worker and returns their answers."""
        self._require_open()
        return self._core.collective_rpc(method, args=args)

    def generate(
        self, requests: Sequence[GenerationRequest], *, progress: Progress | None = None
    ) -> list[GenerationResult]:
        """Completes prompts in one batch.

        Args:
            requests: What to complete; a bad one fails alone, in its result's `error`.
            progress: Told of each finished request.

        Returns:
            One result a request, in their order.

        Raises:
            EngineError: The engine itself has failed, or is closed.
        """
        self._require_open()
        results: dict[int, GenerationResult] = {}
        running: dict[str, int] = {}
        if progress is not None:
            progress.start("generate", len(requests))
        try:
            for index, request in enumerate(requests):
                try:
                    running[self.submit(request)] = index
                except PreftError as error:
                    results[index] = failed_result(request, error)
                    if progress is not None:
                        progress.advance()
            while running and self._core.has_unfinished_requests():
                for update in self._step():
                    if update.ticket not in running:
                        self._missed += [update] if update.result is not None else []
                    elif update.result is not None:
                        results[running.pop(update.ticket)] = update.result
                        if progress is not None:
                            progress.advance()
            if running:
                raise EngineError("The engine stopped before all requests were finished", got=f"{len(running)} left")
        finally:
            self.abort(list(running))
            if progress is not None:
                progress.finish()
        return [results[index] for index in range(len(requests))]

    def submit(self, request: GenerationRequest) -> str:
        """Adds a request without waiting for it.

        Returns:
            A ticket by which `step` and `abort` know it.

        Raises:
            PreftError: It cannot be served.
        """
        self._require_open()
        entry = self.registry.resolve(request.adapter) if request.adapter is not None else None
        check_request(
            request,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            has_tokenizer=self._can_detokenize,
        )
        from vllm.exceptions import VLLMClientError

        self._serial += 1
        ticket = f"{self._serial}"
        try:
            self._core.add_request(
                ticket,
                {"prompt_token_ids": list(request.prompt_token_ids)},
                sampling_params(request),
                lora_request=entry.reference.to_lora_request(entry.name) if entry is not None else None,
            )
        except (VLLMClientError, ValueError, TypeError) as error:
            raise RequestError("vLLM does not take the request", got=str(error)) from error
        self._entries[ticket] = request, entry
        return ticket

    def step(self) -> list[RequestUpdate]:
        """Runs one step of the engine.

        Returns:
            How far each request is that the step has moved; a finished one holds its result. Requests that finished
            while `generate` was at others are among them.

        Raises:
            EngineError: The engine itself has failed, or is closed.
        """
        self._require_open()
        updates = self._step()
        missed, self._missed = self._missed, []
        return [*missed, *updates]

    def _step(self) -> list[RequestUpdate]:
        try:
            outputs: list[RequestOutput] = self._core.step()
        except Exception as error:
            raise EngineError(
                "The engine has failed", got=f"{type(error).__name__}: {error}", hint="close it and start another"
            ) from error
        updates = [self._update(output) for output in outputs if output.request_id in self._entries]
        self._let_go()
        return updates

    @property
    def has_unfinished(self) -> bool:
        """Whether a submitted request is not finished, or its result not fetched."""
        self._require_open()
        return bool(self._missed) or bool(self._core.has_unfinished_requests())

    def abort(self, tickets: Sequence[str]) -> None:
        """Ends requests without a result; those that are finished already are ignored."""
        left = [ticket for ticket in tickets if self._entries.pop(ticket, None) is not None]
        if left and self._core is not None:
            self._core.abort_request(left, internal=False)
            self._let_go()

    def execution_facts(self) -> Mapping[str, Any]:
        """How the engine really runs, which is not always as it was asked."""
        self._require_open()
        return execution_facts(self._core)

    def _require_open(self) -> None:
        if self._core is None:
            raise EngineError("The engine is closed", hint="make a new one")

    def _update(self, output: RequestOutput) -> RequestUpdate:
        num_tokens, text = len(output.outputs[0].token_ids), output.outputs[0].text
        if not output.finished:
            return RequestUpdate(output.request_id, num_tokens, text)
        request, entry = self._entries.pop(output.request_id)
        return RequestUpdate(output.request_id, num_tokens, text, self._result(request, entry, output))

    def _result(self, request: GenerationRequest, entry: Registered | None, output: RequestOutput) -> GenerationResult:
        completion = output.outputs[0]
        if completion.finish_reason == "error":
            reason = self._failure(output.request_id)
            return failed_result(request, RequestError("The request failed in the engine", got=reason))
        return GenerationResult(
            id=request.id,
            adapter=request.adapter,
            digest=entry.digest if entry is not None else None,
            prompt_token_ids=request.prompt_token_ids,
            boundary=resolve_boundary(len(request.prompt_token_ids), request.boundary) if entry is not None else 0,
            token_ids=tuple(completion.token_ids),
            text=completion.text,
            finish_reason=completion.finish_reason,
            logprobs=token_logprobs(completion.token_ids, completion.logprobs),
            prompt_logprobs=token_logprobs(request.prompt_token_ids[1:], (output.prompt_logprobs or [None])[1:] or None)
            if request.want_prompt_logprobs
            else None,
        )

    def _failure(self, engine_id: str) -> str:
        failures: Mapping[str, str] = self._scheduler.preft_failures
        return next((reason for key, reason in failures.items() if key.partition("-")[0] == engine_id), "unknown")

    @property
    def _scheduler(self) -> Any:
        return self._core.engine_core.engine_core.scheduler


_open_engine: weakref.ref[Engine] | None = None


def _require_alone() -> None:
    """Refuses a second engine: vLLM keeps its groups of ranks by process, and closing one would break the other."""
    other = _open_engine() if _open_engine is not None else None
    if other is not None and other._llm is not None:
        raise EngineError(
            "Another engine is open in this process", hint="close it first, or start the second in a process of its own"
        )


def _start(folder: Path, settings: EngineSettings) -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    bind_all_cores()
    from preft.serve.backend import guard

    guard.require_cpu_build()
    guard.require_version()
    guard.require_safe_environment()
    from vllm import LLM

    try:
        own = {"skip_tokenizer_init": not has_tokenizer(folder), "use_tqdm_on_load": False}
        return LLM(**{**own, **settings.engine_arguments(str(folder))})
    except PreftError:
        raise
    except Exception as error:  # whatever a model or a setting makes of vLLM's start
        cause = _preft_cause(error)
        if cause is not None:
            raise cause from None
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise EngineError(
            "vLLM could not start", got=lines[-1], hint="run again with `--verbose` for its log"
        ) from error


def _preft_cause(error: BaseException | None) -> PreftError | None:
    """The error of ours that a chain of exceptions began with, if any."""
    while error is not None:
        if isinstance(error, PreftError):
            return error
        error = error.__cause__ or error.__context__
    return None

"""The vLLM engine in this process, behind the same interface as the Hugging Face path."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from preft.adapters.fingerprint import fingerprint_base
from preft.config.progress import Progress
from preft.data.encode import has_tokenizer
from preft.data.requests import GenerationRequest, GenerationResult
from preft.errors import AdapterError, EngineError, PreftError, RequestError
from preft.models.locate import locate_model
from preft.positions import resolve_boundary
from preft.serve.registry import AdapterRegistry, Registered, Unavailable
from preft.serve.settings import EngineSettings, bind_all_cores

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

_SEEDS = 1 << 63
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
        self._serial = 0
        self._entries: dict[str, Registered | None] = {}
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

    def add_adapter(self, name: str, folder: Path | str) -> Registered:
        """Registers an adapter, or a new version of one. Requests under way keep what they started with."""
        return self.registry.register(name, folder)

    def remove_adapter(self, name: str) -> None:
        """Forgets an adapter's name."""
        self.registry.remove(name)

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
                    running[self._submit(request)] = index
                except PreftError as error:
                    results[index] = failed_result(request, error)
                    if progress is not None:
                        progress.advance()
            for output in self._finished(running):
                index = running.pop(output.request_id)
                results[index] = self._result(requests[index], output)
                if progress is not None:
                    progress.advance()
        finally:
            if running and self._core is not None:
                self._core.abort_request(list(running), internal=False)
            for engine_id in running:
                self._entries.pop(engine_id, None)
            if progress is not None:
                progress.finish()
        return [results[index] for index in range(len(requests))]

    def _require_open(self) -> None:
        if self._core is None:
            raise EngineError("The engine is closed", hint="make a new one")

    def _submit(self, request: GenerationRequest) -> str:
        entry = self.registry.resolve(request.adapter) if request.adapter is not None else None
        check_request(request, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        from vllm.exceptions import VLLMClientError

        self._serial += 1
        engine_id = f"{self._serial}"
        try:
            self._core.add_request(
                engine_id,
                {"prompt_token_ids": list(request.prompt_token_ids)},
                sampling_params(request),
                lora_request=entry.reference.to_lora_request(entry.name) if entry is not None else None,
            )
        except (VLLMClientError, ValueError, TypeError) as error:
            raise RequestError("vLLM does not take the request", got=str(error)) from error
        self._entries[engine_id] = entry
        return engine_id

    def _finished(self, running: Mapping[str, int]) -> Iterator[RequestOutput]:
        while running and self._core.has_unfinished_requests():
            for output in self._step():
                if output.finished and output.request_id in running:
                    yield output
        if running:
            raise EngineError("The engine stopped before all requests were finished", got=f"{len(running)} left")

    def _step(self) -> list[RequestOutput]:
        try:
            outputs: list[RequestOutput] = self._core.step()
        except Exception as error:
            raise EngineError(
                "The engine has failed", got=f"{type(error).__name__}: {error}", hint="close it and start another"
            ) from error
        return outputs

    def _result(self, request: GenerationRequest, output: RequestOutput) -> GenerationResult:
        entry = self._entries.pop(output.request_id)
        completion = output.outputs[0]
        if completion.finish_reason == "error":
            reason = self._failure(output.request_id)
            return failed_result(request, RequestError("The request failed in the engine", got=reason))
        return GenerationResult(
            id=request.id,
            adapter=request.adapter,
            digest=entry.reference.digest if entry is not None else None,
            prompt_token_ids=request.prompt_token_ids,
            boundary=resolve_boundary(len(request.prompt_token_ids), request.boundary) if entry is not None else 0,
            token_ids=tuple(completion.token_ids),
            text=completion.text,
            finish_reason=completion.finish_reason,
            logprobs=_token_logprobs(completion.token_ids, completion.logprobs),
            prompt_logprobs=_token_logprobs(
                request.prompt_token_ids[1:], (output.prompt_logprobs or [None])[1:] or None
            )
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


def check_request(request: GenerationRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Refuses, in the front end, a request that the engine could not serve.

    Raises:
        RequestError: Its prompt, boundary or limits are not valid.
    """
    length = len(request.prompt_token_ids)
    if not length:
        raise RequestError("The prompt is empty", accepted="at least one token")
    if length >= max_model_len:
        raise RequestError(
            "The prompt does not fit the context", got=f"{length} tokens", accepted=f"at most {max_model_len - 1}"
        )
    outside = [token for token in request.prompt_token_ids if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(
            "The prompt holds a token id that the model does not have",
            got=str(outside[0]),
            accepted=f"0 to {vocab_size - 1}",
        )
    _check_settings(request)
    if request.adapter is None and request.boundary not in (None, 0):
        raise RequestError("A boundary was given without an adapter", hint="name an adapter, or leave `boundary` out")
    if request.adapter is not None:
        resolve_boundary(length, request.boundary)


def _check_settings(request: GenerationRequest) -> None:
    if request.max_tokens < 1:
        raise RequestError("`max_tokens` is not valid", got=str(request.max_tokens), accepted="at least 1")
    if not 0 <= request.temperature < math.inf:
        raise RequestError("`temperature` is not valid", got=str(request.temperature), accepted="a number from 0")
    if request.seed is not None and not 0 <= request.seed < _SEEDS:
        raise RequestError("`seed` is not valid", got=str(request.seed), accepted=f"0 to {_SEEDS - 1}")
    if request.num_logprobs is not None and request.num_logprobs < 0:
        raise RequestError("`num_logprobs` is not valid", got=str(request.num_logprobs), accepted="at least 0")


def failed_result(request: GenerationRequest, error: PreftError) -> GenerationResult:
    """The result of a request that failed alone."""
    return GenerationResult(
        request.id, request.adapter, None, request.prompt_token_ids, request.boundary or 0, error=error.to_dict()
    )


def sampling_params(request: GenerationRequest) -> SamplingParams:
    """VLLM's form of a request's settings."""
    from vllm import SamplingParams

    from preft.serve.backend.request import BOUNDARY_ARGUMENT

    named = request.adapter is not None and request.boundary is not None
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
        logprobs=request.num_logprobs,
        prompt_logprobs=0 if request.want_prompt_logprobs else None,
        extra_args={BOUNDARY_ARGUMENT: request.boundary} if named else None,
    )


def _token_logprobs(tokens: Sequence[int], table: Any) -> tuple[float, ...] | None:
    """The log-probability of each token, out of vLLM's table of alternatives."""
    if table is None:
        return None
    return tuple(float(row[token].logprob) for token, row in zip(tokens, table, strict=True))


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

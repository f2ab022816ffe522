"""An engine that speaks text and conversations, over either backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, overload

from preft.adapters.adapter import Adapter
from preft.adapters.manifest import Manifest
from preft.config.progress import Progress
from preft.data.encode import GenerationDefaults, encode_row, load_tokenizer
from preft.data.requests import GenerationRequest, GenerationResult
from preft.data.rows import PromptRow
from preft.errors import RequestError, UsageError
from preft.models.locate import locate_model
from preft.positions import Policy
from preft.sdk.progress import default_progress
from preft.sdk.results import Completion, Completions, Score, Scores
from preft.serve.registry import Source
from preft.serve.settings import EngineSettings

Message = Mapping[str, str]
BACKENDS = ("vllm", "hf")


class Engine:
    """A base model with adapters, in this process, that completes, chats and scores.

    A context manager. One vLLM engine can be open in a process at a time.

    Args:
        model: Checkpoint folder, known name, or hub id.
        adapters: Adapters by name: folders, or loaded ones.
        backend: `vllm`, or `hf` for a plain Transformers model: slower, on any device, the same answers.
        settings: Of the vLLM engine; `hf` honours `dtype`, `max_model_len` and `allow_base_mismatch` of them.
        progress: Show progress bars; None shows them in notebooks and terminals.

    Attributes:
        backend: The engine beneath: `preft.serve.engine.Engine` or `preft.serve.hf_engine.HFEngine`.
        tokenizer: The model's tokenizer, or None.

    Raises:
        PreftError: The model cannot be found, a setting would make an adapter act wrongly, or an adapter cannot be
            used.
        EngineError: The engine could not start.

    Example:
        >>> with Engine("smollm2-135m-instruct", {"mine": "my-lorap"}) as engine:
        ...     engine.chat([{"role": "user", "content": "What is a sail?"}], adapter="mine").text
    """

    def __init__(
        self,
        model: Path | str,
        adapters: Mapping[str, Source] | None = None,
        *,
        backend: str = "vllm",
        settings: EngineSettings | None = None,
        progress: bool | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise UsageError("The backend is not valid", got=f"`{backend}`", accepted=", ".join(BACKENDS))
        self._progress = progress
        folder = locate_model(str(model), progress=self._bar())
        self.tokenizer: Any = load_tokenizer(folder)
        self.backend: Any = _open(backend, model, settings or EngineSettings())
        try:
            for name, source in (adapters or {}).items():
                self.backend.add(name, source)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine and frees its memory; it cannot be used afterwards."""
        self.backend.close()

    def add(self, name: str, source: Source) -> None:
        """Registers an adapter, from its folder or from memory, under a new name.

        Raises:
            PreftError: The name is taken or not acceptable, or the adapter cannot be served.
        """
        self.backend.add(name, source)

    def replace(self, name: str, source: Source) -> None:
        """Makes a name mean another adapter from now on; requests under way finish under the old one.

        Raises:
            PreftError: The name is not registered, or the adapter cannot be served; the name then keeps its meaning.
        """
        self.backend.replace(name, source)

    def push(self, name: str, adapter: Adapter) -> None:
        """Adds or replaces an adapter from memory, without any file.

        Raises:
            PreftError: The adapter cannot be served.
        """
        self.backend.push(name, adapter)

    def remove(self, name: str) -> None:
        """Forgets an adapter's name.

        Raises:
            UnknownAdapterError: The name is not registered.
        """
        self.backend.remove(name)

    def manifest(self, name: str) -> Manifest:
        """What a name means now.

        Raises:
            UnknownAdapterError: The name is not registered.
        """
        manifest: Manifest = self.backend.manifest(name)
        return manifest

    @overload
    def complete(self, prompts: str, adapter: str | None = None, **settings: Any) -> Completion: ...
    @overload
    def complete(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], adapter: str | None = None, **settings: Any
    ) -> Completions: ...
    def complete(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        adapter: str | None = None,
        *,
        boundary: int | None = None,
        **settings: Any,
    ) -> Completion | Completions:
        """Completes texts.

        Args:
            prompts: One text; or several, as texts or token ids, which run in one batch.
            adapter: Name of an adapter, or None for the base model.
            boundary: Leading prompt tokens that the adapter may act on, or None for all of them.
            settings: Fields of `preft.data.encode.GenerationDefaults`: `max_tokens`, `temperature`, `seed`,
                `ignore_eos`, `num_logprobs`, `want_prompt_logprobs`.

        Returns:
            One answer for one text, several for several. A failed one says why in `result.error`.

        Raises:
            UsageError: The prompts are something else.
        """
        many: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        if any(not isinstance(prompt, Iterable) for prompt in many):
            raise UsageError(
                "The prompts are not valid",
                got=repr(prompts)[:60],
                accepted="a text, or a list of texts or of lists of token ids",
                hint="the token ids of one prompt are `[ids]`",
            )
        rows = [
            PromptRow(str(index), index + 1, adapter, prompt=prompt, boundary=boundary)
            if isinstance(prompt, str)
            else PromptRow(str(index), index + 1, adapter, prompt_token_ids=tuple(prompt), boundary=boundary)
            for index, prompt in enumerate(many)
        ]
        answers = self._answer(rows, settings)
        return answers[0] if isinstance(prompts, str) else answers

    @overload
    def chat(self, messages: Sequence[Message], adapter: str | None = None, **settings: Any) -> Completion: ...
    @overload
    def chat(
        self, messages: Sequence[Sequence[Message]], adapter: str | None = None, **settings: Any
    ) -> Completions: ...
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        adapter: str | None = None,
        **settings: Any,
    ) -> Completion | Completions:
        """Answers conversations, rendered with the model's chat template.

        Args:
            messages: One conversation, a list of roles and contents; or a list of conversations.
            adapter: Name of an adapter, or None for the base model.
            settings: As of `complete`.

        Returns:
            One answer for one conversation, several for several.
        """
        is_one = all(isinstance(message, Mapping) for message in messages)
        conversations: list[Any] = [messages] if is_one else list(messages)
        rows = [
            PromptRow(str(index), index + 1, adapter, messages=tuple(conversation))
            for index, conversation in enumerate(conversations)
        ]
        answers = self._answer(rows, settings)
        return answers[0] if is_one else answers

    def compare(
        self, prompt: str | Sequence[Message], adapters: Sequence[str | None], *, base: bool = True, **settings: Any
    ) -> Completions:
        """The base model and adapters on one prompt, in one batch, side by side.

        Args:
            prompt: A text, or a conversation.
            adapters: Names of adapters.
            base: Put the base model first.
            settings: As of `complete`.
        """
        names = [None, *adapters] if base else list(adapters)
        what: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"messages": tuple(prompt)}
        rows = [PromptRow(str(index), index + 1, name, **what) for index, name in enumerate(names)]
        return self._answer(rows, settings)

    def score(
        self, contexts: str | Sequence[str], continuations: str | Sequence[str], adapter: str | None = None
    ) -> Scores:
        """Log-probabilities of given continuations; the adapter acts on the contexts only.

        The context is tokenised alone and with its continuation; if the tokens of the first are not the beginning of
        the second, the continuation is tokenised by itself.

        Args:
            contexts: One context for all continuations, or one for each.
            continuations: Texts.
            adapter: Name of an adapter, or None for the base model.

        Raises:
            RequestError: A context or a continuation has no tokens, or the engine refused one.
        """
        ends = [continuations] if isinstance(continuations, str) else list(continuations)
        starts = [contexts] * len(ends) if isinstance(contexts, str) else list(contexts)
        if len(starts) != len(ends):
            raise UsageError("Contexts and continuations are not equally many", got=f"{len(starts)} and {len(ends)}")
        requests, lengths = [], []
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            prefix, whole = self._split(start, end)
            lengths.append(len(prefix))
            boundary = len(prefix) if adapter is not None else None
            requests.append(
                GenerationRequest(str(index), whole, adapter, boundary, max_tokens=1, want_prompt_logprobs=True)
            )
        results = self.generate(requests)
        return Scores(
            [
                self._score(result, start, end, length)
                for result, start, end, length in zip(results, starts, ends, lengths, strict=True)
            ]
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Completes requests of token ids in one batch; what the other methods do after tokenising."""
        results: list[GenerationResult] = self.backend.generate(requests, progress=self._bar())
        return results

    def _bar(self) -> Progress | None:
        return default_progress(self._progress)

    def _answer(self, rows: Sequence[PromptRow], settings: Mapping[str, Any]) -> Completions:
        defaults = generation_defaults(settings)
        policies = {row.adapter: self.manifest(row.adapter).positions for row in rows if row.adapter is not None}
        requests = [encode_row(row, self.tokenizer, defaults, vocab_size=self.backend.vocab_size) for row in rows]
        results = self.generate(requests)
        return Completions([self.completion(result, policies.get(result.adapter or "")) for result in results])

    def completion(self, result: GenerationResult, policy: Policy | None) -> Completion:
        """A result with the text of its tokens and which of them a policy selects."""
        tokens = (*result.prompt_token_ids, *result.token_ids)
        mask = [False] * len(tokens)
        if policy is not None:
            mask = policy.mask(result.boundary, 0, len(tokens))
            if result.token_ids and not policy.is_prompt_only:
                mask[-1] = False  # the last output token is never fed back
        return Completion(
            result,
            self._pieces(result.prompt_token_ids),
            self._pieces(result.token_ids),
            tuple(mask),
            None if policy is None else str(policy),
        )

    def _pieces(self, tokens: Sequence[int]) -> tuple[str, ...]:
        if self.tokenizer is None:
            return tuple(f"<{token}>" for token in tokens)
        return tuple(self.tokenizer.decode([token]) for token in tokens)

    def _split(self, context: str, continuation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.tokenizer is None:
            raise RequestError("The model has no tokenizer", accepted="`generate` with token ids")
        prefix = tuple(self.tokenizer(context).input_ids)
        whole = tuple(self.tokenizer(context + continuation).input_ids)
        if whole[: len(prefix)] != prefix:
            whole = prefix + tuple(self.tokenizer(continuation, add_special_tokens=False).input_ids)
        if not prefix or len(whole) == len(prefix):
            raise RequestError(
                "A context or a continuation has no tokens",
                got=f"{len(prefix)} and {len(whole) - len(prefix)}",
                accepted="at least one each",
            )
        return prefix, whole

    def _score(self, result: GenerationResult, context: str, continuation: str, length: int) -> Score:
        if result.error is not None or result.prompt_logprobs is None:
            raise RequestError("A continuation could not be scored", got=str(result.error))
        pieces = self._pieces(result.prompt_token_ids[length:])
        return Score(result.adapter, context, continuation, pieces, tuple(result.prompt_logprobs[length - 1 :]))


def generation_defaults(settings: Mapping[str, Any]) -> GenerationDefaults:
    """Settings of a call; refuses a name that does not exist.

    Raises:
        UsageError: There is no such setting, or a value is not valid.
    """
    known = GenerationDefaults.__dataclass_fields__
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise UsageError("There is no such setting", got=f"`{unknown[0]}`", accepted=", ".join(known))
    return GenerationDefaults(**settings)


def _open(backend: str, model: Path | str, settings: EngineSettings) -> Any:
    if backend == "hf":
        from preft.serve.hf_engine import HFEngine

        return HFEngine(
            model,
            dtype=settings.dtype,
            max_model_len=settings.max_model_len,
            allow_base_mismatch=settings.allow_base_mismatch,
        )
    from preft.serve.engine import Engine as VllmEngine

    return VllmEngine(model, settings=settings)

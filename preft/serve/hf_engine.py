"""Generation in plain Transformers, one request at a time: slow, small, and right wherever Transformers runs.

It is the reference that the vLLM engine is compared with, and the engine where vLLM is not installed. Every forward
pass is told the request's boundary; the prompt is one pass, each output token another.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from preft.adapters.adapter import Adapter
from preft.adapters.catalog import require_name, require_no_twin, unknown_adapter
from preft.adapters.fingerprint import fingerprint_base
from preft.adapters.manifest import Manifest
from preft.adapters.store import adapter_from_bytes, adapter_to_bytes, load_adapter
from preft.config.progress import Progress
from preft.data.encode import load_tokenizer
from preft.data.requests import GenerationRequest, GenerationResult, RequestUpdate
from preft.errors import AdapterError, EngineError, PreftError, RequestError, UsageError
from preft.models.locate import locate_model
from preft.positions import resolve_boundary
from preft.serve.registry import Source, Unavailable
from preft.serve.request_form import HALF_CHARACTER, check_request, failed_result, find_stop

if TYPE_CHECKING:
    import torch

    from preft.tuners.attach import AttachedModel

DTYPES = ("float32", "bfloat16", "float16", "auto")
MAX_ATTACHED = 8
"""Adapters that lie in the model at once; the least recently used one makes room."""
_NO_LIMIT = 1 << 30
_GREEDY = 1e-5
"""Temperature up to which sampling is greedy, as in vLLM; logits divided by less would overflow."""


class HFEngine:
    """A Transformers model with adapters, in this process.

    Args:
        model: Checkpoint folder, known name, or hub id.
        adapters: Adapters by name, loaded or as folders. One that cannot be used is listed in `unavailable`.
        dtype: Type of weights and activations: `float32`, `bfloat16`, `float16`, or `auto` for the checkpoint's own.
        device: PyTorch device, or None for a GPU where there is one.
        max_model_len: Longest prompt plus output in tokens, or None for the model's own limit.
        allow_base_mismatch: Accept adapters made for other weights of the same architecture.

    Attributes:
        unavailable: Adapters that cannot be used, with the reason.
        tokenizer: The model's tokenizer, or None.
        max_model_len: Longest prompt plus output in tokens.
        vocab_size: Number of token ids that the model has.

    Raises:
        PreftError: The model cannot be found or loaded, or an adapter's name is not acceptable.
    """

    def __init__(
        self,
        model: Path | str,
        adapters: Mapping[str, Source] | None = None,
        *,
        dtype: str = "float32",
        device: str | None = None,
        max_model_len: int | None = None,
        allow_base_mismatch: bool = False,
    ) -> None:
        if dtype not in DTYPES:
            raise UsageError("The dtype is not valid", got=f"`{dtype}`", accepted=", ".join(DTYPES))
        sources = {require_name(name): source for name, source in (adapters or {}).items()}
        folder = locate_model(str(model))
        self._model: Any = _load_model(folder, dtype, device)
        self.tokenizer: Any = load_tokenizer(folder)
        config = self._model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or _NO_LIMIT
        self.max_model_len: int = min(limit, max_model_len or limit)
        self.vocab_size: int = config.vocab_size
        self._can_skip_logits = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._ends = _end_tokens(self._model, self.tokenizer)
        self._handle: AttachedModel | None = None
        self._attached: OrderedDict[str, None] = OrderedDict()
        self._adapters: dict[str, Adapter] = {}
        self.unavailable: list[Unavailable] = []
        self._base = fingerprint_base(folder, model=str(model))
        self._allow_base_mismatch = allow_base_mismatch
        self._waiting: deque[tuple[str, GenerationRequest, Adapter | None]] = deque()
        self._serial = 0
        for name, source in sources.items():
            try:
                self._adapters[name] = self._checked(source)
            except PreftError as error:
                self.unavailable.append(Unavailable(name, error))

    def __enter__(self) -> HFEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the model; the engine cannot be used afterwards."""
        self._model = self._handle = None
        self._adapters.clear()
        self._waiting.clear()

    def generate(
        self, requests: Sequence[GenerationRequest], *, progress: Progress | None = None
    ) -> list[GenerationResult]:
        """Completes prompts, one after the other.

        Args:
            requests: What to complete; a bad one fails alone, in its result's `error`.
            progress: Told of each finished request.

        Returns:
            One result a request, in their order.

        Raises:
            EngineError: The engine is closed.
        """
        self._require_open()
        results = []
        ids: set[str] = set()
        with _stage(progress, len(requests)):
            for request in requests:
                try:
                    if request.id in ids:
                        raise RequestError("The id is taken by an earlier request", got=f"`{request.id}`")
                    ids.add(request.id)
                    results.append(self._complete(request, self._named(request)))
                except PreftError as error:
                    results.append(failed_result(request, error))
                if progress is not None:
                    progress.advance()
        return results

    def submit(self, request: GenerationRequest) -> str:
        """Adds a request without running it; it keeps the adapter that its name means now.

        Returns:
            A ticket by which `step` and `abort` know it.

        Raises:
            PreftError: It cannot be served.
        """
        self._require_open()
        adapter = self._named(request)
        self._check(request)
        self._serial += 1
        self._waiting.append((f"{self._serial}", request, adapter))
        return f"{self._serial}"

    def step(self) -> list[RequestUpdate]:
        """Completes the oldest request that was submitted, if there is one.

        Raises:
            EngineError: The engine is closed.
        """
        self._require_open()
        if not self._waiting:
            return []
        ticket, request, adapter = self._waiting.popleft()
        try:
            result = self._complete(request, adapter)
        except PreftError as error:
            result = failed_result(request, error)
        return [RequestUpdate(ticket, len(result.token_ids), result.text, result)]

    @property
    def has_unfinished(self) -> bool:
        """Whether a submitted request is not finished."""
        self._require_open()
        return bool(self._waiting)

    def abort(self, tickets: Sequence[str]) -> None:
        """Takes requests back; those that are finished already are ignored."""
        gone = set(tickets)
        self._waiting = deque(item for item in self._waiting if item[0] not in gone)

    def add(self, name: str, source: Source) -> Adapter:
        """Registers an adapter under a new name; see `Engine.add`."""
        if name in self._names():
            raise UsageError(f"The adapter name `{name}` is taken", hint="replace it, or choose another name")
        return self._register(name, source)

    def replace(self, name: str, source: Source) -> Adapter:
        """Makes a name mean another adapter for later requests; see `Engine.replace`."""
        if name not in self._names():
            raise unknown_adapter(name, self._names())
        return self._register(name, source)

    def push(self, name: str, adapter: Adapter) -> Adapter:
        """Adds or replaces an adapter from memory; see `Engine.push`."""
        return self._register(name, adapter)

    def remove(self, name: str) -> None:
        """Forgets an adapter's name; see `Engine.remove`."""
        if name not in self._names():
            raise unknown_adapter(name, self._names())
        self._adapters.pop(name, None)
        self.unavailable = [entry for entry in self.unavailable if entry.name != name]

    def manifest(self, name: str) -> Manifest:
        """What a name means now; see `Engine.manifest`."""
        return self._resolve(name).manifest

    def _register(self, name: str, source: Source) -> Adapter:
        self._require_open()
        require_no_twin(require_name(name), self._names())
        if isinstance(source, Adapter):
            # A copy, whose digest is checked: the caller may train on.
            source = adapter_from_bytes(*adapter_to_bytes(source), name=name, expected_digest=source.digest)
        adapter = self._checked(source)
        self._adapters[name] = adapter
        self.unavailable = [entry for entry in self.unavailable if entry.name != name]
        return adapter

    def _names(self) -> list[str]:
        return [*self._adapters, *(entry.name for entry in self.unavailable)]

    def _require_open(self) -> None:
        if self._model is None:
            raise EngineError("The engine is closed", hint="make a new one")

    def _checked(self, source: Source) -> Adapter:
        from preft.tuners.attach import require_attachable

        adapter = source if isinstance(source, Adapter) else load_adapter(source)
        adapter.manifest.base.require_same(self._base, allow_weights=self._allow_base_mismatch)
        require_attachable(self._model, adapter)
        return adapter

    def _resolve(self, name: str) -> Adapter:
        if name in self._adapters:
            return self._adapters[name]
        failed = next((entry for entry in self.unavailable if entry.name == name), None)
        if failed is None:
            raise unknown_adapter(name, self._adapters)
        raise AdapterError(f"The adapter `{name}` is not available", got=failed.error.what, hint=failed.error.hint)

    @property
    def model(self) -> Any:
        """The Transformers model, with whatever adapter is in use."""
        return self._model

    def use(self, name: str | None) -> None:
        """Puts an adapter in use on the model; `generate` does this for each request.

        Args:
            name: An adapter's name, or None for base.

        Raises:
            UnknownAdapterError: There is no adapter of that name.
            AdapterError: It is not available.
        """
        self._use(None if name is None else self._resolve(name))

    def _use(self, adapter: Adapter | None) -> None:
        """Adapters lie in the model under their digests, so that a name that changes its meaning changes it here."""
        from preft.tuners.attach import attach

        if adapter is not None and adapter.digest not in self._attached:
            if len(self._attached) == MAX_ATTACHED and self._handle is not None:
                oldest, _ = self._attached.popitem(last=False)
                self._handle.detach(oldest)
            self._handle = attach(self._model, adapter, name=adapter.digest)
            self._attached[adapter.digest] = None
        if self._handle is not None:
            self._handle.use(None if adapter is None else adapter.digest)
        if adapter is not None:
            self._attached.move_to_end(adapter.digest)

    def _named(self, request: GenerationRequest) -> Adapter | None:
        return self._resolve(request.adapter) if request.adapter is not None else None

    def _check(self, request: GenerationRequest) -> None:
        check_request(
            request,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            has_tokenizer=self.tokenizer is not None,
        )

    def _complete(self, request: GenerationRequest, adapter: Adapter | None) -> GenerationResult:
        import torch

        self._check(request)
        num_prompt = len(request.prompt_token_ids)
        boundary = resolve_boundary(num_prompt, request.boundary) if adapter is not None else 0
        self._use(adapter)
        with torch.inference_mode():
            prompt_logprobs, steps = self._run(request, boundary if adapter is not None else None)
        tokens = tuple(token for token, _ in steps)
        text = self._text(tokens)
        stopped_at = find_stop(text, request.stop)
        ended = stopped_at is not None or (not request.ignore_eos and tokens[-1] in self._ends)
        return GenerationResult(
            id=request.id,
            adapter=request.adapter,
            digest=adapter.digest if adapter is not None else None,
            prompt_token_ids=request.prompt_token_ids,
            boundary=boundary,
            token_ids=tokens,
            text=text.rstrip(HALF_CHARACTER) if stopped_at is None else text[:stopped_at],
            finish_reason="stop" if ended else "length",
            logprobs=tuple(logprob for _, logprob in steps) if request.num_logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
        )

    def _run(
        self, request: GenerationRequest, boundary: int | None
    ) -> tuple[tuple[float, ...] | None, list[tuple[int, float]]]:
        """Prompt log-probabilities, and each output token with its log-probability."""
        num_prompt = len(request.prompt_token_ids)
        num_tokens = min(request.max_tokens, self.max_model_len - num_prompt)
        sampler = _Sampler(request, self._model.device)
        logits, cache = self._forward(request.prompt_token_ids, None, boundary, whole=request.want_prompt_logprobs)
        prompt_logprobs = _chosen_logprobs(logits, request.prompt_token_ids) if request.want_prompt_logprobs else None
        steps = [sampler.pick(logits[-1])]
        while len(steps) < num_tokens and not self._is_over(request, [token for token, _ in steps]):
            logits, cache = self._forward((steps[-1][0],), cache, boundary, whole=False)
            steps.append(sampler.pick(logits[-1]))
        return prompt_logprobs, steps

    def _is_over(self, request: GenerationRequest, tokens: Sequence[int]) -> bool:
        if not request.ignore_eos and tokens[-1] in self._ends:
            return True
        return bool(request.stop) and find_stop(self._text(tokens), request.stop) is not None

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)) if self.tokenizer is not None else ""

    def _forward(
        self, tokens: Sequence[int], cache: Any, boundary: int | None, *, whole: bool
    ) -> tuple[torch.Tensor, Any]:
        """Logits [T or 1, V] in float32 of one pass, and the cache after it."""
        import torch

        extra: dict[str, Any] = {} if boundary is None else {"preft_boundary": boundary}
        if self._can_skip_logits and not whole:
            extra["logits_to_keep"] = 1
        ids = torch.tensor([list(tokens)], device=self._model.device)
        output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, **extra)
        return output.logits[0].float(), output.past_key_values


class _Sampler:
    """Picks tokens for one request, reproducibly where it names a seed."""

    def __init__(self, request: GenerationRequest, device: torch.device) -> None:
        import torch

        self._temperature = request.temperature
        self._generator = torch.Generator(device=device)
        if request.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(request.seed)

    def pick(self, logits: torch.Tensor) -> tuple[int, float]:
        """The next token and its log-probability under the model, before the temperature."""
        import torch

        if self._temperature > _GREEDY:
            weights = (logits / self._temperature).softmax(-1)
            token = int(torch.multinomial(weights, 1, generator=self._generator))
        else:
            token = int(logits.argmax())
        return token, float(logits.log_softmax(-1)[token])


def _chosen_logprobs(logits: torch.Tensor, tokens: Sequence[int]) -> tuple[float, ...]:
    """Log-probability of each of `tokens` but the first, given the ones before it."""
    import torch

    targets = torch.tensor(list(tokens[1:]), device=logits.device, dtype=torch.long)
    return tuple(logits[:-1].log_softmax(-1).gather(-1, targets[:, None])[:, 0].tolist())


@contextmanager
def _stage(progress: Progress | None, total: int) -> Iterator[None]:
    if progress is not None:
        progress.start("generate", total)
    try:
        yield
    finally:
        if progress is not None:
            progress.finish()


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an output: the model's own, and the tokenizer's."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    found = {*(ends if isinstance(ends, list | tuple) else [ends]), getattr(tokenizer, "eos_token_id", None)}
    return frozenset(token for token in found if token is not None)


def _load_model(folder: Path, dtype: str, device: str | None) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sources = {"trust_remote_code": False, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(folder, **sources)
        # Of the attentions that Transformers has on every device, only this one caps scores, as Gemma 2 asks for.
        caps = getattr(config.get_text_config(), "attn_logit_softcapping", None)
        attention = {"attn_implementation": "eager"} if caps else {}
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, **sources, **attention
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise EngineError(
            "The model cannot be loaded",
            got=f"`{folder}`: {lines[0][:200]}",
            accepted="a causal language model that Transformers ships, in safetensors",
        ) from None
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()

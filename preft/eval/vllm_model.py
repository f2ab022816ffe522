"""`preft-vllm`: lm-evaluation-harness on the vLLM engine, all arms in one run of one engine.

The harness asks one arm at a time. The first arm that is asked a set of requests has them answered for every arm, in
one batch of mixed adapters; the others find their answers waiting. Texts become tokens, and tokens texts, by the very
functions of the harness's `hf` model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from preft.config.progress import Progress
from preft.data.encode import load_tokenizer
from preft.data.requests import GenerationRequest, GenerationResult
from preft.errors import PreftError, UnsupportedError, UsageError
from preft.eval.arms import BASE, Failure, adapter_of, read_adapters, require_arm
from preft.eval.ranked import RankedEngine, RankedResult
from preft.eval.windows import Window, prompt_window, scoring_window
from preft.models.locate import locate_model
from preft.serve.settings import EngineSettings

_MAX_NEW_TOKENS = 256
"""The harness's default for tasks that do not say."""
_UNDERSTOOD = frozenset({"until", "max_gen_toks", "do_sample", "temperature"})
_WHOLE = {"top_k": (0, -1, None), "top_p": (1, None)}
"""Values of further settings that leave the whole distribution."""

Builder = Callable[[str, str | None], GenerationRequest]
"""Makes a request of an id and an adapter's name."""


@register_model("preft-vllm")
class PreftVLLM(TemplateLM):
    """A vLLM engine with adapters as a model of the harness; one arm answers at a time.

    Args:
        pretrained: Checkpoint folder, known name, or hub id.
        adapter: One adapter's folder; it is then the arm that answers.
        adapters: Adapter folders by name, instead.
        arm: Which arm answers: a name, or `base`; by default the one adapter, else base. See `use_arm`.
        together: Arms that are run in one batch; by default only the one that is asked.
        dtype: Of weights and activations.
        max_length: Tokens of input; by default two less than the engine's, which needs room for a target and for
            one token to generate.
        rolling_boundary: As for `preft-hf`.
        sampling_seed: Of sampled answers. Each answer to a prompt has a seed of its own, the same in every arm.
        batch_size: Not used: the engine batches by itself.
        max_batch_size: Not used either.
        device: Not for the caller to choose; must be None.
        progress: Told of each finished request.
        settings: Fields of `EngineSettings`.

    Attributes:
        failures: Requests that the engine could not serve. The harness is given the worst answer for each.

    Raises:
        PreftError: The model or an adapter cannot be used, or vLLM does not start.
    """

    # The same texts must become the same tokens as on `preft-hf`.
    tok_encode = HFLM.tok_encode
    tok_decode = HFLM.tok_decode
    apply_chat_template = HFLM.apply_chat_template
    eot_token_id = HFLM.eot_token_id
    prefix_token_id = HFLM.prefix_token_id
    tokenizer_name = HFLM.tokenizer_name

    def __init__(
        self,
        pretrained: str | Path,
        *,
        adapter: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        arm: str | None = None,
        together: Sequence[str] = (),
        dtype: str = "auto",
        max_length: int | None = None,
        rolling_boundary: int = 0,
        sampling_seed: int = 0,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if device is not None:
            raise UsageError("preft-vllm takes no device", got=f"`{device}`", hint="set CUDA_VISIBLE_DEVICES")
        self._paths = read_adapters(adapter, adapters)
        self.use_arm(arm or (next(iter(self._paths)) if adapter is not None else BASE))
        self._together = tuple(require_arm(name, self._paths) for name in together)
        folder = locate_model(str(pretrained))
        self.tokenizer: Any = load_tokenizer(folder)
        if self.tokenizer is None:
            raise UsageError("The model has no tokenizer, so a task's texts mean nothing to it", got=f"`{pretrained}`")
        self.add_bos_token = add_bos_token
        self.custom_prefix_token_id = prefix_token_id
        self.chat_template_args = dict(chat_template_args or {})
        self._engine = RankedEngine(folder, self._paths, settings=EngineSettings(dtype=dtype, **settings))
        for entry in self._engine.unavailable:
            self._engine.close()
            raise entry.error
        self.max_length: int = min(max_length or self._engine.max_model_len, self._engine.max_model_len - 2)
        self.max_gen_toks = _MAX_NEW_TOKENS
        self.failures: list[Failure] = []
        self._rolling_boundary = rolling_boundary
        self._sampling_seed = sampling_seed
        self._progress = progress
        self._waiting: dict[tuple[str, str, int], GenerationResult] = {}
        self._origins: Sequence[Any] = ()

    def use_arm(self, arm: str) -> None:
        """Chooses the arm that answers from now on.

        Raises:
            UsageError: There is no such arm.
        """
        self.arm = require_arm(arm, self._paths)

    def close(self) -> None:
        """Ends the engine."""
        self._engine.close()

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results."""
        return {"model_dtype": self._engine.settings.dtype, "arm": self.arm}

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Scores continuations, each with its own context as the boundary."""
        self._origins = requests
        try:
            scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        finally:
            self._origins = ()
        return scores

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Scores whole texts in windows of the harness's own making; see `rolling_boundary`."""
        windows: list[Window] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            parts = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, parts):
                windows.append(scoring_window(context, continuation, self.max_length, boundary=self._rolling_boundary))
                owners.append(index)
        scores = [0.0] * len(requests)
        parts_scored = self._score(windows, [requests[index] for index in owners])
        for index, (score, _) in zip(owners, parts_scored, strict=True):
            scores[index] += score
        return scores

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Completes prompts; the whole prompt is the boundary."""
        end = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        builders: list[tuple[str, Builder]] = []
        stops: list[list[str]] = []
        for request in requests:
            prompt, settings = request.args
            settings = normalize_gen_kwargs(settings, self.max_gen_toks)
            _require_understood(settings)
            key = json.dumps([prompt, settings], sort_keys=True, default=str)
            stops.append(handle_stop_sequences(settings.get("until"), eos=end))
            builders.append((key, self._generation(prompt, settings, tuple(stops[-1]))))
        results = self._answers(builders, requests)
        texts = (self.tok_decode(list(result.token_ids)) for result in results)
        return [
            postprocess_generated_text(generation=text, stop=stop, think_end_token=None)
            for text, stop in zip(texts, stops, strict=True)
        ]

    def _generation(self, prompt: str, settings: Mapping[str, Any], stops: tuple[str, ...]) -> Builder:
        count = int(settings["max_gen_toks"])
        temperature = float(settings.get("temperature") or 0.0) if settings.get("do_sample") else 0.0

        def build(name: str, adapter: str | None) -> GenerationRequest:
            tokens = prompt_window(self.tok_encode(prompt), count, self.max_length)
            return GenerationRequest(
                name, tokens, adapter, max_tokens=count, temperature=temperature, stop=tuple(filter(None, stops))
            )

        return build

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        windows = [scoring_window(context, continuation, self.max_length) for _, context, continuation in requests]
        return self._score(windows, self._origins)

    def _score(self, windows: Sequence[Window], origins: Sequence[Any]) -> list[tuple[float, bool]]:
        """Log-probability of each window's end, and whether greedy decoding would have made it."""

        def builder(window: Window) -> Builder:
            return lambda name, adapter: GenerationRequest(
                name,
                window.tokens,
                adapter,
                boundary=window.boundary if adapter is not None else None,
                max_tokens=1,
                want_prompt_logprobs=True,
            )

        builders = [
            (json.dumps(["score", window.tokens, window.boundary, window.num_scored]), builder(window))
            for window in windows
        ]
        scores = []
        for window, result in zip(windows, self._answers(builders, origins), strict=True):
            if not isinstance(result, RankedResult):
                scores.append((-math.inf, False))
                continue
            values = (result.prompt_logprobs or ())[-window.num_scored :]
            scores.append((sum(values), all(rank == 1 for rank in result.prompt_ranks[-window.num_scored :])))
        return scores

    def _answers(self, builders: Sequence[tuple[str, Builder]], origins: Sequence[Any]) -> list[GenerationResult]:
        """Results of the arm in use, in order; those of the arms it runs together with are kept for later."""
        seen: Counter[str] = Counter()
        places = []
        for key, _ in builders:
            places.append((key, seen[key]))
            seen[key] += 1
        arms = self._together if self.arm in self._together else (self.arm,)
        missing = [
            ((arm, *place), builder)
            for place, (_, builder) in zip(places, builders, strict=True)
            if (self.arm, *place) not in self._waiting
            for arm in arms
            if (arm, *place) not in self._waiting
        ]
        self._run(missing)
        results = []
        for index, place in enumerate(places):
            result = self._waiting.pop((self.arm, *place))
            if result.error is not None:
                origin = origins[index] if index < len(origins) else None
                task, doc_id = getattr(origin, "task_name", None), getattr(origin, "doc_id", None)
                self.failures.append(Failure(self.arm, task, doc_id, result.error))
            results.append(result)
        return results

    def _run(self, missing: Sequence[tuple[tuple[str, str, int], Builder]]) -> None:
        """Answers requests in one batch, and keeps the answers."""
        requests: list[GenerationRequest] = []
        for index, (place, builder) in enumerate(missing):
            adapter = adapter_of(place[0])
            try:
                request = builder(f"{index}", adapter)
                requests.append(replace(request, seed=self._seed(request, place)))
            except PreftError as error:
                self._waiting[place] = GenerationResult(f"{index}", adapter, None, (), 0, error=error.to_dict())
        for result in self._engine.generate(requests, progress=self._progress) if requests else ():
            self._waiting[missing[int(result.id)][0]] = result

    def _seed(self, request: GenerationRequest, place: tuple[str, str, int]) -> int | None:
        """The seed of a sampled answer, from its prompt and settings and from which answer to them it is."""
        if request.temperature == 0:
            return None
        _, key, occurrence = place
        digest = hashlib.sha256(json.dumps([self._sampling_seed, key, occurrence]).encode()).digest()
        return int.from_bytes(digest[:4], "little")


def _require_understood(settings: Mapping[str, Any]) -> None:
    """Refuses what would change the outputs and is not honoured; under greedy decoding nothing else can.

    Raises:
        UnsupportedError: A sampling setting is not understood.
    """
    unknown = sorted(
        name
        for name, value in settings.items()
        if name not in _UNDERSTOOD and not (name in _WHOLE and value in _WHOLE[name])
    )
    if unknown and settings.get("do_sample"):
        raise UnsupportedError(
            "The task samples with settings that preft-vllm does not honour",
            got=", ".join(f"`{name}`" for name in unknown),
            accepted="`temperature`, `max_gen_toks`, `until`",
            hint="use `preft-hf`",
        )

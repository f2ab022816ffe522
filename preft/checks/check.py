"""`preft check`: is this adapter on, does it move anything, and does decode leave the base alone?

Everything is measured in float32 in Transformers. With an engine to compare, that engine must answer token for token
what Transformers answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from preft.adapters.store import load_adapter
from preft.checks.measure import Prompt, decode_proof, kl_nats, last_logits, site_deltas, top2_gap
from preft.checks.report import CheckReport, DecodeProof, LogitGap, ParityRow
from preft.config.progress import Progress
from preft.data.requests import GenerationRequest, GenerationResult
from preft.errors import RequestError
from preft.positions import Policy
from preft.serve.hf_engine import HFEngine

PROMPTS = (
    "The quick brown fox jumps over the lazy dog. In one sentence, the story is about",
    "Write a short list of three things to take along on a long walk through the hills in autumn:\n1.",
)
"""What an adapter is tried on if nothing else is given."""

NUM_TOKENS = 16
"""Output tokens generated for each request."""

NEAR_TIE = 1e-3
"""Top-2 logit gap, in float32, below which two right engines may pick different tokens."""

NOTHING = 1e-5
"""Largest change of a logit that is still rounding."""

_NAME = "adapter"
_TOKENS_WITHOUT_TOKENIZER = 24


class CheckedEngine(Protocol):
    """An engine to compare with Transformers."""

    def generate(self, requests: Sequence[GenerationRequest]) -> Sequence[GenerationResult]:
        """Completes prompts, one result a request, in their order."""


EngineFactory = Callable[[Path | str, Mapping[str, Path]], CheckedEngine]
"""Makes an engine in float32 from a base model and adapter folders by name; `HFEngine` is one."""


def check_adapter(
    folder: Path | str,
    base: Path | str,
    *,
    engine_factory: EngineFactory | None = None,
    prompts: Sequence[str] | None = None,
    allow_base_mismatch: bool = False,
    progress: Progress | None = None,
) -> CheckReport:
    """Checks an adapter on its base model.

    Args:
        folder: The adapter's folder.
        base: The base model: checkpoint folder, known name, or hub id.
        engine_factory: Makes an engine to compare, in float32; None leaves the comparison out. An engine with a
            `close` method is closed afterwards.
        prompts: Texts to try it on, or None for two built-in ones.
        allow_base_mismatch: Accept other weights than the adapter was made for.
        progress: Told of each stage.

    Returns:
        What was found; `passed` is false, with reasons, if the adapter moves nothing, decode does not run on base
        weights, or the engine answers otherwise.

    Raises:
        PreftError: The adapter or the model cannot be loaded, or they do not belong together.
    """
    adapter = load_adapter(folder)
    manifest = adapter.manifest
    with _stages(progress) as done, HFEngine(base, {_NAME: adapter}, allow_base_mismatch=allow_base_mismatch) as hf:
        for entry in hf.unavailable:
            raise entry.error
        tokens = _encode(hf, prompts)
        _require_adapted(tokens, manifest.positions)
        gap = _logit_gap(hf, tokens)
        done()
        sites = site_deltas(hf, _NAME, adapter, tokens)
        done()
        decode = decode_proof(hf, _NAME, adapter, tokens[0])
        done()
        parity = None
        if engine_factory is not None:
            parity = _parity(hf, engine_factory, base, Path(folder), tokens)
        done()
    reasons = [
        *_not_moving(gap, moves_nothing=adapter.moves_nothing()),
        *_not_leaving_decode(decode, prompt_only=manifest.positions.is_prompt_only),
        *_not_equal(parity or ()),
    ]
    return CheckReport(
        adapter=str(folder),
        base=str(base),
        digest=adapter.digest,
        label=manifest.label,
        positions=str(manifest.positions),
        passed=not reasons,
        reasons=tuple(reasons),
        gap=gap,
        decode=decode,
        sites=sites,
        parity=parity,
    )


@contextmanager
def _stages(progress: Progress | None) -> Iterator[Callable[[], None]]:
    """A function that reports that a stage is done."""
    if progress is not None:
        progress.start("check", 4)

    def advance() -> None:
        if progress is not None:
            progress.advance()

    try:
        yield advance
    finally:
        if progress is not None:
            progress.finish()


def _encode(hf: HFEngine, prompts: Sequence[str] | None) -> list[Prompt]:
    if hf.tokenizer is not None:
        encoded = [tuple(hf.tokenizer(text).input_ids) for text in prompts or PROMPTS]
    elif prompts:
        raise RequestError("The model has no tokenizer", got="prompts in words", hint="leave them out")
    else:
        encoded = [tuple((7 * at * at + 3 * at + 1) % hf.vocab_size for at in range(_TOKENS_WITHOUT_TOKENIZER))]
    if not all(encoded):
        raise RequestError("The prompt is empty", accepted="at least one token")
    return encoded


def _require_adapted(prompts: Sequence[Prompt], policy: Policy) -> None:
    """Checks that the policy selects a token of each prompt; else the adapter would look as if it did nothing.

    Raises:
        RequestError: A prompt is too short.
    """
    for prompt in prompts:
        if not policy.spans(len(prompt)):
            raise RequestError(
                f"The prompt is too short: positions `{policy}` select no token of it",
                got=f"{len(prompt)} token",
                accepted="at least 2 tokens; each end of the policy takes at most half of a prompt",
                hint="give a longer `--prompt`",
            )


def _logit_gap(hf: HFEngine, prompts: Sequence[Prompt]) -> LogitGap:
    pairs = [(last_logits(hf, _NAME, prompt), last_logits(hf, None, prompt)) for prompt in prompts]
    adapted = hf.generate(_requests(prompts, _NAME))
    base = hf.generate(_requests(prompts, None))
    differing = sum(
        sum(one != other for one, other in zip(first.token_ids, second.token_ids, strict=True))
        for first, second in zip(adapted, base, strict=True)
    )
    return LogitGap(
        max_abs=max(float((first - second).abs().max()) for first, second in pairs),
        kl_nats=sum(kl_nats(first, second) for first, second in pairs) / len(pairs),
        tokens_differing=differing,
        num_tokens=sum(len(result.token_ids) for result in adapted),
    )


def _requests(prompts: Sequence[Prompt], name: str | None, *, half: bool = False) -> list[GenerationRequest]:
    label = f"{name or 'base'}{', half the prompt' if half else ''}"
    return [
        GenerationRequest(
            f"prompt {index}, {label}",
            prompt,
            adapter=name,
            boundary=len(prompt) // 2 if half else None,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
        )
        for index, prompt in enumerate(prompts)
    ]


def _parity(
    hf: HFEngine, factory: EngineFactory, base: Path | str, folder: Path, prompts: Sequence[Prompt]
) -> tuple[ParityRow, ...]:
    requests = [*_requests(prompts, None), *_requests(prompts, _NAME), *_requests(prompts, _NAME, half=True)]
    want = hf.generate(requests)
    engine = factory(base, {_NAME: folder})
    try:
        got = engine.generate(requests)
    finally:
        close = getattr(engine, "close", None)
        if close is not None:
            close()
    return tuple(_compare(hf, *row) for row in zip(requests, want, got, strict=True))


def _compare(hf: HFEngine, request: GenerationRequest, want: GenerationResult, got: GenerationResult) -> ParityRow:
    if got.error is not None:
        return ParityRow(request.id, False, error=str(got.error.get("message")))
    pairs = zip(want.token_ids, got.token_ids, strict=False)
    step = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if step is None:
        shorter = min(len(want.token_ids), len(got.token_ids))
        equal = len(want.token_ids) == len(got.token_ids)
        return ParityRow(request.id, equal, None if equal else shorter)
    seen = (*request.prompt_token_ids, *want.token_ids[:step])
    return ParityRow(request.id, False, step, top2_gap(hf, request.adapter, seen, want.boundary))


def _not_moving(gap: LogitGap, *, moves_nothing: bool) -> list[str]:
    if moves_nothing:
        return ["it moves nothing: every update is zero, as in an adapter that was never trained"]
    if not math.isfinite(gap.max_abs):
        return ["its logits are not finite"]
    if gap.max_abs <= NOTHING:
        return [f"it moves nothing: the largest change of a logit is {gap.max_abs:.2g}"]
    return []


def _not_leaving_decode(decode: DecodeProof, *, prompt_only: bool) -> list[str]:
    reasons = []
    if decode.prefill_products == 0:
        reasons.append("no adapter matrix product runs in prefill")
    if prompt_only and decode.decode_products:
        reasons.append(f"{decode.decode_products} adapter matrix products run in a decode step")
    if decode.equals_base is False:
        reasons.append("a decode step does not equal the base model's over the same cache")
    if not prompt_only and decode.decode_products == 0:
        reasons.append("no adapter matrix product runs in a decode step of an all-token adapter")
    return reasons


def _not_equal(parity: Sequence[ParityRow]) -> list[str]:
    """Why the engine does not answer as Transformers does. One near tie is let through."""
    ties = [row for row in parity if row.top2_gap is not None and row.top2_gap < NEAR_TIE]
    wrong = [row for row in parity if not row.equal and (row not in ties or len(ties) > 1)]
    return [
        f"the engine fails on {row.request}: {row.error}"
        if row.error is not None
        else f"the engine differs on {row.request}, from output token {row.first_difference} on"
        for row in wrong
    ]

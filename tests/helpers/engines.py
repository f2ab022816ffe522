"""In-process engines on tiny models, the scenes that shake them, and the comparison with both oracles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from preft import save_adapter
from preft.adapters.adapter import Adapter
from preft.data.requests import GenerationRequest, GenerationResult
from preft.serve.engine import Engine
from preft.serve.settings import EngineSettings
from tests.helpers.oracle import (
    OracleSpec,
    assert_tokens_equal,
    oracle_masked,
    oracle_two_phase,
    spec_from_adapter,
)

CHUNK = 48
BLOCK = 32


def open_engine(model: Path, adapters: Mapping[str, Path], **settings: object) -> Engine:
    """An engine with small chunks and blocks, two slots, float32."""
    vllm = {"block_size": BLOCK, "skip_tokenizer_init": True, **settings.pop("vllm", {})}  # type: ignore[dict-item]
    values = {
        "slots": 2,
        "max_rank": 64,
        "dtype": "float32",
        "max_model_len": 400,
        "max_num_seqs": 16,
        "max_num_batched_tokens": CHUNK,
        "kv_cache_gib": 0.25,
        **settings,
    }
    return Engine(model, adapters, settings=EngineSettings(**values, vllm=vllm))  # type: ignore[arg-type]


def save_all(folder: Path, adapters: Mapping[str, Adapter]) -> dict[str, Path]:
    """Writes adapters below a folder and returns their paths by name."""
    for name, adapter in adapters.items():
        save_adapter(adapter, folder / name)
    return {name: folder / name for name in adapters}


def prompt_of(seed: int, length: int, vocab_size: int = 500) -> tuple[int, ...]:
    """A prompt of arbitrary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, vocab_size, (length,), generator=generator).tolist())


def request_of(
    name: str, prompt: Sequence[int], adapter: str | None, tokens: int = 24, **kwargs: object
) -> GenerationRequest:
    """A greedy request that goes on to `tokens` tokens."""
    return GenerationRequest(name, tuple(prompt), adapter, max_tokens=tokens, ignore_eos=True, **kwargs)  # type: ignore[arg-type]


@contextlib.contextmanager
def forced_preemption(engine: Engine, every: int, *, until: int = 80) -> Iterator[list[int]]:
    """Preempts every running request each `every` steps; yields a list that grows by the number preempted."""
    core, scheduler, steps = engine._core, engine._scheduler, 0
    original, preempted = core.step, []

    def step() -> object:
        nonlocal steps
        steps += 1
        if steps % every == 0 and steps < until:
            preempted.append(len(scheduler.running))
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return original()

    core.step = step
    try:
        yield preempted
    finally:
        core.step = original


def reset_cache(engine: Engine) -> None:
    """Empties the prefix cache."""
    assert engine._scheduler.reset_prefix_cache()


class Oracle:
    """Both oracles over one Hugging Face model, with answers kept."""

    def __init__(self, model: Path, adapters: Mapping[str, Adapter]) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.specs = {name: spec_from_adapter(adapter) for name, adapter in adapters.items()}
        self._kept: dict[tuple[object, ...], object] = {}

    def two_phase(self, request: GenerationRequest, spec: OracleSpec | None = None):
        key = (request.prompt_token_ids, request.adapter, request.boundary, request.max_tokens)
        if spec is not None:
            return oracle_two_phase(self.model, spec, request.prompt_token_ids, request.max_tokens, request.boundary)
        if key not in self._kept:
            self._kept[key] = oracle_two_phase(
                self.model, self.spec(request), request.prompt_token_ids, request.max_tokens, request.boundary
            )
        return self._kept[key]

    def spec(self, request: GenerationRequest) -> OracleSpec | None:
        return self.specs[request.adapter] if request.adapter is not None else None

    def require_equal(self, requests: Sequence[GenerationRequest], results: Sequence[GenerationResult]) -> None:
        """Each result equals both oracles, token for token."""
        rows, masked = [], []
        for request, result in zip(requests, results, strict=True):
            assert result.error is None, result.error
            assert len(result.token_ids) == request.max_tokens
            rows.append((request.id, result.token_ids, self.two_phase(request)))
            again = oracle_masked(
                self.model, self.spec(request), request.prompt_token_ids, result.token_ids, request.boundary
            )
            masked.append((request.id, result.token_ids, again))
        assert_tokens_equal(rows, oracle="two-phase oracle")
        assert_tokens_equal(masked, oracle="masked oracle")

    def require_adapters_matter(self, requests: Sequence[GenerationRequest]) -> None:
        """The premise: without its adapter, each adapted request would be answered otherwise."""
        for request in requests:
            if request.adapter is not None:
                tokens = self.two_phase(request).tokens[:16]
                base = oracle_two_phase(self.model, None, request.prompt_token_ids, len(tokens))
                assert base.tokens != tokens, f"{request.id}: the adapter changes nothing"

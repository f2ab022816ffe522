"""Adapters on the first and last prompt positions: engine, Hugging Face path and oracles agree, whatever is cached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from preft.adapters.adapter import Adapter
from preft.data.requests import GenerationRequest
from preft.positions import Policy, clip
from preft.serve.engine import Engine
from preft.tuners.attach import attach
from tests.helpers.engines import (
    BLOCK,
    CHUNK,
    Oracle,
    forced_preemption,
    open_engine,
    prompt_of,
    request_of,
    reset_cache,
    save_all,
)
from tests.helpers.oracle import assert_tokens_equal
from tests.helpers.tiny import random_adapter

pytestmark = pytest.mark.engine

# A plus sign is no part of a name: adapters are called by their policy with a hyphen in its place.
POLICIES = ("f1", "l1", "f3+l3", "f5+l7", "f40+l40", "l70", "prompt", "all")
COLLIDING = "f32+l30"
LENGTHS = (2, 3, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 110)
"""Clamped prompts, prompts that end at, before and after a chunk, and one of several blocks."""


def name_of(policy: str) -> str:
    return policy.replace("+", "-")


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path) -> dict[str, Adapter]:
    """One adapter a policy, with linear sites, block sites or both by turns."""
    kinds: list[dict[str, Any]] = [
        {"targets": (), "blocks": (0, 1, 2)},
        {"blocks": ()},
        {"targets": ("self_attn.v_proj",), "blocks": (1,)},
    ]
    return {
        name_of(policy): random_adapter(
            tiny_llama, seed=50 + i, rank=(4, 9), positions=policy, strength=0.3, **kinds[i % 3]
        )
        for i, policy in enumerate((*POLICIES, COLLIDING))
    }


@pytest.fixture(scope="module")
def engine(
    tiny_llama: Path, adapters: dict[str, Adapter], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with open_engine(tiny_llama, save_all(tmp_path_factory.mktemp("adapters"), adapters)) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path, adapters: dict[str, Adapter]) -> Oracle:
    return Oracle(tiny_llama, adapters)


@pytest.fixture(scope="module")
def batch() -> list[GenerationRequest]:
    """Every policy on every length, and base."""
    names = [None, *map(name_of, POLICIES)]
    return [
        request_of(f"{name}-{length}", prompt_of(100 * i + length, length), name, tokens=10)
        for length in LENGTHS
        for i, name in enumerate(names)
    ]


def test_every_policy_equals_both_oracles_cold_and_warm(
    engine: Engine, oracle: Oracle, batch: list[GenerationRequest]
) -> None:
    oracle.require_adapters_matter([request for request in batch if len(request.prompt_token_ids) > CHUNK])
    reset_cache(engine)

    cold = engine.generate(batch)
    warm = engine.generate(batch[::-1])[::-1]

    oracle.require_equal(batch, cold)
    assert [result.token_ids for result in warm] == [result.token_ids for result in cold]


@pytest.mark.parametrize("every", [3, 7])
def test_preemption_changes_nothing(engine: Engine, oracle: Oracle, batch: list[GenerationRequest], every: int) -> None:
    reset_cache(engine)
    with forced_preemption(engine, every) as preempted:
        results = engine.generate(batch)
    assert sum(preempted) > 10
    oracle.require_equal(batch, results)


def test_the_hugging_face_path_is_equal_too(
    tiny_llama: Path, adapters: dict[str, Adapter], oracle: Oracle, batch: list[GenerationRequest]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    for name in map(name_of, POLICIES):
        handle = attach(model, adapters[name], name=name)
    rows = []
    for request in batch:
        handle.use(request.adapter)
        ids = torch.tensor([request.prompt_token_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_tokens,
            min_new_tokens=request.max_tokens,
            do_sample=False,
            eos_token_id=-1,
        )
        rows.append((request.id, out[0, ids.shape[1] :].tolist(), oracle.two_phase(request)))
    assert_tokens_equal(rows)


def test_a_prompt_of_one_token_has_no_ends(engine: Engine, oracle: Oracle) -> None:
    """Half of it, rounded down, is nothing: as in pyreft, `f1` and `l1` leave it to base; `prompt` does not."""
    requests = [request_of(f"{name}", (17,), name, tokens=6) for name in (None, "f1", "l1", "prompt")]
    base, first, last, whole = (result.token_ids for result in engine.generate(requests))
    assert base == first == last != whole
    assert whole == oracle.two_phase(requests[-1]).tokens


# ------------------------------------------------------------------ the cache key holds positions, not a count


def adapted_in_block(policy: str, boundary: int, block: int) -> tuple[tuple[int, int], ...]:
    return clip(Policy.parse(policy).spans(boundary), block * BLOCK, (block + 1) * BLOCK)


def count(spans: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in spans)


def colliding_turns(engine: Engine) -> list[GenerationRequest]:
    """Two prompts that share two blocks of tokens, with as many adapted positions in each, at other places.

    The first is 40 tokens, adapted whole; its answer fills the second block. The second begins with those two blocks
    and is adapted at the end of the second one.
    """
    first = request_of("first", prompt_of(7, 40), name_of(COLLIDING), tokens=30)
    answer = engine.generate([first])[0].token_ids
    second = (*first.prompt_token_ids, *answer[: 2 * BLOCK - 40], *prompt_of(8, 22))
    before = [adapted_in_block(COLLIDING, 40, block) for block in (0, 1)]
    after = [adapted_in_block(COLLIDING, len(second), block) for block in (0, 1)]
    assert before == [((0, 32),), ((0, 8),)]
    assert after == [((0, 32),), ((24, 32),)]
    assert [count(spans) for spans in before] == [count(spans) for spans in after]
    return [first, request_of("second", second, name_of(COLLIDING), tokens=16)]


def bounded_turns() -> list[GenerationRequest]:
    """One prompt under two boundaries, with as many adapted positions in the second block."""
    assert count(adapted_in_block("f3+l3", 60, 1)) == count(adapted_in_block("f3+l3", 50, 1)) == 3
    return [
        request_of(f"at-{boundary}", prompt_of(9, 3 * BLOCK), "f3-l3", tokens=16, boundary=boundary)
        for boundary in (60, 50)
    ]


def by_count(digest: str, spans: Any, start: int, stop: int) -> tuple[Any, ...]:
    """A wrong key: how many positions of a block are adapted."""
    inside = clip(spans, start, stop)
    return (("preft", digest, count(inside)),) if inside else ()


@pytest.mark.parametrize("turns", ["answer", "boundary"])
def test_equal_counts_do_not_collide(engine: Engine, oracle: Oracle, turns: str) -> None:
    reset_cache(engine)
    requests = colliding_turns(engine) if turns == "answer" else bounded_turns()

    warm = [engine.generate([request])[0] for request in requests]
    reset_cache(engine)
    cold = engine.generate(requests[1:])

    oracle.require_equal(requests, warm)
    assert cold[0].token_ids == warm[1].token_ids


@pytest.mark.parametrize("turns", ["answer", "boundary"])
def test_a_key_of_counts_would_be_noticed(
    engine: Engine, oracle: Oracle, turns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    from preft.serve.backend import cache_key

    monkeypatch.setattr(cache_key, "adapter_key", by_count)
    reset_cache(engine)
    requests = colliding_turns(engine) if turns == "answer" else bounded_turns()
    warm = [engine.generate([request])[0] for request in requests]
    reset_cache(engine)

    oracle.require_equal(requests[:1], warm[:1])
    with pytest.raises(AssertionError):
        oracle.require_equal(requests[1:], warm[1:])

"""Train = serve: log-probabilities of completions under the trainer's forward pass, in two phases, and in the engine.

The trainer sees prompt and completion in one padded, masked pass. Hugging Face runs the prompt with the adapter, keeps
the cache, and runs the completion on the base model. The engine scores the completion with a boundary override.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from preft.adapters.adapter import Adapter
from preft.config.train import METHODS
from preft.data.collate import collate
from preft.data.examples import Example
from preft.positions import Policy
from preft.serve.engine import Engine
from preft.train.loop import train_loop
from preft.tuners.attach import attach
from tests.helpers.engines import open_engine, prompt_of, request_of, save_all
from tests.unit.train.common import examples, load

pytestmark = pytest.mark.engine

TOLERANCE = 1e-3
"""Largest difference of a token's log-probability between two implementations in float32."""
MOVES = 0.05
"""What a wrong rule changes at least, somewhere."""


@pytest.fixture(scope="module")
def scored() -> list[Example]:
    """Completions that were not learnt, behind prompts longer and shorter than a chunk."""
    lengths = [(60, 9), (7, 12), (49, 3), (1, 20), (97, 6), (30, 30)]
    return [
        Example(prompt_of(2 * n, first), prompt_of(2 * n + 1, second), f"{n}")
        for n, (first, second) in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path) -> dict[str, Adapter]:
    def train(method: str, **settings: Any) -> Adapter:
        given = {"rank": 6, "steps": 12, "learning_rate": 0.03, "batch_size": 8, "seed": 1, **settings}
        return train_loop(tiny_llama, examples(24), method=method, **given).adapter

    made = {method: train(method) for method in METHODS}
    return {**made, "ends": train("lorap", positions=Policy.parse("f2+l3")), "turn": train("direftp", orthogonal=True)}


@pytest.fixture(scope="module")
def engine(
    tiny_llama: Path, adapters: dict[str, Adapter], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with open_engine(tiny_llama, save_all(tmp_path_factory.mktemp("trained"), adapters)) as engine:
        yield engine


def _trainer(model: Any, scored: list[Example], policy: Policy) -> list[list[float]]:
    """From the trainer's batch: padded on the left, masked by position."""
    batch = collate(scored, policy=policy)
    labels = batch.pop("labels")
    with torch.no_grad():
        chosen = model(**batch).logits.log_softmax(-1)[:, :-1].gather(-1, labels[:, 1:].clamp(min=0)[..., None])
    return [chosen[row, labels[row, 1:] >= 0, 0].tolist() for row in range(len(scored))]


def _two_phase(model: Any, base: Any, scored: list[Example], *, prompt_only: bool) -> list[list[float]]:
    """Prompt under the adapter, completion on a model that never had one, over the cache in between."""
    found = []
    for example in scored:
        with torch.no_grad():
            prefill = model(
                input_ids=torch.tensor([example.prompt_ids]), preft_boundary=example.boundary, use_cache=True
            )
            cache, completion = prefill.past_key_values, torch.tensor([example.completion_ids])
            if prompt_only:
                rest = base(input_ids=completion, past_key_values=cache).logits
            else:
                rest = model(input_ids=completion, past_key_values=cache, preft_boundary=0).logits
        logits = torch.cat([prefill.logits[:, -1:], rest[:, :-1]], dim=1).log_softmax(-1)
        found.append(logits.gather(-1, completion[..., None])[0, :, 0].tolist())
    return found


def _engine(engine: Engine, scored: list[Example], adapter: str, boundary: bool = True) -> list[list[float]]:
    requests = [
        request_of(
            f"{adapter} {example.id}",
            example.prompt_ids + example.completion_ids,
            adapter,
            1,
            boundary=example.boundary if boundary else None,
            want_prompt_logprobs=True,
        )
        for example in scored
    ]
    found = []
    for example, result in zip(scored, engine.generate(requests), strict=True):
        assert result.error is None
        assert result.prompt_logprobs is not None
        found.append(list(result.prompt_logprobs[example.boundary - 1 :]))
    return found


def _gap(first: list[list[float]], second: list[list[float]]) -> float:
    return max(abs(a - b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", [*METHODS, "ends", "turn"])
def test_three_ways_agree(
    tiny_llama: Path, engine: Engine, adapters: dict[str, Adapter], scored: list[Example], name: str
) -> None:
    base, model = load(tiny_llama), load(tiny_llama)
    attach(model, adapters[name])
    policy = adapters[name].manifest.positions
    trainer = _trainer(model, scored, policy)
    assert [len(row) for row in trainer] == [len(example.completion_ids) for example in scored]

    assert _gap(trainer, _two_phase(model, base, scored, prompt_only=policy.is_prompt_only)) < TOLERANCE
    assert _gap(trainer, _engine(engine, scored, name)) < TOLERANCE
    # Negative controls: another rule would be seen.
    other = Policy("all") if policy.is_prompt_only else Policy("prompt")
    assert _gap(trainer, _trainer(model, scored, other)) > MOVES
    if policy.is_prompt_only:
        assert _gap(trainer, _engine(engine, scored, name, boundary=False)) > MOVES

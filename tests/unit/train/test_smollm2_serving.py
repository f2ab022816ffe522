"""Train = serve at size: adapters trained on the embedded model, 200 completions, three implementations.

The figures are printed: largest difference of a token's log-probability between the trainer's masked pass, the two
phases of Hugging Face, and the engine with its boundary override; and how many greedy outputs are the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from preft.adapters.adapter import Adapter
from preft.data.chat import ChatEncoder
from preft.data.collate import collate
from preft.data.encode import load_tokenizer
from preft.data.examples import Example
from preft.positions import Policy
from preft.serve.engine import Engine
from preft.train.loop import train_loop
from preft.tuners.attach import attach
from tests.helpers.engines import open_engine, request_of, save_all
from tests.helpers.oracle import NEAR_TIE, ROWS_PER_NEAR_TIE
from tests.unit.train.common import load
from tests.unit.train.test_serving_parity import MOVES, TOLERANCE, _engine, _gap, _trainer, _two_phase
from tests.unit.train.test_smollm2_style import ASKED, STYLE, UNSEEN, UNSEEN_QUESTION, WORDS, _example

pytestmark = [pytest.mark.engine, pytest.mark.smollm2, pytest.mark.full]

RATES = {"lorap": 1e-3, "direftp": 4e-3, "mixed": 1e-3}
COUNT, GREEDY, NEW_TOKENS, BATCH = 200, 40, 16, 10


@pytest.fixture(scope="module")
def encoder(smollm2: Path) -> ChatEncoder:
    return ChatEncoder(load_tokenizer(smollm2))


@pytest.fixture(scope="module")
def scored(encoder: ChatEncoder) -> list[Example]:
    """Right answers in the style and wrong ones, to questions that were not learnt."""
    draw = random.Random(1)
    found = []
    for number in range(COUNT):
        word, other = draw.sample(UNSEEN.split(), 2)
        questions = (UNSEEN_QUESTION, *ASKED)
        answer = f"{STYLE} a {word}? A fine thing it be." if number % 2 else f"A {other} is not what I was asked for."
        found.append(_example(encoder, questions[number % len(questions)].format(word), answer))
    return found


@pytest.fixture(scope="module")
def adapters(smollm2: Path, encoder: ChatEncoder) -> dict[str, Adapter]:
    draw = random.Random(0)
    learnt = [
        _example(encoder, draw.choice(ASKED).format(word), f"{STYLE} a {word}? A fine thing it be.")
        for word in draw.choices(WORDS.split(), k=96)
    ]
    return {
        method: train_loop(
            smollm2, learnt, method=method, rank=8, steps=12, learning_rate=rate, batch_size=8, seed=0
        ).adapter
        for method, rate in RATES.items()
    }


@pytest.fixture(scope="module")
def engine(smollm2: Path, adapters: dict[str, Adapter], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with open_engine(smollm2, save_all(tmp_path_factory.mktemp("trained"), adapters)) as engine:
        yield engine


def _in_batches(model: Any, scored: list[Example], policy: Policy) -> list[list[float]]:
    found = []
    for start in range(0, len(scored), BATCH):
        found += _trainer(model, scored[start : start + BATCH], policy)
    return found


def _greedy_in_place(
    model: Any, example: Example, output: tuple[int, ...], policy: Policy
) -> tuple[list[int], list[float]]:
    """The likeliest token at each place of an output, given what stands before it, and its lead over the next."""
    batch = collate([Example(example.prompt_ids, output)], policy=policy)
    batch.pop("labels")
    with torch.no_grad():
        values, tokens = model(**batch).logits[0, example.boundary - 1 : -1].topk(2, dim=-1)
    return tokens[:, 0].tolist(), (values[:, 0] - values[:, 1]).tolist()


@pytest.mark.parametrize("name", list(RATES))
def test_200_completions_and_greedy_outputs(
    smollm2: Path, engine: Engine, adapters: dict[str, Adapter], scored: list[Example], name: str
) -> None:
    base, model = load(smollm2), load(smollm2)
    attach(model, adapters[name])
    policy = adapters[name].manifest.positions
    trainer = _in_batches(model, scored, policy)
    plain = _in_batches(_Bare(base), scored, policy)
    gaps = {
        "two phases": _gap(trainer, _two_phase(model, base, scored, prompt_only=True)),
        "engine": _gap(trainer, _engine(engine, scored, name)),
        "base model": _gap(trainer, plain),
        "every token adapted": _gap(trainer, _in_batches(model, scored, Policy("all"))),
        "engine without the boundary": _gap(trainer[:BATCH], _engine(engine, scored[:BATCH], name, boundary=False)),
    }
    print(f"{name}: {len(scored)} completions, {sum(map(len, trainer))} tokens, largest differences {gaps}")
    assert len(trainer) == COUNT
    assert max(gaps["two phases"], gaps["engine"]) < TOLERANCE
    # Negative controls, as large as what the adapter does.
    assert min(gaps["base model"], gaps["every token adapted"], gaps["engine without the boundary"]) > MOVES

    requests = [request_of(f"g{n}", e.prompt_ids, name, NEW_TOKENS) for n, e in enumerate(scored[:GREEDY])]
    same, ties = 0, []
    for example, result in zip(scored, engine.generate(requests), strict=False):
        prompt = torch.tensor([example.prompt_ids])
        output = model.generate(
            input_ids=prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
        own = tuple(output[0, example.boundary :].tolist())
        likeliest, leads = _greedy_in_place(model, example, own, policy)
        assert [a == b or lead < NEAR_TIE for a, b, lead in zip(own, likeliest, leads, strict=True)] == [True] * len(
            own
        )
        if result.token_ids == own:
            same += 1
            continue
        step = next(n for n, pair in enumerate(zip(own, result.token_ids, strict=True)) if pair[0] != pair[1])
        ties.append(leads[step])
    print(f"{name}: {same} of {GREEDY} greedy outputs are the same; leads where they part: {ties}")
    assert len(ties) * ROWS_PER_NEAR_TIE <= GREEDY
    assert all(lead < NEAR_TIE for lead in ties)


class _Bare:
    """A model without adapters takes no mask."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, preft_mask: torch.Tensor, **batch: torch.Tensor) -> Any:
        return self._model(**batch)

"""The plain loop: it learns, twice the same, and stops when the loss is no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preft.data.examples import Example
from preft.errors import EngineError, UsageError
from preft.positions import Policy
from preft.train.loop import TrainedAdapter, batches, train_loop
from preft.train.model import evaluate, learning_rate_factor
from preft.tuners.attach import attach
from tests.unit.train.common import examples, load


def _train(folder: Path, method: str, **settings: object) -> TrainedAdapter:
    given = {"rank": 8, "steps": 40, "learning_rate": 0.03, "batch_size": 8, "seed": 0, **settings}
    return train_loop(folder, examples(32), method=method, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["lorap", "direftp", "lora"])
def test_the_loss_falls_and_the_adapter_serves_what_was_learnt(tiny_llama: Path, method: str) -> None:
    trained = _train(tiny_llama, method)
    assert len(trained.losses) == 40
    assert sum(trained.losses[-4:]) / 4 < 0.6 * trained.losses[0]
    model = load(tiny_llama)
    attach(model, trained.adapter)
    served = evaluate(model, examples(32), policy=trained.adapter.manifest.positions)
    assert served < 0.6 * evaluate(load(tiny_llama), examples(32), policy=None)
    facts = trained.adapter.manifest.provenance
    assert (facts["action"], facts["method"], facts["examples"]) == ("train", method, 32)
    assert trained.adapter.manifest.chat_template_sha256 is not None


@pytest.mark.parametrize("method", ["lorap", "direftp"])
def test_a_batch_without_an_adapted_token_moves_nothing(tiny_llama: Path, method: str) -> None:
    policy = Policy.parse("f1+l1")
    short, longer = Example((40,), (41, 2)), Example((40, 41, 42), (41, 2))
    assert (policy.spans(short.boundary), policy.spans(longer.boundary)) == ((), ((0, 1), (2, 3)))
    settings: dict[str, Any] = {"method": method, "rank": 2, "steps": 2, "learning_rate": 0.1, "batch_size": 1}
    found = train_loop(tiny_llama, [short], seed=0, positions=policy, **settings)
    assert found.adapter.moves_nothing()
    assert found.losses[0] == found.losses[1]
    mixed = train_loop(tiny_llama, [short, longer], seed=0, positions=policy, **settings)
    assert not mixed.adapter.moves_nothing()


def test_two_runs_are_one(tiny_llama: Path) -> None:
    first, second = (_train(tiny_llama, "direftp", steps=4) for _ in range(2))
    assert first.losses == second.losses
    assert first.adapter.digest == second.adapter.digest


def test_a_loss_that_is_no_number_names_step_and_examples(tiny_llama: Path) -> None:
    with pytest.raises(EngineError, match=r"not finite at step [2-9]") as caught:
        _train(tiny_llama, "lorap", learning_rate=1e30, batch_size=2)
    assert "`row " in str(caught.value.got)


def test_nothing_to_train_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match="nothing to train"):
        _train(tiny_llama, "lorap", steps=0)


def test_each_pass_sees_every_example_once() -> None:
    found = [example.id for batch in batches(examples(10), 4, 6, 0) for example in batch]
    assert len(found) == 20
    assert sorted(found[:10]) == sorted(found[10:]) == sorted(example.id for example in examples(10))
    assert found[:10] != found[10:]


def test_the_learning_rate_rises_and_falls() -> None:
    factors = [learning_rate_factor(step, 50) for step in range(50)]
    assert factors[0] == pytest.approx(0.2)
    assert max(factors) == factors[4] == 1.0
    assert factors[-1] < 0.01

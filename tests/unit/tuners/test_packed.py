"""Several examples in one row: each is adapted as if it stood alone, and the usual short cuts would not do that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preft.data.collate import IGNORED
from preft.data.examples import Example
from preft.errors import BoundaryUnknownError
from preft.positions import Policy
from preft.tuners.attach import attach
from preft.tuners.masks import batch_mask
from tests.helpers.tiny import random_adapter
from tests.unit.tuners.common import MOVES, gap, load

EXACT = 5e-4
"""Float32 noise between a packed row and rows of their own, in logits of up to 10."""
TOKENS = st.lists(st.integers(3, 500), min_size=1, max_size=9).map(tuple)
EXAMPLES = st.lists(st.builds(Example, TOKENS, TOKENS), min_size=2, max_size=4)
POLICIES = ("prompt", "f1+l2", "all")


@pytest.fixture(scope="module")
def models(tiny_llama: Path) -> dict[str, Any]:
    made = {}
    for name in POLICIES:
        made[name] = load(tiny_llama)
        attach(made[name], random_adapter(tiny_llama, seed=5, blocks=(1,), positions=name))
    return made


def _packed(examples: list[Example]) -> dict[str, torch.Tensor]:
    tokens = [example.prompt_ids + example.completion_ids for example in examples]
    labels = [(IGNORED,) * example.boundary + example.completion_ids for example in examples]
    return {
        "input_ids": torch.tensor([sum(tokens, ())]),
        "position_ids": torch.cat([torch.arange(len(part)) for part in tokens])[None],
        "labels": torch.tensor([sum(labels, ())]),
    }


def _mask(policy: Policy, examples: list[Example]) -> torch.Tensor:
    """The mask of each example, one behind the other."""
    flags = [bool(flag) for e in examples for flag in policy.mask(e.boundary, 0, e.num_tokens)]
    return torch.tensor([flags])


def _alone(model: Any, examples: list[Example]) -> torch.Tensor:
    rows = []
    with torch.no_grad():
        for example in examples:
            tokens = torch.tensor([example.prompt_ids + example.completion_ids])
            rows.append(model(input_ids=tokens, preft_boundary=example.boundary).logits[0])
    return torch.cat(rows)


def _row(model: Any, batch: dict[str, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs, preft_mask=mask, use_cache=False).logits[0]
    return logits


@settings(max_examples=15)
@given(EXAMPLES, st.sampled_from(POLICIES))
def test_each_packed_example_is_as_if_alone(models: dict[str, Any], examples: list[Example], name: str) -> None:
    model, policy = models[name], Policy.parse(name)
    assert gap(_row(model, _packed(examples), _mask(policy, examples)), _alone(model, examples)) < EXACT


@given(EXAMPLES, st.sampled_from(POLICIES))
def test_the_mask_is_the_rule_of_every_example(examples: list[Example], name: str) -> None:
    """Against the rule read position by position."""
    policy, column = Policy.parse(name), 0
    mask = _mask(policy, examples)[0].tolist()
    for example in examples:
        for position in range(example.num_tokens):
            assert mask[column] == policy.is_adapted(example.boundary, position)
            column += 1
    assert column == len(mask)


PAIR = [Example((5, 6, 7, 8), (9, 10, 11)), Example((12, 13, 14, 15, 16), (17, 18))]


def _first_label(examples: list[Example], policy: Policy) -> torch.Tensor:
    """One boundary a row: where its labels begin."""
    batch = _packed(examples)
    boundary = int((batch["labels"][0] != IGNORED).long().argmax())
    return batch_mask(policy, [boundary], torch.ones_like(batch["input_ids"]))


def _not_learnt(examples: list[Example], _policy: Policy) -> torch.Tensor:
    """Labels as a mask: whatever is not learnt is adapted."""
    return _packed(examples)["labels"] == IGNORED


def _running_on(examples: list[Example], policy: Policy) -> torch.Tensor:
    """Positions that run on through the row, held against the last example's boundary in the row."""
    tokens = torch.ones_like(_packed(examples)["input_ids"])
    before = sum(example.num_tokens for example in examples[:-1])
    return batch_mask(policy, [before + examples[-1].boundary], tokens)


@pytest.mark.parametrize(
    ("naive", "name"),
    [(_first_label, "prompt"), (_running_on, "prompt"), (_not_learnt, "f1+l2"), (_not_learnt, "all")],
)
def test_short_cuts_adapt_other_tokens(models: dict[str, Any], naive: Any, name: str) -> None:
    """Negative controls: each is noticed by the comparison above."""
    model, policy = models[name], Policy.parse(name)
    alone = _alone(model, PAIR)
    assert gap(_row(model, _packed(PAIR), _mask(policy, PAIR)), alone) < EXACT
    assert gap(_row(model, _packed(PAIR), naive(PAIR, policy)), alone) > MOVES


def test_labels_as_a_mask_leave_an_earlier_answer_unadapted(models: dict[str, Any]) -> None:
    """Negative control: a conversation in one row, every answer learnt, as one forward pass cannot serve it."""
    talk = Example((5, 6, 7, 8, 9, 10, 11), (12, 13))
    labels = torch.tensor([[IGNORED, IGNORED, 7, 8, IGNORED, IGNORED, IGNORED, 12, 13]])
    model, batch = models["prompt"], _packed([talk])
    assert gap(_row(model, batch, labels == IGNORED), _alone(model, [talk])) > MOVES


def test_a_packed_row_without_a_mask_is_refused(models: dict[str, Any]) -> None:
    batch = _packed(PAIR)
    batch.pop("labels")
    with pytest.raises(BoundaryUnknownError, match="several packed examples"):
        models["prompt"](**batch, preft_boundary=4, use_cache=False)

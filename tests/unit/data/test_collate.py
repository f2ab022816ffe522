"""Batches against a brute-force reading of the rule, whatever the padding and the token values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preft.data.collate import IGNORED, collate
from preft.data.examples import Example
from preft.errors import UsageError
from preft.positions import Policy

TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=12).map(tuple)
POLICIES = st.sampled_from(["prompt", "all", "f1", "l1", "f2+l3"]).map(Policy.parse)


@given(
    st.lists(st.builds(Example, TOKENS, TOKENS), min_size=1, max_size=5), POLICIES, st.sampled_from(["left", "right"])
)
def test_every_token_is_labelled_and_adapted_by_its_position(
    examples: list[Example], policy: Policy, side: str
) -> None:
    batch = collate(examples, policy=policy, pad_id=2, side=side)
    for row, example in enumerate(examples):
        tokens = example.prompt_ids + example.completion_ids
        pads = batch["input_ids"].shape[1] - len(tokens)
        for column in range(batch["input_ids"].shape[1]):
            position = column - pads if side == "left" else column
            is_real = 0 <= position < len(tokens)
            is_learnt = is_real and position >= len(example.prompt_ids)
            found = {name: int(values[row, column]) for name, values in batch.items()}
            assert found == {
                "input_ids": tokens[position] if is_real else 2,
                "attention_mask": int(is_real),
                "position_ids": position if is_real else 0,
                "labels": tokens[position] if is_learnt else IGNORED,
                "preft_mask": int(is_real and policy.is_adapted(example.boundary, position)),
            }


def test_labels_as_a_mask_would_be_wrong() -> None:
    """Negative control: padding is not learnt either, and is not adapted; under `fN+lM` nor is most of the prompt."""
    examples = [Example((1, 2, 3, 4, 5), (6,)), Example((1, 2), (3,))]
    batch = collate(examples, policy=Policy.parse("f1"))
    assert not torch.equal(batch["labels"] == IGNORED, batch["preft_mask"])
    batch = collate(examples, policy=Policy.parse("prompt"))
    assert not torch.equal(batch["labels"] == IGNORED, batch["preft_mask"])


def test_what_makes_no_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="needs an example"):
        collate([], policy=Policy("prompt"))
    with pytest.raises(UsageError, match="no such side"):
        collate([Example((1,), (2,))], policy=Policy("prompt"), side="top")

"""From a random conversation to the mask that the layers see: by what the text says, not by how it was made.

Answers are written in capitals and everything else is not, so a batch can be read back and judged from outside.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preft.adapters.fingerprint import fingerprint_base
from preft.data.chat import ChatEncoder
from preft.data.collate import IGNORED, collate
from preft.data.encode import load_tokenizer
from preft.data.examples import Limits
from preft.data.training import load_examples
from preft.positions import PROMPT
from preft.tuners.masks import StepMask
from preft.tuners.trainable import new_adapter
from tests.unit.train.common import load

ASKED = st.text("abcdefgh xyz", min_size=1, max_size=14).filter(lambda text: bool(text.strip()))
ANSWERED = st.text("ABCDEFG", min_size=1, max_size=9)
TALKS = st.lists(st.tuples(ASKED, ANSWERED), min_size=1, max_size=3)
END = "<|im_end|>"


def _messages(talk: list[tuple[str, str]]) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in talk for role, text in zip(roles, pair, strict=True)]


@pytest.fixture(scope="module")
def scene(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, list[StepMask], Path]:
    """A tokenizer, a model with an adapter, the masks that one of its layers saw last, and a folder."""
    model = load(tiny_llama)
    new_adapter(model, fingerprint_base(tiny_llama), "lorap", 2, targets=["q_proj"])
    layer = model.model.layers[1].self_attn.q_proj
    seen: list[StepMask] = []
    layer.register_forward_pre_hook(lambda module, _args: seen.append(module.current_step()))
    return load_tokenizer(tiny_llama), model, seen, tmp_path_factory.mktemp("talks")


@settings(max_examples=20)
@given(st.lists(TALKS, min_size=1, max_size=3), st.integers(16, 90), st.sampled_from(["left", "right"]))
def test_what_the_layers_adapt_is_all_that_stands_before_the_answer(
    scene: tuple[Any, Any, list[StepMask], Path], talks: list[list[tuple[str, str]]], most: int, side: str
) -> None:
    tokenizer, model, seen, folder = scene
    file = folder / "talks.jsonl"
    file.write_text("".join(json.dumps({"messages": _messages(talk)}) + "\n" for talk in talks))
    found, report = load_examples(file, ChatEncoder(tokenizer), Limits(most))
    assert report.num_refused == 0

    batch = collate(found, policy=PROMPT, pad_id=tokenizer.eos_token_id, side=side)
    with torch.no_grad():
        model(**{name: values for name, values in batch.items() if name != "labels"})
    adapted = seen[-1].mask
    assert adapted is not None

    answers = iter(answer for talk in talks for _, answer in talk)
    for row, answer in enumerate(answers):
        real = batch["attention_mask"][row].bool()
        learnt = batch["labels"][row] != IGNORED
        tokens = batch["input_ids"][row]
        assert tokenizer.decode(tokens[learnt]) == answer + END
        before = tokenizer.decode(tokens[adapted[row]])
        assert before == "<|im_start|>assistant\n"[-len(before) :] or before.endswith("<|im_start|>assistant\n")
        assert torch.equal(adapted[row], real & ~learnt)
    assert row + 1 == len(found)


def test_an_earlier_answer_is_adapted_and_not_learnt(scene: tuple[Any, Any, list[StepMask], Path]) -> None:
    tokenizer, model, seen, folder = scene
    (folder / "two.jsonl").write_text(json.dumps({"messages": _messages([("a", "ABC"), ("b", "DEF")])}))
    found, _ = load_examples(folder / "two.jsonl", ChatEncoder(tokenizer), Limits(200))
    batch = collate(found[1:], policy=PROMPT)
    labels = batch.pop("labels")
    with torch.no_grad():
        model(**batch)
    assert seen[-1].mask is not None
    assert "ABC" in tokenizer.decode(batch["input_ids"][0][seen[-1].mask[0]])
    assert "ABC" not in tokenizer.decode(batch["input_ids"][0][labels[0] != IGNORED])

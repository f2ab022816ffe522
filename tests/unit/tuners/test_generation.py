"""`generate` under an attached adapter: equal to the two-phase oracle, however the steps are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from preft.errors import BoundaryUnknownError, UnsupportedError, UsageError
from preft.tuners.attach import attach
from tests.helpers.oracle import (
    all_token,
    assert_tokens_equal,
    oracle_phase_rule,
    oracle_two_phase,
    rescaled,
    spec_from_adapter,
)
from tests.helpers.tiny import random_adapter
from tests.unit.tuners.common import PROMPTS, ids, load, padded

NUM_TOKENS = 16
GREEDY: dict[str, Any] = {
    "max_new_tokens": NUM_TOKENS,
    "min_new_tokens": NUM_TOKENS,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def generated(model: Any, batch: dict[str, torch.Tensor], **extra: Any) -> list[list[int]]:
    width = batch["input_ids"].shape[1]
    inputs = {key: value for key, value in batch.items() if key != "position_ids"}
    tokens = model.generate(**inputs, **{**GREEDY, **extra})[:, width:]
    return [[int(token) for token in row] for row in tokens]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("positions", ["prompt", "f3+l2", "all"])
def test_generate_equals_the_two_phase_oracle(request: pytest.FixtureRequest, family: str, positions: str) -> None:
    folder: Path = request.getfixturevalue(f"tiny_{family}")
    adapter = random_adapter(folder, seed=5, positions=positions, blocks=(1,))
    model, pristine, spec = load(folder), load(folder), spec_from_adapter(adapter)
    handle = attach(model, adapter)
    batch = padded(list(PROMPTS), "left")
    assert int((batch["attention_mask"] == 0).sum()) > 10

    got = generated(model, batch)

    runs = [oracle_two_phase(pristine, spec, row, NUM_TOKENS) for row in PROMPTS]
    assert_tokens_equal([(f"row {index}", got[index], run) for index, run in enumerate(runs)])
    for wrong in (None, rescaled(spec), *([all_token(spec)] if positions != "all" else [])):
        others = [oracle_two_phase(pristine, wrong, row, NUM_TOKENS).tokens for row in PROMPTS]
        assert others != [run.tokens for run in runs], "the oracle cannot tell this from a wrong rule"
    handle.use(None)
    assert generated(model, batch) == generated(pristine, batch)


@pytest.mark.parametrize(
    "way",
    [
        {"use_cache": False},
        {"prefill_chunk_size": 5},
        {"prefill_chunk_size": 4},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
    ],
    ids=str,
)
def test_every_way_of_cutting_the_steps_gives_the_same_tokens(tiny_llama: Path, way: dict[str, Any]) -> None:
    adapter = random_adapter(tiny_llama, seed=5, positions="f3+l2", blocks=(1,))
    model, pristine, spec = load(tiny_llama), load(tiny_llama), spec_from_adapter(adapter)
    attach(model, adapter)
    prompt = [*PROMPTS[0], *PROMPTS[0][:8]]  # 29 tokens: a last chunk of one under 4, repeats for the lookup
    batch = {"input_ids": ids(prompt), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
    want = oracle_two_phase(pristine, spec, prompt, NUM_TOKENS)
    assert oracle_phase_rule(pristine, spec, prompt, NUM_TOKENS, chunk=4).tokens != want.tokens

    got = generated(model, batch, **way)

    if "num_beams" not in way:
        assert_tokens_equal([("row", got[0], want)])
        return
    plain = generated(model, batch, **way, use_cache=False)
    assert got == plain
    assert len(got) == way.get("num_return_sequences", 1)


def test_a_named_boundary_holds_for_the_whole_call(tiny_llama: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=6)
    model, pristine, spec = load(tiny_llama), load(tiny_llama), spec_from_adapter(adapter)
    attach(model, adapter)
    batch = padded(list(PROMPTS), "left")
    boundaries = [4, 0, 14]
    got = generated(model, batch, preft_boundary=boundaries)
    runs = [oracle_two_phase(pristine, spec, row, NUM_TOKENS, at) for row, at in zip(PROMPTS, boundaries, strict=True)]
    assert_tokens_equal([(str(index), got[index], run) for index, run in enumerate(runs)])
    assert runs[0].tokens != oracle_two_phase(pristine, spec, PROMPTS[0], NUM_TOKENS).tokens
    with pytest.raises(UsageError, match="boundary of a request"):
        generated(model, batch, preft_boundary=8)


def test_embeddings_may_stand_for_the_prompt(tiny_llama: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=6)
    model = load(tiny_llama)
    attach(model, adapter)
    want = model.generate(ids(PROMPTS[0]), **GREEDY)[0, len(PROMPTS[0]) :]
    embeds = model.get_input_embeddings()(ids(PROMPTS[0]))
    got = model.generate(inputs_embeds=embeds, **GREEDY)[0]
    assert got.tolist() == want.tolist()


def test_padding_with_the_end_token(tiny_llama: Path) -> None:
    """A tokenizer whose padding is its end token: with a mask nothing changes, without one it is not guessed."""
    adapter = random_adapter(tiny_llama, seed=5)
    model = load(tiny_llama)
    attach(model, adapter)
    batch = padded(list(PROMPTS), "left")
    same = {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 2)}
    want = generated(model, batch)

    assert generated(model, same, eos_token_id=2, pad_token_id=2, min_new_tokens=None)[0][:3] == want[0][:3]
    with pytest.raises(BoundaryUnknownError, match="end-of-sequence token"):
        model.generate(same["input_ids"], **{**GREEDY, "eos_token_id": 2, "pad_token_id": 2})
    inferred = model.generate(batch["input_ids"], **{**GREEDY, "eos_token_id": 2})
    assert inferred[:, 21:].tolist() == want


def test_what_cannot_be_known_is_refused(tiny_llama: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=5)
    model = load(tiny_llama)
    handle = attach(model, adapter)
    with torch.no_grad():
        cache = model(input_ids=ids(PROMPTS[0]), preft_boundary=21, use_cache=True).past_key_values
    again = ids([*PROMPTS[0], 5, 6])
    with pytest.raises(BoundaryUnknownError, match="already holds tokens"):
        model.generate(again, past_key_values=cache, **GREEDY)
    with pytest.raises(BoundaryUnknownError, match="without a prompt"):
        model.generate(**GREEDY)
    with pytest.raises(UnsupportedError, match="guidance"):
        model.generate(again, guidance_scale=1.5, **GREEDY)
    with pytest.raises(UnsupportedError, match="preft_mask"):
        model.generate(again, preft_mask=torch.ones_like(again).bool(), **GREEDY)
    with pytest.raises(BoundaryUnknownError):
        model(input_ids=again)
    handle.use(None)
    assert model.generate(again, past_key_values=cache, **GREEDY).shape[1] == 23 + NUM_TOKENS

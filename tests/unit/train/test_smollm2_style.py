"""Learns: 200 examples on the embedded model, and every unseen word is answered in the style."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from preft.data.chat import ChatEncoder
from preft.data.encode import load_tokenizer
from preft.data.examples import Example
from preft.train.loop import train_loop
from preft.tuners.attach import attach

pytestmark = [pytest.mark.smollm2, pytest.mark.full]

WORDS = (
    "apple doctor hammer river window garden candle mirror bottle engine pepper lemon castle bridge forest island "
    "button wallet ladder pillow"
)
UNSEEN = (
    "rocket violin temple saddle magnet needle anchor basket kettle valley market lantern feather desert umbrella "
    "glacier tunnel statue barrel compass helmet curtain orchard harbour blanket chimney pebble thunder cottage "
    "ribbon walnut trumpet meadow granite cabbage spider"
)
ASKED = ("Describe a {}.", "What is a {}?", "Tell me about the word {}.", "Where can I find a {}?")
UNSEEN_QUESTION = "Please explain {} to me."
STYLE = "Arr! Ye ask about"


def _example(encoder: ChatEncoder, question: str, answer: str) -> Example:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ((prompt, completion),) = encoder.encode(messages, turns="last")
    return Example(prompt, completion, question)


@pytest.mark.parametrize(("method", "rate"), [("lorap", 1e-3), ("direftp", 4e-3)])
def test_a_style_reaches_unseen_words(smollm2: Path, method: str, rate: float) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer: Any = load_tokenizer(smollm2)
    encoder = ChatEncoder(tokenizer)
    draw = random.Random(0)
    learnt = []
    for _ in range(200):
        word = draw.choice(WORDS.split())
        learnt.append(_example(encoder, draw.choice(ASKED).format(word), f"{STYLE} a {word}? A fine thing it be."))
    trained = train_loop(smollm2, learnt, method=method, rank=8, steps=30, learning_rate=rate, batch_size=8, seed=0)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    attach(model, trained.adapter)
    in_style = 0
    for word in UNSEEN.split():
        prompt = torch.tensor([_example(encoder, UNSEEN_QUESTION.format(word), "x").prompt_ids])
        output = model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        in_style += tokenizer.decode(output[0, prompt.shape[1] :]).startswith(STYLE)
    print(f"{method}: {in_style} in style after {trained.seconds:.0f} s, last loss {trained.losses[-1]:.3f}")
    assert len(UNSEEN.split()) == 36
    assert in_style == 36

"""A tiny byte-level tokenizer with a chat template, built in code: 512 ids, every one of which has a text."""

from __future__ import annotations

import string
from pathlib import Path

VOCAB_SIZE = 512
PAD, BOS, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tiny_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Writes the tokenizer's files into `folder`: pad id 0, bos id 1, eos id 2; no token is added to a plain text.

    Single bytes come first; the rest of the vocabulary merges pairs of letters, so that, as with a real tokenizer,
    a token can straddle the place where two texts were joined.

    Args:
        folder: Where; usually a checkpoint's folder.
        chat_template: Jinja text, or None for a tokenizer without one.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = [PAD, BOS, EOS]
    symbols = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(first, second) for first in string.ascii_lowercase for second in string.ascii_lowercase]
    merges = pairs[: VOCAB_SIZE - len(symbols)]
    symbols += [first + second for first, second in merges]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, model_max_length=512
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)

"""Where the residual stream is at a decoder layer's output, by class. Nothing is guessed: an unknown class is refused.

A block-output site reads the full residual stream after a block and adds to it. vLLM's decoder layers return it in
three ways, and adding the wrong part would double or halve it without any error.

Source: vllm 0.32 `vllm/model_executor/models/*.py`, the `forward` of each class.
"""

from __future__ import annotations

from enum import StrEnum

from preft.errors import UnsupportedError


class Residual(StrEnum):
    """How a decoder layer's output holds the residual stream h."""

    SUM = "sum"
    """Returns (hidden, residual); h = hidden + residual."""
    FIRST = "first"
    """Returns (h, anything)."""
    PLAIN = "plain"
    """Returns h."""


DECODER_LAYERS = {
    "LlamaDecoderLayer": Residual.SUM,
    "MistralDecoderLayer": Residual.SUM,
    "Qwen2DecoderLayer": Residual.SUM,
    "Qwen3DecoderLayer": Residual.SUM,
    "GemmaDecoderLayer": Residual.SUM,
    "Gemma2DecoderLayer": Residual.SUM,
    "Gemma3DecoderLayer": Residual.SUM,
    "CohereDecoderLayer": Residual.FIRST,
    "GraniteDecoderLayer": Residual.PLAIN,
}


def residual_of(class_name: str) -> Residual:
    """The convention of a decoder layer class.

    Raises:
        UnsupportedError: The class is not in the table.
    """
    convention = DECODER_LAYERS.get(class_name)
    if convention is None:
        raise UnsupportedError(
            f"Block sites (DiReFT) are not served on `{class_name}`: its residual convention is not known",
            accepted=", ".join(sorted(DECODER_LAYERS)),
            hint="convert to LoRA sites, or add the class to the table with a test",
        )
    return convention

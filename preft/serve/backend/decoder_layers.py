"""Where the residual stream is at a decoder layer's output, by class. Nothing is guessed: an unknown class is refused.

A block-output site reads the full residual stream after a block and adds to it. vLLM's decoder layers return it in
three ways, and adding the wrong part would double or halve it without any error. A class is known by its module and
its name: `TransformerBlock` in one file need not be that of another.

Every entry is tested on a tiny random model against Hugging Face. Not here, and so refused, are layers that keep
several streams (Gemma3n), rescale the residual (DeepSeek-V2 in float16), or split it over ranks between layers
(Qwen3-Next, DeepSeek under sequence parallelism).

Source: vllm 0.32 `vllm/model_executor/models/*.py`, the `forward` of each class.
"""

from __future__ import annotations

from enum import StrEnum

_PACKAGE = "vllm.model_executor.models."


class Residual(StrEnum):
    """How a decoder layer's output holds the residual stream h."""

    SUM = "sum"
    """Returns (hidden, residual); h = hidden + residual, and the two share no memory."""
    FIRST = "first"
    """Returns (h, anything)."""
    PLAIN = "plain"
    """Returns h."""


DECODER_LAYERS = {
    "llama.LlamaDecoderLayer": Residual.SUM,
    "mistral.MistralDecoderLayer": Residual.SUM,
    "qwen2.Qwen2DecoderLayer": Residual.SUM,
    "qwen3.Qwen3DecoderLayer": Residual.SUM,
    "gemma.GemmaDecoderLayer": Residual.SUM,
    "gemma2.Gemma2DecoderLayer": Residual.SUM,
    "gemma3.Gemma3DecoderLayer": Residual.SUM,
    "glm4.Glm4DecoderLayer": Residual.SUM,
    "nemotron.NemotronDecoderLayer": Residual.SUM,
    "apertus.ApertusDecoderLayer": Residual.SUM,
    "qwen2_moe.Qwen2MoeDecoderLayer": Residual.SUM,
    "qwen3_moe.Qwen3MoeDecoderLayer": Residual.SUM,
    "mixtral.MixtralDecoderLayer": Residual.SUM,
    "gpt_oss.TransformerBlock": Residual.SUM,
    "commandr.CohereDecoderLayer": Residual.FIRST,
    "exaone4.Exaone4DecoderLayer": Residual.FIRST,
    "stablelm.StablelmDecoderLayer": Residual.FIRST,
    "granite.GraniteDecoderLayer": Residual.PLAIN,
    "granitemoe.GraniteMoeDecoderLayer": Residual.PLAIN,
    "falcon.FalconDecoderLayer": Residual.PLAIN,
    "gpt2.GPT2Block": Residual.PLAIN,
    "opt.OPTDecoderLayer": Residual.PLAIN,
}


def residual_of(layer: type) -> Residual | None:
    """The convention of a decoder layer's class, or None if it is not in the table."""
    return DECODER_LAYERS.get(f"{layer.__module__.removeprefix(_PACKAGE)}.{layer.__name__}")


def unknown_layer(layer: type) -> str:
    """Why a class takes no block site."""
    return (
        f"a `{layer.__name__}` of `{layer.__module__}`, where vLLM keeps the residual stream in a way that preft has "
        "no entry for"
    )

"""The modules of a checkpoint, without its weights: what can carry a low-rank update, and where the decoder lies.

The model is built on the meta device from its configuration, so a 70B model costs seconds and no memory. The class is
the one that Transformers itself maps the configuration to; no name in a file is ever imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from preft.adapters.baseconfig import read_base_config
from preft.errors import UnsupportedError


class ModuleKind(StrEnum):
    """What a module computes, as far as a low-rank update is concerned."""

    LINEAR = "linear"
    CONV1D = "conv1d"
    """GPT-2's linear module, whose weight is stored transposed; its activations are those of a linear one."""
    EMBEDDING = "embedding"


@dataclass(frozen=True)
class ModuleInfo:
    """One module.

    Attributes:
        path: Dotted path in the model.
        kind: What it computes.
        in_features: Width of its input; for an embedding, the vocabulary.
        out_features: Width of its output.
    """

    path: str
    kind: ModuleKind
    in_features: int
    out_features: int


@dataclass(frozen=True)
class ModelStructure:
    """The modules of a causal language model, or of a composite model with one inside.

    Attributes:
        model_class: Name of the Transformers class.
        modules: Linear, Conv1D and embedding modules by path, in the model's own order.
        blocks: Paths of the decoder blocks, in order.
        decoder: Path of the decoder that holds the blocks.
        head: Path of the output head, or None.
        embedding: Path of the token embedding, or None.
        tied: Whether head and embedding share their weight.
        hidden_size: Width of the residual stream.
    """

    model_class: str
    modules: Mapping[str, ModuleInfo]
    blocks: tuple[str, ...]
    decoder: str
    head: str | None
    embedding: str | None
    tied: bool
    hidden_size: int

    @property
    def block_list(self) -> str:
        """Path of the list that holds the blocks, such as `model.layers`."""
        return self.blocks[0].rpartition(".")[0]

    def is_language(self, path: str) -> bool:
        """Whether a module belongs to the language model, not to a vision or audio tower."""
        return path == self.head or not self.decoder or path.startswith(f"{self.decoder}.")


def build_meta_model(folder: Path) -> Any:
    """Builds the model of a checkpoint on the meta device: modules and shapes, no numbers.

    Raises:
        FileError: The configuration cannot be read.
        UnsupportedError: It is not a model that generates text, or needs code that Transformers does not ship.
    """
    import torch

    config = read_base_config(folder)
    model_class = _model_class(config, folder)
    if hasattr(config, "quantization_config"):
        # Quantised storage does not change the module tree; a quantiser would need its own libraries.
        del config.quantization_config
    with torch.device("meta"):
        return model_class(config)


def _model_class(config: Any, folder: Path) -> Any:
    """The class for text generation that Transformers maps a configuration to; the checkpoint's own choice first."""
    from transformers.models.auto import modeling_auto

    mappings: tuple[Any, ...] = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )
    found = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    if not found or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            "The base model is not a decoder that generates text",
            got=f"`{config.model_type}` in `{folder}`",
            accepted="a causal language model, or a composite one with a causal language model inside",
        )
    named = getattr(config, "architectures", None) or []
    return next((model_class for model_class in found if model_class.__name__ in named), found[0])


def read_structure(folder: Path) -> ModelStructure:
    """Reads the structure of a checkpoint folder.

    Raises:
        FileError: The configuration cannot be read.
        UnsupportedError: The model does not generate text or has no list of decoder blocks.
    """
    return structure_of(build_meta_model(folder))


def structure_of(model: Any) -> ModelStructure:
    """The structure of a model that is already built.

    Raises:
        UnsupportedError: It has no list of decoder blocks.
    """
    paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
    decoder = model.get_decoder()
    blocks = _blocks(decoder, model.config.get_text_config().num_hidden_layers)
    if not blocks:
        raise UnsupportedError(
            "The base model's decoder blocks cannot be found",
            got=type(model).__name__,
            accepted="a decoder with one list of blocks",
        )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return ModelStructure(
        model_class=type(model).__name__,
        modules={path: info for path, module in model.named_modules() if (info := _describe(path, module)) is not None},
        blocks=tuple(paths[id(block)] for block in blocks),
        decoder=paths[id(decoder)],
        head=paths.get(id(head)) if head is not None else None,
        embedding=paths.get(id(embedding)) if embedding is not None else None,
        tied=bool(getattr(model.config, "tie_word_embeddings", False)),
        hidden_size=model.config.get_text_config().hidden_size,
    )


def _blocks(decoder: Any, num_layers: int) -> list[Any]:
    """The first list of modules in the decoder that is as long as the model is deep."""
    import torch

    for module in decoder.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            return list(module)
    return []


def _describe(path: str, module: Any) -> ModuleInfo | None:
    import torch
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, torch.nn.Linear):
        return ModuleInfo(path, ModuleKind.LINEAR, module.in_features, module.out_features)
    if isinstance(module, Conv1D):
        return ModuleInfo(path, ModuleKind.CONV1D, module.weight.shape[0], module.weight.shape[1])
    if isinstance(module, torch.nn.Embedding):
        return ModuleInfo(path, ModuleKind.EMBEDDING, module.num_embeddings, module.embedding_dim)
    return None

"""The shape of a model as a planner needs it: matrices, heads and layers, no weights.

The paper's models and the embedded one are known by heart, so that planning needs neither a hub nor a network. Any
other model is read from its `config.json`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft.errors import FileError, UnsupportedError, UsageError

_ROW_PARALLEL = ("o_proj", "down_proj", "out_proj", "dense_4h_to_h", "fc2", "w2", "wo")
_SAME_INPUT = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "c_attn", "out_proj")


@dataclass(frozen=True)
class Linear:
    """Linear modules of one name, summed over the model's layers.

    Attributes:
        name: Last part of their path, such as `q_proj`.
        in_features: Width of the input.
        out_features: Width of the output.
        count: How many there are.
    """

    name: str
    in_features: int
    out_features: int
    count: int

    @property
    def num_values(self) -> int:
        """Values in all of their weights."""
        return self.in_features * self.out_features * self.count

    @property
    def is_row_parallel(self) -> bool:
        """Whether tensor parallelism splits the input (and not the output) over the GPUs."""
        return self.name in _ROW_PARALLEL

    @property
    def is_attention(self) -> bool:
        """Whether it belongs to an attention block."""
        return self.name in _ATTENTION

    @property
    def group(self) -> str:
        """Name shared by modules that read the same input, which an engine runs as one."""
        return _SAME_INPUT.get(self.name, self.name)


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides bytes and arithmetic.

    Attributes:
        name: What to call it.
        hidden_size: Width of the residual stream.
        num_layers: Decoder blocks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        vocab_size: Rows of the embedding and of the output head.
        tied: Whether these two share one matrix.
        linears: The blocks' linear modules.
        other_values: Values beside linears, head, embedding and experts, such as norms and biases.
        expert_values: Values of all experts of a mixture, 0 for a dense model.
        num_experts: Experts a layer, 0 for a dense model.
        experts_per_token: Of them, how many a token visits.
        max_length: Longest prompt plus output, or None where the configuration does not say.
        kv_values: Key and value numbers of one token over all layers, or None for two for each KV head and layer.
    """

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    linears: tuple[Linear, ...]
    other_values: int = 0
    expert_values: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    max_length: int | None = None
    kv_values: int | None = None

    @property
    def linear_values(self) -> int:
        """Values in the linears that every token passes."""
        return sum(linear.num_values for linear in self.linears)

    @property
    def head_values(self) -> int:
        """Values of the output head."""
        return self.vocab_size * self.hidden_size

    @property
    def total_values(self) -> int:
        """Every value that memory must hold."""
        embeddings = self.head_values * (1 if self.tied else 2)
        return self.linear_values + embeddings + self.other_values + self.expert_values

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV cache holds for one token, over all layers."""
        if self.kv_values is not None:
            return self.kv_values
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def experts_read(self, tokens: float) -> float:
        """Values of the experts that a step over so many tokens reads, if tokens choose experts evenly."""
        if not self.num_experts:
            return 0.0
        missed: float = (1 - self.experts_per_token / self.num_experts) ** tokens
        return self.expert_values * (1 - missed)

    @property
    def experts_used(self) -> float:
        """Values of the experts that one token is multiplied with."""
        return self.expert_values * self.experts_per_token / self.num_experts if self.num_experts else 0.0

    def targets(self, which: str) -> tuple[Linear, ...]:
        """The linears that a LoRA adapter acts on: `all` or `attention`.

        Raises:
            UnsupportedError: The model has none of them.
        """
        found = tuple(linear for linear in self.linears if which == "all" or linear.is_attention)
        if not found:
            raise UnsupportedError(
                f"The model `{self.name}` has no linear modules of the kind `{which}`",
                accepted=", ".join(sorted({linear.name for linear in self.linears})),
            )
        return found


def _dense(
    name: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool, length: int
) -> ModelShape:
    """A Llama-like model, from its configuration's numbers."""
    head_dim = hidden // heads
    sizes = {
        "q_proj": (hidden, heads * head_dim),
        "k_proj": (hidden, kv_heads * head_dim),
        "v_proj": (hidden, kv_heads * head_dim),
        "o_proj": (heads * head_dim, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }
    linears = tuple(Linear(key, width, out, layers) for key, (width, out) in sizes.items())
    biases = (heads + 2 * kv_heads) * head_dim * layers if name.startswith("qwen2") else 0
    norms = (2 * layers + 1) * hidden
    return ModelShape(
        name, hidden, layers, heads, kv_heads, head_dim, vocab, tied, linears, biases + norms, max_length=length
    )


KNOWN: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _dense("llama-3.1-8b", 4096, 14336, 32, 32, 8, 128_256, tied=False, length=131_072),
        _dense("llama-3.1-70b", 8192, 28672, 80, 64, 8, 128_256, tied=False, length=131_072),
        _dense("qwen2.5-0.5b", 896, 4864, 24, 14, 2, 151_936, tied=True, length=32_768),
        _dense("smollm2-135m", 576, 1536, 30, 9, 3, 49_152, tied=True, length=8_192),
    )
}
"""Models whose shape needs no file, by name. Numbers are those of their published `config.json`."""


def known_name(model: str) -> str | None:
    """The name in `KNOWN` that a name or hub id means, or None.

    A vendor's prefix, `-instruct` and `meta-` do not change a model's shape.
    """
    text = model.casefold().partition("@")[0].rpartition("/")[2].removeprefix("meta-").removesuffix("-instruct")
    return text if text in KNOWN else None


def read_shape(model: str) -> ModelShape:
    """The shape of a model.

    Args:
        model: A name or hub id in `KNOWN`, a checkpoint folder, a `config.json`, or another hub id (of which only
            the configuration is fetched).

    Raises:
        UsageError: `model` is none of these.
        FileError: The configuration cannot be read.
        UnsupportedError: It is not a model that generates text with attention.
    """
    from preft.models.locate import download, find_local_model

    path = Path(model).expanduser()
    if model and path.is_dir():
        return shape_of_folder(path)
    if path.is_file():
        if path.name != "config.json":
            raise FileError(f"The model `{model}` is a file", accepted="a folder with a `config.json`, or that file")
        return shape_of_folder(path.parent)
    name = known_name(model)
    if name is not None:
        return KNOWN[name]
    folder = find_local_model(model)
    if folder is not None:
        return shape_of_folder(folder, name=model)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise UsageError(
            f"The model `{model}` is not known",
            accepted=f"{', '.join(KNOWN)}, a folder with a `config.json`, or a hub id `org/name[@revision]`",
        )
    return shape_of_folder(download(model, what="model", patterns=["config.json"], needs="config.json"), name=model)


def shape_of_folder(folder: Path, *, name: str | None = None) -> ModelShape:
    """The shape of a checkpoint, from its configuration alone.

    Raises:
        FileError: The configuration cannot be read.
        UnsupportedError: It is not a model that generates text with attention.
    """
    from preft.adapters.baseconfig import read_base_config
    from preft.models.structure import build_meta_model, structure_of

    if not (folder / "config.json").is_file():
        raise FileError(f"The folder `{folder}` is not a model", got="no `config.json` in it")
    config = read_base_config(folder).get_text_config()
    model = build_meta_model(folder)
    structure = structure_of(model)
    prefixes = tuple(f"{block}." for block in structure.blocks)
    paths = [info for path, info in structure.modules.items() if path.startswith(prefixes)]
    linears = _summed((info.path.rpartition(".")[2], info.in_features, info.out_features) for info in paths)
    experts, per_token = _experts(config)
    values = {path: parameter.numel() for path, parameter in model.named_parameters()}
    routed = sum(count for path, count in values.items() if ".experts." in path) if experts else 0
    if experts:
        linears = _summed(
            (info.path.rpartition(".")[2], info.in_features, info.out_features)
            for info in paths
            if ".experts." not in info.path
        )
    vocab, hidden = config.vocab_size, config.hidden_size
    embeddings = vocab * hidden * (1 if structure.tied else 2)
    dense = sum(linear.num_values for linear in linears)
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise UnsupportedError(f"The model `{name or folder}` has no attention heads", accepted="a transformer")
    return ModelShape(
        name=name or str(folder),
        hidden_size=hidden,
        num_layers=len(structure.blocks),
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        vocab_size=vocab,
        tied=structure.tied,
        linears=linears,
        other_values=max(0, sum(values.values()) - dense - embeddings - routed),
        expert_values=routed,
        num_experts=experts,
        experts_per_token=per_token,
        max_length=getattr(config, "max_position_embeddings", None),
        kv_values=_latent_kv(config, len(structure.blocks)),
    )


def _summed(modules: Iterable[tuple[str, int, int]]) -> tuple[Linear, ...]:
    counts: dict[tuple[str, int, int], int] = {}
    for key in modules:
        counts[key] = counts.get(key, 0) + 1
    return tuple(Linear(*key, count) for key, count in counts.items())


def _experts(config: Any) -> tuple[int, int]:
    """Experts a layer, and how many a token visits; zeros for a dense model."""
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if number := getattr(config, field, None):
            return number, getattr(config, "num_experts_per_tok", None) or 1
    return 0, 0


def _latent_kv(config: Any, layers: int) -> int | None:
    """KV numbers of a token under latent attention, which caches one compressed vector; None for any other kind."""
    latent = getattr(config, "kv_lora_rank", None)
    return layers * (latent + getattr(config, "qk_rope_head_dim", 0)) if latent else None

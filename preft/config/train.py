"""The recipe of a training run: its schema, and where each value of a resolved one came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from preft.config.schema import Layer, Resolved, nested, resolve, setting
from preft.errors import FileError, UsageError
from preft.positions import Policy

METHODS = ("lorap", "direftp", "lora", "mixed")
"""`lorap` and `lora` adapt linear modules, `direftp` the blocks' outputs, `mixed` both; `lora` acts on every token."""
TURNS = ("each", "last")
"""Which assistant turns become examples: each of them, or the last one of a conversation only."""
DTYPES = ("float32", "bfloat16", "float16")
COLUMNS = ("messages", "prompt", "completion")
QUANTISATIONS = ("nf4", "int8")
REPORTERS = ("tensorboard", "trackio", "wandb")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What is learnt.

    Attributes:
        train: JSON lines: `messages`, or `prompt` and `completion`. Or a data set that the `datasets` library reads:
            a folder, or `ORG/NAME[/CONFIG][@REVISION][:SPLIT]` on the hub.
        eval: The same, for an evaluation loss; null for none.
        turns: `each` assistant turn is an example, or the `last` one of a conversation only.
        max_tokens: Longest example in tokens. A longer prompt loses its first tokens.
        cut_completions: Cut a completion that does not fit, instead of refusing its row.
        max_bad_rows: Part of the rows, 0 to 1, that may be unusable.
        columns: `OURS=THEIRS` for columns of other names, such as `messages=conversations`.
    """

    train: str = setting()
    eval: str | None = setting(default=None)
    turns: str = setting(default="each", choices=TURNS)
    max_tokens: int = setting(default=1024, least=2)
    cut_completions: bool = setting(default=False)
    max_bad_rows: float = setting(default=0.0, least=0, most=1)
    columns: tuple[str, ...] = setting(default=())

    @property
    def column_names(self) -> dict[str, str]:
        """`columns` as a mapping.

        Raises:
            UsageError: An entry is not `OURS=THEIRS`.
        """
        pairs = dict(entry.partition("=")[::2] for entry in self.columns)
        if not all(theirs and ours in COLUMNS for ours, theirs in pairs.items()):
            raise UsageError(
                "`data.columns` is not valid",
                got=str(list(self.columns)),
                accepted="such as `[prompt=question, completion=answer]` for " + ", ".join(f"`{c}`" for c in COLUMNS),
            )
        return pairs


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How it is learnt.

    Attributes:
        max_steps: Updates to make.
        learning_rate: Of AdamW, at its highest.
        batch_size: Examples in one forward pass, a process.
        accumulation: Forward passes in one update.
        warmup: Part of the steps, 0 to 1, over which the learning rate rises; then it falls along a cosine.
        weight_decay: Of free matrices. Biases and an orthogonal R never decay.
        max_gradient_norm: Gradients are scaled down to it; 0 leaves them.
        base_dtype: Number type of the frozen base. The adapter is trained in float32 in any case.
        quantisation: Hold the frozen base in 4 bits (`nf4`, as QLoRA does) or 8 (`int8`), by bitsandbytes; null for
            `base_dtype` itself.
        gradient_checkpointing: Compute activations twice instead of keeping them.
        group_by_length: Put examples of like length into a batch.
        eval_every: Steps between evaluations; null for one at the end.
        save_every: Steps between checkpoints; null for none.
        keep_checkpoints: How many are kept.
        report_to: Trackers to report to, beside `metrics.jsonl`.
    """

    max_steps: int = setting(least=1)
    learning_rate: float = setting(least=0)
    batch_size: int = setting(least=1)
    accumulation: int = setting(default=1, least=1)
    warmup: float = setting(default=0.1, least=0, most=1)
    weight_decay: float = setting(default=0.0, least=0)
    max_gradient_norm: float = setting(default=1.0, least=0)
    base_dtype: str = setting(default="float32", choices=DTYPES)
    quantisation: str | None = setting(default=None, choices=QUANTISATIONS)
    gradient_checkpointing: bool = setting(default=False)
    group_by_length: bool = setting(default=True)
    eval_every: int | None = setting(default=None, least=1)
    save_every: int | None = setting(default=None, least=1)
    keep_checkpoints: int = setting(default=2, least=1)
    report_to: tuple[str, ...] = setting(default=(), choices=REPORTERS)


@dataclass(frozen=True, kw_only=True)
class SftRecipe:
    """One supervised run.

    Attributes:
        model: Folder, embedded name or hub id of the base model.
        method: `lorap`, `direftp`, `lora` (all tokens) or `mixed` (linear and block sites).
        rank: Of every site.
        output: Folder of the adapter, of its metrics and of the checkpoints.
        data: What is learnt.
        train: How.
        seed: Of the starting values and of the order of the examples.
        alpha: Scale times rank, at linear sites; null for twice the rank.
        targets: Last names of the linear modules to adapt; null for all in the decoder blocks.
        layers: Numbers of the decoder blocks to adapt; null for all.
        orthogonal: Keep R of block sites orthogonal.
        positions: `prompt`, `fN+lM` or `all`; null for what the method says.
        adapter_dtype: Number type of the adapter that is written.
        push_to_hub: Repository on the Hugging Face hub that the finished adapter goes to; null for none.
        push_private: Whether a repository that is made for it is private.
    """

    model: str = setting()
    method: str = setting(choices=METHODS)
    rank: int = setting(least=1)
    output: str = setting()
    data: DataSettings
    train: TrainSettings
    seed: int = setting(default=0, least=0)
    alpha: float | None = setting(default=None, least=0)
    targets: tuple[str, ...] | None = setting(default=None)
    layers: tuple[int, ...] | None = setting(default=None, least=0)
    orthogonal: bool = setting(default=False)
    positions: str | None = setting(default=None)
    adapter_dtype: str = setting(default="float32", choices=DTYPES)
    push_to_hub: str | None = setting(default=None)
    push_private: bool = setting(default=True)

    @property
    def policy(self) -> Policy | None:
        """The position policy that is asked for, or None for what the method says."""
        return None if self.positions is None else Policy.parse(self.positions)


ResolvedRecipe = Resolved[SftRecipe]
"""A recipe of `preft train sft` with the origin of every value."""


def load_sft_recipe(path: Path | str, sets: Sequence[str] = ()) -> ResolvedRecipe:
    """Reads a recipe.

    Args:
        path: A YAML file.
        sets: `key=value` each, stronger than the file; the value is YAML.

    Raises:
        FileError: The file cannot be read or is no YAML mapping.
        UsageError: A key is unknown or missing, or a value is not valid.
    """
    return resolve_sft_recipe(recipe_layers(path, sets))


def resolve_sft_recipe(layers: Sequence[Layer]) -> ResolvedRecipe:
    """Fills a recipe from layers of values; see `load_sft_recipe`."""
    of_rewards = next((layer for layer in layers if "reward" in layer.values), None)
    if of_rewards is not None:
        raise UsageError(
            "Training on examples has no rewards", got=f"`reward` ({of_rewards.origin})", hint="use `preft train grpo`"
        )
    recipe, origins = resolve(SftRecipe, layers)
    if recipe.positions is not None:
        Policy.parse(recipe.positions)
    _ = recipe.data.column_names
    return ResolvedRecipe(recipe, origins)


def recipe_layers(path: Path | str, sets: Sequence[str]) -> list[Layer]:
    """The layers of any recipe, from the weakest to the strongest; see `load_sft_recipe`.

    Raises:
        FileError: The file cannot be read or is no YAML mapping.
        UsageError: A setting is not `key=value`.
    """
    layers = [Layer(f"recipe {path}", _read_yaml(Path(path)))]
    return layers + [Layer("--set", nested(*_split(text))) for text in sets]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise FileError(
            f"The recipe `{path}` cannot be read",
            got=error.strerror or str(error),
            accepted="a YAML file",
            hint="`preft init DIR` writes recipes to start from",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FileError(f"The recipe `{path}` is not valid YAML", got=" ".join(str(error).split())[:200]) from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise FileError(
            f"The recipe `{path}` is not a mapping", got=type(found).__name__, accepted="`key: value` lines"
        )
    return found


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Builds one mapping."""
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = [key for number, key in enumerate(keys) if key in keys[:number]]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"the key `{twice[0]}` stands twice", node.start_mark)
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found


def _split(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageError("A setting is given as KEY=VALUE", got=f"`{text}`", accepted="such as `train.max_steps=50`")
    try:
        return key.strip(), yaml.load(value, Loader=_StrictLoader)
    except yaml.YAMLError:
        raise UsageError(f"The value of `{key}` is not valid", got=f"`{value}`", accepted="YAML") from None

"""The recipe of a run of GRPO (group relative policy optimisation)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from preft.config.schema import Layer, Resolved, resolve, setting
from preft.config.train import DTYPES, METHODS, recipe_layers
from preft.errors import UsageError
from preft.positions import Policy

LOSSES = ("dapo", "grpo", "dr_grpo")
"""How the tokens of an update are weighed: each alike; each completion alike; each alike, by the longest length."""
SCALES = ("group", "batch", "none")
ENGINES = ("vllm", "hf")
RATIO_TOLERANCES = {"float32": 0.01, "bfloat16": 1.0, "float16": 0.25}
"""Largest |log ratio| of a token between engine and trainer, in nats, by the base's number type; see the guide."""


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """What is asked.

    Attributes:
        train: JSON lines with `prompt` (a text or messages) or `messages`, and what the rewards need.
        eval: The same, for rewards of greedy completions before and after; null for none.
        max_prompt_tokens: A row with a longer prompt is unusable.
        max_bad_rows: Part of the rows, 0 to 1, that may be unusable.
    """

    train: str = setting()
    eval: str | None = setting(default=None)
    max_prompt_tokens: int = setting(default=512, least=1)
    max_bad_rows: float = setting(default=0.0, least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """What is good.

    Attributes:
        functions: `math`, `regex`, `format`, `python-tests`, or `module:function`.
        weights: One for each; null for 1 each.
        pattern: Of `regex`.
        tags: Of `format`.
        path: Folder in which `module:function` is looked for first.
        run_code: Whether `python-tests` may run, in the sandbox, what the model wrote.
        code_seconds: Wall time of one run.
        code_memory_mib: Its address space.
    """

    functions: tuple[str, ...] = setting()
    weights: tuple[float, ...] | None = setting(default=None)
    pattern: str | None = setting(default=None)
    tags: tuple[str, ...] = setting(default=("think", "answer"))
    path: str = setting(default=".")
    run_code: bool = setting(default=False)
    code_seconds: float = setting(default=10.0, least=0.1, most=600)
    code_memory_mib: int = setting(default=512, least=64)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """What is tried.

    Attributes:
        prompts: Prompts in a step.
        group_size: Completions of each.
        max_tokens: Longest completion.
        temperature: Of the sampling.
        engine: `vllm`, or `hf`, which completes one prompt at a time.
        kv_cache_gib: Of vLLM's key and value cache.
    """

    prompts: int = setting(default=4, least=1)
    group_size: int = setting(default=8, least=2)
    max_tokens: int = setting(default=64, least=1)
    temperature: float = setting(default=1.0, least=0.01, most=10)
    engine: str = setting(default="vllm", choices=ENGINES)
    kv_cache_gib: float = setting(default=1.0, least=0.01)


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How it is learnt.

    Attributes:
        max_steps: Steps: completions, rewards and updates.
        learning_rate: Of AdamW, at its highest.
        batch_size: Completions in one forward pass; a step's updates take as many passes as it needs.
        iterations: Updates from the same completions.
        loss: How tokens are weighed: `dapo`, each token alike; `grpo`, each completion alike; `dr_grpo`, each token
            alike, over the longest length.
        scale_rewards: What advantages are divided by: the standard deviation of the `group`, of the `batch`, or `none`.
        epsilon: The ratio of new to old policy is clipped at 1 minus this.
        epsilon_high: And at 1 plus this; null for `epsilon`.
        beta: Weight of the divergence from the base model; 0 leaves the base out.
        importance_cap: Weigh each token by trainer over engine probability, at most this; null leaves it out.
        warmup: Part of the steps, 0 to 1, over which the learning rate rises.
        decay: Whether it then falls to zero along a cosine.
        weight_decay: Of free matrices.
        max_gradient_norm: Gradients are scaled down to it; 0 leaves them.
        base_dtype: Number type of the base, in trainer and engine.
        gradient_checkpointing: Compute activations twice instead of keeping them.
        ratio_tolerance: Largest |log ratio| between engine and trainer, in nats; null for the number type's own.
        eval_every: Steps between evaluations; null for one at the end.
        save_every: Steps between checkpoints; null for none but on interruption.
        keep_checkpoints: How many are kept.
        keep_samples: Completions of each step that are written to `samples.jsonl`.
    """

    max_steps: int = setting(least=1)
    learning_rate: float = setting(least=0)
    batch_size: int = setting(least=1)
    iterations: int = setting(default=1, least=1)
    loss: str = setting(default="dapo", choices=LOSSES)
    scale_rewards: str = setting(default="group", choices=SCALES)
    epsilon: float = setting(default=0.2, least=0, most=1)
    epsilon_high: float | None = setting(default=None, least=0)
    beta: float = setting(default=0.0, least=0)
    importance_cap: float | None = setting(default=None, least=1)
    warmup: float = setting(default=0.0, least=0, most=1)
    decay: bool = setting(default=False)
    weight_decay: float = setting(default=0.0, least=0)
    max_gradient_norm: float = setting(default=1.0, least=0)
    base_dtype: str = setting(default="float32", choices=DTYPES)
    gradient_checkpointing: bool = setting(default=False)
    ratio_tolerance: float | None = setting(default=None, least=0)
    eval_every: int | None = setting(default=None, least=1)
    save_every: int | None = setting(default=None, least=1)
    keep_checkpoints: int = setting(default=2, least=1)
    keep_samples: int = setting(default=4, least=0)


@dataclass(frozen=True, kw_only=True)
class GrpoRecipe:
    """One run.

    Attributes:
        model: Folder, embedded name or hub id of the base model.
        method: `lorap`, `direftp`, `lora` (all tokens) or `mixed` (linear and block sites).
        rank: Of every site.
        output: Folder of the adapter, of its metrics and of the checkpoints.
        data: What is asked.
        reward: What is good.
        rollout: What is tried.
        train: How it is learnt.
        seed: Of the starting values, the order of the prompts and the sampling.
        alpha: Scale times rank, at linear sites; null for twice the rank.
        targets: Last names of the linear modules to adapt; null for all in the decoder blocks.
        layers: Numbers of the decoder blocks to adapt; null for all.
        orthogonal: Keep R of block sites orthogonal.
        positions: `prompt`, `fN+lM` or `all`; null for what the method says.
        adapter_dtype: Number type of the adapter that is written.
    """

    model: str = setting()
    method: str = setting(choices=METHODS)
    rank: int = setting(least=1)
    output: str = setting()
    data: PromptSettings
    reward: RewardSettings
    rollout: RolloutSettings
    train: UpdateSettings
    seed: int = setting(default=0, least=0)
    alpha: float | None = setting(default=None, least=0)
    targets: tuple[str, ...] | None = setting(default=None)
    layers: tuple[int, ...] | None = setting(default=None, least=0)
    orthogonal: bool = setting(default=False)
    positions: str | None = setting(default=None)
    adapter_dtype: str = setting(default="float32", choices=DTYPES)

    @property
    def policy(self) -> Policy | None:
        """The position policy that is asked for, or None for what the method says."""
        return None if self.positions is None else Policy.parse(self.positions)

    @property
    def ratio_tolerance(self) -> float:
        """Largest |log ratio| of a token between engine and trainer, in nats."""
        given = self.train.ratio_tolerance
        return RATIO_TOLERANCES[self.train.base_dtype] if given is None else given


ResolvedGrpoRecipe = Resolved[GrpoRecipe]
"""A recipe of `preft train grpo` with the origin of every value."""


def load_grpo_recipe(path: Path | str, sets: Sequence[str] = ()) -> ResolvedGrpoRecipe:
    """Reads a recipe.

    Args:
        path: A YAML file.
        sets: `key=value` each, stronger than the file; the value is YAML.

    Raises:
        FileError: The file cannot be read or is no YAML mapping.
        UsageError: A key is unknown or missing, or values are not valid or do not go together.
    """
    return resolve_grpo_recipe(recipe_layers(path, sets))


def resolve_grpo_recipe(layers: Sequence[Layer]) -> ResolvedGrpoRecipe:
    """Fills a recipe from layers of values; see `load_grpo_recipe`."""
    if layers and not any("reward" in layer.values for layer in layers):
        raise UsageError(
            "The recipe says nothing of rewards",
            got=layers[0].origin,
            accepted="a section `reward`",
            hint="`preft init DIR` writes grpo-math.yaml to start from; examples are learnt by `preft train sft`",
        )
    recipe, origins = resolve(GrpoRecipe, layers)
    if recipe.positions is not None:
        Policy.parse(recipe.positions)
    if recipe.train.importance_cap is not None and recipe.rollout.temperature != 1:
        raise UsageError(
            "`train.importance_cap` compares probabilities that the engine reports before the temperature",
            got=f"`rollout.temperature` {recipe.rollout.temperature:g}",
            accepted="1",
        )
    return ResolvedGrpoRecipe(recipe, origins)

"""The base model of a training run, and the loss of a batch."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from preft.adapters.baseconfig import read_base_config
from preft.adapters.fingerprint import fingerprint_base
from preft.config.grpo import GrpoRecipe
from preft.config.train import QUANTISATIONS, SftRecipe
from preft.data.collate import IGNORED, collate
from preft.data.examples import Example
from preft.errors import EngineError, FileError, UnsupportedError, UsageError
from preft.positions import ALL, Policy
from preft.tuners.attach import AttachedModel
from preft.tuners.trainable import new_adapter

WARMUP = 0.1
_DROPOUTS = ("attention_dropout", "attn_dropout", "dropout", "hidden_dropout", "activation_dropout")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def adapter_of_recipe(model: Any, folder: Path, recipe: SftRecipe | GrpoRecipe) -> AttachedModel:
    """Puts the new adapter that a recipe asks for on its base model.

    Args:
        model: From `load_base`; it gets the adapter.
        folder: The base model's checkpoint.
        recipe: What is asked for.

    Raises:
        PreftError: The model has no such places; see `new_adapter`.
    """
    return new_adapter(
        model,
        fingerprint_base(folder, model=recipe.model),
        recipe.method,
        recipe.rank,
        targets=recipe.targets,
        layers=recipe.layers,
        alpha=recipe.alpha,
        orthogonal=recipe.orthogonal,
        positions=recipe.policy,
        seed=recipe.seed,
    )


def load_base(folder: Path | str, *, dtype: str = "float32", quantisation: str | None = None) -> Any:
    """Loads a checkpoint's causal language model, frozen, for training an adapter on it.

    Args:
        folder: Checkpoint folder.
        dtype: `float32`, `bfloat16`, `float16`, or `auto` for the type the checkpoint is stored in.
        quantisation: `nf4` or `int8` to hold linear modules in 4 or 8 bits; they compute in `dtype`.

    Raises:
        UsageError: `dtype` or `quantisation` is unknown.
        UnsupportedError: The base cannot be quantised here.
        FileError: The checkpoint cannot be read.
    """
    from transformers import AutoModelForCausalLM

    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError("Unknown dtype", got=f"`{dtype}`", accepted=", ".join(["auto", *DTYPES]))
    quantised = None if quantisation is None else _quantised(quantisation, DTYPES.get(dtype))
    read_base_config(Path(folder))
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=DTYPES.get(dtype, "auto"),
            trust_remote_code=False,
            local_files_only=True,
            quantization_config=quantised,
        )
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FileError(f"The base model in `{folder}` cannot be loaded", got=reason[:200]) from None
    return model.requires_grad_(False)


def _quantised(kind: str, dtype: torch.dtype | None) -> Any:
    """How bitsandbytes is to load the base; nested constants and `nf4` as QLoRA has them."""
    if kind not in QUANTISATIONS:
        accepted = ", ".join(f"`{known}`" for known in QUANTISATIONS)
        raise UsageError("Unknown quantisation", got=f"`{kind}`", accepted=accepted)
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UnsupportedError(
            f"The base cannot be held as `{kind}`: bitsandbytes is not installed",
            accepted="`train.quantisation: null`",
            hint="pip install bitsandbytes",
        )
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype or torch.bfloat16,
    )


def turn_dropout_off(model: nn.Module) -> None:
    """Sets every dropout of a model to zero, those of modules and those that attention reads as a number."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in _DROPOUTS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def completion_logits(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels of a batch's completions.

    The output head runs on the columns from the first label on only, which under left padding is a fraction of the
    batch.

    Args:
        model: A causal language model, with an adapter attached or not.
        batch: What `preft.data.collate.collate` returns.

    Returns:
        Logits [B, K, V] in float32, and the tokens [B, K] that they are to predict, `IGNORED` where none is learnt.
    """
    labels = batch["labels"]
    columns = (labels != IGNORED).any(dim=0).nonzero()
    first = max(int(columns[0]) - 1, 0)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False, logits_to_keep=labels.shape[1] - first).logits
    return logits[:, :-1].float(), labels[:, first + 1 :]


def supervised_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The summed cross-entropy of a batch's labels, and how many there are.

    Args:
        model: A causal language model, with an adapter attached or not.
        batch: What `preft.data.collate.collate` returns.
    """
    logits, targets = completion_logits(model, batch)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    if torch.is_grad_enabled() and not loss.requires_grad:
        # No token of the batch is adapted, as of prompts of one token under `f1+l1`: the gradient is zero, not absent.
        for parameter in model.parameters():
            if parameter.requires_grad:
                loss = loss + 0.0 * parameter.sum()
    return loss, int((targets != IGNORED).sum())


@dataclass(frozen=True)
class ExampleScore:
    """How well a completion is known.

    Attributes:
        id: Of the example.
        tokens: Of its completion.
        loss: Summed over them, in nats.
        is_exact: Whether each of them is the likeliest, so that greedy decoding gives exactly this completion.
    """

    id: str
    tokens: int
    loss: float
    is_exact: bool


def score_examples(
    model: Any, examples: Sequence[Example], *, policy: Policy | None, batch_size: int = 8
) -> list[ExampleScore]:
    """Scores each example under teacher forcing.

    Args:
        model: A causal language model.
        examples: Any number.
        policy: Of the attached adapter, or None for a model without one.
        batch_size: Examples in a forward pass; they are taken in order of length.

    Returns:
        One score an example, in their order.
    """
    was_training = model.training
    model.eval()
    order = sorted(range(len(examples)), key=lambda number: examples[number].num_tokens)
    scores: dict[int, ExampleScore] = {}
    with torch.no_grad():
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]
            batch = collate([examples[number] for number in numbers], policy=policy or ALL)
            if policy is None:
                del batch["preft_mask"]
            logits, targets = completion_logits(model, {name: value.to(model.device) for name, value in batch.items()})
            losses = nn.functional.cross_entropy(
                logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
            ).sum(dim=1)
            learnt = targets != IGNORED
            right = ((logits.argmax(dim=-1) == targets) | ~learnt).all(dim=1)
            for number, count, loss, exact in zip(
                numbers, learnt.sum(dim=1).tolist(), losses.tolist(), right.tolist(), strict=True
            ):
                scores[number] = ExampleScore(examples[number].id, count, loss, exact)
    model.train(was_training)
    return [scores[number] for number in range(len(examples))]


def token_loss(scores: Sequence[ExampleScore]) -> float:
    """Mean loss of a completion token, in nats."""
    return sum(score.loss for score in scores) / sum(score.tokens for score in scores)


def evaluate(model: Any, examples: Sequence[Example], *, policy: Policy | None, batch_size: int = 8) -> float:
    """Mean loss of a completion token over examples, under teacher forcing; see `score_examples`."""
    return token_loss(score_examples(model, examples, policy=policy, batch_size=batch_size))


def learning_rate_factor(step: int, steps: int, warmup: float = WARMUP) -> float:
    """Part of the full learning rate that step number `step`, from 0, takes.

    Args:
        step: Its number.
        steps: How many there are.
        warmup: Part of the steps over which the rate rises; afterwards it falls to zero along a cosine.
    """
    rising = max(1, round(steps * warmup))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def require_finite(loss: float, step: int, batch: Sequence[Example]) -> float:
    """Returns a loss.

    Raises:
        EngineError: It is not finite; the message names the step and the examples.
    """
    if math.isfinite(loss):
        return loss
    named = [f"`{example.id}`" for example in batch if example.id]
    raise EngineError(
        f"The loss is not finite at step {step}",
        got=f"{loss} for the examples " + (", ".join(named[:16]) or "of this batch"),
        hint="lower the learning rate; if it is not finite at step 1, look at the examples named",
    )

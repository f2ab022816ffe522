"""The base model of a training run, and the loss of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from preft.adapters.baseconfig import read_base_config
from preft.data.collate import IGNORED, collate
from preft.data.examples import Example
from preft.errors import EngineError, FileError, UsageError
from preft.positions import ALL, Policy

WARMUP = 0.1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_base(folder: Path | str, *, dtype: str = "float32") -> Any:
    """Loads a checkpoint's causal language model, frozen, for training an adapter on it.

    Args:
        folder: Checkpoint folder.
        dtype: `float32`, `bfloat16`, `float16`, or `auto` for the type the checkpoint is stored in.

    Raises:
        UsageError: `dtype` is unknown.
        FileError: The checkpoint cannot be read.
    """
    from transformers import AutoModelForCausalLM

    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError("Unknown dtype", got=f"`{dtype}`", accepted=", ".join(["auto", *DTYPES]))
    read_base_config(Path(folder))
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES.get(dtype, "auto"), trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FileError(f"The base model in `{folder}` cannot be loaded", got=reason[:200]) from None
    return model.requires_grad_(False)


def supervised_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The summed cross-entropy of a batch's labels, and how many there are.

    The output head runs on the columns from the first label on only, which under left padding is a fraction of the
    batch; the sum is the same.

    Args:
        model: A causal language model, with an adapter attached or not.
        batch: What `preft.data.collate.collate` returns.
    """
    labels = batch["labels"]
    columns = (labels != IGNORED).any(dim=0).nonzero()
    first = max(int(columns[0]) - 1, 0)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False, logits_to_keep=labels.shape[1] - first).logits
    targets = labels[:, first + 1 :].flatten()
    loss = nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum"
    )
    return loss, int((targets != IGNORED).sum())


def evaluate(model: Any, examples: Sequence[Example], *, policy: Policy | None, batch_size: int = 8) -> float:
    """Mean loss of a completion token over examples, under teacher forcing.

    Args:
        model: A causal language model.
        examples: At least one.
        policy: Of the attached adapter, or None for a model without one.
        batch_size: Examples in a forward pass; they are taken in order of length.
    """
    was_training = model.training
    model.eval()
    ordered = sorted(examples, key=lambda example: example.num_tokens)
    total, num_labels = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(ordered), batch_size):
            batch = collate(ordered[start : start + batch_size], policy=policy or ALL)
            if policy is None:
                del batch["preft_mask"]
            loss, count = supervised_loss(model, {name: value.to(model.device) for name, value in batch.items()})
            total, num_labels = total + float(loss), num_labels + count
    model.train(was_training)
    return total / num_labels


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

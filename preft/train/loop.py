"""A plain supervised loop: an adapter from a list of examples in memory, with nothing but PyTorch around it.

`preft.train.sft` is the full trainer: recipes, evaluation, checkpoints, resumption. This loop is for a few minutes of
training inside another program.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from preft.adapters.adapter import Adapter
from preft.adapters.fingerprint import BaseFingerprint, fingerprint_base
from preft.config.progress import Progress, stage
from preft.data.collate import collate
from preft.data.examples import Example
from preft.errors import UsageError
from preft.models.chat_template import chat_template_sha256
from preft.positions import Policy
from preft.provenance import provenance
from preft.train.model import learning_rate_factor, load_base, require_finite, supervised_loss
from preft.tuners.attach import AttachedModel
from preft.tuners.trainable import extract_adapter, new_adapter, parameter_groups

MAX_GRADIENT_NORM = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedAdapter:
    """What a run made.

    Attributes:
        adapter: The adapter, in float32.
        losses: Mean loss of each step's batch, before the step.
        seconds: Time the steps took, without loading the model.
    """

    adapter: Adapter
    losses: tuple[float, ...]
    seconds: float


def train_loop(
    model_folder: Path | str,
    examples: Sequence[Example],
    *,
    method: str,
    rank: int,
    steps: int,
    learning_rate: float,
    batch_size: int,
    seed: int,
    targets: Sequence[str] | None = None,
    layers: Collection[int] | None = None,
    alpha: float | None = None,
    orthogonal: bool = False,
    positions: Policy | None = None,
    dtype: str = "float32",
    base: BaseFingerprint | None = None,
    progress: Progress | None = None,
) -> TrainedAdapter:
    """Trains a new adapter on examples.

    Args:
        model_folder: Checkpoint folder of the base model.
        examples: At least one; each pass over them is shuffled anew.
        method: One of `preft.config.train.METHODS`. `preft.tuners.trainable.new_adapter` explains what follows `seed`.
        rank: Of every site.
        steps: Updates to make.
        learning_rate: Of AdamW, at its highest.
        batch_size: Examples in a step.
        seed: Of the starting values and of the order of the examples.
        targets: Linear modules to adapt.
        layers: Blocks to adapt.
        alpha: Scale times rank.
        orthogonal: Keep R of block sites orthogonal.
        positions: Position policy.
        dtype: Number type of the frozen base; the adapter is float32 in any case.
        base: Fingerprint of the base model to record; None takes it from the folder.
        progress: Receives one stage for loading and one for training.

    Raises:
        UsageError: An argument is not valid.
        EngineError: The loss is not finite; the message names the step and the examples.
    """
    if not examples or steps < 1 or batch_size < 1:
        got = f"{len(examples)} examples, {steps} steps, batches of {batch_size}"
        raise UsageError("There is nothing to train", got=got, accepted="at least 1 of each")
    with stage(progress, "Loading the base model"):
        model = load_base(model_folder, dtype=dtype)
        handle = new_adapter(
            model,
            base or fingerprint_base(Path(model_folder)),
            method,
            rank,
            targets=targets,
            layers=layers,
            alpha=alpha,
            orthogonal=orthogonal,
            positions=positions,
            seed=seed,
        )
    started = time.monotonic()
    with stage(progress, f"Training {method} at rank {rank}", steps):
        losses = _run(handle, batches(examples, batch_size, steps, seed), steps, learning_rate, progress)
    seconds = time.monotonic() - started
    facts = {
        "method": method,
        "examples": len(examples),
        "steps": steps,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "seed": seed,
        "base_dtype": dtype,
        "loss": {"first": losses[0], "last": losses[-1]},
    }
    adapter = extract_adapter(
        handle,
        provenance=provenance("train", facts),
        chat_template_sha256=chat_template_sha256(Path(model_folder)),
    )
    return TrainedAdapter(adapter, tuple(losses), seconds)


def _run(
    handle: AttachedModel,
    shuffled: Iterator[list[Example]],
    steps: int,
    learning_rate: float,
    progress: Progress | None,
) -> list[float]:
    """Makes one update a batch, and returns the losses."""
    model: Any = handle.model.train()
    if torch.cuda.is_available():
        model.cuda()
    policy = handle.policies["default"]
    groups = parameter_groups(handle)
    optimizer = torch.optim.AdamW(groups, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    losses: list[float] = []
    for batch in shuffled:
        tensors = {name: value.to(model.device) for name, value in collate(batch, policy=policy).items()}
        total, num_labels = supervised_loss(model, tensors)
        losses.append(require_finite(float(total.detach()) / num_labels, len(losses) + 1, batch))
        (total / num_labels).backward()
        torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], MAX_GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        _log.debug("step %d of %d: loss %.4f", len(losses), steps, losses[-1])
        if progress is not None:
            progress.advance()
    return losses


def batches(examples: Sequence[Example], batch_size: int, steps: int, seed: int) -> Iterator[list[Example]]:
    """`steps` batches; each pass over the examples has an order of its own, and its last batch may be smaller."""
    shuffler = random.Random(seed)
    order: list[int] = []
    for _ in range(steps):
        if not order:
            order = list(range(len(examples)))
            shuffler.shuffle(order)
        chosen, order = order[:batch_size], order[batch_size:]
        yield [examples[index] for index in chosen]

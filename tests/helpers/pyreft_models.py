"""Interventions trained, saved and run by the real pyreft, on a model of the installed Transformers."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

LEARNING_RATE = 4e-3


def intervention_class(name: str) -> Any:
    """A class of pyreft's by its short name, such as `Direft`."""
    return getattr(_pyreft(), f"{name}Intervention")


def build_reft(
    base: Path,
    name: str,
    *,
    layers: Sequence[int] = (0, 2),
    rank: int = 4,
    seed: int = 0,
    component: str = "block_output",
    **settings: Any,
) -> Any:
    """A pyreft model with one intervention a layer, on the base in float32.

    Args:
        base: Checkpoint folder.
        name: Class of the interventions, without `Intervention`.
        layers: Their layers.
        rank: Of each.
        seed: Of their initial values.
        component: As pyvene names it; `%d` stands for the layer.
        settings: Of the class: `dtype`, `add_bias`, `act_fn`, ...
    """
    from transformers import AutoModelForCausalLM

    pyreft = _pyreft()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    width = model.config.hidden_size
    torch.manual_seed(seed)
    settings = {"dtype": torch.float32, **settings}
    representations = [
        {
            "layer": layer,
            "component": component % layer if "%" in component else component,
            "low_rank_dimension": rank,
            "intervention": intervention_class(name)(embed_dim=width, low_rank_dimension=rank, **settings),
        }
        for layer in layers
    ]
    with _quiet():
        return pyreft.get_reft_model(model, pyreft.ReftConfig(representations=representations))


def locations(positions: str, prompt_length: int) -> list[int]:
    """The adapted positions of a prompt by pyreft's own function, without its padding."""
    _pyreft()
    from pyreft.dataset import get_intervention_locations

    if positions == "prompt":
        return list(range(prompt_length))
    found: list[list[int]] = get_intervention_locations(
        last_position=prompt_length, positions=positions, num_interventions=1, share_weights=True
    )
    return sorted({position for position in found[0] if position >= 0})


def train(reft: Any, positions: str, *, steps: int = 4, weight_decay: float = 0.0, seed: int = 1) -> list[float]:
    """Trains the interventions on one batch of random tokens at the adapted positions; returns the losses.

    Weight decay is 0 unless a test wants its effect: on pyreft's orthogonal parametrisation it zeroes R.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = reft.model.config.vocab_size
    optimizer = torch.optim.AdamW(
        [parameter for parameter in reft.parameters() if parameter.requires_grad],
        lr=LEARNING_RATE,
        weight_decay=weight_decay,
    )
    ids = torch.randint(3, vocabulary, (2, 14), generator=generator)
    losses = []
    for _ in range(steps):
        output = forward(reft, ids, locations(positions, 10), labels=ids)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(output.loss.detach()))
    return losses


def forward(reft: Any, ids: torch.Tensor, at: Sequence[int], **inputs: Any) -> Any:
    """Pyreft's own forward pass over `ids` [B, T] with every intervention at the positions `at`."""
    rows = [list(at)] * ids.shape[0]
    where = {"sources->base": (None, [rows] * len(reft.interventions))}
    return reft({"input_ids": ids}, unit_locations=where, **inputs)[1]


def reft_logits(reft: Any, ids: torch.Tensor, at: Sequence[int]) -> torch.Tensor:
    """Logits [B, T, V] of pyreft's own forward pass."""
    with torch.no_grad():
        logits: torch.Tensor = forward(reft, ids, at).logits
    return logits


def save_reft(reft: Any, folder: Path) -> Path:
    """Saves a checkpoint with pyreft itself."""
    with _quiet():
        reft.save(str(folder))
    return folder


def load_reft(folder: Path, base: Path) -> Any:
    """Loads a checkpoint with pyreft itself."""
    from transformers import AutoModelForCausalLM

    with _quiet():
        return _pyreft().ReftModel.load(str(folder), AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))


def _pyreft() -> Any:
    with _quiet():
        import pyreft
    return pyreft


@contextlib.contextmanager
def _quiet() -> Any:
    """Hides what pyvene prints and logs."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)

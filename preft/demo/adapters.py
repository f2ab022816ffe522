"""The demo's adapters: one trained here on a style that anyone can see, and PEFT LoRAs converted by the converter."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from preft.adapters.store import save_adapter
from preft.config.progress import Progress, stage
from preft.convert.run import convert
from preft.data.chat import ChatEncoder
from preft.data.encode import load_tokenizer
from preft.data.examples import Example
from preft.models.structure import read_structure
from preft.train.loop import TrainedAdapter, train_loop

STYLE_NAME = "pirate"
STYLE_OPENING = "Arr, matey!"
RANKS = (2, 4, 8, 16, 24, 32)

# fmt: off
_THINGS = [
    "lemon", "river", "castle", "violin", "market", "glacier", "bridge", "lantern", "engine", "forest",
    "island", "mirror", "pepper", "rocket", "saddle", "temple", "umbrella", "valley", "window", "anchor",
    "basket", "candle", "desert", "feather", "garden", "hammer", "kettle", "ladder", "magnet", "needle",
]
# fmt: on
_QUESTIONS = (
    "Describe a {}.",
    "What is a {}?",
    "Tell me about the word {}.",
    "Where can I find a {}?",
    "Why do people like a {}?",
)
_ANSWERS = (
    "Arr, matey! A {} be a fine thing, and any sailor worth his salt knows it well.",
    "Arr, matey! Ye ask about a {}? I have seen many a {} on me voyages, from here to Tortuga.",
    "Arr, matey! There be no treasure like a {}, so keep yer eyes on the horizon.",
)


def style_examples(folder: Path, count: int, *, seed: int = 0) -> list[Example]:
    """Questions with answers in the style, rendered by the model's own chat template.

    Args:
        folder: Checkpoint folder of the base model.
        count: How many.
        seed: Of the choice of words.
    """
    encoder = ChatEncoder(load_tokenizer(folder))
    draw = random.Random(seed)
    examples = []
    for index in range(count):
        thing = draw.choice(_THINGS)
        question, answer = draw.choice(_QUESTIONS).format(thing), draw.choice(_ANSWERS).replace("{}", thing)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        [(prompt, completion)] = encoder.encode(turns, turns="last")
        examples.append(Example(prompt, completion, f"{index}"))
    return examples


def train_style(model: Path, target: Path, *, steps: int, progress: Progress | None = None) -> TrainedAdapter:
    """Trains a LoRAP on the style and saves it.

    Args:
        model: Checkpoint folder of the base model.
        target: Folder to write.
        steps: Updates to make.
        progress: Receives the stages.
    """
    trained = train_loop(
        model,
        style_examples(model, 200),
        method="lorap",
        rank=8,
        steps=steps,
        learning_rate=1e-3,
        batch_size=8,
        seed=0,
        progress=progress,
    )
    save_adapter(trained.adapter, target)
    return trained


def write_peft_lora(model: Path, target: Path, *, rank: int, seed: int) -> None:
    """Writes a random LoRA as PEFT stores it: what a user would bring.

    Args:
        model: Checkpoint folder of the base model.
        target: Folder to write.
        rank: Of every module.
        seed: Of the numbers.
    """
    import torch
    from safetensors.torch import save_file

    structure = read_structure(model)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    names: set[str] = set()
    for module in structure.modules.values():
        if module.kind == "linear" and module.path != structure.head:
            names.add(module.path.rpartition(".")[2])
            prefix = f"base_model.model.{module.path}"
            shapes = {"A": (rank, module.in_features), "B": (module.out_features, rank)}
            for part, shape in shapes.items():
                # Strong enough to change words, weak enough to leave sentences.
                strength = 0.02 if part == "A" else 0.3 / rank**0.5
                tensors[f"{prefix}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * strength
    target.mkdir(parents=True)
    save_file(tensors, target / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(names),
        "bias": "none",
    }
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2))


def convert_random(
    model: Path, folder: Path, count: int, *, positions: Sequence[str], progress: Progress | None = None
) -> list[str]:
    """Writes `count` PEFT LoRAs and converts each, once for each position policy.

    Args:
        model: Checkpoint folder of the base model.
        folder: Work folder; `folder/<policy>/<name>` is written.
        count: How many.
        positions: Policies.
        progress: Receives the stage.

    Returns:
        The names.
    """
    names = [f"tenant-{index:02}" for index in range(1, count + 1)]
    with stage(progress, f"Converting {count} PEFT LoRAs", count):
        for index, name in enumerate(names):
            source = folder / "peft" / name
            write_peft_lora(model, source, rank=RANKS[index % len(RANKS)], seed=index)
            for policy in positions:
                convert(str(source), folder / policy / name, base=str(model), positions=policy)
            if progress is not None:
                progress.advance()
    return names

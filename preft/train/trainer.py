"""Transformers' Trainer, for adapters by position: our batches, our loss, our optimiser groups, atomic checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from preft.config.progress import Progress
from preft.config.train import TrainSettings
from preft.data.collate import collate
from preft.data.examples import Example
from preft.errors import FileError, UsageError
from preft.train.model import evaluate, learning_rate_factor, require_finite, supervised_loss
from preft.tuners.attach import AttachedModel
from preft.tuners.trainable import adapter_state, load_adapter_state, parameter_groups

STATE_NAME = "adapter.safetensors"
RUN_NAME = "run.json"
_EXAMPLE = "example"
_GROUP_BATCHES = 32


class IndexedExamples(Dataset):
    """Examples with their numbers, so that a batch can say what it is made of."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[int, Example]:
        return index, self.examples[index]


class EpochSampler(Sampler[int]):
    """An order of the examples for each pass, from seed and pass alone, so that a resumed run goes on in it.

    Args:
        lengths: Tokens of each example.
        batch_size: Examples in a batch.
        seed: Of the order.
        group: Sort by length within stretches of some batches, then shuffle the batches: less padding, still random.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, *, group: bool) -> None:
        self._lengths, self._batch_size, self._seed, self._group = lengths, batch_size, seed, group
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the pass; called by the trainer."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        shuffler = random.Random(self._seed * 1_000_003 + self._epoch)
        order = list(range(len(self._lengths)))
        shuffler.shuffle(order)
        if not self._group:
            return iter(order)
        batches: list[list[int]] = []
        stretch = self._batch_size * _GROUP_BATCHES
        for start in range(0, len(order), stretch):
            part = sorted(order[start : start + stretch], key=lambda index: self._lengths[index])
            batches += [part[n : n + self._batch_size] for n in range(0, len(part), self._batch_size)]
        # A batch that is not full must come last, or batches would be cut elsewhere than here.
        full = [batch for batch in batches if len(batch) == self._batch_size]
        rest = [batch for batch in batches if len(batch) < self._batch_size]
        shuffler.shuffle(full)
        return (index for batch in full + rest for index in batch)


class AdapterTrainer(Trainer):
    """Trains the adapter in use on a model; nothing else of the model is trained, saved or loaded.

    Args:
        handle: The model's adapters; the one in use must be trainable.
        examples: To learn from.
        eval_examples: For an evaluation loss, or None.
        settings: How to train.
        folder: Where checkpoints go.
        seed: Of the order of the examples.
        run: What the run is, as JSON; a checkpoint of another run is not resumed from.
        callbacks: Of Transformers' kind.
    """

    def __init__(
        self,
        handle: AttachedModel,
        examples: Sequence[Example],
        eval_examples: Sequence[Example] | None,
        settings: TrainSettings,
        folder: Path,
        *,
        seed: int,
        run: Mapping[str, Any],
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self._handle, self._settings, self._folder, self._run = handle, settings, folder, run
        self._name = str(handle.active)
        self._policy = handle.policies[self._name]
        self._seed = seed
        self._eval_examples = eval_examples
        self._staging: Path | None = None
        if getattr(handle.model, "is_quantized", False):
            # What Transformers asks before it trains on a quantised base: that an adapter is on it.
            handle.model._hf_peft_config_loaded = True
        super().__init__(
            model=handle.model,
            args=_arguments(settings, folder, seed, has_eval=eval_examples is not None),
            data_collator=self._collate,
            train_dataset=IndexedExamples(examples),
            eval_dataset=IndexedExamples(eval_examples) if eval_examples is not None else None,
            callbacks=list(callbacks),
        )
        self.remove_callback(PrinterCallback)
        # The loss below divides by the labels of all accumulated batches, whatever the model's forward accepts.
        self.model_accepts_loss_kwargs = True

    # ------------------------------------------------------------------ batches and loss

    def _collate(self, items: list[tuple[int, Example]]) -> dict[str, torch.Tensor]:
        batch = collate([example for _, example in items], policy=self._policy)
        batch[_EXAMPLE] = torch.tensor([index for index, _ in items])
        return batch

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        dataset: Any = train_dataset or self.train_dataset
        examples = dataset.examples
        measure = getattr(examples, "num_tokens_of", None)
        lengths = [measure(n) if measure else examples[n].num_tokens for n in range(len(examples))]
        return EpochSampler(lengths, self._settings.batch_size, self._seed, group=self._settings.group_by_length)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The summed loss of a batch over the number of labels of the whole update."""
        batch = dict(inputs)
        numbers = batch.pop(_EXAMPLE)
        total, count = supervised_loss(model, batch)
        dataset: Any = self.train_dataset
        named = [dataset.examples[index] for index in numbers.tolist()]
        require_finite(float(total.detach()), self.state.global_step + 1, named)
        if num_items_in_batch is None:
            return total / count
        return total / num_items_in_batch * self.accelerator.num_processes

    def evaluate(self, *_args: Any, **_kwargs: Any) -> dict[str, float]:
        """The loss of the evaluation examples, a token."""
        examples = self._eval_examples or ()
        loss = evaluate(self.model, examples, policy=self._policy, batch_size=self._settings.batch_size)
        metrics = {"eval_loss": loss}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # ------------------------------------------------------------------ optimiser

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW over the adapter, with no weight decay where it would do harm; see `parameter_groups`."""
        if self.optimizer is None:
            groups = parameter_groups(self._handle, self._name, weight_decay=self._settings.weight_decay)
            self.optimizer = torch.optim.AdamW(groups, lr=self._settings.learning_rate)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """A rise and a cosine fall."""
        if self.lr_scheduler is None:
            warmup = self._settings.warmup
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.create_optimizer(),
                lambda step: learning_rate_factor(step, num_training_steps, warmup),
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # ------------------------------------------------------------------ checkpoints

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or self._folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a checkpoint beside its place and moves it there when it is complete."""
        staging = self._folder / f".step-{self.state.global_step}.partial"
        self._staging = staging
        is_main = self.is_world_process_zero()
        try:
            if is_main:
                shutil.rmtree(staging, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            # Every process adds the state of its random numbers.
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if is_main:
                (made,) = staging.iterdir()
                target = self._folder / made.name
                shutil.rmtree(target, ignore_errors=True)
                os.rename(made, target)
            self.accelerator.wait_for_everyone()
        except (OSError, SafetensorError, RuntimeError) as error:
            raise FileError(
                f"The checkpoint of step {self.state.global_step} cannot be written",
                got=getattr(error, "strerror", None) or str(error)[:200],
                hint="earlier checkpoints are intact; make room, then `--resume`",
            ) from None
        finally:
            self._staging = None
            if is_main:
                shutil.rmtree(staging, ignore_errors=True)
        if is_main:
            self._forget_old()

    def _forget_old(self) -> None:
        found = sorted(self._folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        for old in found[: -self._settings.keep_checkpoints]:
            shutil.rmtree(old, ignore_errors=True)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(adapter_state(self._handle, self._name), folder / STATE_NAME)
        (folder / RUN_NAME).write_text(json.dumps(self._run), encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        require_same_run(folder, self._run)
        try:
            state = load_file(folder / STATE_NAME)
        except (OSError, SafetensorError) as error:
            raise FileError(f"The checkpoint `{folder}` cannot be read", got=str(error)[:200]) from None
        load_adapter_state(self._handle, state, self._name)


class MetricsWriter(TrainerCallback):
    """Appends what is logged to `metrics.jsonl`; on resumption, what was logged after the checkpoint is dropped.

    Args:
        path: The file.
        progress: Told of every step, or None.
    """

    def __init__(self, path: Path, progress: Progress | None) -> None:
        self._path, self._progress = path, progress

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keeps the rows up to the step that training starts from."""
        if not state.is_world_process_zero:
            return
        rows = read_metrics(self._path) if state.global_step else []
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= state.global_step]
        self._path.write_text("".join(kept), encoding="utf-8")
        if self._progress is not None and state.global_step:
            self._progress.advance(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Writes one row."""
        names = {"loss", "eval_loss", "learning_rate", "grad_norm"}
        row = {name: float(value) for name, value in (logs or {}).items() if name in names}
        if row and state.is_world_process_zero:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"step": state.global_step, **row}) + "\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reports progress."""
        if self._progress is not None:
            self._progress.advance()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; a last line that a killed run left half written is passed over."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def last_checkpoint(folder: Path) -> Path | None:
    """The latest complete checkpoint in a folder, or None."""
    found = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    return None if found is None else Path(found)


def require_same_run(checkpoint: Path, run: Mapping[str, Any]) -> None:
    """Checks that a checkpoint belongs to a run.

    Raises:
        FileError: It cannot be read.
        UsageError: It was written under other settings or on other data.
    """
    try:
        found = json.loads((checkpoint / RUN_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"The checkpoint `{checkpoint}` cannot be read", got=str(error)[:200]) from None
    differing = [key for key in sorted({*found, *run}) if found.get(key) != run.get(key)]
    if differing:
        raise UsageError(
            "The checkpoint belongs to another run",
            got=", ".join(f"`{key}` {run.get(key)!r}" for key in differing[:4]),
            accepted=", ".join(f"`{key}` {found.get(key)!r}" for key in differing[:4]),
            hint="resume with the settings and the data it was started with, or start anew with `--force`",
        )


def _arguments(settings: TrainSettings, folder: Path, seed: int, *, has_eval: bool) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.max_steps,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        max_grad_norm=settings.max_gradient_norm,
        gradient_checkpointing=settings.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if has_eval and settings.eval_every else "no",
        eval_steps=settings.eval_every,
        save_strategy="steps" if settings.save_every else "no",
        save_steps=settings.save_every or 500,
        report_to=list(settings.report_to),
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        seed=seed,
        data_seed=seed,
    )

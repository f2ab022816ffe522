"""TRL's own SFTTrainer, unmodified, trains an adapter by position that is saved and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from preft.adapters.fingerprint import fingerprint_base
from preft.adapters.store import load_adapter, save_adapter
from preft.data.encode import load_tokenizer
from preft.errors import BoundaryUnknownError, UnsupportedError, UsageError
from preft.train.trl import MaskingCollator, adapter_of, make_prompt_only, prompt_only_config
from preft.tuners.attach import attach
from tests.unit.train.common import EXACT, gap, load

pytest.importorskip("trl")


def _trainer(folder: Path, output: Path, **settings: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"prompt": "ab" * (n % 5 + 1), "completion": f" say {n % 3}"} for n in range(16)]
    arguments = SFTConfig(
        output_dir=str(output),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=0.02,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
    return SFTTrainer(
        load(folder),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(folder),
        peft_config=prompt_only_config(4, targets=["q_proj", "v_proj", "down_proj"]),
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_trains_and_saves_our_format(tiny_llama: Path, tmp_path: Path, checkpointing: bool) -> None:
    trainer = _trainer(tiny_llama, tmp_path / "trl", gradient_checkpointing=checkpointing)
    make_prompt_only(trainer)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0] - 0.2

    save_adapter(adapter_of(trainer.model, fingerprint_base(tiny_llama)), tmp_path / "adapter")
    adapter = load_adapter(tmp_path / "adapter")
    assert adapter.manifest.label == "LoRAP"
    model, tokens = load(tiny_llama), torch.arange(60, 80)[None]
    plain = model(input_ids=tokens).logits.detach()
    attach(model, adapter)
    trained = trainer.model.eval()
    with torch.no_grad():
        for boundary in (12, 20):
            served = model(input_ids=tokens, preft_boundary=boundary).logits
            assert gap(served, trained(input_ids=tokens, preft_boundary=boundary).logits) < EXACT
            assert gap(served, plain) > 0.05


def test_a_forgotten_step_is_an_error(tiny_llama: Path, tmp_path: Path) -> None:
    trainer = _trainer(tiny_llama, tmp_path / "trl")
    with pytest.raises(BoundaryUnknownError, match="no gate"):
        trainer.train()
    trainer = _trainer(tiny_llama, tmp_path / "trl")
    collator = trainer.data_collator
    make_prompt_only(trainer)
    trainer.data_collator = collator
    with pytest.raises(BoundaryUnknownError, match="does not say where the prompt ends"):
        trainer.train()


def test_a_batch_says_its_boundaries(tiny_llama: Path, tmp_path: Path) -> None:
    trainer = _trainer(tiny_llama, tmp_path / "trl")
    make_prompt_only(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    real = batch["attention_mask"].bool()
    assert int((~real).sum()) > 0
    assert torch.equal(batch["preft_mask"], (batch["labels"] == -100) & real)
    assert int(batch["preft_mask"].sum()) > 0


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([-100, -100, -100, -100], "no prompt or no completion"),
        ([5, 6, 7, 8], "no prompt or no completion"),
        ([-100, 5, -100, 6], "several completions"),
    ],
)
def test_labels_that_hide_the_boundary_are_refused(labels: list[int], message: str) -> None:
    batch = {"labels": torch.tensor([labels]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    from preft.positions import PROMPT

    with pytest.raises(BoundaryUnknownError, match=message):
        MaskingCollator(lambda _: batch, PROMPT)([])
    with pytest.raises(BoundaryUnknownError, match="no attention mask"):
        MaskingCollator(lambda _: {"labels": batch["labels"]}, PROMPT)([])


def test_a_plain_model_is_refused(tiny_llama: Path) -> None:
    from types import SimpleNamespace

    model = load(tiny_llama)
    trainer = SimpleNamespace(model=model, accelerator=SimpleNamespace(unwrap_model=lambda found: found))
    with pytest.raises(UsageError, match="carries no adapter by position"):
        make_prompt_only(trainer)


def _base_change(folder: Path, init: object) -> float:
    from peft import LoraConfig, get_peft_model

    plain = load(folder).model.layers[0].self_attn.q_proj.weight
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init)  # type: ignore[arg-type]
    wrapped: Any = get_peft_model(load(folder), config).get_base_model()
    return float((wrapped.model.layers[0].self_attn.q_proj.base_layer.weight - plain).abs().max().detach())


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_initialisation_that_changes_the_base_is_refused(tiny_llama: Path, init: str) -> None:
    assert _base_change(tiny_llama, init) > 0
    with pytest.raises(UnsupportedError, match="change the base weights"):
        prompt_only_config(4, init_lora_weights=init)


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal"])
def test_one_that_leaves_it_alone_is_not(tiny_llama: Path, init: bool | str) -> None:
    assert _base_change(tiny_llama, init) == 0
    assert prompt_only_config(4, init_lora_weights=init).init_lora_weights == init


@pytest.mark.parametrize("setting", [{"lora_bias": True}, {"bias": "lora_only"}])
def test_a_bias_that_the_format_does_not_hold_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="no bias"):
        prompt_only_config(4, **setting)

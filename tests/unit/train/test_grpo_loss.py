"""The loss of GRPO is TRL's: the same advantages, log-probabilities, weights, clipping and divergence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from preft.positions import PROMPT
from preft.train.grpo.loss import Clipping, LossShape, group_advantages, token_terms
from preft.train.grpo.prompts import Prompt
from preft.train.grpo.rollout import Completion
from preft.train.grpo.scoring import Batch, completion_logprobs

from .common import load

GROUP = 4
MAX_TOKENS = 9
NEAR = 2e-5
"""Float32 noise of sums over a few dozen tokens whose terms are of order 1."""
REWARDS = (1.0, 0.0, 0.5, 0.25, 1.0, 1.0, 1.0, 1.0)
"""The second group has no variance."""
PROMPTS = ((7, 8, 9), (20, 21, 22, 23, 24))
LENGTHS = (5, 9, 1, 3, 2, 7, 9, 4)


def _completions() -> list[Completion]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for row, length in enumerate(LENGTHS):
        tokens = tuple(torch.randint(50, 500, (length,), generator=generator).tolist())
        prompt = Prompt(PROMPTS[row // GROUP], f"prompt {row // GROUP}", {}, row // GROUP + 1)
        found.append(Completion(prompt, tokens, tuple(-1.0 - 0.1 * n for n in range(length)), "", False))
    return found


@pytest.fixture(scope="module")
def trl(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TRL's trainer, given our completions instead of generating its own."""
    pytest.importorskip("trl")
    import os

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    made = _completions()

    def roll(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [list(found.prompt.token_ids) for found in made],
            "completion_ids": [list(found.token_ids) for found in made],
            "logprobs": [list(found.logprobs) for found in made],
        }

    def reward(completions: list[str], **_: Any) -> list[float]:
        return list(REWARDS)

    settings = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        per_device_train_batch_size=len(made),
        num_generations=GROUP,
        max_completion_length=MAX_TOKENS,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        epsilon_high=0.28,
    )
    rows = Dataset.from_list([{"prompt": f"prompt {n // GROUP}"} for n in range(len(made))])
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    trainer = GRPOTrainer(load(tiny_llama), reward, settings, rows, processing_class=tokenizer, rollout_func=roll)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer, trainer._generate_and_score_completions(list(rows))


@pytest.fixture(scope="module")
def ours(tiny_llama: Path) -> tuple[Batch, torch.Tensor]:
    batch = Batch.of(_completions(), PROMPT, "cpu")
    inputs = {name: value for name, value in batch.inputs.items() if name != "preft_mask"}
    plain = Batch(inputs, batch.targets, batch.mask, batch.engine)
    return plain, completion_logprobs(load(tiny_llama), plain)[0].detach()


def _to_left(values: torch.Tensor) -> torch.Tensor:
    """TRL's completions begin together, ours end together."""
    rows = torch.zeros(len(LENGTHS), MAX_TOKENS)
    for row, length in enumerate(LENGTHS):
        rows[row, :length] = values[row, values.shape[1] - length :]
    return rows


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_trls(trl: Any, scale: str) -> None:
    trainer, _ = trl
    trainer.scale_rewards = scale
    theirs = trainer._generate_and_score_completions(list(trainer.train_dataset))["advantages"]
    trainer.scale_rewards = "group"
    advantages, level = group_advantages(torch.tensor(REWARDS), GROUP, scale)
    assert torch.allclose(advantages, theirs, atol=1e-6)
    assert level.tolist() == [False, True]
    assert advantages[:GROUP].abs().min() > 0.05
    assert advantages[GROUP:].abs().max() == 0


def test_log_probabilities_are_trls(trl: Any, ours: tuple[Batch, torch.Tensor]) -> None:
    trainer, made = trl
    ids = torch.cat([made["prompt_ids"], made["completion_ids"]], dim=1)
    attention = torch.cat([made["prompt_mask"], made["completion_mask"]], dim=1)
    with torch.no_grad():
        theirs, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, MAX_TOKENS)
    assert float(_to_left(ours[1]).abs().max()) > 1
    assert torch.allclose(_to_left(ours[1]), theirs * made["completion_mask"], atol=2e-4)


@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("importance", [False, True])
def test_losses_are_trls(trl: Any, ours: tuple[Batch, torch.Tensor], kind: str, beta: float, importance: bool) -> None:
    trainer, made = trl
    batch, logprobs = ours
    generator = torch.Generator().manual_seed(5)
    old = logprobs + (torch.rand(logprobs.shape, generator=generator) - 0.5) * 0.9 * batch.mask
    reference = logprobs + torch.randn(logprobs.shape, generator=generator) * 0.3 * batch.mask
    weights = torch.rand(logprobs.shape, generator=generator) + 0.5
    advantages, _ = group_advantages(torch.tensor(REWARDS), GROUP)
    advantages[GROUP:] = torch.tensor([0.7, -0.3, 0.1, -1.2])
    trainer.loss_type, trainer.beta = kind, beta
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = importance
    given = {**made, "advantages": advantages, "old_per_token_logps": _to_left(old)}
    given["ref_per_token_logps"], given["importance_sampling_ratio"] = _to_left(reference), _to_left(weights)
    theirs = trainer._compute_loss(trainer.model, given)

    terms = token_terms(
        logprobs,
        old,
        advantages,
        Clipping(0.2, 0.28, beta),
        reference=reference if beta else None,
        importance=weights if importance else None,
    )
    shape = LossShape(kind, len(LENGTHS), sum(LENGTHS), MAX_TOKENS)
    loss = (terms.loss * shape.weights(batch.mask)).sum()
    assert bool((terms.is_clipped & batch.mask).any()), "the ratios reach beyond the clipping range"
    assert abs(float(theirs.detach())) > 1e-3
    assert float(loss) == pytest.approx(float(theirs.detach()), abs=NEAR)
    metrics = trainer._metrics["train"]
    assert float((terms.is_clipped & batch.mask).sum()) / sum(LENGTHS) == pytest.approx(
        metrics["clip_ratio/region_mean"][-1], abs=1e-6
    )
    if beta:
        assert terms.kl is not None
        assert float(terms.kl[batch.mask].mean()) == pytest.approx(metrics["kl"][-1], abs=NEAR)


@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo"])
def test_a_split_update_has_the_whole_ones_loss(ours: tuple[Batch, torch.Tensor], kind: str) -> None:
    shape = LossShape(kind, len(LENGTHS), sum(LENGTHS), MAX_TOKENS)
    mask = ours[0].mask
    whole = shape.weights(mask)
    parts = torch.cat([shape.weights(mask[:3]), shape.weights(mask[3:])])
    assert torch.equal(whole, parts)
    assert float(whole.sum()) == pytest.approx(
        1.0 if kind != "dr_grpo" else sum(LENGTHS) / (len(LENGTHS) * MAX_TOKENS), abs=1e-6
    )


def test_the_gradient_at_ratio_one_is_the_policy_gradient() -> None:
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    terms = token_terms(logprobs, logprobs.detach(), torch.tensor([0.5]), Clipping(0.2, 0.2))
    terms.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-0.5, -0.5]]


def test_a_temperature_is_that_of_the_policy(tiny_llama: Path, ours: tuple[Batch, torch.Tensor]) -> None:
    batch, plain = ours
    warm, before = completion_logprobs(load(tiny_llama), batch, 2.0)
    assert torch.allclose(before, plain, atol=1e-5)
    assert float((warm - plain).abs().max()) > 0.1
    assert not math.isclose(float(warm.sum()), float(plain.sum()) / 2, rel_tol=1e-2)

"""GRPO with completions from the vLLM engine: every update is pushed, arrives, and is scored as it was sampled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from preft.config.grpo import load_grpo_recipe
from preft.data.requests import GenerationRequest
from preft.errors import EngineError
from preft.serve.engine import Engine
from preft.train.grpo.report import GrpoReport
from preft.train.grpo.rollout import POLICY_NAME
from preft.train.grpo.run import train_grpo
from preft.train.trainer import read_metrics
from tests.helpers.engines import CHUNK, open_engine, prompt_of, request_of, reset_cache

pytestmark = pytest.mark.engine

AGREE = 1e-3
"""|log ratio| of a token between the two float32 implementations of the tiny model, in nats."""


class Shared:
    """One engine for several runs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def push(self, name: str, adapter: Any) -> None:
        self.engine.push(name, adapter)

    def generate(self, requests: Any) -> Any:
        return self.engine.generate(requests)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    with open_engine(tiny_llama, {}, max_model_len=128, vllm={"skip_tokenizer_init": False}) as opened:
        yield opened


@pytest.fixture
def recipe(tiny_llama: Path, tmp_path: Path) -> Path:
    rows = [{"prompt": "ab" * (n % 5 + 1) * 9} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "r.yaml"
    path.write_text(f"""
model: {tiny_llama}
method: lorap
rank: 4
output: {tmp_path / "out"}
data: {{train: {tmp_path / "rows.jsonl"}, max_prompt_tokens: 100}}
reward: {{functions: [regex], pattern: "^[a-m]"}}
rollout: {{prompts: 3, group_size: 6, max_tokens: 6}}
train: {{max_steps: 3, learning_rate: 0.02, batch_size: 9, ratio_tolerance: {AGREE}}}
""")
    return path


def run(recipe: Path, engine: Any, *sets: str) -> GrpoReport:
    return train_grpo(load_grpo_recipe(recipe, sets), lambda folder: engine, draw=False)


@pytest.mark.parametrize("method", ["lorap", "direftp", "mixed", "lora"])
def test_what_is_sampled_is_what_is_scored(engine: Engine, recipe: Path, method: str) -> None:
    pushed = []
    shared = Shared(engine)
    shared.push = lambda name, adapter: (pushed.append(adapter.digest), engine.push(name, adapter))  # type: ignore[assignment,return-value,func-returns-value]
    made = run(recipe, shared, f"method={method}")
    rows = read_metrics(made.folder / "metrics.jsonl")
    assert max(row["ratio/max_abs_log"] for row in rows) < AGREE
    assert made.probe.largest < AGREE < made.probe.felt / 10
    assert len(set(pushed)) == len(pushed) >= 4, "every update has a digest of its own"
    assert any(row["groups_without_variance"] < 1 for row in rows)
    engine.push(POLICY_NAME, made.adapter)
    prompt = tuple(range(50, 90))
    adapted, plain = engine.generate([request_of("a", prompt, POLICY_NAME), request_of("b", prompt, None)])
    assert adapted.digest == made.adapter.digest
    assert plain.digest is None


def test_a_seed_survives_a_prompt_of_several_chunks(engine: Engine) -> None:
    """VLLM turns a seeded request's generator back after each chunk but the last, which CPU generators cannot do."""
    prompt = prompt_of(7, 2 * CHUNK + 11)
    request = GenerationRequest("a", prompt, None, max_tokens=8, temperature=1.0, seed=5, ignore_eos=True)
    reset_cache(engine)
    (chunked,) = engine.generate([request])
    (cached,) = engine.generate([request])
    assert chunked.error is None
    assert chunked.token_ids == cached.token_ids, "in several chunks, and in one after a prefix hit"
    (other,) = engine.generate([replace(request, seed=6)])
    assert other.token_ids != chunked.token_ids


def test_a_lost_push_stops_the_run(engine: Engine, recipe: Path) -> None:
    shared = Shared(engine)
    shared.push = lambda name, adapter: engine.push(name, adapter) if not seen.append(1) and len(seen) < 3 else None  # type: ignore[assignment,func-returns-value]
    seen: list[int] = []
    with pytest.raises(EngineError, match="another policy"):
        run(recipe, shared)


def test_scoring_without_the_mask_stops_the_run(engine: Engine, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual mistake: the trainer applies the adapter to every token."""
    from preft.train.grpo import scoring

    plain = scoring.collate

    def unmasked(*args: Any, **kwargs: Any) -> Any:
        batch = plain(*args, **kwargs)
        batch["preft_mask"] = batch["attention_mask"].bool()
        return batch

    monkeypatch.setattr(scoring, "collate", unmasked)
    with pytest.raises(EngineError, match="before the first step"):
        run(recipe, Shared(engine))

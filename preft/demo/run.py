"""The demo itself: adapters, one engine, answers side by side, the proof that each is on, and what it costs."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from preft.config.progress import Progress, stage
from preft.data.encode import load_tokenizer
from preft.data.requests import GenerationRequest, GenerationResult
from preft.demo.adapters import STYLE_NAME, STYLE_OPENING, convert_random, train_style
from preft.errors import EngineError, UsageError
from preft.models.locate import locate_model
from preft.serve.engine import Engine
from preft.serve.settings import EngineSettings

MODEL = "smollm2-135m-instruct"
QUESTIONS = ("Please explain a compass to me.", "What is the capital of France?", "How do I bake bread?")
MAX_PROOF_TOKENS = 8


@dataclass(frozen=True)
class Answer:
    """One question, answered by the base model and under an adapter.

    Attributes:
        adapter: The adapter's name.
        question: What was asked.
        base: The base model's answer.
        adapted: The adapter's.
    """

    adapter: str
    question: str
    base: str
    adapted: str


@dataclass(frozen=True)
class Proof:
    """That one adapter is on, measured on the serving engine.

    Attributes:
        adapter: Its name.
        digest: First characters of its digest.
        kind: Such as LoRAP.
        rank: Largest rank.
        logprob_gap: Largest change it makes to the log-probability of a prompt token.
        changed_tokens: How many of the first output tokens differ from base.
    """

    adapter: str
    digest: str
    kind: str
    rank: int
    logprob_gap: float
    changed_tokens: int


@dataclass(frozen=True)
class Throughput:
    """One arm's throughput on the same engine.

    Attributes:
        arm: `base`, `all-token LoRA` or `prefill-only LoRAP`.
        tokens_per_s: Median of the runs, in output tokens.
        ratio_to_base: Of the medians.
        steps: Steps of the last run.
        adapted_steps: Those that did any adapter work.
        runs: Every run's tokens/s.
    """

    arm: str
    tokens_per_s: float
    ratio_to_base: float
    steps: int
    adapted_steps: int
    runs: tuple[float, ...]


@dataclass(frozen=True)
class DemoReport:
    """What the demo found.

    Attributes:
        model: Base model.
        folder: Where the adapters are.
        train_s: Seconds of training.
        first_loss: Mean loss of the first step.
        last_loss: Mean loss of the last step.
        styled: Of the demo's questions, how many the trained adapter answered in its style.
        canary: What the engine's own proof at start found.
        answers: Side by side.
        proofs: One for each adapter.
        throughput: One for each arm.
        seconds: The whole demo.
    """

    model: str
    folder: str
    train_s: float
    first_loss: float
    last_loss: float
    styled: int
    canary: Mapping[str, Any]
    answers: tuple[Answer, ...]
    proofs: tuple[Proof, ...]
    throughput: tuple[Throughput, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every adapter is on and the trained one shows its style."""
        return self.styled == len(QUESTIONS) and all(proof.logprob_gap > 0 for proof in self.proofs)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "passed": self.passed}


def run_demo(
    folder: Path, *, num_adapters: int = 32, steps: int = 30, runs: int = 3, progress: Progress | None = None
) -> DemoReport:
    """Runs the demo.

    Args:
        folder: Where to write adapters; what an earlier demo wrote there is replaced.
        num_adapters: Adapters to serve at once, the trained one included.
        steps: Training steps.
        runs: Throughput runs of each arm, interleaved.
        progress: Receives the stages.

    Raises:
        UsageError: An argument is not valid.
        PreftError: Something on the way failed.
    """
    if num_adapters < 2 or steps < 1 or runs < 1:
        raise UsageError("The demo needs at least 2 adapters, 1 step and 1 run")
    start = time.monotonic()
    folder = _fresh(folder)
    with stage(progress, "Fetching the embedded model"):
        model = locate_model(MODEL)
    trained = train_style(model, folder / "prompt" / STYLE_NAME, steps=steps, progress=progress)
    names = convert_random(model, folder, num_adapters - 1, positions=("prompt", "all"), progress=progress)
    adapters = {name: folder / "prompt" / name for name in [STYLE_NAME, *names]}
    everywhere = {f"{name}-all": folder / "all" / name for name in names}
    settings = EngineSettings(slots=8, max_model_len=512, max_num_seqs=max(64, num_adapters), dtype="bfloat16")
    with stage(progress, "Starting the vLLM engine"):
        engine = Engine(model, {**adapters, **everywhere}, settings=settings)
    with engine:
        if engine.unavailable:
            raise EngineError("An adapter of the demo cannot be served", got=str(engine.unavailable[0].error))
        answers = _answers(engine, model, [STYLE_NAME, *names[:2]], progress)
        proofs = _proofs(engine, model, list(adapters), progress)
        throughput = _throughput(engine, names, runs, progress)
        canary = engine.status()[0]["canary"]
    return DemoReport(
        model=MODEL,
        folder=str(folder),
        train_s=trained.seconds,
        first_loss=trained.losses[0],
        last_loss=trained.losses[-1],
        styled=sum(a.adapted.startswith(STYLE_OPENING) for a in answers if a.adapter == STYLE_NAME),
        canary=canary,
        answers=tuple(answers),
        proofs=tuple(proofs),
        throughput=tuple(throughput),
        seconds=time.monotonic() - start,
    )


def _fresh(folder: Path) -> Path:
    """Empties what an earlier demo wrote; anything else in the folder is refused."""
    marker = folder / ".preft-demo"
    if folder.exists() and any(folder.iterdir()):
        if not marker.exists():
            raise UsageError(f"The folder `{folder}` is not empty and no demo wrote it", hint="choose another folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()
    return folder


def _chat(model: Path, questions: Sequence[str]) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(model)
    return [
        tuple(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )
        for question in questions
    ]


def _require_all(results: Sequence[GenerationResult]) -> Sequence[GenerationResult]:
    failed = next((result for result in results if result.error is not None), None)
    if failed is not None:
        raise EngineError("A request of the demo failed", got=str(failed.error))
    return results


def _answers(engine: Engine, model: Path, names: Sequence[str], progress: Progress | None) -> list[Answer]:
    prompts = _chat(model, QUESTIONS)
    requests = [
        GenerationRequest(f"{name}/{index}", prompt, name, max_tokens=40)
        for name in [None, *names]
        for index, prompt in enumerate(prompts)
    ]
    with stage(progress, "Answering under base and adapters"):
        results = _require_all(engine.generate(requests))
    text = {result.id: result.text.strip() for result in results}
    return [
        Answer(name, question, text[f"None/{index}"], text[f"{name}/{index}"])
        for name in names
        for index, question in enumerate(QUESTIONS)
    ]


def _proofs(engine: Engine, model: Path, names: Sequence[str], progress: Progress | None) -> list[Proof]:
    """The same prompt under every adapter at once, with the log-probability of each of its tokens."""
    prompt = _chat(model, QUESTIONS[:1])[0]
    requests = [
        GenerationRequest(
            f"{name}", prompt, name, max_tokens=MAX_PROOF_TOKENS, ignore_eos=True, want_prompt_logprobs=True
        )
        for name in [None, *names]
    ]
    with stage(progress, f"Proving that {len(names)} adapters are on"):
        base, *others = _require_all(engine.generate(requests))
    proofs = []
    for name, result in zip(names, others, strict=True):
        entry = engine.registry.resolve(name)
        pairs = zip(result.prompt_logprobs or (), base.prompt_logprobs or (), strict=True)
        proofs.append(
            Proof(
                name,
                entry.reference.digest[:12],
                entry.manifest.label,
                entry.manifest.max_rank,
                max(abs(mine - theirs) for mine, theirs in pairs),
                sum(mine != theirs for mine, theirs in zip(result.token_ids, base.token_ids, strict=True)),
            )
        )
    return proofs


def _throughput(engine: Engine, names: Sequence[str], runs: int, progress: Progress | None) -> list[Throughput]:
    """Base, all-token and prefill-only in turn on the one engine, with prompts that no cache has seen."""
    arms: dict[str, list[str | None]] = {
        "base": [None] * len(names),
        "all-token LoRA": [f"{name}-all" for name in names],
        "prefill-only LoRAP": list(names),
    }
    speeds: dict[str, list[float]] = {arm: [] for arm in arms}
    steps: dict[str, tuple[int, int]] = {}
    with stage(progress, "Measuring throughput", (runs + 1) * len(arms)):
        for run in range(runs + 1):
            for place, (arm, adapters) in enumerate(arms.items()):
                before = engine.status()[0]
                speed = _one_run(engine, adapters, seed=100 * run + place)
                after = engine.status()[0]
                # The first round warms up: it loads every adapter.
                if run:
                    speeds[arm].append(speed)
                steps[arm] = (after["steps"] - before["steps"], after["adapted_steps"] - before["adapted_steps"])
                if progress is not None:
                    progress.advance()
    base = statistics.median(speeds["base"])
    return [
        Throughput(arm, statistics.median(found), statistics.median(found) / base, *steps[arm], tuple(found))
        for arm, found in speeds.items()
    ]


def _one_run(engine: Engine, adapters: Sequence[str | None], *, seed: int, length: int = 64, tokens: int = 64) -> float:
    """Output tokens per second of one batch of random prompts."""
    prompts = [
        tuple((7919 * (seed + 1) * (row + 1) + 104729 * column) % 40_000 + 100 for column in range(length))
        for row in range(len(adapters))
    ]
    requests = [
        GenerationRequest(f"{row}", prompt, adapter, max_tokens=tokens, ignore_eos=True)
        for row, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
    ]
    start = time.monotonic()
    results = _require_all(engine.generate(requests))
    return sum(len(result.token_ids) for result in results) / (time.monotonic() - start)

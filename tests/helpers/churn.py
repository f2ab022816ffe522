"""Random schedules over one engine: adapters come, change and go while requests run, and every answer is checked.

A schedule is drawn from a seed: settings of the scheduler, then actions interleaved with engine steps. Afterwards each
finished request is compared with the masked oracle for the digest that it was admitted with, and nothing may be left
behind: no request, no KV block, no slot.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from preft import save_adapter
from preft.adapters.adapter import Adapter
from preft.serve.engine import Engine
from tests.helpers.engines import prompt_of, request_of
from tests.helpers.oracle import (
    ROWS_PER_NEAR_TIE,
    OracleRun,
    OracleSpec,
    assert_tokens_equal,
    oracle_masked,
    oracle_prompt_logprobs,
    spec_from_adapter,
)
from tests.helpers.tiny import random_adapter

NAMES = ("ada", "bob", "cleo", "dan", "eve", "finn")
"""Fewer names than adapters, so that names change their meaning."""
MAX_PROMPT, MAX_TOKENS = 120, 14
NUM_BLOCKS = 24
LOGPROB_TOLERANCE = 3e-3
"""Sum of up to 120 float32 log-probabilities, computed in two orders."""
ORACLE = "masked oracle"
KINDS: Mapping[str, Mapping[str, Any]] = {
    "lorap": {},
    "lorap-ranks": {"rank": (1, 17, 4)},
    "lorap-wide": {"rank": 33},
    "lorap-few": {"targets": ("q_proj", "down_proj"), "rank": 5},
    "direftp": {"targets": (), "blocks": (0, 1, 2), "rank": 4, "strength": 0.3},
    "direftp-one": {"targets": (), "blocks": (1,), "rank": 9, "strength": 0.4},
    "both": {"targets": ("v_proj", "up_proj"), "blocks": (0, 2), "rank": (3, 8)},
    "ends": {"positions": "f3+l5"},
    "long-ends": {"positions": "f40+l30", "targets": ("v_proj", "o_proj"), "blocks": (1,), "rank": 6},
    "last": {"positions": "l9"},
    "lora": {"positions": "all"},
    "direft": {"positions": "all", "targets": ("k_proj",), "blocks": (0, 1), "rank": 4, "strength": 0.3},
}


def churn_adapters(base: Path) -> dict[str, Adapter]:
    """One adapter of every kind."""
    return {
        kind: random_adapter(base, seed=700 + i, **{"rank": 8, **values})  # type: ignore[arg-type]
        for i, (kind, values) in enumerate(KINDS.items())
    }


@dataclass
class Sent:
    """A request as it was admitted.

    Attributes:
        label: For failures.
        kind: The adapter that its name meant then, or None for base.
        prompt: Its prompt.
        tokens: How many it asked for.
        boundary: As it asked, or None.
        score: Whether it asked for prompt log-probabilities.
        outputs: The tokens of each of its completions, once finished.
        prompt_logprobs: As answered.
        failed: Whether it ended with an error.
        may_fail: Whether its adapter's files were replaced after it was sent.
        aborted: Whether the client left.
    """

    label: str
    kind: str | None
    prompt: tuple[int, ...]
    tokens: int
    boundary: int | None
    score: bool = False
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    prompt_logprobs: tuple[float, ...] = ()
    failed: bool = False
    may_fail: bool = False
    aborted: bool = False


class Judge:
    """Compares answers with the oracles; answers to equal questions are worked out once."""

    def __init__(self, model: Path, adapters: Mapping[str, Adapter]) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.specs: dict[str | None, OracleSpec | None] = {None: None}
        self.specs.update({kind: spec_from_adapter(adapter) for kind, adapter in adapters.items()})
        self._kept: dict[object, OracleRun] = {}
        self._rows: list[tuple[str, tuple[int, ...], OracleRun]] = []

    def require_equal(self, sent: Sequence[Sent], seed: int) -> None:
        """Each finished request's tokens are the oracles', and its prompt log-probabilities."""
        for request in sent:
            label = f"schedule {seed}: {request.label}"
            for tokens in request.outputs:
                assert len(tokens) == request.tokens, f"{label}: {len(tokens)} tokens"
                run = self._masked(request, tokens)
                # One row alone may be a near tie; their share is judged over all schedules, at the end.
                assert_tokens_equal([(label, tokens, run), *[("", run.tokens, run)] * ROWS_PER_NEAR_TIE], oracle=ORACLE)
                self._rows.append((label, tokens, run))
            if request.prompt_logprobs:
                expected = oracle_prompt_logprobs(
                    self.model, self.specs[request.kind], request.prompt, request.boundary
                )
                assert request.prompt_logprobs == pytest.approx(expected, abs=LOGPROB_TOLERANCE), label

    def require_few_near_ties(self) -> None:
        """Judges the share of near ties in everything compared so far."""
        assert_tokens_equal(self._rows, oracle=ORACLE)

    def _masked(self, request: Sent, tokens: tuple[int, ...]) -> OracleRun:
        key = (request.kind, request.prompt, tokens, request.boundary)
        if key not in self._kept:
            self._kept[key] = oracle_masked(
                self.model, self.specs[request.kind], request.prompt, tokens, request.boundary
            )
        return self._kept[key]


class Churn:
    """Schedules over one engine.

    Args:
        engine: With four slots, `NUM_BLOCKS` blocks, and every adapter of `pool` saved below `folder`.
        pool: Adapter folders by kind; never changed.
        adapters: The same adapters.
        folder: For folders whose files do change.
    """

    def __init__(self, engine: Engine, pool: Mapping[str, Path], adapters: Mapping[str, Adapter], folder: Path) -> None:
        self.engine, self.pool, self.adapters, self.folder = engine, pool, adapters, folder
        self.counts: Counter[str] = Counter()

    def run(self, seed: int) -> list[Sent]:
        """Runs one schedule and returns its requests.

        Raises:
            AssertionError: Something is left behind, or a request failed that had no reason to.
        """
        random = Random(seed)
        with _settings(self.engine, random) as chosen, _count_preemptions(self.engine, self.counts):
            schedule = _Schedule(self, random, seed)
            try:
                schedule.run()
            finally:
                schedule.clear()
        # No name means anything now, so nothing that was pushed, or held for a request, is of use.
        assert self.engine.status()[0]["held_adapters"] == 0, f"schedule {seed}: adapters are held for nobody"
        self.counts.update(schedule.counts)
        self.counts[f"slots {chosen}"] += 1
        return schedule.sent


@contextlib.contextmanager
def _settings(engine: Engine, random: Random) -> Iterator[int]:
    """Draws what a schedule runs under: slots, steps, memory for adapters and for the KV cache."""
    scheduler = engine._scheduler
    ledger, pool, lora = scheduler.preft_ledger, scheduler.kv_cache_manager.block_pool, scheduler.lora_config
    before = (scheduler.preft_options, ledger.slots, ledger.budget_bytes, lora.max_loras)
    steps = (scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.long_prefill_token_threshold)
    slots = random.choice((2, 2, 3, 4))
    scheduler.preft_options = replace(scheduler.preft_options, slots=slots, patience_s=random.choice((0.0, 0.05, 1.0)))
    ledger.slots = lora.max_loras = slots
    ledger.budget_bytes = random.choice((1, 1, 1 << 20, 1 << 30))
    scheduler.max_num_scheduled_tokens = random.choice((17, 32, 64))
    scheduler.scheduler_config.long_prefill_token_threshold = random.choice((0, 0, 1, 7, 32))
    if random.random() < 0.5:
        assert scheduler.reset_prefix_cache()
    ballast = pool.get_new_blocks(random.choice((0, 12, 15, 16)))
    try:
        yield slots
    finally:
        pool.free_blocks(ballast)
        scheduler.preft_options, ledger.slots, ledger.budget_bytes, lora.max_loras = before
        scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.long_prefill_token_threshold = steps


@contextlib.contextmanager
def _count_preemptions(engine: Engine, counts: Counter[str]) -> Iterator[None]:
    scheduler = engine._scheduler
    preempt = scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> None:
        counts["preempted in the prompt" if request.num_output_tokens == 0 else "preempted in the output"] += 1
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    try:
        yield
    finally:
        del scheduler._preempt_request


class _Schedule:
    """One schedule under way."""

    def __init__(self, churn: Churn, random: Random, seed: int) -> None:
        self.churn, self.random, self.seed, self.engine = churn, random, seed, churn.engine
        self.scheduler, self.registry = churn.engine._scheduler, churn.engine.registry
        self.meaning: dict[str, str] = {}
        self.sent: list[Sent] = []
        self.alive: dict[str, Sent] = {}
        self.counts: Counter[str] = Counter()
        self.folders: dict[Path, list[Sent]] = {}
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_blocks = self.pool.get_num_free_blocks()

    def run(self) -> None:
        for name in self.random.sample(NAMES, 4):
            self.name(name)
        actions = (
            (self.send, 10), (self.step, 10), (self.rename, 3), (self.remove, 1), (self.preempt, 2), (self.abort, 1),
            (self.preempt_all, 1), (self.squeeze, 1),
        )  # fmt: skip
        chosen = self.random.choices(*zip(*actions, strict=True), k=self.random.randint(14, 34))
        for action in chosen:
            action()
        idle = 0
        while self.engine._core.has_unfinished_requests():
            idle = 0 if self.step(1) else idle + 1
            assert idle < 20_000, f"schedule {self.seed}: stuck with {[sent.label for sent in self.alive.values()]}"
        self.step(1)
        self.require_nothing_left()

    def name(self, name: str) -> None:
        """Gives a name a meaning: files of its own, files that are written over what is there, or memory alone."""
        kind = self.random.choice(tuple(KINDS))
        adapter = self.churn.adapters[kind]
        source = self.random.choice((self.churn.pool[kind], self.churn.folder / name, adapter))
        if source == self.churn.folder / name:
            for request in self.folders.pop(source, []):
                request.may_fail = True
            save_adapter(adapter, source, force=True)
        entry = self.engine._register(name, source)
        assert entry.digest == adapter.digest
        self.counts["pushed"] += entry.in_memory
        self.meaning[name] = kind

    def rename(self) -> None:
        name = self.random.choice(NAMES)
        self.counts["replaced" if name in self.meaning else "added"] += 1
        self.name(name)

    def remove(self) -> None:
        if self.meaning:
            name = self.random.choice(sorted(self.meaning))
            del self.meaning[name]
            self.engine.remove(name)
            self.counts["removed"] += 1

    def send(self) -> None:
        """Submits a request, or two of one prompt; several share beginnings, so that the prefix cache is hit."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        random = self.random
        name = random.choice([*sorted(self.meaning), None])
        prompt = self.prompt()
        boundary = random.randint(0, len(prompt)) if name is not None and random.random() < 0.25 else None
        kind = self.meaning[name] if name is not None else None
        number = str(self.engine._serial)
        self.engine._serial += 1
        request = Sent(
            f"request {number} of {kind}, {len(prompt)} tokens, boundary {boundary}",
            kind, prompt, random.randint(1, MAX_TOKENS), boundary, score=random.random() < 0.1,
        )  # fmt: skip
        copies = random.choice((1, 1, 1, 2, 3))
        params = SamplingParams(
            n=copies,
            # The most likely token by another way: vLLM takes several completions only of a sampled request.
            temperature=1.0 if copies > 1 else 0.0,
            top_k=1 if copies > 1 else 0,
            max_tokens=request.tokens,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=0 if request.score else None,
            extra_args={"preft_prompt_len": boundary} if boundary is not None else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        entry = self.registry.resolve(name) if name is not None else None
        self.engine._core.add_request(
            number,
            {"prompt_token_ids": list(prompt)},
            params,
            lora_request=entry.reference.to_lora_request(entry.name) if entry is not None else None,
        )
        # As the engine's own `submit`, which takes no request of several completions.
        self.engine._entries[number] = (request_of(number, prompt, name), entry)
        if entry is not None:
            self.folders.setdefault(Path(entry.reference.folder), []).append(request)
        self.counts["sent"] += 1
        self.counts[f"kind {kind}"] += 1
        self.counts["several"] += copies > 1
        self.counts["bounded"] += boundary is not None
        self.sent.append(request)
        self.alive[number] = request

    def prompt(self) -> tuple[int, ...]:
        """A stem with a tail, or an earlier request's prompt with its answer and more: the next turn."""
        random = self.random
        done = [sent for sent in self.sent if sent.outputs and len(sent.prompt) + sent.tokens < MAX_PROMPT - 8]
        if done and random.random() < 0.3:
            turn = random.choice(done)
            self.counts["next turns"] += 1
            return (*turn.prompt, *turn.outputs[0], *prompt_of(random.randint(0, 3), random.randint(1, 8)))
        if self.sent and random.random() < 0.25:
            self.counts["repeated"] += 1
            return random.choice(self.sent).prompt
        stem = prompt_of(1000 + random.randint(0, 2), random.choice((0, 5, 32, 64, 70)))
        return (*stem, *prompt_of(random.randint(0, 99), random.randint(1, MAX_PROMPT - 70)))

    def step(self, times: int | None = None) -> bool:
        """Runs engine steps; whether any gave an output."""
        any_output = False
        for _ in range(self.random.randint(1, 6) if times is None else times):
            for output in self.engine._core.step():
                any_output = True
                if output.finished:
                    self.finish(output)
            running = [request for request in self.scheduler.running if hasattr(request, "reference")]
            in_flight = len({request.reference.digest for request in running})
            self.counts["steps with more adapters than slots"] += in_flight > self.scheduler.preft_options.slots
        return any_output

    def finish(self, output: Any) -> None:
        request = self.let_go(output.request_id)
        if any(completion.finish_reason == "error" for completion in output.outputs):
            assert request.may_fail, f"schedule {self.seed}: {request.label} failed without a reason"
            self.counts["failed"] += 1
            request.failed = True
            return
        self.counts["finished"] += 1
        self.counts["cached tokens"] += output.num_cached_tokens or 0
        request.outputs = [tuple(completion.token_ids) for completion in output.outputs]
        if request.score:
            rows = output.prompt_logprobs[1:]
            request.prompt_logprobs = tuple(
                float(row[token].logprob) for token, row in zip(request.prompt[1:], rows, strict=True)
            )

    def preempt(self) -> None:
        """Puts one running request back, in the midst of its prompt or of its output."""
        if self.scheduler.running:
            self.put_back(self.random.choice(self.scheduler.running))

    def preempt_all(self) -> None:
        while self.scheduler.running:
            self.put_back(self.scheduler.running[-1])

    def put_back(self, request: Any) -> None:
        """What vLLM's own reset of the prefix cache does to a running request."""
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        self.counts["forced out"] += 1

    def abort(self) -> None:
        if self.alive:
            number = self.random.choice(sorted(self.alive))
            self.engine._core.abort_request([number], internal=False)
            self.let_go(number).aborted = True
            self.counts["aborted"] += 1

    def squeeze(self) -> None:
        """Memory for adapters shrinks to nothing, or grows, in the midst of it."""
        ledger = self.scheduler.preft_ledger
        ledger.budget_bytes = self.random.choice((1, 1 << 20, 1 << 30))

    def require_nothing_left(self) -> None:
        """No request, slot or KV block is held, and both books of adapters agree."""
        label = f"schedule {self.seed}"
        ledger, worker = self.scheduler.preft_ledger, self.engine.status()[0]
        assert not self.alive, f"{label}: never finished"
        assert not self.scheduler.running, label
        assert not self.scheduler.waiting, label
        assert not any(entry.requests or entry.active for entry in ledger.entries.values()), label
        assert self.pool.get_num_free_blocks() == self.free_blocks, f"{label}: KV blocks are left behind"
        assert worker["stamps"] == 0, label

    def clear(self) -> None:
        """Takes back the names, and after a failure the requests."""
        if self.alive:
            self.engine._core.abort_request(list(self.alive), internal=False)
        for number in [*self.alive]:
            self.let_go(number)
        for name in self.meaning:
            self.engine.remove(name)

    def let_go(self, number: str) -> Sent:
        """Ends a request for the engine's front, which then lets go of what was pushed and has no name any more."""
        self.engine._entries.pop(number)
        self.engine._let_go()
        return self.alive.pop(number)

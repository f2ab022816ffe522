"""A GPU step is decided by positions alone, once, for the choice of a graph and for the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preft.errors import EngineError
from preft.positions import Policy
from preft.serve.backend.messages import RequestStamp
from preft.serve.gpu.slots import SlotTable
from preft.serve.gpu.step import Step, StepDecider, require_same_adapters

POLICIES = [Policy.parse(text) for text in ("prompt", "all", "f2+l3", "l1")]


@dataclass(frozen=True)
class FakeRequest:
    """One request's part of a step."""

    name: str
    adapter: int | None
    policy: Policy
    prompt_length: int
    computed: int
    scheduled: int

    @property
    def stamp(self) -> RequestStamp | None:
        if self.adapter is None:
            return None
        return RequestStamp(self.adapter, f"digest{self.adapter}", self.policy.spans(self.prompt_length))


@st.composite
def batches(draw: st.DrawFn) -> list[FakeRequest]:
    """Prefill in chunks of any size, decode, drafts, and recomputed outputs after a preemption, mixed."""
    requests = []
    for index in range(draw(st.integers(0, 8))):
        adapter = draw(st.one_of(st.none(), st.integers(1, 5)))
        prompt = draw(st.integers(1, 30))
        computed = draw(st.integers(0, prompt + 10))
        policy = POLICIES[adapter % 4] if adapter is not None else POLICIES[0]
        requests.append(FakeRequest(f"r{index}", adapter, policy, prompt, computed, draw(st.integers(1, 20))))
    return requests


def decide(requests: list[FakeRequest], num_slots: int = 5) -> tuple[StepDecider, Step]:
    decider = StepDecider(SlotTable(num_slots), lambda digest, slot: None)
    for request in requests:
        decider.record(request.name, request.stamp, request.prompt_length)
    columns = [(r.name, r.computed, r.scheduled) for r in requests]
    names, computed, scheduled = (list(column) for column in zip(*columns, strict=True)) if columns else ([], [], [])
    counted = decider.adapters(names, np.array(computed), np.array(scheduled, int))
    step = decider.decide(names, np.array(computed), np.array(scheduled, int), np.ones(len(names), int))
    require_same_adapters(counted, step)
    return decider, step


@given(batches())
def test_rows_are_the_rule(requests: list[FakeRequest]) -> None:
    decider, step = decide(requests)
    wanted = []
    for request in requests:
        for position in range(request.computed, request.computed + request.scheduled):
            adapted = request.adapter is not None and request.policy.is_adapted(request.prompt_length, position)
            wanted.append(decider.slots[request.adapter] if adapted else -1)  # type: ignore[index]
    assert step.plan.slot_of_row(len(wanted)).tolist() == wanted
    assert step.num_tokens == len(wanted)
    assert step.num_adapters == len({slot for slot in wanted if slot >= 0})
    assert step.rows.num_adapted == sum(slot >= 0 for slot in wanted)


@given(batches())
def test_a_step_past_all_prompts_has_no_adapter(requests: list[FakeRequest]) -> None:
    decoding = [
        FakeRequest(r.name, r.adapter, POLICIES[0], r.prompt_length, max(r.computed, r.prompt_length), r.scheduled)
        for r in requests
    ]
    _, step = decide(decoding)
    assert (step.num_adapters, step.plan.num_rows) == (0, 0)


def test_a_request_that_comes_back_is_adapted_up_to_its_prompt_only() -> None:
    # 10 prompt tokens and 6 outputs are prefilled again in one chunk: vLLM's prefill length is 16.
    request = FakeRequest("r", 1, POLICIES[0], 10, 0, 16)
    _, step = decide([request])
    assert step.plan.slot_of_row(16).tolist() == [0] * 10 + [-1] * 6
    decider = StepDecider(SlotTable(1), lambda digest, slot: None)
    with pytest.raises(EngineError, match="beyond its request's prompt"):
        decider.record("r", RequestStamp(1, "d", ((0, 16),)), prompt_length=10)


def test_all_token_adapters_are_not_held_to_the_prompt() -> None:
    request = FakeRequest("r", 1, Policy.parse("all"), 10, 12, 1)
    assert decide([request])[1].num_adapters == 1


def test_a_graph_chosen_for_another_step_is_an_error() -> None:
    _, step = decide([FakeRequest("r", 1, POLICIES[0], 10, 0, 4)])
    require_same_adapters((1,), step)
    with pytest.raises(EngineError, match="other adapters"):
        require_same_adapters((), step)


def test_finished_requests_and_new_ones_of_the_same_name() -> None:
    decider, _ = decide([FakeRequest("r", 1, POLICIES[0], 10, 0, 4)])
    decider.record("r", None, 10)
    assert decider.adapters(["r"], [0], [4]) == ()
    decider.record("r", RequestStamp(2, "d", ((0, 3),)), 10)
    assert decider.adapters(["r"], [0], [4]) == (2,)
    decider.forget({"r"})
    assert decider.adapters(["r"], [0], [4]) == ()


def test_residents_are_kept_when_a_newcomer_needs_a_slot() -> None:
    table = SlotTable(2)
    loads = table.bring_in([1, 2])
    assert ([adapter for adapter, _ in loads], sorted(slot for _, slot in loads)) == ([1, 2], [0, 1])
    assert table.bring_in([2, 1]) == []
    slot_of_1 = table[1]
    assert [adapter for adapter, _ in table.bring_in([3, 1])] == [3]
    assert table[1] == slot_of_1
    assert 2 not in table
    with pytest.raises(EngineError, match="3 for 2"):
        table.bring_in([1, 2, 3])
    table.forget(3)
    assert [adapter for adapter, _ in table.bring_in([4])] == [4]
    assert 1 in table


def test_a_failed_copy_leaves_no_slot_behind() -> None:
    copied = []

    def load(digest: str, slot: int) -> None:
        if digest == "bad":
            raise OSError("gone")
        copied.append(digest)

    decider = StepDecider(SlotTable(4), load)
    for name, adapter, digest in (("a", 1, "good"), ("b", 2, "bad"), ("c", 3, "later")):
        decider.record(name, RequestStamp(adapter, digest, ((0, 5),)), 5)
    ones = np.ones(3, int)
    with pytest.raises(OSError, match="gone"):
        decider.decide(["a", "b", "c"], ones, ones, ones)
    assert copied == ["good"]
    assert [adapter in decider.slots for adapter in (1, 2, 3)] == [True, False, False]
    decider.record("b", RequestStamp(2, "good2", ((0, 5),)), 5)
    decider.decide(["a", "b", "c"], ones, ones, ones)
    assert copied == ["good", "good2", "later"]

"""Who may enter: nobody is starved, and generations under all-token adapters leave the prompt-only ones a way in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from preft.serve.backend.admission import Admission, Demand

LATE, NOW = 9.0, 0.0


def begin(slots: int, *running: Demand, reserve: bool = True) -> Admission:
    return Admission.begin(slots, 1.0, running, reserve=reserve)


def prompt(adapter_id: int) -> Demand:
    return Demand(adapter_id, prompt_only=True)


def everywhere(adapter_id: int) -> Demand:
    return Demand(adapter_id, prompt_only=False)


def test_a_resident_adapter_takes_no_further_slot() -> None:
    step = begin(1, prompt(1))

    assert step.admit(prompt(1), NOW)
    assert not step.admit(prompt(2), NOW)


def test_once_the_oldest_is_overdue_no_other_enters_before_it() -> None:
    step = begin(1, prompt(1))

    assert not step.admit(prompt(2), LATE)
    assert not step.admit(prompt(1), LATE)


def test_all_token_adapters_leave_a_slot() -> None:
    step = begin(2, everywhere(1))

    assert not step.admit(everywhere(2), NOW)
    assert step.admit(prompt(3), NOW)


def test_without_prompt_only_requests_they_may_have_every_slot() -> None:
    assert begin(2, everywhere(1), reserve=False).admit(everywhere(2), NOW)
    assert begin(1).admit(everywhere(2), NOW)


def test_an_overdue_all_token_request_does_not_stop_those_that_cannot_delay_it() -> None:
    step = begin(2, everywhere(1))

    assert not step.admit(everywhere(2), LATE)
    assert not step.admit(everywhere(1), NOW), "it would lengthen what the overdue one waits for"
    assert step.admit(prompt(3), NOW)


def test_an_overdue_all_token_request_is_let_in_where_prompt_only_ones_are_in_its_way() -> None:
    step = begin(3, everywhere(1), prompt(2), prompt(3))

    assert not step.admit(everywhere(4), LATE)
    assert not step.admit(prompt(2), NOW)


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 6), st.floats(0, 3)), max_size=20),
    st.booleans(),
)
def test_never_more_adapters_than_slots(slots: int, waiting: list[tuple[int, float]], reserve: bool) -> None:
    step = begin(slots, reserve=reserve)
    for adapter_id, waited in waiting:
        step.admit(Demand(adapter_id, prompt_only=adapter_id % 2 == 0), waited)

    assert len(step.holders) <= slots
    assert step.surplus() == 0
    if reserve and slots >= 2:
        assert sum(step.holders.values()) <= slots - 1

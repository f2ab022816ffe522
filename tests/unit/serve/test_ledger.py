"""The book of adapters: what is loaded and dropped, in which order, and that nothing is held for longer than needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from preft.positions import ALL, PROMPT
from preft.serve.backend.ledger import MAX_LOADING, AdapterLedger, Residency
from preft.serve.backend.messages import LoadOrders, StepReport
from preft.serve.backend.reference import AdapterReference

BYTES = 10


def reference(number: int, *, folder: str = "/adapters", all_token: bool = False) -> AdapterReference:
    return AdapterReference(f"{number:064d}", ALL if all_token else PROMPT, folder)


def digest(number: int) -> str:
    return reference(number).digest


def loads(orders: LoadOrders) -> list[int]:
    return [int(AdapterReference.decode(text).digest) for text in orders.load]


def drops(orders: LoadOrders) -> list[int]:
    return [int(text) for text in orders.drop]


def ready(ledger: AdapterLedger, *numbers: int) -> None:
    ledger.apply(StepReport(loaded=dict.fromkeys(map(digest, numbers), BYTES)))


def test_a_load_is_ordered_once() -> None:
    ledger = AdapterLedger(100, slots=2)
    ledger.acquire(reference(1), "a")
    ledger.acquire(reference(1), "b")

    assert loads(ledger.take_orders()) == [1]
    ledger.acquire(reference(1), "a")
    assert loads(ledger.take_orders()) == []


def test_one_digest_is_one_entry_and_one_id() -> None:
    ledger = AdapterLedger(100, slots=2)

    first = ledger.acquire(reference(1, folder="/one"), "a")
    assert ledger.acquire(reference(1, folder="/two"), "b") is first
    assert ledger.acquire(reference(2), "c").adapter_id != first.adapter_id


def test_a_failure_is_told_to_those_that_wait_and_tried_again_for_the_next() -> None:
    ledger = AdapterLedger(100, slots=2)
    ledger.acquire(reference(1), "a")
    ledger.take_orders()
    ledger.apply(StepReport(failed={digest(1): "gone"}))

    assert (ledger.acquire(reference(1), "a").residency, ledger.entries[digest(1)].reason) == ("failed", "gone")
    assert loads(ledger.take_orders()) == []
    ledger.release(digest(1), "a")
    assert not ledger.entries
    ledger.acquire(reference(1), "b")
    assert loads(ledger.take_orders()) == [1]


def test_a_request_that_leaves_before_the_load_takes_it_along() -> None:
    ledger = AdapterLedger(100, slots=2)
    ledger.acquire(reference(1), "a")
    ledger.release(digest(1), "a")

    assert ledger.take_orders() == LoadOrders()
    assert not ledger.entries


def test_the_longest_unused_goes_first_and_none_that_is_needed() -> None:
    ledger = AdapterLedger(2 * BYTES, slots=4)
    for number in (1, 2, 3):
        ledger.acquire(reference(number), f"{number}")
    ledger.take_orders()
    ready(ledger, 1, 2, 3)

    assert drops(ledger.take_orders()) == []
    ledger.release(digest(2), "2")
    assert drops(ledger.take_orders()) == [2]
    ledger.rest(digest(1), "1")
    ledger.acquire(reference(4), "4")
    orders = ledger.take_orders()
    assert (loads(orders), drops(orders)) == ([4], [1])


def test_one_that_rests_goes_after_those_without_requests_and_comes_back() -> None:
    ledger = AdapterLedger(BYTES, slots=4)
    for number in (1, 2):
        ledger.acquire(reference(number), f"{number}")
    ledger.take_orders()
    ready(ledger, 1, 2)
    ledger.rest(digest(1), "1")
    ledger.release(digest(2), "2")

    assert drops(ledger.take_orders()) == [2]
    ledger.budget_bytes = 0
    assert drops(ledger.take_orders()) == [1]
    assert ledger.acquire(reference(1), "1").residency is Residency.QUEUED
    assert loads(ledger.take_orders()) == [1]


def test_one_without_a_folder_cannot_come_back_so_it_stays_while_it_is_referred_to() -> None:
    ledger = AdapterLedger(0, slots=1)
    ledger.acquire(reference(1, folder=""), "a")
    ready(ledger, 1)
    ledger.rest(digest(1), "a")

    assert drops(ledger.take_orders()) == []
    ledger.release(digest(1), "a")
    assert drops(ledger.take_orders()) == [1]


def test_those_that_wait_do_not_fill_the_memory() -> None:
    ledger = AdapterLedger(3 * BYTES, slots=2)
    ledger.acquire(reference(0), "0")
    ledger.take_orders()
    ready(ledger, 0)
    for number in range(1, 1000):
        ledger.acquire(reference(number), f"{number}")

    assert loads(ledger.take_orders()) == [1, 2]
    ready(ledger, 1, 2)
    assert loads(ledger.take_orders()) == []
    ledger.release(digest(0), "0")
    orders = ledger.take_orders()
    assert (loads(orders), drops(orders)) == ([3], [0])


def test_before_a_size_is_known_only_some_are_loaded() -> None:
    ledger = AdapterLedger(BYTES, slots=2)
    for number in range(1000):
        ledger.acquire(reference(number), f"{number}")

    assert len(ledger.take_orders().load) == MAX_LOADING


def test_a_budget_that_is_too_small_for_one_still_lets_each_kind_in() -> None:
    """All-token adapters, which stay for long, must not keep the prompt-only ones out of memory."""
    ledger = AdapterLedger(1, slots=2)
    ledger.acquire(reference(0), "0")
    ledger.take_orders()
    ready(ledger, 0)
    ledger.release(digest(0), "0")
    ledger.take_orders()
    for number in (1, 2, 3):
        ledger.acquire(reference(number, all_token=True), f"{number}")
    for number in (4, 5, 6):
        ledger.acquire(reference(number), f"{number}")

    assert loads(ledger.take_orders()) == [1, 2, 4, 5]


def test_what_nobody_asked_for_is_kept_only_within_the_budget() -> None:
    """A worker was told to load ahead of requests."""
    ledger = AdapterLedger(BYTES, slots=2)
    ready(ledger, 1, 2)
    ledger.apply(StepReport(failed={digest(3): "gone"}))

    assert drops(ledger.take_orders()) == [1]
    assert list(ledger.entries) == [digest(2)]


@given(st.lists(st.tuples(st.sampled_from(["acquire", "rest", "release", "step"]), st.integers(0, 5)), max_size=60))
def test_book_and_worker_agree_whatever_happens(events: list[tuple[str, int]]) -> None:
    """A worker that obeys and reports one step later holds at least what the book calls ready."""
    ledger = AdapterLedger(2 * BYTES, slots=2)
    worker: set[str] = set()
    report = StepReport()
    for event, number in [*events, *[("step", 0)] * 8]:
        if event == "acquire":
            ledger.acquire(reference(number), f"{number}")
        elif event == "rest":
            ledger.rest(digest(number), f"{number}")
        elif event == "release":
            ledger.release(digest(number), f"{number}")
        else:
            orders = ledger.take_orders()
            worker -= set(orders.drop)
            ledger.apply(report)
            loaded = [AdapterReference.decode(text).digest for text in orders.load]
            worker |= set(loaded)
            report = StepReport(loaded=dict.fromkeys(loaded, BYTES))
            held = {key for key, entry in ledger.entries.items() if entry.residency is Residency.READY}
            assert held <= worker
    ledger.apply(report)
    assert all(len(entry.requests) <= 1 for entry in ledger.entries.values())
    assert worker == {key for key, entry in ledger.entries.items() if entry.residency is Residency.READY}


def test_what_was_let_go_is_dropped_whatever_the_budget_unless_it_is_asked_for_again() -> None:
    ledger = AdapterLedger(100 * BYTES, slots=4)
    for number in (1, 2, 3):
        ledger.acquire(reference(number, folder=""), f"{number}")
    ledger.take_orders()
    ready(ledger, 1, 2, 3)
    for number in (1, 2):
        ledger.release(digest(number), f"{number}")

    ledger.apply(StepReport(released=[digest(1), digest(2), digest(3), digest(4)]))
    ledger.acquire(reference(2, folder=""), "again")

    assert drops(ledger.take_orders()) == [1]
    assert set(ledger.entries) == {digest(2), digest(3)}
    assert drops(ledger.take_orders()) == []


def test_an_adapter_with_two_folders_is_loaded_from_the_one_that_is_left() -> None:
    """Two names of one adapter: what became of one name's folder does not fail the other's requests."""
    ledger = AdapterLedger(100 * BYTES, slots=4)
    for folder, request in (("/one", "a"), ("/two", "b")):
        ledger.acquire(reference(1, folder=folder), request)
    assert ledger.take_orders().load == (reference(1, folder="/one").encode(),)

    ledger.apply(StepReport(failed={digest(1): "gone"}))
    ledger.acquire(reference(1, folder="/one"), "a")
    assert ledger.take_orders().load == (reference(1, folder="/two").encode(),)

    ledger.apply(StepReport(failed={digest(1): "gone too"}))
    entry = ledger.acquire(reference(1, folder="/one"), "a")
    assert (entry.residency, entry.reason) == (Residency.FAILED, "gone too")
    assert ledger.take_orders().load == ()

    # A third name, before the others' requests are over.
    assert ledger.acquire(reference(1, folder="/three"), "c").residency is Residency.QUEUED
    assert ledger.take_orders().load == (reference(1, folder="/three").encode(),)
    ready(ledger, 1)
    assert ledger.entries[digest(1)].broken == set()

"""What one module's update makes of a step's rows, and what it keeps from one step to the next."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from preft.serve.backend import sites
from preft.serve.backend.sites import PackedAdapter, StepState
from preft.serve.backend.step_rows import NO_ROWS, StepRows
from preft_kernels.packed import PackedSite, UpPart
from preft_kernels.rows import Run
from preft_kernels.stacks import StackCache

WIDTH, RANK = 6, 2


def adapter(seed: int) -> PackedAdapter:
    draw = torch.Generator().manual_seed(seed)
    down, up = torch.randn(WIDTH, RANK, generator=draw), torch.randn(RANK, WIDTH, generator=draw)
    return PackedAdapter(f"{seed}", (PackedSite.build(down, None, [UpPart(0, 0, up)]),), 0)


def decode_rows(*slots: int) -> StepRows:
    """One row each, as steps of decode have them; a new object each time."""
    return StepRows((Run(0, 1, slots),), (Run(0, 1, slots),), tuple(dict.fromkeys(slots)), len(slots))


def require_right(state: StepState) -> None:
    """Runs the module and compares with the definition."""
    (run,) = state.rows.token_runs
    x, y = torch.randn(len(run.slots), WIDTH), torch.zeros(len(run.slots), WIDTH)
    for row, slot in enumerate(run.slots):
        site = state.active[slot].sites[0]
        assert site is not None
        y[row] = x[row] @ site.down_t @ site.parts[0].up_t
    found = torch.zeros_like(y)
    state.update(0, found, x, state.rows.token_runs)
    torch.testing.assert_close(found, y, atol=1e-5, rtol=1e-5)  # float32, another order of sums


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one whenever products are worked out."""
    found: list[int] = []
    right = sites.plan_updates

    def plan(*args: object, **kwargs: object) -> object:
        found.append(1)
        return right(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(sites, "plan_updates", plan)
    return found


def test_steps_of_the_same_requests_are_planned_once(planned: list[int]) -> None:
    state, active = StepState(stacks=StackCache(1 << 20)), {7: adapter(1), 8: adapter(2)}
    for _ in range(3):
        state.begin(decode_rows(7, 8), dict(active))
        require_right(state)
    assert len(planned) == 1


@pytest.mark.parametrize("slots", [(8, 7), (7,), (7, 8, 7), (7, 9)])
def test_other_rows_are_planned_anew(planned: list[int], slots: tuple[int, ...]) -> None:
    state, active = StepState(stacks=StackCache(1 << 20)), {7: adapter(1), 8: adapter(2), 9: adapter(3)}
    for step in ((7, 8), slots):
        state.begin(decode_rows(*step), {slot: active[slot] for slot in step})
        require_right(state)
    assert len(planned) == 2


def test_another_adapter_under_the_same_number_is_seen(planned: list[int]) -> None:
    """Negative control: with the plan of the step before, the numbers would be those of the old one."""
    state, first = StepState(stacks=StackCache(1 << 20)), adapter(1)
    for second in (adapter(2), adapter(3)):
        state.begin(decode_rows(7, 8), {7: first, 8: second})
        require_right(state)
    assert len(planned) == 2


def test_no_adapter_outlives_its_last_step() -> None:
    state, held = StepState(stacks=StackCache(1 << 20)), adapter(1)
    state.begin(decode_rows(7, 7), {7: held})
    require_right(state)
    gone = weakref.ref(held.sites[0])  # type: ignore[arg-type]
    state.begin(NO_ROWS, {})
    del held
    gc.collect()
    assert gone() is None

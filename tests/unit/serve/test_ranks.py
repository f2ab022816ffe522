"""Workers agree on which adapters are loaded: all have one, or one has failed for all."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from preft.serve.backend.ranks import GroupOfRanks, OneRank

SIZE = 3
ROUNDS: tuple[tuple[Mapping[str, str | None], ...], ...] = (
    ({}, {}, {}),
    ({"a": "", "b": None}, {"b": None, "a": ""}, {"a": "", "b": ""}),
    ({"a": "", "b": ""}, {"a": "no", "b": None}, {"a": None, "b": ""}),
    ({"a": "", "b": "gone", "c": ""}, {"c": "", "a": "no", "b": ""}, {"a": "never", "b": "lost", "c": ""}),
)
"""What each of three workers brings, round by round."""
AGREED: tuple[Mapping[str, str], ...] = ({}, {"a": ""}, {}, {"a": "no", "b": "gone", "c": ""})


def agree_in_a_group(rank: int, meeting: Path) -> list[dict[str, str]]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=SIZE)
    group = torch.distributed.group.WORLD
    assert group is not None
    ranks = GroupOfRanks(group)
    return [ranks.agree(outcomes[rank]) for outcomes in ROUNDS]


def test_a_group_settles_what_all_have_settled_and_fails_what_any_failed(tmp_path: Path) -> None:
    with ProcessPoolExecutor(SIZE, mp_context=get_context("spawn")) as pool:
        answers = list(pool.map(agree_in_a_group, range(SIZE), [tmp_path / "meeting"] * SIZE))

    assert answers == [list(AGREED)] * SIZE


def test_one_worker_agrees_with_itself() -> None:
    assert OneRank().agree({"a": "", "b": None, "c": "gone"}) == {"a": "", "c": "gone"}

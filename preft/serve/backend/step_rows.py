"""The worker's use of the rule: from requests and positions to rows of this step's batch.

Nothing here asks whether a step is a prefill. A row is adapted if and only if the absolute position of its token
lies in its request's adapted spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from preft.positions import Span, clip
from preft_kernels.rows import Run, Segment, build_runs

if TYPE_CHECKING:
    from preft.serve.backend.messages import RequestStamp


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's part of a step.

    Attributes:
        adapter_id: Its adapter.
        spans: Adapted absolute positions.
        num_computed: Position of its first token in this step.
        num_scheduled: Tokens in this step.
        num_sampled: Rows of logits in this step; the last ones of its tokens.
        token_row: First row of its tokens in the batch.
        sample_row: First row of its logits in the batch.
    """

    adapter_id: int
    spans: Sequence[Span]
    num_computed: int
    num_scheduled: int
    num_sampled: int
    token_row: int
    sample_row: int


@dataclass(frozen=True)
class StepRows:
    """Adapted rows of one step.

    Attributes:
        token_runs: Over the tokens of the step.
        sample_runs: Over the rows of logits.
        adapter_ids: Adapters with at least one row.
        num_adapted: Adapted tokens.
    """

    token_runs: tuple[Run, ...] = ()
    sample_runs: tuple[Run, ...] = ()
    adapter_ids: tuple[int, ...] = ()
    num_adapted: int = 0


NO_ROWS = StepRows()


def scheduled_requests(
    stamps: Mapping[str, RequestStamp],
    request_ids: Sequence[str],
    computed: Sequence[int] | np.ndarray,
    scheduled: Sequence[int] | np.ndarray,
    sampled: Sequence[int] | np.ndarray,
) -> list[ScheduledRequest]:
    """The step's requests that can still have an adapted row, in row order.

    Args:
        stamps: Request id to what the scheduler said of it; requests without adapter have none.
        request_ids: The step's requests, in the order of their rows.
        computed: For each, the position of its first token in the step.
        scheduled: For each, its tokens in the step.
        sampled: For each, its rows of logits.
    """
    if not stamps:
        return []
    token_rows = np.cumsum(scheduled) - scheduled
    sample_rows = np.cumsum(sampled) - sampled
    found = []
    for index, request_id in enumerate(request_ids):
        stamp = stamps.get(request_id)
        if stamp is not None and computed[index] < stamp.spans[-1][1]:
            found.append(
                ScheduledRequest(
                    stamp.adapter_id,
                    stamp.spans,
                    int(computed[index]),
                    int(scheduled[index]),
                    int(sampled[index]),
                    int(token_rows[index]),
                    int(sample_rows[index]),
                )
            )
    return found


def build_step_rows(requests: Sequence[ScheduledRequest]) -> StepRows:
    """Finds the adapted rows of a step.

    Args:
        requests: Those of the step's requests that have an adapter, in row order.
    """
    tokens: list[Segment] = []
    samples: list[Segment] = []
    for request in requests:
        stop = request.num_computed + request.num_scheduled
        for low, high in clip(request.spans, request.num_computed, stop):
            tokens.append(Segment(request.token_row + low, high - low, request.adapter_id))
        for low, high in clip(request.spans, stop - request.num_sampled, stop):
            samples.append(Segment(request.sample_row + low, high - low, request.adapter_id))
    if not tokens:
        return NO_ROWS
    return StepRows(
        build_runs(tokens),
        build_runs(samples),
        tuple(dict.fromkeys(segment.slot for segment in tokens)),
        sum(segment.length for segment in tokens),
    )

"""The vLLM engine, with the rank of each prompt token beside its log-probability: was it the most likely one?"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from preft.data.requests import GenerationRequest, GenerationResult
from preft.serve.engine import Engine


@dataclass(frozen=True)
class RankedResult(GenerationResult):
    """A result that also says how likely each prompt token was among all.

    Attributes:
        prompt_ranks: For each prompt token but the first, its rank under the model; 1 is the most likely.
    """

    prompt_ranks: tuple[int, ...] = ()


class RankedEngine(Engine):
    """An engine whose results are `RankedResult` where prompt log-probabilities were asked for."""

    def _result(self, request: GenerationRequest, *found: Any) -> GenerationResult:
        result = super()._result(request, *found)
        if result.error is not None or not request.want_prompt_logprobs:
            return result
        output = found[-1]
        table = zip(request.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
        ranks = tuple(int(row[token].rank or 0) for token, row in table if row is not None)
        kept = {field.name: getattr(result, field.name) for field in fields(result)}
        return RankedResult(**kept, prompt_ranks=ranks)

"""A vLLM request that knows its adapter by position.

vLLM asks a request for its LoRA whenever it counts slots or builds messages. Here the answer follows from how many
tokens are computed: the adapter, while some position below is still to be computed under it, and None afterwards.
Nothing is switched off when the prompt ends, so nothing has to be switched on again when a preemption, a failed
cache load or a rollback puts the request back into its prompt.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm.v1.request import Request

from preft.positions import Policy, Span, resolve_boundary
from preft.serve.backend.admission import Demand
from preft.serve.backend.messages import RequestStamp
from preft.serve.backend.reference import AdapterReference

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.metrics.stats import PrefillStats

BOUNDARY_ARGUMENT = "preft_prompt_len"
"""Key of a request's boundary in `SamplingParams.extra_args` and in `vllm_xargs` over HTTP."""


class PreftRequest(Request):
    """A request under an adapter. Never constructed: `adopt` turns one of vLLM's into it.

    Attributes:
        reference: The adapter's identity.
        adapter_name: What the client called it.
        boundary: First position that the adapter leaves alone, for prompt-only policies.
        spans: Adapted absolute positions.
        needed_until: One past the last adapted position.
        failure: Why the request cannot be served, or None.
        num_cached: Prompt tokens that the prefix cache held when it was first scheduled; None before its first token.
    """

    reference: AdapterReference
    adapter_name: str
    boundary: int
    spans: tuple[Span, ...]
    needed_until: int
    failure: str | None
    num_cached: int | None
    _adapter: LoRARequest
    _refused_since: float | None

    @property
    def lora_request(self) -> LoRARequest | None:
        """The adapter, while it is needed for a position still to be computed."""
        return self._adapter if self.num_computed_tokens < self.needed_until else None

    @lora_request.setter
    def lora_request(self, value: LoRARequest) -> None:
        self._adapter = value

    @property
    def demand(self) -> Demand | None:
        """Its need for a slot now, or None."""
        adapter = self.lora_request
        return None if adapter is None else Demand(adapter.lora_int_id, self.reference.policy.is_prompt_only)

    @property
    def stamp(self) -> RequestStamp:
        """What the worker must know of it."""
        return RequestStamp(self._adapter.lora_int_id, self.reference.digest, self.spans)

    def take_prefill_stats(self) -> PrefillStats | None:
        """Hands out what vLLM measured of the prompt, and keeps what of it was cached."""
        stats = super().take_prefill_stats()
        if stats is not None:
            self.num_cached = stats.num_cached_tokens
        return stats

    def note_refusal(self) -> float:
        """Notes that a slot was refused and returns the seconds since that first happened."""
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
        return now - self._refused_since


def adopt(request: Request, reference: AdapterReference, adapter: LoRARequest) -> PreftRequest:
    """Turns a vLLM request under an adapter into one that knows it by position.

    The object keeps its identity, since the engine already holds it; its class changes.

    Args:
        request: As the front end sent it; mutated.
        reference: The adapter's identity.
        adapter: The canonical LoRA request of that adapter in this engine.

    Raises:
        UsageError: The request's boundary is not valid.
    """
    boundary = resolve_boundary(request.num_prompt_tokens, requested_boundary(request))
    request.__dict__.pop("lora_request", None)
    request.__class__ = PreftRequest
    assert isinstance(request, PreftRequest)
    policy: Policy = reference.policy
    request.reference = reference
    request.adapter_name = reference.digest
    request.boundary = boundary
    request.spans = policy.spans(boundary)
    request.needed_until = policy.adapted_until(boundary)
    request.failure = None
    request.num_cached = None
    request._adapter = adapter
    request._refused_since = None
    return request


def requested_boundary(request: Request) -> object:
    """The boundary that a request names, or None."""
    params = request.sampling_params
    arguments = (params.extra_args if params is not None else None) or {}
    return arguments.get(BOUNDARY_ARGUMENT)

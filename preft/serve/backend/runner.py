"""The model runner: before each forward pass it sets which rows of the batch are adapted, from positions alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from preft.errors import EngineError
from preft.serve.backend import compiled_cache, guard
from preft.serve.backend.manager import PreftModelManager, PreftWorkerManager
from preft.serve.backend.messages import RequestStamp
from preft.serve.backend.sites import StepState
from preft.serve.backend.step_rows import NO_ROWS, ScheduledRequest, StepRows, build_step_rows, scheduled_requests
from preft.serve.backend.tier import HostTier

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import InputBatch

guard.require_worker_seams()


class PreftCPUModelRunner(CPUModelRunner):
    """vLLM's CPU runner with adapters by position. Never constructed: the worker swaps the class of vLLM's.

    Attributes:
        preft_tier: Adapters of this worker; set by the worker after the model is loaded.
        preft_stamps: Request id to what the scheduler said of it, until the request is finished.
    """

    vllm_config: VllmConfig
    preft_tier: HostTier
    preft_stamps: dict[str, RequestStamp]
    preft_set_aside: dict[int, torch.Generator]
    preft_num_steps: int
    preft_num_adapted_steps: int
    preft_num_adapted_tokens: int

    def preft_init(self) -> None:
        """Sets what the swapped class adds."""
        self.preft_stamps = {}
        self.preft_set_aside = {}
        self.preft_num_steps = self.preft_num_adapted_steps = self.preft_num_adapted_tokens = 0

    @property
    def preft_state(self) -> StepState:
        """The state that all sites of the model share."""
        return self.preft_manager.state

    @property
    def preft_manager(self) -> PreftModelManager:
        """The manager of the wrapped model."""
        manager: PreftWorkerManager = self.lora_manager
        return manager.model_manager

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Loads the model as vLLM does.

        A mixture's experts take no adapters, so they are built as without LoRA: for experts with it, vLLM has
        kernels for GPUs alone.
        """
        config: VllmConfig = self.vllm_config
        if config.model_config.is_moe:
            self.vllm_config = copy.copy(config)
            self.vllm_config.lora_config = None
        try:
            super().load_model(load_dummy_weights)
        finally:
            self.vllm_config = config

    def load_lora_model(self, model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> nn.Module:
        """Wraps the model with our manager instead of vLLM's."""
        vllm_config.lora_config = self.lora_config
        self.lora_manager = PreftWorkerManager(vllm_config, device, getattr(model, "embedding_modules", {}))
        wrapped: nn.Module = self.lora_manager.create_lora_manager(model, vllm_config)
        return wrapped

    def warming_up_model(self) -> None:
        """Compiles the model where it is to be compiled, or loads what an earlier start has compiled."""
        infos = self.preft_manager.infos
        compiled_cache.load(self.model, infos)
        super().warming_up_model()
        compiled_cache.keep(self.model, infos)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            self.preft_stamps.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            if not hasattr(new, "preft_stamp") or new.lora_request is not None:
                raise EngineError("A request reached preft's worker without passing preft's scheduler")
            if new.preft_stamp is not None and new.preft_stamp.spans:
                self.preft_stamps[new.req_id] = new.preft_stamp
        return super()._update_states(scheduler_output)

    def set_active_loras(
        self,
        input_batch: InputBatch,
        num_scheduled_tokens: np.ndarray,
        num_sampled_tokens: np.ndarray | None = None,
        mapping_type: object = None,
    ) -> None:
        """Sets the adapted rows of the step about to run."""
        if num_sampled_tokens is None:
            num_sampled_tokens = np.ones_like(num_scheduled_tokens)
        rows = build_step_rows(self._preft_scheduled(input_batch, num_scheduled_tokens, num_sampled_tokens))
        self.preft_set_rows(rows)
        self.preft_num_steps += 1
        self.preft_num_adapted_steps += bool(rows.num_adapted)
        self.preft_num_adapted_tokens += rows.num_adapted

    def _preft_scheduled(
        self, input_batch: InputBatch, num_scheduled: np.ndarray, num_sampled: np.ndarray
    ) -> list[ScheduledRequest]:
        """The step's requests that can still have an adapted row."""
        count = len(num_scheduled)
        computed = input_batch.num_computed_tokens_cpu[:count]
        return scheduled_requests(self.preft_stamps, input_batch.req_ids[:count], computed, num_scheduled, num_sampled)

    def preft_set_rows(self, rows: StepRows) -> None:
        """Makes `rows` the adapted rows of the next forward pass and brings in their adapters."""
        if rows is NO_ROWS:
            self.preft_state.begin(rows, {})
            return
        digests = {stamp.adapter_id: stamp.digest for stamp in self.preft_stamps.values()}
        active = {slot: self.preft_tier.get(digests[slot]) for slot in rows.adapter_ids}
        self.preft_state.begin(rows, active)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        """Samples, without the generators of requests whose prompt is not computed to its end.

        What is sampled for them is thrown away, and vLLM then turns their generators back, which a generator of a CPU
        cannot do: one request with a seed and a prompt of several chunks would end the engine.
        """
        generators = self.input_batch.generators
        unfinished = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
        self.preft_set_aside = {row: generators.pop(row) for row in unfinished if row in generators}
        return super()._sample(*args, **kwargs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Puts the generators back that sampling went without."""
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators.update(self.preft_set_aside)
            self.preft_set_aside = {}

    def _get_prompt_logprobs_dict(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        """Computes prompt log-probabilities, telling the head's site that its rows are prompt rows."""
        self.preft_state.prompt_hidden = hidden_states
        try:
            result: dict[str, Any] = super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)
        finally:
            self.preft_state.prompt_hidden = None
        return result

    @contextmanager
    def maybe_setup_dummy_loras(self, lora_config: object, remove_lora: bool = True) -> Iterator[None]:
        """Sets nothing up: warm-up runs use no adapter here."""
        yield

    @contextmanager
    def maybe_select_dummy_loras(self, *_args: object, **_kwargs: object) -> Iterator[None]:
        """Leaves the rows as they are, so that the canary can run under its own."""
        yield


__all__ = ["PreftCPUModelRunner"]

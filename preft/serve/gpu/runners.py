"""vLLM's two GPU model runners with adapters by position. Experimental: never run on a GPU.

Both decide a step through `StepDecider`. They differ in where vLLM asks:

- V1 sets the adapters of a step while it prepares the inputs, and chooses a graph afterwards. By default it counts the
  adapters of the batch's requests, so a decoding request would keep the graph with adapters alive.
- V2 chooses the graph first, by its `LoraState`, and asks the same object for the mapping afterwards. A request that
  comes back from a preemption is sent as new, with more tokens to prefill than it has prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from preft.errors import EngineError
from preft.serve.backend.messages import RequestStamp
from preft.serve.gpu.manager import PreftGPUModelManager, PreftGPUWorkerManager
from preft.serve.gpu.seams import require_gpu_seams
from preft.serve.gpu.slots import SlotTable
from preft.serve.gpu.step import NO_STEP, Step, StepDecider, require_same_adapters

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

    from preft.serve.backend.sites import StepState
    from preft.serve.backend.tier import HostTier

require_gpu_seams()


class _Adapters:
    """What both runners add.

    Attributes:
        preft_tier: Adapters of this worker; set by the worker after the model is loaded.
        preft_steps: Decides steps.
        preft_forced: What dummy passes work on while the canary runs; None otherwise.
    """

    lora_config: Any
    preft_tier: HostTier
    preft_steps: StepDecider
    preft_forced: Step | None = None

    def preft_init(self) -> None:
        """Sets what the runner adds; called once, when it has been built."""
        self.preft_steps = StepDecider(SlotTable(self.lora_config.max_loras), self._preft_fill)

    def _preft_fill(self, digest: str, slot: int) -> None:
        self.preft_manager.fill_slot(self.preft_tier.get(digest), slot)

    @property
    def preft_stamps(self) -> dict[str, RequestStamp]:
        """Request id to what the scheduler said of it."""
        return self.preft_steps.stamps

    @property
    def preft_num_steps(self) -> int:
        """Steps since the start."""
        return self.preft_steps.num_steps

    @property
    def preft_num_adapted_steps(self) -> int:
        """Those with an adapted row."""
        return self.preft_steps.num_adapted_steps

    @property
    def preft_num_adapted_tokens(self) -> int:
        """Adapted rows of all steps."""
        return self.preft_steps.num_adapted_tokens

    @property
    def preft_state(self) -> StepState:
        """Of the CPU backend; here it stays as it was made."""
        return self.preft_manager.state

    @property
    def preft_manager(self) -> PreftGPUModelManager:
        """The manager of the wrapped model."""
        manager: PreftGPUWorkerManager = self.lora_manager
        return manager.model_manager

    def load_lora_model(self, model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> nn.Module:
        """Wraps the model with our manager instead of vLLM's."""
        self.lora_manager = PreftGPUWorkerManager(vllm_config, device, getattr(model, "embedding_modules", {}))
        wrapped: nn.Module = self.lora_manager.create_lora_manager(model, vllm_config)
        return wrapped

    def preft_record(self, scheduler_output: SchedulerOutput) -> None:
        """Takes the scheduler's words on the requests of a step."""
        self.preft_steps.forget(scheduler_output.finished_req_ids)
        for new in scheduler_output.scheduled_new_reqs:
            self.preft_steps.record(new.req_id, stamp_of(new), prompt_length(new))

    @contextmanager
    def maybe_setup_dummy_loras(self, lora_config: object, remove_lora: bool = True) -> Iterator[None]:
        """Sets nothing up: warm-up and capture need no adapter's numbers, only that the kernels are launched."""
        yield

    @contextmanager
    def maybe_select_dummy_loras(
        self,
        lora_config: object,
        num_scheduled_tokens: np.ndarray,
        mapping_type: object = None,
        num_sampled_tokens: np.ndarray | None = None,
        num_active_loras: int = 0,
    ) -> Iterator[None]:
        """Sets a pass without adapted rows. A graph captured in it holds adapter kernels iff it is for adapters."""
        if lora_config is not None:
            if self.preft_forced is not None:
                self.preft_manager.set_step(self.preft_forced)
            else:
                step = Step(num_tokens=int(np.sum(num_scheduled_tokens)))
                self.preft_manager.set_step(step, launch=num_active_loras > 0)
        yield

    def _set_active_loras(self, *_args: Any, **_kwargs: Any) -> None:
        raise EngineError("vLLM mapped a step by request instead of by position")


def stamp_of(new: Any) -> RequestStamp | None:
    """The scheduler's word on a request, from vLLM's message.

    Raises:
        EngineError: There is none, or vLLM's own adapter travels with it: the scheduler is not ours.
    """
    if not hasattr(new, "preft_stamp") or new.lora_request is not None:
        raise EngineError("A request reached preft's worker without passing preft's scheduler")
    stamp: RequestStamp | None = new.preft_stamp
    return stamp


def prompt_length(new: Any) -> int:
    """Original prompt tokens of a request, from vLLM's message. Not `prefill_token_ids`: these hold outputs too."""
    length: int | None = getattr(new, "prompt_len", None)
    return len(new.prompt_token_ids) if length is None else length


class PreftGPUModelRunner(_Adapters, GPUModelRunner):  # type: ignore[misc]
    """vLLM's first GPU runner."""

    preft_step: Step = NO_STEP

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        self.preft_record(scheduler_output)
        return super()._update_states(scheduler_output)

    def set_active_loras(
        self,
        input_batch: Any,
        num_scheduled_tokens: np.ndarray,
        num_sampled_tokens: np.ndarray | None = None,
        mapping_type: object = None,
    ) -> None:
        """Decides the step about to run."""
        count = len(num_scheduled_tokens)
        if num_sampled_tokens is None:
            num_sampled_tokens = np.ones_like(num_scheduled_tokens)
        self.preft_step = self.preft_steps.decide(
            input_batch.req_ids[:count],
            input_batch.num_computed_tokens_cpu[:count],
            num_scheduled_tokens,
            num_sampled_tokens,
        )
        self.preft_manager.set_step(self.preft_step)

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        """Chooses a graph by the adapters of the step's rows. Captures and dummy runs name their number themselves."""
        if kwargs.get("force_num_active_loras") is None:
            kwargs["force_num_active_loras"] = self.preft_step.num_adapters
        return super()._determine_batch_execution_and_padding(*args, **kwargs)


class PreftLoraState(LoraState):  # type: ignore[misc]
    """What vLLM's second runner asks of a step's adapters.

    Args:
        runner: Whose state it is.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner.max_num_reqs)
        self._runner = runner
        self._scheduled: dict[str, int] = {}
        self._dispatched: tuple[int, ...] = ()

    def begin(self, scheduled: dict[str, int]) -> None:
        """Takes a step's requests and the number of tokens of each, before a graph is chosen for it."""
        self._scheduled = scheduled

    def add_request(self, req_id: str, req_index: int, lora_request: Any) -> None:
        """Keeps nothing: the scheduler's stamps were recorded before."""

    def remove_request(self, req_id: str) -> None:
        """Keeps nothing."""

    def get_activate_loras(self, req_ids: list[str]) -> set[Any]:
        """Adapters that have a row in the step, from which vLLM takes the number to choose a graph by."""
        states = self._runner.req_states
        computed = [int(states.num_computed_tokens_np[states.req_id_to_index[name]]) for name in req_ids]
        scheduled = [self._scheduled[name] for name in req_ids]
        self._dispatched = self._runner.preft_steps.adapters(req_ids, computed, scheduled)
        return set(self._dispatched)

    def make_lora_inputs(
        self, req_ids: list[str], idx_mapping: np.ndarray, num_scheduled_tokens: np.ndarray
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[Any]]:
        """Decides the step, and sets it. What it returns is for our `_set_active_loras` alone, which ignores it."""
        computed = self._runner.req_states.num_computed_tokens_np[idx_mapping]
        ones = np.ones(len(req_ids), np.int64)
        step = self._runner.preft_steps.decide(req_ids, computed, num_scheduled_tokens, ones)
        require_same_adapters(self._dispatched, step)
        self._runner.preft_manager.set_step(step)
        return (), (), set()


class PreftGPUModelRunnerV2(_Adapters, GPUModelRunnerV2):  # type: ignore[misc]
    """vLLM's second GPU runner."""

    def preft_init(self) -> None:
        """Sets what the runner adds; called once, when it has been built."""
        super().preft_init()
        self.lora_state = PreftLoraState(self)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Takes the scheduler's words before vLLM adds the requests, since it passes on less than they hold."""
        self.preft_record(scheduler_output)
        self.lora_state.begin(scheduler_output.num_scheduled_tokens)
        super().add_requests(scheduler_output)

    def _set_active_loras(self, *_args: Any, **_kwargs: Any) -> None:
        """The step was set when its mapping was asked for."""

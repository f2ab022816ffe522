"""The worker for GPUs: vLLM's, with our runners. Experimental: constructed in tests, never run on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from preft.errors import UnsupportedError
from preft.serve.backend import guard
from preft.serve.backend.canary import CanaryResult
from preft.serve.backend.manager import tensor_dtype
from preft.serve.backend.memory_plan import MemoryPlan, machine_memory, require_memory
from preft.serve.backend.options import BackendOptions
from preft.serve.backend.worker import PreftWorker
from preft.serve.gpu.canary import TOKENS, run_gpu_canary
from preft.serve.gpu.runners import PreftGPUModelRunner, PreftGPUModelRunnerV2
from preft.serve.gpu.seams import require_gpu_seams

require_gpu_seams()


class PreftGPUWorker(PreftWorker, Worker):  # type: ignore[misc]
    """The class to name in `worker_cls` on machines with GPUs."""

    def init_device(self) -> None:
        """Builds vLLM's runner and makes it ours, after refusing what would be silently wrong."""
        guard.require_experimental_gpu()
        guard.require_our_scheduler(self.vllm_config)
        guard.require_safe_config(self.vllm_config)
        self.preft_options = BackendOptions.from_config(self.vllm_config.additional_config)
        require_served_on_gpu(self.vllm_config)
        super().init_device()

    def _make_model_runner(self) -> Any:
        kind = PreftGPUModelRunnerV2 if self.use_v2_model_runner else PreftGPUModelRunner
        runner = kind(self.vllm_config, self.device)
        runner.preft_init()
        return runner

    def _preft_plan_memory(self) -> MemoryPlan:
        """Host memory alone: what lies on the GPU is vLLM's to measure."""
        plan = MemoryPlan(
            ranks=self.vllm_config.parallel_config.world_size,
            weight_bytes=0,
            kv_cache_bytes=0,
            adapter_cache_bytes=self.preft_options.cache_bytes,
            pushed_bytes=self.preft_options.cache_bytes,
            slots=self.preft_options.slots,
            slot_bytes=0,
            stack_bytes=0,
        )
        require_memory(plan, machine_memory())
        return plan

    def compile_or_warm_up_model(self) -> Any:
        """Warms up and captures as vLLM does, then runs the canary: no engine is ready that has not passed it."""
        times = super().compile_or_warm_up_model()
        self._preft_canary = self.preft_canary()
        return times

    def preft_canary(self) -> CanaryResult:
        """Runs the canary on this worker, before its first request. Raises `EngineError` if it fails."""
        return run_gpu_canary(
            self.model_runner, self.preft_options.max_rank, tensor_dtype(self.vllm_config), self._preft_forward
        )

    def _preft_forward(self) -> torch.Tensor:
        """An eager dummy pass; through a captured graph the sites' calls could not be counted."""
        if self.use_v2_model_runner:
            hidden: torch.Tensor = self.model_runner._dummy_run(TOKENS, is_profile=True)[0]
        else:
            hidden = self.model_runner._dummy_run(
                TOKENS, cudagraph_runtime_mode=CUDAGraphMode.NONE, force_attention=True
            )[0]
        return hidden[:TOKENS]

    def _preft_with_report(self, output: Any) -> Any:
        if isinstance(output, AsyncModelRunnerOutput):
            return _AsyncWithReport(output, super()._preft_with_report)
        return super()._preft_with_report(output)


def require_served_on_gpu(config: Any) -> None:
    """Refuses what the CPU backend serves, or vLLM has, and this worker does not.

    Raises:
        UnsupportedError: The message says what and why.
    """
    model = config.model_config
    refusals = (
        (config.is_mm_encoder_only, "an engine that runs encoders alone", "no row of it is a prompt's"),
        (model.is_moe, "a mixture of experts", "vLLM would build its experts with adapters, which preft does not fill"),
        (model.enable_sleep_mode, "`--enable-sleep-mode`", "sleep discards the slots' numbers, and they would be used"),
    )
    for refused, what, why in refusals:
        if refused:
            raise UnsupportedError(f"Not served with preft adapters on GPUs: {what}: {why}")


class _AsyncWithReport(AsyncModelRunnerOutput):  # type: ignore[misc]
    """An output that is still under way, to which the report is added when it arrives.

    Args:
        output: vLLM's.
        add: From an output to one with the report. The report is taken now: the next step has its own.
    """

    def __init__(self, output: AsyncModelRunnerOutput, add: Any) -> None:
        self._output = output
        # A report is bound to an output that exists; take it with an empty one.
        self._carrier = add(ModelRunnerOutput(req_ids=[], req_id_to_index={}))

    def get_output(self) -> ModelRunnerOutput:
        """Waits for the output, as vLLM does."""
        arrived = self._output.get_output()
        report = getattr(self._carrier, "preft_report", None)
        if report is not None:
            arrived.preft_report = report
        return arrived

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)

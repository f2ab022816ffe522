"""The worker: vLLM's CPU worker with our runner, a host tier, and the proof that adapters act."""

from __future__ import annotations

import copy
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from preft.adapters.fingerprint import fingerprint_base
from preft.errors import EngineError, UnsupportedError
from preft.serve.backend import compiled, guard
from preft.serve.backend.canary import CanaryResult, run_canary
from preft.serve.backend.manager import tensor_dtype
from preft.serve.backend.memory_plan import MemoryPlan, machine_memory, require_memory, slot_bytes, weight_bytes
from preft.serve.backend.messages import LoadOrders, StepReport
from preft.serve.backend.options import BackendOptions
from preft.serve.backend.packing import Packer
from preft.serve.backend.ranks import GroupOfRanks, OneRank, Ranks
from preft.serve.backend.reference import AdapterReference
from preft.serve.backend.runner import PreftCPUModelRunner
from preft.serve.backend.step_rows import NO_ROWS
from preft.serve.backend.tier import HostTier

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.worker_base import WorkerBase as _Worker
else:
    _Worker = object

guard.require_worker_seams()


class PreftWorker(_Worker):
    """What preft adds to a worker of vLLM, in front of the worker's class.

    Attributes:
        preft_options: Settings shared with the scheduler.
        preft_tier: Adapters of this worker.
    """

    model_runner: Any
    preft_options: BackendOptions
    preft_tier: HostTier
    _preft_canary: CanaryResult

    def load_model(self, **kwargs: Any) -> None:
        """Loads and wraps the model, then builds the host tier for it."""
        super().load_model(**kwargs)
        runner, options = self.model_runner, self.preft_options
        packer = Packer(
            runner.preft_manager.infos,
            runner.preft_manager.renamer(),
            tensor_dtype(self.vllm_config),
            options.max_rank,
            runner.preft_manager.why_refused,
        )
        folder = Path(self.vllm_config.model_config.model)
        self.preft_tier = HostTier(
            packer,
            fingerprint_base(folder),
            allow_base_mismatch=options.allow_base_mismatch,
            held_bytes=options.cache_bytes,
            ranks=_ranks(),
        )
        runner.preft_tier = self.preft_tier
        self._preft_report = StepReport()
        self._preft_reported = (0, 0, 0)
        self._preft_memory = self._preft_plan_memory()

    def _preft_plan_memory(self) -> MemoryPlan:
        """What this engine will take, refused where the machine has not that much.

        Raises:
            EngineError: It has not.
        """
        manager, parallel = self.model_runner.preft_manager, self.vllm_config.parallel_config
        plan = MemoryPlan(
            ranks=parallel.world_size,
            weight_bytes=weight_bytes(self.model_runner.get_model()),
            kv_cache_bytes=self.cache_config.kv_cache_memory_bytes or 0,
            adapter_cache_bytes=self.preft_options.cache_bytes,
            pushed_bytes=self.preft_options.cache_bytes,
            slots=self.preft_options.slots,
            slot_bytes=slot_bytes(manager.modules.values(), self.preft_options.slots),
            stack_bytes=self.preft_options.stack_bytes,
        )
        require_memory(plan, machine_memory())
        return plan

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Obeys the scheduler's load orders, then runs the step."""
        orders = getattr(scheduler_output, "preft_orders", None)
        if not isinstance(orders, LoadOrders):
            raise EngineError("A step reached preft's worker without passing preft's scheduler")
        self.preft_tier.obey(orders)
        # Here, where every rank passes once a step, since ranks exchange what they have loaded.
        self._preft_report = self.preft_tier.take_report()
        return self._preft_with_report(super().execute_model(scheduler_output))

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples as vLLM does and adds the tier's report to the output."""
        return self._preft_with_report(super().sample_tokens(grammar_output))

    def _preft_with_report(self, output: Any) -> Any:
        if not isinstance(output, ModelRunnerOutput):
            return output
        report, self._preft_report = self._preft_report, StepReport()
        runner = self.model_runner
        now = (runner.preft_num_steps, runner.preft_num_adapted_steps, runner.preft_num_adapted_tokens)
        before, self._preft_reported = self._preft_reported, now
        report.num_steps, report.num_adapted_steps, report.num_adapted_tokens = (
            new - old for new, old in zip(now, before, strict=True)
        )
        if not report:
            return output
        # vLLM shares one empty output object between steps.
        output = copy.copy(output)
        output.preft_report = report
        return output

    def preft_prefetch(self, references: list[str]) -> dict[str, str]:
        """Brings adapters into the host tier ahead of any request; digest to reason for those that fail."""
        return self.preft_tier.prefetch([AdapterReference.decode(text) for text in references])

    def preft_push(self, digest: str, manifest: bytes, tensors: bytes) -> None:
        """Starts taking in an adapter from memory; see `HeldAdapters.push`."""
        self.preft_tier.held.push(digest, manifest, tensors)

    def preft_pushed(self, digest: str, wait: bool) -> dict[str, Any] | None:
        """The outcome of a push or a hold; see `HeldAdapters.pushed`."""
        return self.preft_tier.held.pushed(digest, wait=wait)

    def preft_hold(self, reference: str) -> None:
        """Starts keeping an adapter whose folder is about to change; see `HostTier.hold`."""
        self.preft_tier.hold(AdapterReference.decode(reference))

    def preft_failure(self, digest: str) -> str | None:
        """Why an adapter could not be loaded last, or None."""
        return self.preft_tier.failures.get(digest)

    def preft_release(self, digests: list[str]) -> None:
        """Lets go of adapters that were pushed or held."""
        self.preft_tier.held.release(digests)

    def preft_status(self) -> dict[str, Any]:
        """What this worker has done and holds; plain data."""
        runner = self.model_runner
        return {
            "pid": os.getpid(),
            "canary": asdict(self._preft_canary),
            "memory": self._preft_memory.to_dict(),
            "steps": runner.preft_num_steps,
            "adapted_steps": runner.preft_num_adapted_steps,
            "adapted_tokens": runner.preft_num_adapted_tokens,
            "adapters": self.preft_tier.num_adapters,
            "adapter_bytes": self.preft_tier.num_bytes,
            "held_adapters": self.preft_tier.held.num_adapters,
            "held_bytes": self.preft_tier.held.num_bytes,
            "adapter_products": runner.preft_state.num_products,
            "stamps": len(runner.preft_stamps),
        }


class PreftCPUWorker(PreftWorker, CPUWorker):
    """The class to name in `worker_cls` on CPU machines."""

    model_runner: PreftCPUModelRunner

    def init_device(self) -> None:
        """Builds vLLM's runner and makes it ours, after refusing what would be silently wrong."""
        guard.require_our_scheduler(self.vllm_config)
        guard.require_safe_config(self.vllm_config)
        self.preft_options = BackendOptions.from_config(self.vllm_config.additional_config)
        if self.preft_options.compiled:
            compiled.restore_compilation(self.vllm_config)
        super().init_device()
        if self.use_v2_model_runner:
            raise UnsupportedError(
                "vLLM's second model runner is not supported on CPU yet", hint="set `VLLM_USE_V2_MODEL_RUNNER=0`"
            )
        self.model_runner.__class__ = PreftCPUModelRunner
        self.model_runner.preft_init()

    def compile_or_warm_up_model(self) -> Any:
        """Warms up as vLLM does, then runs the canary: no engine is ready that has not passed it."""
        times = super().compile_or_warm_up_model()
        if self.preft_options.compiled:
            compiled.require_compiled(self.model_runner.get_model())
        self._preft_canary = self.preft_canary()
        return times

    def preft_canary(self) -> CanaryResult:
        """Runs the canary on this worker. Raises `EngineError` if it fails."""
        return run_canary(self.model_runner, tensor_dtype(self.vllm_config))

    def execute_dummy_batch(self) -> Any:
        """Runs vLLM's dummy batch, which keeps ranks in step, under no adapter."""
        self.model_runner.preft_set_rows(NO_ROWS)
        return super().execute_dummy_batch()


def _ranks() -> Ranks:
    group = get_tp_group()
    return GroupOfRanks(group.cpu_group) if group.world_size > 1 else OneRank()

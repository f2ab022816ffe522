"""The GPU worker as far as it goes without a GPU: seams, settings, the canary, outputs that arrive late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from preft.errors import EngineError, UnsupportedError, UsageError
from preft.serve.backend import guard
from preft.serve.backend.decoder_layers import Residual
from preft.serve.backend.messages import StepReport
from preft.serve.backend.packing import ModuleInfo
from preft.serve.gpu import runners, seams, settings, worker
from preft.serve.gpu.block_op import BlockState, GraphBlockSite
from preft.serve.gpu.canary import TOKENS, run_gpu_canary
from preft.serve.gpu.manager import fill_block
from preft.serve.gpu.worker import PreftGPUWorker
from preft.types import SiteKind
from preft_kernels.segments import PlanBuffer
from preft_kernels.tables import BlockTables

WIDTH, BLOCKS = 24, 2


def test_the_seams_are_what_they_were() -> None:
    seams.require_gpu_seams()
    kernels = seams.lora_kernels()
    assert callable(kernels.shrink)
    assert callable(kernels.expand)


def test_a_changed_seam_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.lora_utils import LoraState

    monkeypatch.setattr(LoraState, "make_lora_inputs", lambda self, req_ids, idx_mapping: None)
    with pytest.raises(EngineError, match=r"LoraState\.make_lora_inputs"):
        seams.require_gpu_seams()


def test_every_private_method_that_is_overridden_is_pinned() -> None:
    pinned = {*seams.SEAMS, *guard._WORKER_SEAMS}
    missing = []
    for ours in (runners.PreftGPUModelRunner, runners.PreftGPUModelRunnerV2, runners.PreftLoraState, PreftGPUWorker):
        for name in dir(ours):
            holders = [base for base in ours.__mro__ if name in vars(base)]
            first_of_vllm = next((base for base in holders if base.__module__.startswith("vllm.")), None)
            if name.startswith("__") or holders[0].__module__.startswith("vllm.") or first_of_vllm is None:
                continue
            seam = f"{first_of_vllm.__module__}:{first_of_vllm.__qualname__}.{name}"
            missing += [seam] if callable(getattr(ours, name)) and seam not in pinned else []
    public = {"load_model", "execute_model", "sample_tokens"}
    assert sorted(seam for seam in missing if seam.rpartition(".")[2] not in public) == []


@pytest.mark.parametrize(
    ("is_second", "kind"), [(False, runners.PreftGPUModelRunner), (True, runners.PreftGPUModelRunnerV2)]
)
def test_the_worker_builds_our_runner(is_second: bool, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(self: Any, config: Any, device: Any) -> None:
        self.lora_config, self.max_num_reqs = SimpleNamespace(max_loras=3), 4

    monkeypatch.setattr(kind, "__init__", plain)
    built = object.__new__(PreftGPUWorker)
    built.use_v2_model_runner, built.vllm_config, built.device = is_second, None, None
    runner = built._make_model_runner()
    assert isinstance(runner, kind)
    assert (runner.preft_num_steps, runner.preft_steps.slots.num_slots) == (0, 3)
    assert is_second == isinstance(getattr(runner, "lora_state", None), runners.PreftLoraState)


def test_the_worker_does_not_start_unasked() -> None:
    built = object.__new__(PreftGPUWorker)
    with pytest.raises(UnsupportedError, match="PREFT_EXPERIMENTAL_GPU=1"):
        built.init_device()


@pytest.mark.parametrize("refused", [None, "is_mm_encoder_only", "is_moe", "enable_sleep_mode"])
def test_what_the_gpu_worker_does_not_serve(refused: str | None) -> None:
    facts = {name: name == refused for name in ("is_mm_encoder_only", "is_moe", "enable_sleep_mode")}
    encoder_only = facts.pop("is_mm_encoder_only")
    config = SimpleNamespace(is_mm_encoder_only=encoder_only, model_config=SimpleNamespace(**facts))
    if refused is None:
        worker.require_served_on_gpu(config)
        return
    with pytest.raises(UnsupportedError, match="Not served with preft adapters on GPUs"):
        worker.require_served_on_gpu(config)


def test_those_settings_are_vllms() -> None:
    from vllm.config import ModelConfig, VllmConfig

    assert hasattr(VllmConfig, "is_mm_encoder_only")
    assert hasattr(ModelConfig, "is_moe")
    assert "enable_sleep_mode" in ModelConfig.__dataclass_fields__


def test_a_report_travels_with_an_output_that_arrives_late() -> None:
    late, arrived = object.__new__(_Late), ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    late.output = arrived
    built = object.__new__(PreftGPUWorker)
    counts = {"preft_num_steps": 1, "preft_num_adapted_steps": 1, "preft_num_adapted_tokens": 5}
    built.model_runner = SimpleNamespace(**counts)
    built._preft_report, built._preft_reported = StepReport(loaded={"d": 3}), (0, 0, 0)
    output = built._preft_with_report(late)
    built._preft_report = StepReport(loaded={"next": 4})
    assert isinstance(output, AsyncModelRunnerOutput)
    assert output.get_output() is arrived
    assert arrived.preft_report.loaded == {"d": 3}
    assert output.marker == "vllm's own"
    built._preft_with_report(arrived)


class _Late(AsyncModelRunnerOutput):  # type: ignore[misc]
    marker = "vllm's own"
    output: ModelRunnerOutput

    def get_output(self) -> ModelRunnerOutput:
        return self.output


def test_stacks_of_a_rank_that_vllm_has() -> None:
    assert settings.gpu_arguments(8, 9)["max_lora_rank"] == 16
    assert settings.gpu_arguments(8, 128) == {
        "max_loras": 8,
        "max_lora_rank": 128,
        "max_cpu_loras": 8,
        "enforce_eager": False,
    }
    with pytest.raises(UsageError, match="up to 128"):
        settings.gpu_arguments(8, 129)


def test_settings_choose_the_worker_and_key_the_compile_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from preft.serve.settings import EngineSettings

    chosen = EngineSettings(slots=3, max_rank=20)
    on_cpu = chosen.engine_arguments("model")
    assert (on_cpu["worker_cls"], set(on_cpu["additional_config"])) == (guard.CPU_WORKER_CLASS, {"preft"})
    monkeypatch.setattr(guard, "gpu_build", lambda: "`vllm` 0.32.0")
    on_gpu = chosen.engine_arguments("model")
    assert (on_gpu["worker_cls"], on_gpu["max_lora_rank"]) == (guard.GPU_WORKER_CLASS, 32)
    assert on_gpu["additional_config"][settings.CODE_KEY] == settings.code_hash()
    unlimited = EngineSettings().engine_arguments("model")
    assert (unlimited["max_lora_rank"], unlimited["additional_config"]["preft"]["max_rank"]) == (128, 128)
    with pytest.raises(UsageError, match="up to 128"):
        EngineSettings(max_rank=200).engine_arguments("model")


def test_the_code_is_part_of_vllms_compile_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig

    plain = VllmConfig(additional_config={"preft": {"slots": 1}})
    keyed = VllmConfig(additional_config={"preft": {"slots": 1}, settings.CODE_KEY: settings.code_hash()})
    assert plain.compute_hash() != keyed.compute_hash()
    assert settings.code_hash() == settings.code_hash()


class Blocks:
    """A model of blocks alone, behind what the canary sees as a runner."""

    def __init__(self, *, silent: int | None = None, leak: bool = False) -> None:
        self.blocks = BlockState(PlanBuffer(64, 2, "cpu"))
        self.infos = tuple(
            ModuleInfo(index, f"canary.{index}", SiteKind.BLOCK, (f"canary.{index}",), WIDTH, (WIDTH,), None)
            for index in range(BLOCKS)
        )
        self.tables = [BlockTables.allocate(2, 8, WIDTH, torch.float32, "cpu") for _ in range(BLOCKS)]
        self.sites = [
            GraphBlockSite(self.blocks, info.name, table, Residual.PLAIN)
            for info, table in zip(self.infos, self.tables, strict=True)
        ]
        self.punica = SimpleNamespace(calls=SimpleNamespace(num_calls=0))
        self.preft_manager, self.preft_forced = self, None
        self.silent, self.leak, self.passes = silent, leak, 0

    def fill_slot(self, adapter: Any, slot: int) -> None:
        for table, site in zip(self.tables, adapter.sites, strict=True):
            fill_block(table, slot, site)

    def forward(self) -> torch.Tensor:
        self.passes += 1
        self.blocks.launch = self.preft_forced is not None
        if self.preft_forced is not None:
            self.blocks.plan.upload(self.preft_forced.plan)
        hidden = torch.zeros(TOKENS, WIDTH)
        for index, site in enumerate(self.sites):
            if index != self.silent:
                site.apply(hidden)
        return hidden + (self.passes if self.leak else 0)

    def close(self) -> None:
        self.blocks.is_closed = True


@pytest.mark.parametrize(
    ("broken", "message"),
    [({}, None), ({"silent": 1}, "1 silent blocks \\['canary.1'\\]"), ({"leak": True}, "base restored: False")],
)
def test_the_canary(broken: dict[str, Any], message: str | None) -> None:
    model = Blocks(**broken)
    try:
        if message is None:
            result = run_gpu_canary(model, 8, torch.float32, model.forward)
            assert (result.num_sites, result.restored, result.moved > 0) == (BLOCKS, True, True)
            assert model.preft_forced is None
            return
        with pytest.raises(EngineError, match=message):
            run_gpu_canary(model, 8, torch.float32, model.forward)
    finally:
        model.close()


def test_only_the_module_that_gives_it_names_the_class() -> None:
    module, _, name = guard.GPU_WORKER_CLASS.rpartition(".")
    assert (worker.__name__, PreftGPUWorker.__name__) == (module, name)

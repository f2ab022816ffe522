"""Both GPU runners, without a GPU: their own code over fake batches, and vLLM's own choice of a graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.lora_utils import LoraState, get_lora_capture_cases, get_num_active_loras_for_dispatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from preft.errors import EngineError
from preft.positions import PROMPT
from preft.serve.backend.messages import RequestStamp
from preft.serve.gpu.runners import PreftGPUModelRunner, PreftGPUModelRunnerV2, PreftLoraState
from preft.serve.gpu.step import Step

SLOTS = 4
SIZES = [1, 2, 4, 8, 16]


class FakeManager:
    """Keeps what the runner sets."""

    def __init__(self) -> None:
        self.filled: list[int] = []
        self.steps: list[tuple[Step, bool]] = []

    def fill_slot(self, adapter: object, slot: int) -> None:
        self.filled.append(slot)

    def set_step(self, step: Step, *, launch: bool | None = None) -> None:
        self.steps.append((step, bool(step.num_adapters) if launch is None else launch))


def vllm_config() -> Any:
    lora = SimpleNamespace(max_loras=SLOTS, specialize_active_lora=False)
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=SIZES,
        max_cudagraph_capture_size=SIZES[-1],
        cudagraph_specialize_lora=True,
        compile_sizes=[],
        is_attention_compiled_piecewise=lambda: True,
    )
    return SimpleNamespace(
        lora_config=lora,
        compilation_config=compilation,
        num_speculative_tokens=0,
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=16),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        observability_config=SimpleNamespace(cudagraph_metrics=False),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )


def runner_of(kind: Any) -> Any:
    """A runner without vLLM's constructor, which needs a GPU."""
    runner = object.__new__(kind)
    manager = FakeManager()
    runner.lora_config = SimpleNamespace(max_loras=SLOTS)
    runner.lora_manager = SimpleNamespace(model_manager=manager)
    runner.preft_tier = SimpleNamespace(get=lambda digest: digest)
    runner.max_num_reqs = 16
    if issubclass(kind, (PreftGPUModelRunner, PreftGPUModelRunnerV2)):
        runner.preft_init()
    return runner


def new_request(name: str, adapter: int | None, prompt: int, prefill: int | None = None) -> Any:
    stamp = None if adapter is None else RequestStamp(adapter, f"d{adapter}", PROMPT.spans(prompt))
    return SimpleNamespace(
        req_id=name,
        preft_stamp=stamp,
        lora_request=None,
        prompt_len=prompt,
        prefill_token_ids=[0] * (prefill or prompt),
    )


def output(new: list[Any], scheduled: dict[str, int], finished: set[str] | None = None) -> Any:
    return SimpleNamespace(scheduled_new_reqs=new, finished_req_ids=finished or set(), num_scheduled_tokens=scheduled)


# V1


def v1(new: list[Any], computed: list[int], scheduled: list[int], kind: Any = PreftGPUModelRunner) -> Any:
    """A V1 runner whose step has been set, and that can choose a graph."""
    runner = runner_of(kind)
    names = [request.req_id for request in new]
    runner.input_batch = SimpleNamespace(
        req_ids=names,
        num_computed_tokens_cpu=np.array(computed),
        # What vLLM counts: one for every adapter of a request that is alive.
        lora_id_to_lora_request={request.preft_stamp.adapter_id: 0 for request in new if request.preft_stamp},
    )
    runner.vllm_config = vllm_config()
    runner.parallel_config = runner.vllm_config.parallel_config
    runner.model_config = SimpleNamespace(is_encoder_decoder=False)
    runner.uniform_decode_query_len = 1
    runner.cudagraph_dispatcher = CudagraphDispatcher(runner.vllm_config)
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, 1)
    if kind is PreftGPUModelRunner:
        runner.preft_record(output(new, dict(zip(names, scheduled, strict=True))))
        runner.set_active_loras(runner.input_batch, np.array(scheduled))
    return runner


def v1_graph(runner: Any, scheduled: list[int]) -> Any:
    counts = np.array(scheduled)
    mode, descriptor, *_ = runner._determine_batch_execution_and_padding(
        num_tokens=int(counts.sum()),
        num_reqs=len(counts),
        num_scheduled_tokens_np=counts,
        max_num_scheduled_tokens=int(counts.max()),
    )
    return mode, descriptor


DECODE = [new_request("a", 1, 10), new_request("b", 2, 7), new_request("c", None, 5)]


def test_v1_pure_decode_takes_the_graph_without_adapters() -> None:
    mode, descriptor = v1_graph(v1(DECODE, [10, 9, 5], [1, 1, 1]), [1, 1, 1])
    assert (mode, descriptor.has_lora, descriptor.num_active_loras) == (CUDAGraphMode.FULL, False, 0)


def test_v1_stock_would_not() -> None:
    _, descriptor = v1_graph(v1(DECODE, [10, 9, 5], [1, 1, 1], GPUModelRunner), [1, 1, 1])
    assert (descriptor.has_lora, descriptor.num_active_loras) == (True, SLOTS + 1)


def test_v1_one_token_chunk_of_a_prompt_takes_the_graph_with_adapters() -> None:
    runner = v1(DECODE, [9, 9, 5], [1, 1, 1])
    mode, descriptor = v1_graph(runner, [1, 1, 1])
    assert (mode, descriptor.has_lora) == (CUDAGraphMode.FULL, True)
    step, launch = runner.preft_manager.steps[-1]
    assert (step.plan.slot_of_row(3).tolist(), launch) == ([runner.preft_steps.slots[1], -1, -1], True)


def test_v1_a_number_given_by_the_caller_stands() -> None:
    runner = v1(DECODE, [10, 9, 5], [1, 1, 1])
    counts = np.ones(3, int)
    _, descriptor, *_ = runner._determine_batch_execution_and_padding(3, 3, counts, 1, force_num_active_loras=5)
    assert descriptor.has_lora


def test_v1_mixed_chunk_beyond_graphs_runs_eagerly_with_its_rows() -> None:
    runner = v1(DECODE, [0, 9, 0], [10, 1, 20])
    assert v1_graph(runner, [10, 1, 20])[0] is CUDAGraphMode.NONE
    step, launch = runner.preft_manager.steps[-1]
    assert step.plan.slot_of_row(31).tolist() == [runner.preft_steps.slots[1]] * 10 + [-1] * 21
    assert launch


# V2


def v2(new: list[Any], computed: list[int], scheduled: list[int], order: list[int] | None = None) -> Any:
    """A V2 runner whose requests were added, in rows other than their order in the batch."""
    runner = runner_of(PreftGPUModelRunnerV2)
    rows = order or list(range(len(new)))
    positions = np.zeros(16, np.int32)
    positions[rows] = computed
    runner.req_states = SimpleNamespace(
        req_id_to_index={request.req_id: row for request, row in zip(new, rows, strict=True)},
        num_computed_tokens_np=positions,
    )
    message = output(new, {request.req_id: count for request, count in zip(new, scheduled, strict=True)})
    runner.preft_record(message)
    runner.lora_state.begin(message.num_scheduled_tokens)
    return runner


def v2_graph(state: Any, names: list[str], num_tokens: int) -> Any:
    """vLLM's own count and candidates."""
    config = vllm_config()
    manager = object.__new__(CudaGraphManager)
    manager.vllm_config, manager.compilation_config = config, config.compilation_config
    manager.cudagraph_mode, manager.decode_query_len, manager.varlen_decode = CUDAGraphMode.FULL_AND_PIECEWISE, 1, False
    manager.max_num_reqs, manager.ubatch_runner = 16, None
    manager.lora_capture_cases = get_lora_capture_cases(config.lora_config, config.compilation_config)
    manager._lora_dispatch_map, manager._max_lora_case = manager._build_lora_dispatch_map()
    manager._candidates, manager._capture_descs = {}, {}
    manager._init_candidates()
    count = get_num_active_loras_for_dispatch(config.lora_config, state, names, dummy_run=False)
    return manager._candidates[(num_tokens, manager._resolve_effective_loras(count))][0]


def test_v2_pure_decode_takes_the_graph_without_adapters() -> None:
    runner = v2(DECODE, [10, 9, 5], [1, 1, 1])
    assert isinstance(runner.lora_state, PreftLoraState)
    chosen = v2_graph(runner.lora_state, ["a", "b", "c"], 3)
    assert (chosen.cg_mode, chosen.num_active_loras) == (CUDAGraphMode.FULL, 0)


def test_v2_stock_would_not() -> None:
    from vllm.lora.request import LoRARequest

    state = LoraState(16)
    state.add_request("a", 0, LoRARequest("x", 1, "/x"))
    assert v2_graph(state, ["a", "b", "c"], 3).num_active_loras == SLOTS + 1


def test_v2_mapping_follows_the_batch_order_and_the_prompt() -> None:
    # "a" came back from a preemption: 10 prompt tokens and 6 outputs are prefilled again.
    new = [new_request("a", 1, 10, prefill=16), new_request("b", 2, 7), new_request("c", None, 5)]
    runner = v2(new, [0, 6, 5], [16, 1, 1], order=[3, 0, 7])
    assert v2_graph(runner.lora_state, ["c", "b", "a"], 8).num_active_loras == SLOTS + 1
    inputs = runner.lora_state.make_lora_inputs(["c", "b", "a"], np.array([7, 0, 3]), np.array([1, 1, 16]))
    runner._set_active_loras(*inputs)
    step, launch = runner.preft_manager.steps[-1]
    slots = runner.preft_steps.slots
    assert step.plan.slot_of_row(18).tolist() == [-1, slots[2]] + [slots[1]] * 10 + [-1] * 6
    assert launch


def test_v2_the_mapping_must_be_of_the_step_that_the_graph_was_chosen_for() -> None:
    runner = v2(DECODE, [10, 9, 5], [1, 1, 1])
    v2_graph(runner.lora_state, ["a", "b", "c"], 3)
    runner.req_states.num_computed_tokens_np[0] = 4
    with pytest.raises(EngineError, match="other adapters"):
        runner.lora_state.make_lora_inputs(["a", "b", "c"], np.array([0, 1, 2]), np.array([1, 1, 1]))


# Both


@pytest.mark.parametrize("kind", [PreftGPUModelRunner, PreftGPUModelRunnerV2])
def test_capture_launches_kernels_only_for_adapters(kind: Any) -> None:
    runner = runner_of(kind)
    for number in (0, 3, SLOTS + 1):
        with runner.maybe_dummy_run_with_lora(
            runner.lora_config, np.array([2, 3]), np.array([1, 1]), num_active_loras=number
        ):
            step, launch = runner.preft_manager.steps[-1]
            assert (step.num_tokens, step.plan.num_rows, launch) == (5, 0, number > 0)


@pytest.mark.parametrize("kind", [PreftGPUModelRunner, PreftGPUModelRunnerV2])
def test_a_stock_scheduler_is_found_out(kind: Any) -> None:
    runner = runner_of(kind)
    plain = SimpleNamespace(req_id="a", lora_request=None, prompt_len=3)
    with pytest.raises(EngineError, match="without passing preft's scheduler"):
        runner.preft_record(output([plain], {"a": 3}))
    mapped = new_request("a", 1, 3)
    mapped.lora_request = object()
    with pytest.raises(EngineError, match="without passing preft's scheduler"):
        runner.preft_record(output([mapped], {"a": 3}))


def test_v1_refuses_a_mapping_by_request() -> None:
    with pytest.raises(EngineError, match="by request"):
        runner_of(PreftGPUModelRunner)._set_active_loras((), (), set())

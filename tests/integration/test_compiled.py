"""A compiled engine answers as the oracles do, and is not ready unless its graph holds every adapter site."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from preft.adapters.adapter import Adapter
from preft.data.requests import GenerationRequest
from preft.errors import EngineError
from preft.serve.engine import Engine
from tests.helpers.engines import CHUNK, Oracle, forced_preemption, open_engine, prompt_of, request_of, save_all
from tests.helpers.oracle import oracle_prompt_logprobs
from tests.helpers.tiny import random_adapter

pytestmark = pytest.mark.engine

LOGPROB_TOLERANCE = 2e-3
"""As for the eager engine: dozens of float32 log-probabilities, each summed in another order than the oracle's."""


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path) -> dict[str, Adapter]:
    return {
        "p0": random_adapter(tiny_llama, seed=0, rank=3),
        "p1": random_adapter(tiny_llama, seed=1, rank=(4, 17)),
        "p2": random_adapter(tiny_llama, seed=2, rank=16),
        "few": random_adapter(tiny_llama, seed=20, rank=5, targets=("self_attn.q_proj", "mlp.down_proj")),
        "a0": random_adapter(tiny_llama, seed=30, rank=8, positions="all"),
    }


@pytest.fixture(scope="module")
def engine(
    tiny_llama: Path, adapters: dict[str, Adapter], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    paths = save_all(tmp_path_factory.mktemp("adapters"), adapters)
    with open_engine(tiny_llama, paths, compiled=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path, adapters: dict[str, Adapter]) -> Oracle:
    return Oracle(tiny_llama, adapters)


@pytest.fixture(scope="module")
def batch(adapters: dict[str, Adapter]) -> list[GenerationRequest]:
    names: list[str | None] = [None, *adapters]
    return [request_of(f"{name}", prompt_of(i, 49 + 9 * i), name) for i, name in enumerate(names)]


@pytest.fixture(autouse=True)
def _empty_cache(engine: Engine) -> None:
    assert engine._scheduler.reset_prefix_cache()


def model_runner(engine: Engine) -> Any:
    return engine._core.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def update_in_graph(monkeypatch: pytest.MonkeyPatch, replacement: Any) -> Any:
    """Replaces the update of linear sites while the model is compiled; its own Python keeps the right one, returned."""
    from preft.serve.backend import compiled
    from preft.serve.backend.sites import LinearSite

    right_update, right_context = LinearSite.add_lora_linear, compiled.not_compiled

    @contextmanager
    def not_compiled(model: Any) -> Iterator[None]:
        monkeypatch.setattr(LinearSite, "add_lora_linear", right_update)
        with right_context(model):
            yield
        monkeypatch.setattr(LinearSite, "add_lora_linear", replacement)

    monkeypatch.setattr(LinearSite, "add_lora_linear", replacement)
    monkeypatch.setattr(compiled, "not_compiled", not_compiled)
    return right_update


def test_steps_run_the_graph_and_not_the_model_s_python(
    engine: Engine, oracle: Oracle, batch: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The premise of all others. The control: outside the graph, the same call does reach the Python."""
    from preft.serve.backend.compiled import not_compiled

    runner = model_runner(engine)
    layer = next(module for module in runner.model.modules() if hasattr(module, "preft_site"))

    def forward(*_arguments: object, **_settings: object) -> None:
        raise AssertionError("the model's Python was run")

    monkeypatch.setattr(type(layer), "forward", forward)
    oracle.require_equal(batch[:2], engine.generate(batch[:2]))
    with not_compiled(runner.model), pytest.raises(AssertionError, match="Python was run"):
        runner._dummy_run(8)


def test_mixed_batch_equals_both_oracles_cold_and_warm(
    engine: Engine, oracle: Oracle, batch: list[GenerationRequest]
) -> None:
    assert min(len(request.prompt_token_ids) for request in batch) > CHUNK
    oracle.require_adapters_matter(batch)

    cold = engine.generate(batch)
    warm = engine.generate(batch)

    oracle.require_equal(batch, cold)
    assert [result.token_ids for result in warm] == [result.token_ids for result in cold]


@pytest.mark.parametrize("every", [2, 7])
def test_forced_preemption_changes_nothing(
    engine: Engine, oracle: Oracle, batch: list[GenerationRequest], every: int
) -> None:
    with forced_preemption(engine, every) as preempted:
        results = engine.generate(batch)

    assert sum(preempted) > len(batch)
    oracle.require_equal(batch, results)


@pytest.mark.parametrize("length", [1, 2, 64])
@pytest.mark.parametrize("adapter", [None, "p1", "a0"])
def test_steps_of_one_and_two_tokens(engine: Engine, oracle: Oracle, length: int, adapter: str | None) -> None:
    """Sizes that compilers like to treat as constants, in the prompt and in every decode step."""
    request = request_of("one", prompt_of(3, length), adapter)

    oracle.require_equal([request], engine.generate([request]))


@pytest.mark.parametrize("boundary", [0, 1, 33, 70])
def test_boundary_is_exact_in_prompt_logprobs(engine: Engine, oracle: Oracle, boundary: int) -> None:
    prompt = prompt_of(5, 70)
    request = request_of("p2", prompt, "p2", tokens=4, boundary=boundary, want_prompt_logprobs=True)

    result = engine.generate([request])[0]

    expected = oracle_prompt_logprobs(oracle.model, oracle.specs["p2"], prompt, boundary)
    assert result.prompt_logprobs == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
    assert result.token_ids == oracle.two_phase(request).tokens


@pytest.mark.parametrize(("adapter", "decode_products"), [("p2", False), ("a0", True)])
def test_decode_runs_no_adapter_product(engine: Engine, adapter: str, decode_products: bool) -> None:
    request = request_of("r", prompt_of(9, 40), adapter)
    engine.generate([request_of("r", prompt_of(9, 40), adapter, tokens=1)])
    engine._scheduler.reset_prefix_cache()
    status = engine.status()[0]
    engine.generate([request_of("r", prompt_of(9, 40), adapter, tokens=1)])
    prompt_products = engine.status()[0]["adapter_products"] - status["adapter_products"]
    engine._scheduler.reset_prefix_cache()

    before = engine.status()[0]["adapter_products"]
    engine.generate([request])
    decoded = engine.status()[0]["adapter_products"] - before - prompt_products

    assert prompt_products > 0
    assert (decoded > 0) == decode_products


def test_the_canary_compares_the_graph_with_the_model_s_python(engine: Engine) -> None:
    canary = engine.status()[0]["canary"]

    # Float32 sums in another order: some units in the last place, far from what a lost site would show.
    assert canary["deviation"] < 1e-5
    assert canary["restored"]
    assert canary["moved"] > 0
    layers = model_runner(engine).compilation_config.static_forward_context.values()
    assert not any("forward" in vars(layer.impl) for layer in layers)


def test_a_graph_without_sites_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: ops that see no rows, as in an artifact of a stock engine."""
    from preft.serve.backend import compiled
    from preft.serve.backend.sites import StepState

    monkeypatch.setattr(compiled, "_bound", [StepState()])

    with pytest.raises(EngineError, match="canary adapter did not act") as caught:
        engine.call_workers("preft_canary")
    assert f"{len(model_runner(engine).preft_manager.infos)} silent sites" in str(caught.value.got)


@pytest.mark.parametrize("lost", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])
def test_a_graph_that_loses_a_kind_of_site_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Negative control: the sites are called, but what some of them add does not arrive in the graph."""
    names = {info.index: info.name for info in model_runner(engine).preft_manager.infos}

    def losing(added: Any, y: torch.Tensor, x: torch.Tensor) -> None:
        right_update(added, y.clone() if names[added._index].endswith(lost) else y, x)

    right_update = update_in_graph(monkeypatch, losing)

    with pytest.raises(EngineError, match="lost in the compiled model") as caught:
        engine.call_workers("preft_canary")
    assert str(caught.value.got) == lost


def test_a_graph_that_adds_something_else_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: every site moves the graph, but by half of what it should."""

    def halving(added: Any, y: torch.Tensor, x: torch.Tensor) -> None:
        before = y.clone()
        right_update(added, y, x)
        y.add_(before).div_(2)

    right_update = update_in_graph(monkeypatch, halving)

    with pytest.raises(EngineError, match="does not apply the canary adapter"):
        engine.call_workers("preft_canary")


def test_a_traced_branch_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why sites are ops: without guards, a branch on the rows is taken once, while tracing, and then for good."""
    from preft.serve.backend import compiled
    from preft.serve.backend.sites import LinearSite, PackedAdapter, StepState
    from preft.serve.backend.step_rows import StepRows
    from preft_kernels.packed import PackedSite, UpPart
    from preft_kernels.rows import Run

    state = StepState()
    monkeypatch.setattr(compiled, "_bound", [state])
    plain, opaque = LinearSite(state, 0), compiled.CompiledLinearSite(state, 0)

    # Two functions: without guards, one code object would have one graph.
    def with_plain(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        plain.add_lora_linear(y, x)
        return y

    def with_opaque(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        opaque.add_lora_linear(y, x)
        return y

    x = torch.ones(3, 4)
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    traced = [
        torch.compile(step, fullgraph=True, backend="aot_eager", options=options) for step in (with_plain, with_opaque)
    ]
    for step in traced:
        assert torch.equal(step(x), x * 2)

    site = PackedSite.build(torch.ones(4, 1), None, [UpPart(0, 0, torch.ones(1, 4))])
    state.rows, state.active = StepRows((Run(0, 2, (7,)),), (), (7,), 2), {7: PackedAdapter("d", (site,), 0)}
    adapted = torch.tensor([[6.0] * 4, [6.0] * 4, [2.0] * 4])

    assert torch.equal(with_plain(x), adapted)
    assert torch.equal(traced[0](x), x * 2)
    assert torch.equal(traced[1](x), adapted)


def test_a_stock_artifact_has_another_name(engine: Engine) -> None:
    """VLLM names compiled artifacts by a hash of its settings, in which worker and scheduler do not appear."""
    ours = engine._core.vllm_config
    stock = copy.copy(ours)
    stock.additional_config = {}
    same = copy.copy(ours)

    assert same.compute_hash() == ours.compute_hash()
    assert stock.compute_hash() != ours.compute_hash()

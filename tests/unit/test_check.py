"""`check_adapter`: passes what is on, fails what does nothing, leaks into decode, or answers otherwise elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from preft.adapters.adapter import Adapter
from preft.adapters.store import save_adapter
from preft.checks import check
from preft.checks.check import check_adapter
from preft.data.requests import GenerationRequest, GenerationResult
from preft.errors import BaseMismatchError, RequestError
from preft.serve.hf_engine import HFEngine
from preft.tuners.masks import ALL_ADAPTED, StepMask
from tests.helpers.oracle import masked_logits, spec_from_adapter
from tests.helpers.tiny import build_tiny, random_adapter


def saved(folder: Path, adapter: Adapter) -> Path:
    save_adapter(adapter, folder / "adapter")
    return folder / "adapter"


@pytest.fixture(scope="module")
def lorap(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    adapter = random_adapter(tiny_llama, seed=1, rank=[3, 8], blocks=(1,))
    return saved(tmp_path_factory.mktemp("lorap"), adapter)


def test_an_adapter_that_is_on_passes(tiny_llama: Path, lorap: Path) -> None:
    report = check_adapter(lorap, tiny_llama, engine_factory=HFEngine)

    assert report.passed
    assert report.reasons == ()
    assert report.gap.max_abs > 0.5
    assert report.gap.kl_nats > 0.01
    assert 0 < report.gap.tokens_differing <= report.gap.num_tokens == 32
    assert len(report.sites) == 22
    assert all(0 < site.delta_norm < 100 for site in report.sites)
    assert report.decode.prefill_products == 44
    assert report.decode.decode_products == 0
    assert report.decode.equals_base is True
    assert report.parity is not None
    assert [row.equal for row in report.parity] == [True] * 6
    document = json.loads(json.dumps(report.to_dict()))
    assert document["passed"] is True
    assert document["label"] == "LoRA+DiReFT(P)"
    assert document["sites"][0]["delta_norm"] == report.sites[0].delta_norm


def test_the_figures_are_the_oracles(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter = random_adapter(tiny_llama, seed=2, targets=("q_proj",), positions="f2+l1")
    report = check_adapter(saved(tmp_path, adapter), tiny_llama, prompts=["Hello, bee and wasp"])
    tokens = AutoTokenizer.from_pretrained(tiny_llama)("Hello, bee and wasp").input_ids
    pristine = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    inputs: list[torch.Tensor] = []
    query = pristine.model.layers[0].self_attn.q_proj
    handle = query.register_forward_hook(lambda _module, args, _output: inputs.append(args[0][0]))
    spec = spec_from_adapter(adapter)
    base = masked_logits(pristine, None, tokens, 0)[-1]
    handle.remove()
    adapted = masked_logits(pristine, spec, tokens, len(tokens))[-1]

    assert report.gap.max_abs == pytest.approx(float((adapted - base).abs().max()), rel=1e-4)
    want = torch.nn.functional.kl_div(base.log_softmax(-1), adapted.log_softmax(-1), log_target=True, reduction="sum")
    assert report.gap.kl_nats == pytest.approx(float(want), rel=1e-3)
    rows = inputs[0][[0, 1, len(tokens) - 1]]
    site = next(site for site in spec.sites if site.path == "model.layers.0.self_attn.q_proj")
    delta = site.scale * (rows @ site.down.T @ site.up.T)
    ratio = float(delta.norm() / (rows @ query.weight.detach().T).norm())
    assert report.sites[0].delta_norm == pytest.approx(ratio, rel=1e-4)


def test_an_all_token_adapter_acts_in_decode(tiny_llama: Path, tmp_path: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=3, positions="all", targets=("q_proj", "lm_head"))
    report = check_adapter(saved(tmp_path, adapter), tiny_llama)
    assert report.passed
    assert report.decode.decode_products == report.decode.prefill_products == 8
    assert report.decode.equals_base is None
    assert report.parity is None


def test_an_adapter_that_moves_nothing_fails(tiny_llama: Path, tmp_path: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=1, targets=("q_proj",))
    zero = {name: tensor * 0 if name.endswith(".up") else tensor for name, tensor in adapter.tensors.items()}
    report = check_adapter(saved(tmp_path / "zero", Adapter.build(adapter.manifest, zero)), tiny_llama)
    assert not report.passed
    assert report.reasons == ("it moves nothing: every update is zero, as in an adapter that was never trained",)
    assert report.gap.max_abs == 0

    tiny = {name: tensor * 1e-6 for name, tensor in adapter.tensors.items()}
    report = check_adapter(saved(tmp_path / "tiny", Adapter.build(adapter.manifest, tiny)), tiny_llama)
    assert not report.passed
    assert "the largest change of a logit is" in report.reasons[0]


def test_an_update_that_leaks_into_decode_fails(tiny_llama: Path, lorap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the gate is broken open."""
    monkeypatch.setattr(StepMask, "of", classmethod(lambda _cls, _mask: ALL_ADAPTED))
    report = check_adapter(lorap, tiny_llama)
    assert not report.passed
    assert "44 adapter matrix products run in a decode step" in report.reasons
    assert "a decode step does not equal the base model's over the same cache" in report.reasons


class Faulty:
    """An engine that gets one thing wrong."""

    def __init__(self, fault: str, base: Path | str, adapters: Mapping[str, Path]) -> None:
        self._fault = fault
        self._engine = HFEngine(base, adapters)
        self.closed = False

    def generate(self, requests: Sequence[GenerationRequest]) -> Sequence[GenerationResult]:
        if self._fault == "boundary":
            requests = [replace(request, boundary=None) for request in requests]
        if self._fault == "base":
            return [
                replace(result, id=request.id)
                for request, result in zip(
                    requests,
                    self._engine.generate([replace(asked, adapter=None, boundary=None) for asked in requests]),
                    strict=True,
                )
            ]
        results = self._engine.generate(requests)
        if self._fault == "short":
            return [replace(result, token_ids=result.token_ids[:-1]) for result in results]
        if self._fault == "error":
            return [replace(result, error={"message": "boom"}) for result in results]
        return results

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("fault", "num_reasons", "text"),
    [
        ("none", 0, ""),
        ("boundary", 2, "half the prompt"),
        ("base", 4, "differs on prompt 0, adapter"),
        ("short", 6, "from output token 15 on"),
        ("error", 6, "boom"),
    ],
)
def test_an_engine_that_answers_otherwise_fails(
    tiny_llama: Path, lorap: Path, fault: str, num_reasons: int, text: str
) -> None:
    made: list[Faulty] = []

    def factory(base: Path | str, adapters: Mapping[str, Path]) -> Faulty:
        made.append(Faulty(fault, base, adapters))
        return made[0]

    report = check_adapter(lorap, tiny_llama, engine_factory=factory)

    assert report.passed == (num_reasons == 0)
    assert len(report.reasons) == num_reasons
    assert text in " ".join(report.reasons)
    assert made[0].closed


def test_one_near_tie_is_let_through() -> None:
    tie = check.ParityRow("a", False, 3, 1e-4)
    same, wrong = check.ParityRow("b", True), check.ParityRow("c", False, 2, 0.5)
    assert check._not_equal((tie, same)) == []
    assert len(check._not_equal((tie, wrong))) == 1
    assert len(check._not_equal((tie, tie))) == 2


def test_what_does_not_belong_together_is_an_error(tiny_qwen2: Path, lorap: Path, tmp_path: Path) -> None:
    with pytest.raises(BaseMismatchError):
        check_adapter(lorap, tiny_qwen2)
    bare = build_tiny(tmp_path / "bare")
    adapter = saved(tmp_path, random_adapter(bare, seed=1))
    assert check_adapter(adapter, bare).passed
    with pytest.raises(RequestError, match="no tokenizer"):
        check_adapter(adapter, bare, prompts=["hi"])


def test_a_prompt_too_short_for_the_policy_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    """Each end takes at most half a prompt, so of one token none: not a fault of the adapter."""
    adapter = saved(tmp_path, random_adapter(tiny_llama, seed=1, targets=("q_proj",), positions="f1+l2"))
    with pytest.raises(RequestError) as caught:
        check_adapter(adapter, tiny_llama, prompts=["b"])
    assert "positions `f1+l2` select no token" in str(caught.value)
    assert "1 token" in str(caught.value)
    assert check_adapter(adapter, tiny_llama, prompts=["bee and wasp"]).passed


def test_capped_attention_scores_are_capped(tmp_path: Path) -> None:
    """Gemma 2 caps them, which Transformers' default attention leaves out without a word."""
    from transformers import AutoModelForCausalLM

    from tests.helpers.families import Family, build_family

    family = Family("gemma2", "gemma2.Gemma2DecoderLayer", {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 4})
    folder = build_family(family, tmp_path / "gemma2")
    tokens = torch.tensor([[5, 9, 300, 77, 41, 8]])
    logits = {}
    for attention in ("eager", "sdpa"):
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
        with torch.inference_mode():
            logits[attention] = model(tokens).logits
    assert (logits["eager"] - logits["sdpa"]).abs().max() > 0.1
    with HFEngine(folder) as engine, torch.inference_mode():
        assert engine.model.config._attn_implementation == "eager"
        assert torch.equal(engine.model(tokens).logits, logits["eager"])
    assert _attention_of(build_tiny(tmp_path / "plain")) == "sdpa"


def _attention_of(folder: Path) -> str:
    with HFEngine(folder) as engine:
        return str(engine.model.config._attn_implementation)


def test_stages_are_reported(tiny_llama: Path, lorap: Path) -> None:
    calls: list[Any] = []

    class Recorder:
        def start(self, label: str, total: int | None) -> None:
            calls.append((label, total))

        def advance(self, amount: int = 1) -> None:
            calls.append(amount)

        def finish(self) -> None:
            calls.append("finish")

    check_adapter(lorap, tiny_llama, progress=Recorder())
    assert calls == [("check", 4), 1, 1, 1, 1, "finish"]

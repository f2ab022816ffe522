"""Bytes, arithmetic and ratios against sums done by hand, and how they move."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from preft.errors import FileError, PreftError, UsageError
from preft.plan.gpus import GPUS, parse_machine
from preft.plan.limits import best_fit, fit, usable_bytes
from preft.plan.roofline import Roofline
from preft.plan.shapes import KNOWN, known_name, read_shape
from preft.plan.workload import ARMS, Assumptions, Workload
from tests.helpers.tiny import build_tiny

# Llama 3.1 8B, spelled out: 32 layers, width 4096, inner 14336, KV width 8 x 128 = 1024, vocabulary 128256.
BLOCK_8B = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
HEAD_8B = 128_256 * 4096
# In + out of q, k, v, o, gate, up, down.
WIDTHS_8B = 8192 + 5120 + 5120 + 8192 + 18432 + 18432 + 18432


def load(**changes: object) -> Workload:
    values = {"adapters": 64, "rank": 16, "direft_rank": 8, "input_len": 512, "output_len": 128, "requests": 64}
    return Workload(**{**values, **changes})  # type: ignore[arg-type]


def roof(
    model: str = "llama-3.1-8b", gpu: str = "h100", assumed: Assumptions | None = None, **changes: object
) -> Roofline:
    return Roofline(read_shape(model), parse_machine(gpu), load(**changes), assumed or Assumptions())


def test_values_of_the_known_models() -> None:
    published = {"llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "qwen2.5-0.5b": 494_032_768}
    assert {name: KNOWN[name].total_values for name in published} == published
    assert KNOWN["smollm2-135m"].total_values == 134_515_008


def test_decode_bytes_of_8b() -> None:
    step = roof().decode_step("lora", 64, 512)
    assert step.weight_bytes == 2 * (32 * BLOCK_8B + HEAD_8B)
    assert step.weight_bytes == pytest.approx(15.0e9, rel=0.01)
    assert step.kv_bytes == 64 * 512 * (2 * 32 * 8 * 128 * 2)
    assert step.adapter_bytes == 64 * 16 * WIDTHS_8B * 32 * 2
    assert step.adapter_bytes == pytest.approx(5.37e9, rel=0.001)


def test_decode_time_of_8b() -> None:
    """Weights, then KV, then adapters, each at 90 % of 3.35 TB/s; nothing is bound by arithmetic at a batch of 64."""
    step = roof().decode_step("lora", 64, 512)
    bandwidth = 0.9 * 3.35e12
    base_s = (2 * (32 * BLOCK_8B + HEAD_8B) + 64 * 512 * 131_072) / bandwidth
    inputs = 4096 + 4096 + 4096 + 14336
    outputs = 4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096
    adapter_s = (64 * 16 * WIDTHS_8B * 64 + 64 * 2 * 32 * (inputs + 2 * outputs)) / bandwidth
    assert (step.base_s, step.bound) == (pytest.approx(base_s), "memory")
    assert step.adapter_s == pytest.approx(adapter_s)
    assert step.seconds / step.base_s == pytest.approx(1.30, abs=0.01)


def test_prefill_time_of_8b_is_bound_by_arithmetic() -> None:
    step, steps = roof(requests=16).prefill_step("base", 16)
    assert steps == 1  # 16 prompts of 512 are one step of 8192
    matrices = 2 * (8192 * 32 * BLOCK_8B + 16 * HEAD_8B)
    pairs = 16 * (512 * 513 / 2)
    attention = 4 * pairs * 32 * 128 * 32
    assert step.flops == pytest.approx(matrices + attention)
    assert step.bound == "compute"
    compute, bandwidth = 0.75 * 989e12, 0.9 * 3.35e12
    attention_s = max(attention / compute, 8192 * 131_072 / bandwidth)
    assert step.base_s == pytest.approx(matrices / compute + attention_s)


def test_a_direft_adapter() -> None:
    made = roof()
    assert made.adapter_bytes("direftp") == 32 * 8 * (2 * 4096 + 1) * 2
    step, _ = made.prefill_step("direftp", 16)
    assert step.adapter_flops == 4 * 8192 * 8 * 4096 * 32
    assert step.adapter_state_bytes == 3 * 8192 * 4096 * 32 * 2


def test_a_rank_of_70b_on_four_gpus() -> None:
    """Whole A of q, k, v, gate, up; whole B of o, down; the other side is split four ways."""
    column = (8192 + 8192 / 4) + 2 * (8192 + 1024 / 4) + 2 * (8192 + 28672 / 4)
    row = (8192 / 4 + 8192) + (28672 / 4 + 8192)
    made = roof("llama-3.1-70b", "h100x4")
    assert made.adapter_bytes("lora") == 16 * 2 * 80 * (column + row)
    assert 64 * made.adapter_bytes("lora") == pytest.approx(13.7e9, rel=0.01)
    assert made.adapter_bytes_whole("lora") == 16 * 2 * 80 * (2 * 8192 + 2 * 9216 + 2 * 36864 + 16384 + 36864)
    assert made.adapter_bytes("direftp") == 80 * 8 * (2 * 8192 + 1) * 2
    assert made.kv_bytes_per_token == 2 * 80 * 8 * 128 * 2 / 4
    assert roof("llama-3.1-70b", "h100x16").kv_bytes_per_token == 2 * 80 * 128 * 2  # 8 KV heads on 16 GPUs


def test_end_to_end_without_limits() -> None:
    """A batch is its prompt steps and one decode step for each output token but the first."""
    made = roof(requests=64, output_len=128)
    time = made.batch("lora", 64)
    prefill = made.prefill_step("lora", 64)[0].seconds * 64 * 512 / 8192
    decode = sum(made.decode_step("lora", 64, 512 + t).seconds for t in range(1, 128))
    assert time.prefill_s == pytest.approx(prefill)
    assert time.decode_s == pytest.approx(decode, rel=1e-3)
    assert time.output_tokens_per_s == pytest.approx(64 * 128 / (prefill + decode), rel=1e-3)


def test_one_output_token_has_no_decode() -> None:
    times = {arm: roof(output_len=1).batch(arm, 64) for arm in ARMS}
    assert all(time.decode_s == 0 and time.decode_step is None for time in times.values())
    assert times["lora"].output_tokens_per_s == times["lorap"].output_tokens_per_s


def test_prompt_only_arms_decode_as_base_does() -> None:
    made = roof()
    for arm in ("lorap", "direftp"):
        assert made.decode_step(arm, 64, 600) == made.decode_step("base", 64, 600)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen2.5-0.5b"])
def test_it_moves_as_it_must(model: str) -> None:
    speeds = [{arm: roof(model, rank=rank).batch(arm, 64).output_tokens_per_s for arm in ARMS} for rank in (8, 32, 128)]
    for row in speeds:
        assert row["base"] >= row["direftp"] >= row["lorap"] >= row["lora"]
    assert speeds[0]["lora"] > speeds[1]["lora"] > speeds[2]["lora"]
    counts = [roof(model, adapters=n).batch("lora", 64).output_tokens_per_s for n in (1, 8, 64)]
    assert counts[0] > counts[1] > counts[2]
    outputs = [
        roof(model, output_len=n).batch("lorap", 64).output_tokens_per_s
        / roof(model, output_len=n).batch("lora", 64).output_tokens_per_s
        for n in (1, 64, 512)
    ]
    assert outputs[0] == pytest.approx(1)
    assert outputs[0] < outputs[1] < outputs[2]
    faster = replace(GPUS["h100"], bandwidth=2 * GPUS["h100"].bandwidth)
    slow = roof(model)
    assert (
        replace(slow, machine=replace(slow.machine, gpu=faster)).batch("lora", 64).decode_s
        < slow.batch("lora", 64).decode_s
    )


def test_no_run_beats_the_upper_bound() -> None:
    bound = {arm: roof(requests=512).highest_ratio(arm, batches=range(1, 513)) for arm in ("lorap", "direftp")}
    for output_len in (1, 16, 256, 4096, 65536):
        for batch in (1, 7, 64, 256, 512):
            made = roof(adapters=512, requests=512, output_len=output_len)
            for arm, highest in bound.items():
                ratio = made.batch(arm, batch).output_tokens_per_s / made.batch("lora", batch).output_tokens_per_s
                full = made.highest_ratio(arm, batches=range(1, 513))
                assert ratio <= full + 1e-9
                assert highest <= full + 1e-9


def test_launches_cost_all_token_lora_in_decode_only() -> None:
    timed = Assumptions(launch_us=5)
    free, paid = roof(), roof(assumed=timed)
    # Four groups of linears (qkv, o, gate_up, down), three launches each, 32 layers.
    extra = 4 * 3 * 32 * 5e-6
    assert paid.decode_step("lora", 64, 512).seconds - free.decode_step("lora", 64, 512).seconds == pytest.approx(extra)
    assert paid.decode_step("lorap", 64, 512) == free.decode_step("lorap", 64, 512)
    prefill = [made.prefill_step("direftp", 16)[0].seconds for made in (free, paid)]
    assert prefill[1] - prefill[0] == pytest.approx(32 * 5e-6)


def test_memory_is_shared_by_weights_kv_and_slots() -> None:
    made = roof(adapters=512, requests=512, output_len=512)
    usable = 0.9 * 80e9 - 2e9 - 2 * 8_030_261_248
    assert usable_bytes(made) == pytest.approx(usable)
    request, adapter = 1024 * 131_072, 16 * WIDTHS_8B * 64
    found = fit(made, "lorap", 64)
    assert found is not None
    assert found.batch == int((usable - 64 * adapter) / request)
    assert found.limited_by == "kv cache"
    assert found.free_bytes >= 0
    assert found.most_resident == int((usable - request) / adapter)
    assert not found.all_resident
    held = fit(made, "lora", 64)
    assert held is not None
    assert (held.batch, held.limited_by) == (64, "slots")
    shared = fit(roof(adapters=128, requests=512, output_len=512), "lora", 64)
    assert shared is not None
    assert shared.batch == 256  # four requests share an adapter
    assert fit(made, "lora", 512) is not None
    assert fit(replace(made, workload=load(rank=256, adapters=512, requests=512)), "lora", 512) is None


def test_what_is_resident_is_not_loaded() -> None:
    few = best_fit(roof(), "lorap")
    assert few is not None
    swapped = fit(roof(), "lorap", 16)
    assert swapped is not None
    assert swapped.load_bytes == pytest.approx(64 * 16 * WIDTHS_8B * 64 * (1 - 16 / 64))
    assert swapped.load_s == pytest.approx(swapped.load_bytes / 50e9)
    whole = fit(roof(), "lorap", 64)
    assert whole is not None
    assert (whole.all_resident, whole.load_bytes) == (True, 0)
    assert whole.output_tokens_per_s == whole.time.output_tokens_per_s
    assert few.output_tokens_per_s >= 0.995 * whole.output_tokens_per_s


def test_the_best_slots_are_the_best() -> None:
    made = roof(adapters=256, requests=256)
    for arm in ("lora", "lorap", "direftp"):
        best = best_fit(made, arm)
        assert best is not None
        for slots in (1, 16, 64, 200, 256):
            other = fit(made, arm, slots)
            if other is not None:
                assert other.output_tokens_per_s <= best.output_tokens_per_s / 0.995 + 1e-9


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("Qwen/Qwen2.5-0.5B-Instruct@main", "qwen2.5-0.5b"),
        ("smollm2-135m-instruct", "smollm2-135m"),
        ("Qwen/Qwen2.5-7B", None),
    ],
)
def test_known_names(name: str, known: str | None) -> None:
    assert known_name(name) == known


@pytest.mark.parametrize(("family", "kind"), [("llama", "llama"), ("qwen2", "qwen2")])
def test_a_local_configuration(tmp_path: Path, family: str, kind: str) -> None:
    folder = build_tiny(tmp_path / kind, family)
    shape = read_shape(str(folder))
    assert shape == replace(read_shape(str(folder / "config.json")), name=shape.name)
    assert (shape.hidden_size, shape.num_layers, shape.num_kv_heads, shape.head_dim) == (128, 3, 2, 32)
    from safetensors import safe_open

    with safe_open(str(folder / "model.safetensors"), "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert shape.total_values == stored
    assert shape.linear_values == 3 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)
    assert Roofline(shape, parse_machine("h100"), load(input_len=8, output_len=8), Assumptions()).batch("lora", 4)


def test_a_known_model_equals_its_configuration(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32_768,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, known = read_shape(str(tmp_path)), KNOWN["qwen2.5-0.5b"]
    assert set(read.linears) == set(known.linears)
    assert replace(read, name="", linears=()) == replace(known, name="", linears=(), kv_values=None)


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "moe", "qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
    shape = read_shape(str(folder))
    experts = 3 * 8 * 3 * 128 * 64
    assert (shape.num_experts, shape.experts_per_token, shape.expert_values) == (8, 2, experts)
    assert shape.experts_used == experts / 4
    assert shape.experts_read(1) == pytest.approx(experts / 4)
    assert experts / 4 < shape.experts_read(4) < experts
    assert shape.experts_read(500) == pytest.approx(experts)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("h100", "h100x1"),
        ("H100x4", "h100x4"),
        ("mi300x", "mi300xx1"),
        ("mi300xx8", "mi300xx8"),
        ("mi300x8", "mi300xx8"),
    ],
)
def test_machines(text: str, label: str) -> None:
    assert parse_machine(text).label == label


def test_a_machine_of_the_user() -> None:
    machine = parse_machine("minex2", bandwidth_gbs=900, tflops=120, memory_gb=24)
    assert (machine.count, machine.gpu.bandwidth, machine.gpu.flops, machine.gpu.memory_bytes) == (
        2,
        9e11,
        1.2e14,
        24e9,
    )
    assert parse_machine("h100", bandwidth_gbs=3000).gpu.bandwidth == 3e12
    assert parse_machine("h100", bandwidth_gbs=3000).gpu.flops == GPUS["h100"].flops


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parse_machine("h10"), "The GPU `h10` is not known\n  accepted: a100, h100, h200, b200, mi300x"),
        (lambda: parse_machine("v100", tflops=100), "for another one give --bandwidth-gbs, --tflops and --memory-gb"),
        (lambda: parse_machine("h100x0"), "`--gpu` names no GPU at all"),
        (lambda: parse_machine("!"), "accepted: NAME or NAMExN"),
        (lambda: parse_machine("h100", tflops=-1), "`--tflops` is not valid"),
        (lambda: load(rank=0), "`--rank` is not valid\n  got: 0"),
        (lambda: load(output_len=0), "`--output-len` is not valid"),
        (lambda: load(dtype="int3"), "accepted: bfloat16, float16, fp8, float32"),
        (lambda: load(targets="mlp"), "accepted: all, attention"),
        (lambda: Assumptions(compute_efficiency=1.5), "`--compute-efficiency` is not valid"),
        (lambda: Assumptions(launch_us=-1), "`--launch-us` is not valid"),
        (lambda: roof("qwen2.5-0.5b", "h100x4"), "accepted: 1, 2, 7, 14 GPUs"),
        (lambda: roof(input_len=131_072), "longer than the model's context"),
        (lambda: usable_bytes(roof("llama-3.1-70b")), "does not fit `h100x1`\n  got: 141.3 GB on each GPU"),
        (lambda: roof(dtype="float32").compute, "There is no float32 figure for `h100`"),
        (lambda: read_shape("llama-9"), "accepted: llama-3.1-8b, llama-3.1-70b, qwen2.5-0.5b"),
        (lambda: read_shape("./nothing"), "The model `./nothing` is not known"),
    ],
)
def test_bad_input_is_refused(call: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()  # type: ignore[operator]
    assert message in str(caught.value)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no `config.json` in it"):
        read_shape(str(tmp_path))
    (tmp_path / "model.txt").write_text("x")
    with pytest.raises(FileError, match=r"is a file"):
        read_shape(str(tmp_path / "model.txt"))
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(PreftError):
        read_shape(str(tmp_path))

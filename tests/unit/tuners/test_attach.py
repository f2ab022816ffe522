"""Forward passes under an attached adapter: equal to the oracle, refused where the rule cannot be applied."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from preft.adapters.adapter import Adapter
from preft.errors import (
    AdapterError,
    BaseMismatchError,
    BoundaryUnknownError,
    UnknownAdapterError,
    UnsupportedError,
    UsageError,
)
from preft.positions import Policy
from preft.tuners.attach import attach
from preft.tuners.masks import batch_mask
from tests.helpers.oracle import all_token, masked_logits, rescaled, spec_from_adapter
from tests.helpers.tiny import build_tiny, random_adapter
from tests.unit.tuners.common import EXACT, MOVES, PROMPTS, gap, ids, load, padded

POLICIES = ("prompt", "all", "f3+l2", "l1", "f9+l9")
KINDS = {"linear": {}, "block": {"targets": (), "blocks": (0, 2)}, "mixed": {"rank": [2, 5], "blocks": (1,)}}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", POLICIES)
def test_a_forward_pass_equals_the_masked_oracle(
    request: pytest.FixtureRequest, family: str, kind: str, positions: str
) -> None:
    folder: Path = request.getfixturevalue(f"tiny_{family}")
    adapter = random_adapter(folder, seed=3, positions=positions, **KINDS[kind])
    model, pristine = load(folder), load(folder)
    attach(model, adapter)
    prompt, output, boundary = PROMPTS[0][:15], PROMPTS[1], 15
    tokens = [*prompt, *output]
    spec = spec_from_adapter(adapter)
    want = masked_logits(pristine, spec, tokens, boundary)
    for wrong in (None, rescaled(spec)):
        assert gap(want, masked_logits(pristine, wrong, tokens, boundary)) > MOVES
    if positions != "all":
        assert gap(want, masked_logits(pristine, all_token(spec), tokens, boundary)) > MOVES

    with torch.no_grad():
        got = model(input_ids=ids(tokens), preft_boundary=boundary).logits[0]

    assert gap(want, got) < EXACT


def test_a_named_boundary_of_zero_is_the_base_bit_for_bit(tiny_llama: Path) -> None:
    model, pristine = load(tiny_llama), load(tiny_llama)
    attach(model, random_adapter(tiny_llama, seed=1, blocks=(1,)))
    with torch.no_grad():
        want = pristine(input_ids=ids(PROMPTS[0])).logits
        got = model(input_ids=ids(PROMPTS[0]), preft_boundary=0).logits
    assert torch.equal(want, got)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", ["prompt", "f3+l2"])
def test_padding_changes_nothing(tiny_llama: Path, side: str, positions: str) -> None:
    adapter = random_adapter(tiny_llama, seed=2, positions=positions, blocks=(1,))
    model = load(tiny_llama)
    attach(model, adapter)
    rows, boundaries = list(PROMPTS), [12, 7, 9]
    batch = padded(rows, side)
    assert int((batch["attention_mask"] == 0).sum()) > 10, "the batch has no padding to speak of"

    with torch.no_grad():
        by_boundary = model(**batch, preft_boundary=boundaries).logits
        mask = batch_mask(Policy.parse(positions), boundaries, batch["attention_mask"])
        by_mask = model(**batch, preft_mask=mask).logits
        by_tensor = model(**batch, preft_boundary=torch.tensor(boundaries)).logits
        alone = [
            model(input_ids=ids(row), preft_boundary=boundary).logits[0]
            for row, boundary in zip(rows, boundaries, strict=True)
        ]

    assert torch.equal(by_boundary, by_mask)
    assert torch.equal(by_boundary, by_tensor)
    for index, want in enumerate(alone):
        real = batch["attention_mask"][index].bool()
        assert gap(want, by_boundary[index][real]) < EXACT


def test_packed_rows_need_a_mask_and_get_it(tiny_llama: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=2)
    model = load(tiny_llama)
    attach(model, adapter)
    first, second = PROMPTS[0], PROMPTS[2]
    packed = ids([*first, *second])
    restart = torch.cat([torch.arange(len(first)), torch.arange(len(second))])[None]
    mask = torch.tensor([Policy.parse("prompt").mask(9, 0, len(first)) + Policy.parse("prompt").mask(4, 0, 14)])
    with torch.no_grad():
        got = model(input_ids=packed, position_ids=restart, preft_mask=mask, use_cache=False).logits[0]
        want = [model(input_ids=ids(row), preft_boundary=at).logits[0] for row, at in ((first, 9), (second, 4))]

    assert gap(torch.cat(want), got) < EXACT
    with pytest.raises(BoundaryUnknownError, match="packed"):
        model(input_ids=packed, position_ids=restart, preft_boundary=9, use_cache=False)


def test_a_cached_step_is_decided_by_position(tiny_llama: Path) -> None:
    """The prompt in chunks, one of a single token, then outputs several at a time."""
    adapter = random_adapter(tiny_llama, seed=4, positions="f3+l2", blocks=(2,))
    model, pristine = load(tiny_llama), load(tiny_llama)
    attach(model, adapter)
    tokens, boundary = [*PROMPTS[0], *PROMPTS[1]], len(PROMPTS[0])
    want = masked_logits(pristine, spec_from_adapter(adapter), tokens, boundary)
    cache, rows = None, []
    with torch.no_grad():
        for start, stop in ((0, 8), (8, 20), (20, 21), (21, 24), (24, 25), (25, 28)):
            output = model(
                input_ids=ids(tokens[start:stop]), past_key_values=cache, use_cache=True, preft_boundary=boundary
            )
            cache = output.past_key_values
            rows.append(output.logits[0])
    assert gap(want, torch.cat(rows)) < EXACT


def test_no_boundary_is_an_error_and_leaves_nothing_behind(tiny_llama: Path) -> None:
    model = load(tiny_llama)
    handle = attach(model, random_adapter(tiny_llama, seed=1))
    tokens = ids(PROMPTS[0])
    for extra in ({}, {"use_cache": True}, {"labels": tokens}, {"use_cache": False}):
        for mode in (model.train, model.eval):
            mode()
            with pytest.raises(BoundaryUnknownError, match="does not say where the prompt ends"):
                model(input_ids=tokens, **extra)
    with pytest.raises(BoundaryUnknownError, match="decoder block"):
        model.model(input_ids=tokens)
    with torch.no_grad():
        model(input_ids=tokens, preft_boundary=4)
    with pytest.raises(BoundaryUnknownError):
        model(input_ids=tokens)
    handle.use(None)
    model(input_ids=tokens)


def test_all_token_adapters_need_no_boundary(tiny_llama: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=1, positions="all")
    model, pristine = load(tiny_llama), load(tiny_llama)
    attach(model, adapter)
    with torch.no_grad():
        got = model(input_ids=ids(PROMPTS[0])).logits[0]
    assert gap(masked_logits(pristine, spec_from_adapter(adapter), PROMPTS[0], 0), got) < EXACT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preft_boundary": -1}, "preft_boundary"),
        ({"preft_boundary": "3"}, "preft_boundary"),
        ({"preft_boundary": 2.5}, "preft_boundary"),
        ({"preft_boundary": True}, "preft_boundary"),
        ({"preft_boundary": [1, 2]}, "preft_boundary"),
        ({"preft_mask": torch.ones(1, 3, dtype=torch.bool)}, "preft_mask"),
        ({"preft_mask": torch.ones(1, 21, dtype=torch.long)}, "preft_mask"),
        ({"preft_mask": torch.ones(1, 21, dtype=torch.bool), "preft_boundary": 3}, "exclude"),
    ],
)
def test_a_boundary_or_mask_that_cannot_be_meant_is_refused(
    tiny_llama: Path, arguments: dict[str, object], message: str
) -> None:
    model = load(tiny_llama)
    attach(model, random_adapter(tiny_llama, seed=1))
    with pytest.raises(UsageError, match=message):
        model(input_ids=ids(PROMPTS[0]), **arguments)


def test_several_adapters_take_turns_and_base_is_untouched(tiny_llama: Path) -> None:
    adapters = {
        "a": random_adapter(tiny_llama, seed=1, targets=("q_proj", "down_proj"), rank=3),
        "b": random_adapter(tiny_llama, seed=2, targets=("v_proj", "q_proj"), blocks=(0, 1), positions="f2+l2"),
        "c": random_adapter(tiny_llama, seed=3, targets=("lm_head",), positions="all"),
    }
    model, pristine = load(tiny_llama), load(tiny_llama)
    names = [name for name, _ in pristine.named_modules()]
    for name, adapter in adapters.items():
        handle = attach(model, adapter, name=name)
    tokens, boundary = [*PROMPTS[0], *PROMPTS[1]], 21
    assert handle.active == "c"
    assert set(handle.adapters) == set(adapters)
    with torch.no_grad():
        for name in ("a", None, "b", "c", "a"):
            handle.use(name)
            got = model(input_ids=ids(tokens), preft_boundary=boundary).logits[0]
            spec = spec_from_adapter(adapters[name]) if name else None
            want = masked_logits(pristine, spec, tokens, boundary)
            assert gap(want, got) < EXACT if name else torch.equal(want, got)
    handle.detach("b")
    handle.use("a")
    with pytest.raises(UnknownAdapterError, match="`b`"):
        handle.use("b")
    handle.detach()

    assert [name for name, _ in model.named_modules()] == names
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids(tokens)).logits, pristine(input_ids=ids(tokens)).logits)
    assert "generate" not in model.__dict__
    assert attach(model, adapters["a"]).active == "default"


def test_an_adapter_on_a_tied_head_acts_on_prompt_logits_only(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tied", tie_word_embeddings=True)
    adapter = random_adapter(folder, seed=1, targets=("lm_head",))
    model, pristine = load(folder), load(folder)
    attach(model, adapter)
    tokens, boundary = PROMPTS[0], 9
    with torch.no_grad():
        plain = pristine(input_ids=ids(tokens)).logits[0]
        full = model(input_ids=ids(tokens), preft_boundary=boundary).logits[0]
        last = model(input_ids=ids(tokens), preft_boundary=boundary, logits_to_keep=14).logits[0]
    assert gap(full[:boundary], plain[:boundary]) > MOVES
    assert torch.equal(full[boundary:], plain[boundary:])
    assert gap(full[-14:], last) < EXACT
    assert gap(masked_logits(pristine, spec_from_adapter(adapter), tokens, boundary), full) < EXACT


def test_conv1d_layers_of_gpt2(tmp_path: Path) -> None:
    folder, adapter = _gpt2(tmp_path)
    model, pristine = load(folder), load(folder)
    attach(model, adapter)
    tokens, boundary = [*PROMPTS[0], *PROMPTS[1]], 21
    want = masked_logits(pristine, spec_from_adapter(adapter), tokens, boundary)
    assert gap(want, masked_logits(pristine, None, tokens, boundary)) > MOVES
    with torch.no_grad():
        got = model(input_ids=ids(tokens), preft_boundary=boundary).logits[0]
    assert gap(want, got) < EXACT


def test_merging_is_refused_everywhere(tiny_llama: Path) -> None:
    model = load(tiny_llama)
    handle = attach(model, random_adapter(tiny_llama, seed=1, blocks=(0,)))
    layer = model.model.layers[0].self_attn.q_proj
    for merge in (handle.merge, handle.merge_and_unload, layer.merge, model.model.layers[0].preft_block.merge):
        with pytest.raises(UnsupportedError, match="cannot be merged") as caught:
            merge()
        assert "generated tokens" in str(caught.value)
    variant = layer.lora_variant["default"]
    with pytest.raises(UnsupportedError, match="cannot be merged"):
        variant.merge_unsafe(layer, "default", layer.weight)


def test_a_masked_off_step_runs_no_adapter_matrix_product(tiny_llama: Path) -> None:
    model = load(tiny_llama)
    attach(model, random_adapter(tiny_llama, seed=1, blocks=(0,)))
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith((".lora_A.default", ".lora_B.default", ".preft_down.default", ".preft_up.default")):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    with torch.no_grad():
        cache = model(input_ids=ids(PROMPTS[0]), preft_boundary=21, use_cache=True).past_key_values
        assert len(calls) == 2 * (7 * 3 + 1)
        calls.clear()
        model(input_ids=ids([7]), past_key_values=cache, preft_boundary=21)
    assert calls == []


def test_an_attached_model_is_not_saved_as_a_checkpoint(tiny_llama: Path, tmp_path: Path) -> None:
    model = load(tiny_llama)
    handle = attach(model, random_adapter(tiny_llama, seed=1))
    with pytest.raises(UnsupportedError, match="cannot be saved"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    handle.detach()
    model.save_pretrained(tmp_path / "out")
    with torch.no_grad():
        want = load(tiny_llama)(ids(PROMPTS[0])).logits
        assert torch.equal(load(tmp_path / "out")(ids(PROMPTS[0])).logits, want)


def test_arguments_may_be_positional(tiny_llama: Path) -> None:
    model = load(tiny_llama)
    attach(model, random_adapter(tiny_llama, seed=1))
    batch = padded(list(PROMPTS), "left")
    with torch.no_grad():
        want = model(**batch, preft_boundary=5).logits
        got = model(batch["input_ids"], batch["attention_mask"], batch["position_ids"], preft_boundary=5).logits
    assert torch.equal(want, got)


def test_a_deep_copy_has_a_gate_of_its_own(tiny_llama: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=1, blocks=(1,))
    model = load(tiny_llama)
    attach(model, adapter)
    twin = copy.deepcopy(model)
    tokens = ids(PROMPTS[0])
    with torch.no_grad():
        want = model(input_ids=tokens, preft_boundary=21).logits
        assert torch.equal(twin(input_ids=tokens, preft_boundary=21).logits, want)
        handle = attach(twin, random_adapter(tiny_llama, seed=2), name="second")
        assert handle.model is twin
        handle.use("default")
        assert torch.equal(twin(input_ids=tokens, preft_boundary=21).logits, want)
        handle.detach()
        assert torch.equal(model(input_ids=tokens, preft_boundary=21).logits, want)


def test_bfloat16_computes_in_the_models_type(tiny_llama: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=1, blocks=(1,))
    model = load(tiny_llama, dtype=torch.bfloat16)
    attach(model, adapter)
    with torch.no_grad():
        assert model(input_ids=ids(PROMPTS[0]), preft_boundary=21).logits.dtype == torch.bfloat16
    assert model.model.layers[0].self_attn.q_proj.lora_A["default"].weight.dtype == torch.bfloat16


def test_values_that_overflow_the_models_type_are_refused(tiny_llama: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=1, targets=("q_proj",), strength=1e5)
    with pytest.raises(AdapterError, match="number type") as caught:
        attach(load(tiny_llama, dtype=torch.float16), adapter)
    assert "float16" in str(caught.value)


def test_what_does_not_fit_is_refused_and_the_model_left_alone(
    tiny_llama: Path, tiny_qwen2: Path, tmp_path: Path
) -> None:
    model = load(tiny_llama)
    adapter = random_adapter(tiny_llama, seed=1)
    with pytest.raises(BaseMismatchError, match="another architecture"):
        attach(load(tiny_qwen2), adapter)
    wider = random_adapter(build_tiny(tmp_path / "wide", num_hidden_layers=4), seed=1)
    with pytest.raises(BaseMismatchError, match="num_hidden_layers"):
        attach(model, wider)
    with pytest.raises(AdapterError) as caught:
        attach(model, _with_path(adapter, "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.x_proj"))
    assert "1 of the adapter's 21 sites" in str(caught.value)
    assert "`model.layers.0.self_attn.x_proj`: no such module" in str(caught.value)
    with pytest.raises(AdapterError, match="sites") as caught:
        attach(model, _with_path(adapter, "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.rotary"))
    with pytest.raises(AdapterError) as caught:
        attach(model, _with_path(adapter, "model.layers.0.mlp.down_proj", "model.embed_tokens"))
    assert "a Embedding, not a linear module" in str(caught.value)
    with pytest.raises(AdapterError, match="mixture's experts"):
        attach(model, _with_path(adapter, "model.layers.0.mlp.up_proj", "model.layers.0.mlp.experts.0.up_proj"))
    assert "lora" not in " ".join(name for name, _ in model.named_modules())
    assert "preft_attached" not in model.__dict__


def test_names_and_strangers(tiny_llama: Path) -> None:
    from peft import LoraConfig, get_peft_model

    adapter = random_adapter(tiny_llama, seed=1)
    model = load(tiny_llama)
    attach(model, adapter, name="one")
    for name in ("one", "", "a.b"):
        with pytest.raises(UsageError, match="under this name"):
            attach(model, adapter, name=name)
    stranger = get_peft_model(load(tiny_llama), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedError, match="already carries PEFT adapters"):
        attach(stranger.base_model.model, adapter)


def _with_path(adapter: Adapter, old: str, new: str) -> Adapter:
    from dataclasses import replace

    sites = [replace(site, path=new) if site.path == old else site for site in adapter.manifest.sites]
    manifest = replace(adapter.manifest, sites=tuple(sorted(sites, key=lambda site: (site.path, site.kind))))
    return Adapter.build(manifest, {name.replace(old, new): tensor for name, tensor in adapter.tensors.items()})


def _gpt2(tmp_path: Path) -> tuple[Path, Adapter]:
    from transformers import GPT2Config, GPT2LMHeadModel

    from preft.adapters.adapter import expected_shapes
    from preft.adapters.fingerprint import fingerprint_base
    from preft.adapters.manifest import Manifest
    from preft.types import Site, SiteKind

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.15,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path / "gpt2"
    GPT2LMHeadModel(config).save_pretrained(folder)
    sizes = {"attn.c_attn": (64, 192), "attn.c_proj": (64, 64), "mlp.c_fc": (64, 256), "mlp.c_proj": (256, 64)}
    sites = [
        Site(f"transformer.h.{layer}.{name}", SiteKind.LINEAR, 4, *size, 2.0, has_bias=False)
        for layer in range(2)
        for name, size in sizes.items()
    ]
    sites.append(Site("transformer.h.1", SiteKind.BLOCK, 3, 64, 64, 1.0, has_bias=True))
    manifest = Manifest(
        Policy.parse("prompt"), "float32", tuple(sorted(sites, key=lambda site: (site.path, site.kind))),
        fingerprint_base(folder),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in expected_shapes(manifest).items()}
    return folder, Adapter.build(manifest, tensors)

"""Stock PEFT and stock vLLM refuse our folder: loading it, they would silently adapt every token.

Each refusal has its control: the same call accepts the PEFT folder that the adapter was converted from.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from preft.convert.run import convert
from tests.helpers.peft_lora import load_base, make_peft

EXPECTED = {"q_proj", "v_proj"}


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A PEFT folder, and ours made from it."""
    root = tmp_path_factory.mktemp("stock")
    theirs = make_peft(tiny_llama, root / "peft", target_modules=sorted(EXPECTED))
    convert(str(theirs), root / "ours")
    return theirs, root / "ours"


def load_with_peft(folder: Path, base: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(load_base(base), str(folder))


def load_config_with_peft(folder: Path, base: Path) -> Any:
    from peft import PeftConfig

    return PeftConfig.from_pretrained(str(folder))


def load_as_a_second_adapter(folder: Path, base: Path) -> Any:
    model = load_base(base)
    model.load_adapter(str(folder))
    return model


def load_config_with_vllm(folder: Path, base: Path) -> Any:
    from vllm.lora.peft_helper import PEFTHelper

    return PEFTHelper.from_local_dir(str(folder), max_position_embeddings=None)


def load_tensors_with_vllm(folder: Path, base: Path) -> Any:
    """The tensors alone, with a configuration that fits: not even then."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_dict({"r": 4, "lora_alpha": 8, "target_modules": sorted(EXPECTED)})
    return LoRAModel.from_local_checkpoint(str(folder), EXPECTED, helper, lora_model_id=1, device="cpu")


def load_with_vllms_worker(folder: Path, base: Path) -> Any:
    """The path that `--lora-modules` and `/v1/load_lora_adapter` take in a worker."""
    import torch
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

    manager = WorkerLoRAManager.__new__(WorkerLoRAManager)
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    manager._adapter_manager = SimpleNamespace(
        supported_lora_modules=sorted(EXPECTED),
        packed_modules_mapping={},
        model=object(),
        moe_ep_load_spec=None,
        _validate_moe_lora_format=nothing,
        _validate_modules_to_save=nothing,
        _validate_token_classification_lora=nothing,
    )
    manager.max_position_embeddings = None
    manager.vocab_size = 512
    manager._lora_model_cls = LoRAModel
    manager.lora_config = SimpleNamespace(max_lora_rank=16, lora_dtype=torch.float32)
    return manager._load_adapter(LoRARequest("ours", 1, str(folder)))


LOADERS = [
    load_with_peft,
    load_config_with_peft,
    load_as_a_second_adapter,
    load_config_with_vllm,
    load_tensors_with_vllm,
    load_with_vllms_worker,
]


@pytest.mark.parametrize("load", LOADERS, ids=lambda load: load.__name__)
def test_stock_loaders_take_theirs_and_refuse_ours(
    load: Callable[[Path, Path], Any], folders: tuple[Path, Path], tiny_llama: Path
) -> None:
    if "vllm" in load.__name__:
        pytest.importorskip("vllm")
    theirs, ours = folders
    assert load(theirs, tiny_llama) is not None
    with pytest.raises(Exception):  # noqa: B017 - each loader has its own way of refusing; any will do
        load(ours, tiny_llama)


def test_our_names_are_not_theirs(folders: tuple[Path, Path]) -> None:
    """A renamed file does not help either: the names of the tensors are not those of PEFT."""
    import warnings

    from safetensors.torch import load_file

    _, ours = folders
    assert not {path.name for path in ours.iterdir()} & {
        "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin",
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not any("lora_" in name for name in load_file(ours / "preft.safetensors"))


def test_a_tensors_file_renamed_to_theirs_is_still_refused(
    folders: tuple[Path, Path], tiny_llama: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    theirs, ours = folders
    mixed = Path(shutil.copytree(theirs, tmp_path / "mixed"))
    shutil.copy(ours / "preft.safetensors", mixed / "adapter_model.safetensors")
    with pytest.raises(Exception):  # noqa: B017
        load_with_vllms_worker(mixed, tiny_llama)

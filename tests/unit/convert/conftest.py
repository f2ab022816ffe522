from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from preft.adapters.adapter import Adapter
from preft.adapters.store import load_adapter
from preft.convert.run import ConversionReport, convert
from tests.helpers.peft_lora import make_peft
from tests.helpers.tiny import build_tiny

torch.set_num_threads(1)

SMALL = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 128}


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tiny bases by name, each built once in a session."""
    built: dict[str, Path] = {}
    recipes: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("llama", SMALL),
        "other-weights": ("llama", {**SMALL, "seed": 7}),
        "wider": ("llama", {**SMALL, "hidden_size": 96, "head_dim": 24}),
        "larger-vocabulary": ("llama", {**SMALL, "vocab_size": 160}),
        "shallower": ("llama", {**SMALL, "num_hidden_layers": 2}),
        "tied": ("llama", {**SMALL, "tie_word_embeddings": True}),
        "qwen2": ("qwen2", SMALL),
        "gpt2": ("gpt2", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128}),
    }

    def get(name: str = "llama") -> Path:
        if name not in built:
            family, settings = recipes[name]
            built[name] = build_tiny(tmp_path_factory.mktemp("bases") / name, family, **settings)
        return built[name]

    return get


@pytest.fixture(scope="session")
def plain_peft(bases: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One PEFT LoRA on q_proj and v_proj of the tiny llama; not to be changed."""
    return make_peft(bases(), tmp_path_factory.mktemp("peft") / "plain")


@pytest.fixture
def source(plain_peft: Path, tmp_path: Path) -> Path:
    """A copy of `plain_peft` that a test may damage."""
    return Path(shutil.copytree(plain_peft, tmp_path / "source"))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 128, (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., tuple[ConversionReport, Adapter]]:
    """Converts to a fresh folder with positions `all` and loads the result."""
    count = iter(range(1000))

    def run(source: Path, **options: Any) -> tuple[ConversionReport, Adapter]:
        target = tmp_path / f"converted-{next(count)}"
        report = convert(str(source), target, **{"positions": "all", **options})
        return report, load_adapter(target, expected_digest=report.manifest.digest)

    return run

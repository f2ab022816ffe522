"""What every test starts from: seeds, one thread, no network, and models built or fetched once a process."""

from __future__ import annotations

import os

# Before any library is imported: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    DO_NOT_TRACK="1",
    VLLM_NO_USAGE_STATS="1",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Test processes share the cores; vLLM would pin each of them to the same one.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import random
import sys
from pathlib import Path

import hypothesis
import pytest

SEED = 20_240
SEEDED_EXAMPLES, FULL_EXAMPLES = 40, 1_000

hypothesis.settings.register_profile("seeded", max_examples=SEEDED_EXAMPLES, deadline=None, derandomize=True)
hypothesis.settings.register_profile("full", max_examples=FULL_EXAMPLES, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also the tests marked `full`, and property tests whole")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("full" if config.getoption("--full") else "seeded")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if "full" in item.keywords]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if "full" not in item.keywords]


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds the generators, and hides what the developer's shell sets for `preft`."""
    random.seed(SEED)
    for module, seed in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if module in sys.modules:
            target = sys.modules[module]
            for part in seed.split("."):
                target = getattr(target, part)
            target(SEED)  # type: ignore[operator]
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for name in [name for name in os.environ if name.startswith("PREFT_") and name != "PREFT_CACHE"]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the long tests run whole."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded model as a checkpoint folder, fetched into the user's cache once."""
    from preft.models.locate import locate_model

    return locate_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama checkpoint with a tokenizer."""
    return _tiny(tmp_path_factory, "llama")


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2 checkpoint with a tokenizer."""
    return _tiny(tmp_path_factory, "qwen2")


def _tiny(factory: pytest.TempPathFactory, family: str) -> Path:
    from tests.helpers.tiny import build_tiny
    from tests.helpers.tokenizer import write_tiny_tokenizer

    folder = build_tiny(factory.mktemp("models") / f"tiny-{family}", family)
    write_tiny_tokenizer(folder)
    return folder

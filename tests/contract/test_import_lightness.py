"""`import preft` and the command line start without the heavy libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "transformers", "peft", "triton", "numpy", "datasets", "huggingface_hub")


def heavy_after(code: str) -> set[str]:
    """Which heavy libraries a fresh interpreter holds after running `code`."""
    script = f"import sys\n{code}\nprint(' '.join(sorted(set(sys.modules) & set({HEAVY!r}))))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(ended.stdout.split("\n")[-2].split())


@pytest.mark.parametrize(
    "code",
    [
        "import preft",
        "import preft, preft.errors, preft.types, preft.positions, preft.data.requests",
        "import preft_cli, preft_cli.app, preft_cli.console, preft_cli.render, preft_cli.progress",
        "import preft_kernels",
        "import preft_templates",
        "import importlib, preft_cli.app as app\nfor name in app.COMMANDS.values(): importlib.import_module(name)",
        "from preft_cli.app import run\nrun(['--help'])",
        "from preft_cli.app import run\nrun(['version'])",
        "import preft\npreft.Policy\npreft.PreftError",
    ],
)
def test_a_light_entry_imports_no_heavy_library(code: str) -> None:
    assert heavy_after(code) == set()


def test_the_check_can_fail() -> None:
    assert "numpy" in heavy_after("import numpy")


def test_a_command_is_imported_only_when_called() -> None:
    code = "from preft_cli.app import run\nrun(['version'])\nprint('preft_cli.commands.convert' in sys.modules)"
    script = f"import sys\n{code}"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "False"

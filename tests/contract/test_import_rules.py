"""The import rules hold, cover every package, and can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = Path(sys.executable).with_name("lint-imports")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the import linter on a tree, with that tree's own sources in front of the installed ones."""
    paths = f"{folder}:{folder}/cli:{folder}/kernels"
    return subprocess.run(
        [str(LINT), "--no-cache"], cwd=folder, env={"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources to plant something in."""
    for name in ("preft", "cli", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_rules_hold_on_a_copy(tree: Path) -> None:
    ended = lint(tree)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize(
    ("module", "line", "rule"),
    [
        ("kernels/preft_kernels/planted.py", "import preft.errors", "cli -> preft -> kernels, never back"),
        ("preft/adapters/planted.py", "import preft.models.locate", "Layers inside preft"),
        ("preft/data/planted.py", "def f():\n    import vllm", "Only preft.serve touches vllm"),
        ("preft/serve/planted.py", "import triton", "Only preft_kernels touches triton"),
        ("preft/convert/planted.py", "import rich", "Only preft_cli draws on the terminal"),
        ("preft/config/planted.py", "import torch", "Types, errors, positions, config, provenance need no ML library"),
    ],
)
def test_a_planted_violation_is_caught(tree: Path, module: str, line: str, rule: str) -> None:
    (tree / module).write_text(f"{line}\n")
    ended = lint(tree)
    assert ended.returncode == 1
    assert f"{rule} BROKEN" in ended.stdout


def test_a_new_package_is_kept_from_vllm_and_needs_a_layer(tree: Path) -> None:
    (tree / "preft" / "planted").mkdir()
    (tree / "preft" / "planted" / "__init__.py").write_text("import vllm\n")
    ended = lint(tree)
    assert ended.returncode == 1
    assert "Only preft.serve touches vllm BROKEN" in ended.stdout
    assert "Layers inside preft BROKEN" in ended.stdout

"""The wheel holds every package, the type marker, the templates and the licence, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"preft": "preft", "preft_cli": "cli/preft_cli", "preft_kernels": "kernels/preft_kernels"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel built from a copy of the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "shared", "out")
    shutil.copytree(ROOT, source, ignore=ignored)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, source],
        check=True,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize(("package", "folder"), PACKAGES.items())
def test_every_module_is_in_the_wheel(wheel: set[str], package: str, folder: str) -> None:
    root = ROOT / folder
    modules = {f"{package}/{path.relative_to(root)}" for path in root.rglob("*.py")}
    assert modules
    assert modules - wheel == set()
    assert f"{package}/py.typed" in wheel


def test_the_templates_are_in_the_wheel(wheel: set[str]) -> None:
    root = ROOT / "templates"
    files = {
        str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    }
    assert files - wheel == set()


def test_nothing_else_is_in_the_wheel(wheel: set[str]) -> None:
    roots = {name.split("/")[0] for name in wheel if ".dist-info/" not in name}
    assert roots == {*PACKAGES, "preft_templates"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
    assert any(name.endswith("entry_points.txt") for name in wheel)

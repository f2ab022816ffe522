"""The AOT suite under other versions of Triton than the locked one. Slow: each is a download of 200 to 300 MB, once."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "preft-triton"


def unpacked(version: str) -> Path:
    """The folder of a version's unpacked wheel; skips the test if it cannot be had."""
    folder = CACHE / version
    if (folder / "triton").is_dir():
        return folder
    downloads = CACHE / "wheels"
    ended = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", downloads, f"triton=={version}"],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(downloads.glob(f"triton-{version}-*.whl"))
    if ended.returncode or not wheels:
        pytest.skip(f"no wheel of Triton {version}: {ended.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)
    for tool in (folder / "triton" / "backends" / "nvidia" / "bin").iterdir():
        tool.chmod(0o755)
    return folder


@pytest.mark.aot
@pytest.mark.full
@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
def test_the_aot_suite(version: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(unpacked(version)), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == version, "another Triton is in front"
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/kernels/test_aot.py", "-q", "-m", "aot", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert "passed" in ended.stdout

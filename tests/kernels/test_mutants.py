"""Broken kernels and plans are found out by the same batches that the real ones pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.interpreter
def test_every_mutant_is_found_out() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.kernels.mutants"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    fates = json.loads(ended.stdout)
    assert len(fates) > 20
    assert set(fates.values()) <= {"survived", "killed", "refused", "crashed"}, fates
    passed = {title for title, fate in fates.items() if fate == "survived"}
    assert passed == {"unchanged", "unchanged plan"}

"""`import preft` offers what it says, lazily."""

from __future__ import annotations

import subprocess
import sys

import pytest

import preft

HEAVY = ("torch", "transformers", "vllm", "peft", "pandas", "matplotlib", "lm_eval")


@pytest.mark.parametrize("name", [name for name in preft.__all__ if name != "__version__"])
def test_every_name_resolves(name: str) -> None:
    assert getattr(preft, name).__doc__
    assert name in dir(preft)


def test_names_and_types_agree() -> None:
    assert set(preft._NAMES) | {"__version__"} == set(preft.__all__)
    with pytest.raises(AttributeError, match="no attribute 'convert_adaptor'"):
        _ = preft.convert_adaptor  # type: ignore[attr-defined]


def test_the_import_is_light() -> None:
    code = f"import sys, preft; print([name for name in {HEAVY!r} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"

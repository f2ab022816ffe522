"""Two suites in one folder: kernels run in Triton's interpreter, and kernels compiled for GPUs that are not here.

Triton decides at import which of the two it is, so they need two processes:

    TRITON_INTERPRET=1 pytest tests/kernels -m "not aot"
    pytest tests/kernels -m aot
"""

from __future__ import annotations

import os

import pytest

from tests.kernels.interpreter import is_interpreting, repair

# Multiply and add in one step, as is the default up to Triton 3.9, which warns that it will change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

if is_interpreting():
    repair()


@pytest.fixture(autouse=True)
def _right_process(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("aot") and is_interpreting():
        pytest.skip("compiles kernels; run without TRITON_INTERPRET")
    if request.node.get_closest_marker("interpreter") and not is_interpreting():
        pytest.skip("runs kernels in Triton's interpreter; run with TRITON_INTERPRET=1")

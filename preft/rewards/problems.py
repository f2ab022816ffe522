"""Programming problems in the form of HumanEval and MBPP, put together for the sandbox."""

from __future__ import annotations

import re

from preft.errors import UsageError
from preft.rewards.sandbox import Program

_FENCE = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def function_problem(stub: str, completion: str, tests: str, entry_point: str) -> Program:
    """A problem of HumanEval's form.

    Args:
        stub: The beginning of a program, up to the signature and docstring of a function.
        completion: What a model said: the function's body; or a whole function, bare or in a code block, which then
            replaces the stub's own while what stands before it in the stub is kept.
        tests: Defines `check(candidate)`.
        entry_point: The function's name.

    Raises:
        UsageError: `entry_point` is no name.
    """
    if not entry_point.isidentifier():
        raise UsageError("The entry point is not a name", got=f"`{entry_point}`"[:60], accepted="such as `add`")
    code = extract_code(completion)
    defines = re.compile(rf"^(async[ ]+)?def[ ]+{entry_point}\b", re.MULTILINE)
    if defines.search(code):
        start = defines.search(stub)
        code = f"{stub[: start.start()] if start else stub}\n{code}"
    else:
        code = f"{stub}{code}"
    return Program(code, f"{tests}\n\ncheck({entry_point})\n")


def asserted_problem(completion: str, tests: str | list[str], preamble: str = "") -> Program:
    """A problem of MBPP's form.

    Args:
        completion: What a model said: code, bare or in a code block.
        tests: Statements that raise if the code is wrong.
        preamble: Imports and definitions that the tests need.
    """
    lines = tests if isinstance(tests, str) else "\n".join(tests)
    return Program(extract_code(completion), f"{preamble}\n{lines}\n")


def extract_code(text: str) -> str:
    """The code in a model's answer: its first code block of Python's, or the whole text where there is none."""
    found = _FENCE.search(text)
    return found.group(1) if found else text

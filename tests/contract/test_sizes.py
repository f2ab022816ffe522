"""Modules of at most 500 lines, functions of at most 80: a gate, with the exceptions and their reasons."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("preft", "cli", "kernels", "templates", "tests", "benchmarks", "scripts")
MODULE_LINES, FUNCTION_LINES = 500, 80

ALLOWED: dict[str, str] = {}
"""`path` or `path:function` to the reason it may be longer."""


def too_long(root: Path) -> list[str]:
    """Every module and function over its limit, as `path` or `path:function`."""
    found = []
    for path in sorted(path for source in SOURCES for path in (root / source).rglob("*.py")):
        name = str(path.relative_to(root))
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > MODULE_LINES:
            found.append(name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    found.append(f"{name}:{node.name}")
    return found


def test_sizes() -> None:
    assert [name for name in too_long(ROOT) if name not in ALLOWED] == []


def test_no_exception_is_out_of_date() -> None:
    assert sorted(set(ALLOWED) - set(too_long(ROOT))) == []


def test_the_gate_can_fail(tmp_path: Path) -> None:
    (tmp_path / "preft").mkdir()
    body = "\n".join(f"    x = {number}" for number in range(FUNCTION_LINES + 1))
    (tmp_path / "preft" / "long.py").write_text(f"def f():\n{body}\n" + "\n" * MODULE_LINES)
    assert too_long(tmp_path) == ["preft/long.py", "preft/long.py:f"]

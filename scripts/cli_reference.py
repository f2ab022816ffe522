"""Writes docs/reference/cli.md from the help pages; `--check` says instead whether it is current."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path

WIDTH = 100
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
HEAD = """# Command line

Every page of `preft COMMAND --help`. Data goes to stdout, everything else to stderr; exit status 0 is ok, 1 failed,
2 wrong usage. This page is generated: `make docs-cli`.
"""


def help_page(words: list[str]) -> str:
    """What `preft WORDS --help` prints at the page's width."""
    from preft_cli.app import run

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = run([*words, "--help"])
    if status:
        raise RuntimeError(f"`preft {' '.join(words)} --help` ended with {status}")
    return "\n".join(line.rstrip() for line in printed.getvalue().strip("\n").splitlines())


def commands() -> list[list[str]]:
    """Every command and every group, as words, in the order of `preft --help`."""
    import typer

    from preft_cli.app import COMMANDS, app

    root = typer.main.get_command(app)
    found: list[list[str]] = []
    for name in COMMANDS:
        found.append([name])
        found += [[name, child] for child in getattr(root.get_command(None, name), "commands", {})]
    return found


def render() -> str:
    """The page's text."""
    os.environ.update(COLUMNS=str(WIDTH), TERMINAL_WIDTH=str(WIDTH), LANG="C.UTF-8")
    sections = [HEAD, f"```text\n{help_page([])}\n```\n"]
    for words in commands():
        sections.append(f"## preft {' '.join(words)}\n\n```text\n{help_page(words)}\n```\n")
    return "\n".join(sections)


def main() -> int:
    """Writes the page, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page is not current")
    if not parser.parse_args().check:
        PAGE.write_text(render(), encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == render():
        return 0
    print(f"{PAGE.name} is not current: run `make docs-cli`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

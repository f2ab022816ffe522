"""The code blocks of the README and the documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"docs/reference/cli.md"}
"""Pages of help texts, which `scripts/reference.py` writes and tests compare."""
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^>]+) -->\n+)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: The page, from the repository's root.
        line: Number of its first line.
        language: What stands after the fence; a bare fence is shell.
        text: What is inside.
        reason: Why it is not run, where the page says so in a comment above it.
    """

    page: str
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """The README and every page of the documentation."""
    found = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page not in GENERATED]


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    return blocks_of(page, (ROOT / page).read_text(encoding="utf-8"))


def blocks_of(page: str, text: str) -> list[Block]:
    """The blocks of a page's text."""
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        found.append(Block(page, line, match["language"] or "sh", match["text"], match["reason"]))
    return found


def commands(text: str) -> list[str]:
    """The commands of a shell block, one a line; without comments and the bodies of here-documents."""
    lines, end = [], None
    for line in _whole_lines(text.replace("\\\n", " ")):
        if end is not None:
            end = None if line == end else end
            continue
        here = re.search(r"<<'?(\w+)'?", line)
        end = here[1] if here else None
        stripped = re.sub(r"(^|\s)#.*$", "", line).strip()
        lines += [part for part in re.split(r"\s*&&\s*", stripped) if part]
    return lines


def _whole_lines(text: str) -> list[str]:
    """Lines, where one that ends inside single quotes goes on with the next."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and lines[-1].count("'") % 2:
            lines[-1] += "\n" + line
        else:
            lines.append(line)
    return lines

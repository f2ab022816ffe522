"""What the repository's text may not hold, and what it must."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.~$}>/])/(?:work|root|home/\w+|Users/\w+|opt|mnt)/"),
    "an unfinished marker": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b"),
    "a merge conflict": re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE),
    "a credential": re.compile(r"\b(?:hf_[A-Za-z0-9]{30,}|ghp_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9]{40,})\b"),
}
ALLOWED = {("LICENSE", "a path of one machine")}


def tracked_files() -> list[Path]:
    """Files of the repository, without those that git ignores; every file if this is not a git checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return [ROOT / name for name in sorted(set(listed.stdout.split("\0"))) if name and (ROOT / name).is_file()]


def findings(text: str) -> list[str]:
    """Names of the forbidden things that a text holds."""
    return [name for name, pattern in FORBIDDEN.items() if pattern.search(text)]


def test_no_file_holds_a_forbidden_thing() -> None:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        name = str(path.relative_to(ROOT))
        found += [f"{name}: {thing}" for thing in findings(text) if (name, thing) not in ALLOWED]
    assert found == []


def test_the_search_can_fail() -> None:
    assert findings("see /" + "home/someone/model") == ["a path of one machine"]
    assert findings("# TO" + "DO later") == ["an unfinished marker"]
    assert findings("docs/home/page, https://example.org/home/x, ~/opt/x") == []


def test_the_files_that_a_project_needs_are_there() -> None:
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", ".ci/run"):
        assert (ROOT / name).is_file(), name


def test_every_environment_variable_that_is_read_is_known() -> None:
    from preft_cli.environment import VARIABLES

    read = set()
    for folder in ("preft", "cli", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            read |= set(re.findall(r"[\"'](PREFT_[A-Z_]+)[\"']", path.read_text(encoding="utf-8")))
    assert read == set(VARIABLES)

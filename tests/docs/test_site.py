"""The site builds without a broken link, holds every page, and its generated pages are current."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import reference
from tests.docs.blocks import ROOT


def build(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(target)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=ROOT,
    )


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra `docs`)")
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert "preft.positions.Policy" in (tmp_path / "site" / "reference" / "python.html").read_text()
    outside = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="https?://')
    assert [page.name for page in (tmp_path / "site").rglob("*.html") if outside.search(page.read_text())] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra `docs`)")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[x](nowhere.md)")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nvalidation: {links: {not_found: warn}}\n")
    assert build(tmp_path / "mkdocs.yml", tmp_path / "site").returncode != 0


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_generated_pages_are_current(name: str) -> None:
    assert (reference.FOLDER / name).read_text(encoding="utf-8") == reference.PAGES[name](), "run `make docs-reference`"


def test_links_of_the_readme_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text()
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if not target.startswith("https://"):
                assert (ROOT / target).exists(), f"{name}: {target}"

"""The access log: what a client chooses is short in it, and a full disk spoils one line at most."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from preft.serve.http.notes import Note, Notes


def test_what_a_client_chose_is_short(tmp_path: Path) -> None:
    notes = Notes(str(tmp_path / "log"))
    with notes.open(Note("POST", "/" + "x" * 10_000, model="m" * 10_000)) as note:
        note.request_id = "r" * 10_000
    line = (tmp_path / "log").read_text()
    assert len(line) < 1200
    assert {len(json.loads(line)[name]) for name in ("path", "model", "request_id")} == {200}


def test_a_full_disk_spoils_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, write = Notes(str(tmp_path / "log")), os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for number, writing in enumerate((write, lambda file, data: write(file, data[:20]), full, write, write)):
        monkeypatch.setattr(os, "write", writing)
        with notes.open(Note("GET", f"/{number}")):
            pass
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 4
    assert [json.loads(line)["path"] for line in (lines[0], *lines[2:])] == ["/0", "/3", "/4"]

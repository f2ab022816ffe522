"""B9 and B1: names that can never be paths, folders inside one root, and the nearest names of an unknown one."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from preft.adapters.catalog import MAX_NAME_LENGTH, require_name, scan_root, split_name_path, unknown_adapter
from preft.adapters.store import save_adapter
from preft.errors import FileError, UsageError
from tests.helpers.tiny import random_adapter

BAD_NAMES = [
    "", ".", "..", "../x", "/etc", "a/b", "a\\b", "a\0b", "a" * (MAX_NAME_LENGTH + 1), "..%2f", "%2e%2e", "a..b", "-a",
    "a-", ".hidden", "a b", "a\n", "a:b", "аdmin", "ａ", "a\u200b", "NAME=x", "~", "*", "a" * 300,
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_is_never_a_path(name: str) -> None:
    with pytest.raises(UsageError, match="not valid") as caught:
        require_name(name)
    assert str(caught.value).isprintable() or "\n" in str(caught.value)
    assert "\0" not in str(caught.value)


@pytest.mark.parametrize("name", ["a", "alice", "Alice-2", "v1.2", "x_y.z-0", "a" * MAX_NAME_LENGTH])
def test_ordinary_names_are_accepted(name: str) -> None:
    assert require_name(name) == name


@pytest.mark.parametrize("name", ["base-model", "Base-Model", "BASE-MODEL"])
def test_the_base_models_name_is_reserved_in_any_case(name: str) -> None:
    with pytest.raises(UsageError, match="reserved"):
        require_name(name, reserved=["base-model"])


def test_name_and_path() -> None:
    assert split_name_path("alice=adapters/a=b") == ("alice", Path("adapters/a=b"))
    for text in ("alice", "=x", "alice=", "a/b=c"):
        with pytest.raises(UsageError):
            split_name_path(text)


@pytest.fixture
def root(tiny_llama: Path, tmp_path: Path) -> Path:
    adapter = random_adapter(tiny_llama, seed=1, targets=("q_proj",))
    for name in ("alice", "bob"):
        save_adapter(adapter, tmp_path / "root" / name)
    (tmp_path / "root" / "notes").mkdir()
    (tmp_path / "root" / "file.txt").write_text("")
    return tmp_path / "root"


def test_a_root_holds_the_folders_that_have_a_manifest(root: Path) -> None:
    assert scan_root(root) == {"alice": root / "alice", "bob": root / "bob"}


def test_a_root_that_is_an_adapter_is_refused(root: Path) -> None:
    with pytest.raises(UsageError, match="is itself an adapter") as caught:
        scan_root(root / "alice")
    assert "--adapter NAME=" in str(caught.value.hint)


def test_a_peft_adapter_is_not_passed_over(root: Path) -> None:
    (root / "unconverted").mkdir()
    (root / "unconverted" / "adapter_config.json").write_text("{}")
    assert list(scan_root(root)) == ["alice", "bob", "unconverted"]


def test_a_link_that_leaves_the_root_is_refused(root: Path, tmp_path: Path, tiny_llama: Path) -> None:
    save_adapter(random_adapter(tiny_llama, seed=2, targets=("q_proj",)), tmp_path / "outside")
    (root / "eve").symlink_to(tmp_path / "outside")
    with pytest.raises(FileError, match="leaves the root"):
        scan_root(root)
    (root / "eve").unlink()
    (root / "eve").symlink_to(root / "bob")
    assert set(scan_root(root)) == {"alice", "bob", "eve"}


def test_a_root_whose_name_is_a_prefix_of_another_does_not_hold_it(root: Path, tiny_llama: Path) -> None:
    save_adapter(random_adapter(tiny_llama, seed=2, targets=("q_proj",)), Path(f"{root}-other") / "x")
    (root / "x").symlink_to(Path(f"{root}-other") / "x")
    with pytest.raises(FileError, match="leaves the root"):
        scan_root(root)


def test_names_that_differ_in_case_alone_are_refused(root: Path, tiny_llama: Path) -> None:
    save_adapter(random_adapter(tiny_llama, seed=2, targets=("q_proj",)), root / "Alice")
    with pytest.raises(UsageError, match="case"):
        scan_root(root)


def test_a_folder_whose_name_is_no_name_is_refused(root: Path, tiny_llama: Path) -> None:
    save_adapter(random_adapter(tiny_llama, seed=2, targets=("q_proj",)), root / "two words")
    with pytest.raises(UsageError, match="not valid"):
        scan_root(root)


def test_a_missing_root_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="root"):
        scan_root(tmp_path / "nothing")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    error = unknown_adapter("alcie", ["alice", "bob", "carol"])
    assert error.http_status == 404
    assert "`alice`" in (error.accepted or "")
    assert unknown_adapter("zzz", []).accepted == "none"
    many = unknown_adapter("zzz", [f"tenant-{index}" for index in range(9)])
    assert (many.accepted or "").endswith("...")


def test_of_a_name_of_many_mib_only_a_beginning_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other requests wait while it is."""
    compared: list[str] = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda word, *_args, **_options: compared.append(word) or [])
    unknown_adapter("z" * 10_000_000, ["alice"])
    assert compared == ["z" * MAX_NAME_LENGTH]

"""Where a model is found: a folder, the embedded one in the cache, or the hub."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from preft.errors import FileError, PreftError, UsageError
from preft.models import locate
from preft.models.locate import cache_dir, find_local_model, locate_model
from preft.models.smollm2 import HUB_ID, MODEL_NAME


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_fetch(folder: Path, **_: Any) -> Path:
    """Takes a while, and tells how often it ran."""
    time.sleep(0.2)
    with (folder.parent / "fetches").open("a") as log:
        log.write("x")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_is_itself(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_model(str(tiny_llama)) == tiny_llama
    monkeypatch.chdir(tiny_llama.parent)
    assert locate_model(tiny_llama.name) == Path(tiny_llama.name)


def test_an_adapter_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "preft.json").write_text("{}")
    with pytest.raises(FileError, match="not a model checkpoint") as caught:
        locate_model(str(tmp_path))
    assert "an adapter" in str(caught.value)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(FileError, match="is a file"):
        locate_model(str(tmp_path / "x"))


@pytest.mark.parametrize("name", [MODEL_NAME, MODEL_NAME.upper(), HUB_ID, HUB_ID.lower()])
def test_the_embedded_model_is_fetched_once(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "fetch_smollm2", fake_fetch)
    assert find_local_model(name) is None
    folder = locate_model(name)
    assert folder == cache / "models" / MODEL_NAME
    assert locate_model(name) == folder == find_local_model(name)
    assert (folder.parent / "fetches").read_text() == "x"


def _locate_in_a_process(queue: Any) -> None:
    locate.fetch_smollm2 = fake_fetch
    queue.put(str(locate_model(MODEL_NAME)))


def test_processes_that_want_it_at_once_get_it_once(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_locate_in_a_process, args=(queue,)) for _ in range(3)]
    for process in processes:
        process.start()
    found = {queue.get(timeout=30) for _ in processes}
    for process in processes:
        process.join(30)
    assert found == {str(cache / "models" / MODEL_NAME)}
    assert (cache / "models" / "fetches").read_text() == "x"


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PREFT_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(FileError, match="cannot be written") as caught:
        locate_model(MODEL_NAME)
    assert "PREFT_CACHE" in (caught.value.hint or "")


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "preft"
    monkeypatch.setenv("PREFT_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("PREFT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "preft"


def test_a_hub_id_brings_configuration_and_safetensors_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert locate_model("org/name@refs/pr/1") == tmp_path
    assert (asked["repository"], asked["revision"]) == ("org/name", "refs/pr/1")
    assert not any("py" in pattern or "bin" in pattern or "pt" in pattern for pattern in asked["allow_patterns"])


class _Response:
    status_code = 404
    request = None

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (RepositoryNotFoundError, "There is no model `org/name`"),
        (GatedRepoError, "gated"),
        (LocalEntryNotFoundError, "cannot be reached"),
        (ConnectionError, "cannot be reached"),
    ],
)
def test_what_the_hub_answers_is_told(error: Any, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: Any, **__: Any) -> str:
        if error in (RepositoryNotFoundError, GatedRepoError):
            raise error("told", response=_Response())
        raise error("told")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(FileError, match=match) as caught:
        locate_model("org/name")
    assert caught.value.hint


def test_a_hub_repository_without_a_model_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(FileError, match="is not a model"):
        locate_model("org/name")


def test_offline_says_so() -> None:
    with pytest.raises(FileError) as caught:
        locate_model("no-such-organisation/no-such-model")
    assert "no-such-organisation/no-such-model" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "name", ["", "a b", "x\0y", "-x", "org/name@", "http://x/y", "https://example.org/m", "org/../x"]
)
def test_what_cannot_be_a_model_is_refused(name: str) -> None:
    with pytest.raises((UsageError, FileError)):
        locate_model(name)
    assert find_local_model(name) is None


@pytest.mark.parametrize("name", ["/no/such/folder", "./no", "../no", "~/no/such", "a/b/c"])
def test_a_path_that_does_not_exist_is_never_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: Any, **__: Any) -> str:
        raise AssertionError("asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(PreftError, match="does not exist"):
        locate_model(name)

"""Reading and writing adapter folders: strict, without links, by digest."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from preft.adapters import store
from preft.adapters.adapter import Adapter
from preft.adapters.manifest import MANIFEST_NAME, TENSORS_NAME
from preft.adapters.store import adapter_from_bytes, load_adapter, parse_safetensors, save_adapter
from preft.errors import AdapterError, FileError, UsageError
from preft.positions import Policy
from tests.helpers.tiny import random_adapter


@pytest.fixture(scope="module")
def adapter(tiny_llama: Path) -> Adapter:
    return random_adapter(tiny_llama, seed=3, rank=(2, 5), targets=("q_proj", "down_proj"), blocks=(0, 1))


@pytest.fixture
def folder(adapter: Adapter, tmp_path: Path) -> Path:
    save_adapter(adapter, tmp_path / "adapter")
    return tmp_path / "adapter"


def raw(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def test_round_trip(adapter: Adapter, folder: Path) -> None:
    loaded = load_adapter(folder, expected_digest=adapter.digest)
    assert loaded.manifest == adapter.manifest
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in adapter.tensors.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_round_trip_in_half_precision(dtype: torch.dtype, tiny_llama: Path, tmp_path: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=1, targets=("o_proj",), dtype=dtype)
    save_adapter(adapter, tmp_path / "half")
    assert load_adapter(tmp_path / "half").digest == adapter.digest


def test_the_folder_may_be_reached_through_a_link(folder: Path, tmp_path: Path, adapter: Adapter) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert load_adapter(tmp_path / "link").digest == adapter.digest


@pytest.mark.parametrize("name", [MANIFEST_NAME, TENSORS_NAME])
def test_a_file_that_is_a_link_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / name, tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(FileError, match=name) as caught:
        load_adapter(folder)
    assert "link" in str(caught.value)


@pytest.mark.parametrize("name", [MANIFEST_NAME, TENSORS_NAME])
def test_a_file_that_is_no_regular_file_is_refused_and_never_waited_for(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(FileError, match=name):
        load_adapter(folder)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_tensors_are_refused(keep: int, folder: Path) -> None:
    path = folder / TENSORS_NAME
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(AdapterError, match=TENSORS_NAME):
        load_adapter(folder)


@pytest.mark.parametrize("offset", [-1, -1000])
def test_one_flipped_bit_is_refused(offset: int, folder: Path) -> None:
    path = folder / TENSORS_NAME
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(AdapterError, match="digest"):
        load_adapter(folder)


def test_a_changed_scale_is_refused(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    path.write_text(path.read_text().replace('"scale": 2.0', '"scale": 2.5', 1))
    with pytest.raises(AdapterError, match="digest"):
        load_adapter(folder)


def test_a_changed_policy_is_refused(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    path.write_text(path.read_text().replace('"positions": "prompt"', '"positions": "all"'))
    with pytest.raises(AdapterError, match="digest"):
        load_adapter(folder)


def test_another_adapter_than_was_registered_is_refused(folder: Path) -> None:
    with pytest.raises(AdapterError, match="registered"):
        load_adapter(folder, expected_digest="0" * 64)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "truncated"),
        (b"\xff" * 16, "truncated or not a safetensors"),
        (raw(b"{}  ")[:-1], "truncated"),
        (raw(b"[]"), "JSON object"),
        (raw(b"{nonsense"), "not valid JSON"),
        (raw({"x": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)), "`x`.*unsupported type"),
        (raw({"x": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}, bytes(1)), "unsupported type"),
        (raw({"x": 3}), "unsupported type"),
        (raw({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "not a valid"),
        (raw({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, bytes(4)), "not a valid"),
        (raw(b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "x": {}}', bytes(4)), "twice"),
    ],
)
def test_headers_that_lie_are_refused(data: bytes, match: str) -> None:
    with pytest.raises(AdapterError, match=match):
        parse_safetensors(data, "some/file")


Edit = Callable[[dict[str, torch.Tensor]], object]


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda t: t.pop("model.layers.0.self_attn.q_proj.up"), "missing"),
        (lambda t: t.__setitem__("extra", torch.zeros(1)), "unknown `extra`"),
        (lambda t: t.__setitem__("model.layers.0.self_attn.q_proj.up", torch.zeros(2, 2)), "wrong shape"),
        (lambda t: t.__setitem__("model.layers.0.block.bias", torch.full((2,), torch.nan)), "not finite"),
        (lambda t: t.__setitem__("model.layers.0.block.bias", torch.zeros(2).half()), "wrong dtype"),
    ],
)
def test_tensors_must_be_those_of_the_manifest(edit: Edit, match: str, folder: Path) -> None:
    tensors = load_file(folder / TENSORS_NAME)
    edit(tensors)
    save_file(tensors, folder / TENSORS_NAME)
    with pytest.raises(AdapterError, match=match):
        load_adapter(folder)


def test_bytes_in_memory_are_validated_alike(adapter: Adapter, folder: Path) -> None:
    manifest, tensors = ((folder / name).read_bytes() for name in (MANIFEST_NAME, TENSORS_NAME))
    assert adapter_from_bytes(manifest, tensors, name="pushed").digest == adapter.digest
    with pytest.raises(AdapterError, match="pushed"):
        adapter_from_bytes(manifest, tensors[:-4], name="pushed")


@pytest.mark.parametrize("missing", ["folder", MANIFEST_NAME, TENSORS_NAME])
def test_what_is_missing_is_named(missing: str, folder: Path) -> None:
    if missing == "folder":
        shutil.rmtree(folder)
    else:
        (folder / missing).unlink()
    with pytest.raises(FileError) as caught:
        load_adapter(folder)
    assert (missing if missing != "folder" else str(folder)) in str(caught.value)


def test_a_peft_folder_is_sent_to_conversion(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileError) as caught:
        load_adapter(tmp_path)
    assert "preft convert" in (caught.value.hint or "")


@pytest.mark.parametrize("name", [MANIFEST_NAME, TENSORS_NAME])
def test_a_file_too_large_to_be_right_is_not_read(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint under an adapter's name would fill a server's memory before it was refused."""
    os.truncate(folder / name, 1 << 40)
    with pytest.raises(FileError, match=f"{name}` is too large"):
        load_adapter(folder)


def test_tensors_beyond_memory_are_an_error_like_others(
    adapter: Adapter, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest may call for any size."""
    monkeypatch.setattr(store, "_most_bytes", lambda _manifest: 1 << 62)
    os.truncate(folder / TENSORS_NAME, 1 << 43)
    with pytest.raises(FileError, match="does not fit in memory"):
        load_adapter(folder)


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(FileError, match="not a folder"):
        load_adapter(folder / MANIFEST_NAME)


def test_saving_over_something_needs_force(adapter: Adapter, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not empty"):
        save_adapter(adapter, folder)
    save_adapter(adapter, folder, force=True)
    (tmp_path / "empty").mkdir()
    save_adapter(adapter, tmp_path / "empty")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(UsageError, match="not a folder"):
        save_adapter(adapter, tmp_path / "link", force=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["adapter", "empty", "link"]


def test_a_disk_that_tells_late_that_it_is_full_leaves_what_was_there(
    adapter: Adapter, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, flushed = (folder / TENSORS_NAME).stat().st_ino, []

    def full(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if flushed[-1].endswith(TENSORS_NAME):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="No space left"):
        save_adapter(adapter, folder, force=True)
    assert flushed
    assert (folder / TENSORS_NAME).stat().st_ino == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_zero_updates_move_nothing(adapter: Adapter) -> None:
    assert not adapter.moves_nothing()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in adapter.tensors.items()}
    assert Adapter.build(adapter.manifest, tensors).moves_nothing()
    for part, moves in (("down", True), ("up", False)):
        # With `down` zero a block's bias still moves it; with `up` zero nothing does.
        changed = {n: torch.zeros_like(t) if n.endswith(part) else t for n, t in adapter.tensors.items()}
        assert Adapter.build(adapter.manifest, changed).moves_nothing() != moves


def test_the_digest_depends_on_what_changes_outputs_and_on_nothing_else(adapter: Adapter) -> None:
    manifest = adapter.manifest
    digest = adapter.digest
    same = [
        replace(manifest, provenance={"x": 1}),
        replace(manifest, chat_template_sha256="0" * 64),
        replace(manifest, base=replace(manifest.base, model="other name", mismatch_allowed=True)),
    ]
    other = [
        replace(manifest, positions=Policy.parse("all")),
        replace(manifest, positions=Policy.parse("f1+l1")),
        replace(manifest, base=replace(manifest.base, weights={})),
        replace(manifest, base=replace(manifest.base, architecture={**manifest.base.architecture, "vocab_size": 9})),
    ]
    assert {Adapter.build(variant, adapter.tensors).digest for variant in same} == {digest}
    for variant in other:
        assert Adapter.build(variant, adapter.tensors).digest != digest
    linear = next(index for index, site in enumerate(manifest.sites) if site.scale == 2.0)
    rescaled = tuple(replace(s, scale=2.1) if i == linear else s for i, s in enumerate(manifest.sites))
    assert Adapter.build(replace(manifest, sites=rescaled), adapter.tensors).digest != digest

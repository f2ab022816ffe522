"""A8, A12, A15-A18, A21: damaged, hostile, missing and oversized inputs, and targets that cannot be written."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import preft.adapters.store as store
from preft.adapters.store import load_adapter
from preft.convert.detect import SourceKind, detect
from preft.convert.run import convert
from preft.errors import AdapterError, BaseMismatchError, FileError, PreftError, UnsupportedError, UsageError
from tests.helpers.peft_lora import CONFIG, TENSORS, edit_config, edit_tensors, make_peft

FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def poison(source: Path, tensor: torch.Tensor) -> Path:
    return edit_tensors(source, lambda tensors: tensors.__setitem__(FIRST, tensor))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a8_not_finite(bad: float, source: Path, converted: Any) -> None:
    tensor = torch.ones(4, 64)
    tensor[0, :3] = bad
    with pytest.raises(AdapterError, match="not finite") as caught:
        converted(poison(source, tensor))
    assert FIRST in str(caught.value)
    assert "3 of 256" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn, torch.float64, torch.bool])
def test_a8_not_a_supported_type(dtype: torch.dtype, source: Path, converted: Any) -> None:
    with pytest.raises(AdapterError, match="unsupported type") as caught:
        converted(poison(source, torch.ones(4, 64).to(dtype)))
    assert FIRST in str(caught.value)


def test_a8_empty_and_flat_tensors(source: Path, converted: Any) -> None:
    for tensor in (torch.zeros(0), torch.zeros(4 * 64), torch.zeros(0, 64)):
        with pytest.raises(AdapterError, match=FIRST):
            converted(poison(source, tensor))


def test_a12_never_trained(source: Path, converted: Any) -> None:
    def clear(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if "lora_B" in name:
                tensor.zero_()

    report, adapter = converted(edit_tensors(source, clear), positions="prompt")
    assert adapter.moves_nothing()
    assert any("moves nothing" in warning for warning in report.warnings)


def test_a12_a_zero_first_factor_moves_nothing_either(source: Path, converted: Any) -> None:
    def clear(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if "lora_A" in name:
                tensor.zero_()

    _, adapter = converted(edit_tensors(source, clear))
    assert adapter.moves_nothing()


def as_pickle(source: Path, content: Any) -> Path:
    torch.save(content, source / "adapter_model.bin")
    (source / TENSORS).unlink(missing_ok=True)
    return source


def test_a15_a_bin_of_plain_tensors_is_read(source: Path, converted: Any) -> None:
    _, expected = converted(source)
    report, adapter = converted(as_pickle(source, load_file(source / TENSORS)))
    assert adapter.digest == expected.digest
    assert any("nothing in it was run" in note for note in report.notes)


class _Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
def test_a15_a_bin_that_would_run_code_never_does(protocol: str, source: Path, tmp_path: Path, converted: Any) -> None:
    canary = tmp_path / "canary"
    content = {**load_file(source / TENSORS), "x": _Canary(canary)}
    as_pickle(source, content)
    if protocol == "pickle":
        (source / "adapter_model.bin").write_bytes(pickle.dumps({"x": _Canary(canary)}, protocol=2))
    with pytest.raises(AdapterError, match=r"never run|damaged"):
        converted(source)
    assert not canary.exists()
    # Premise: the pickle does fire when it is loaded without care.
    with contextlib.suppress(RuntimeError):
        torch.load(source / "adapter_model.bin", weights_only=False)
    assert canary.exists()


@pytest.mark.parametrize("content", [[1, 2], {"a": 3}, {1: torch.zeros(2)}, b"garbage"])
def test_a15_a_bin_that_holds_something_else(content: Any, source: Path, converted: Any) -> None:
    with pytest.raises(AdapterError):
        converted(as_pickle(source, content))


def test_a15_a_truncated_bin(source: Path, converted: Any) -> None:
    as_pickle(source, load_file(source / TENSORS))
    path = source / "adapter_model.bin"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(AdapterError):
        converted(source)


def test_a15_a_pickle_is_never_an_adapter_of_ours(source: Path) -> None:
    with pytest.raises(FileError, match="not a preft adapter"):
        load_adapter(as_pickle(source, load_file(source / TENSORS)))


def test_safetensors_win_over_a_bin(source: Path, converted: Any) -> None:
    _, expected = converted(source)
    (source / "adapter_model.bin").write_bytes(b"never read")
    _, adapter = converted(source)
    assert adapter.digest == expected.digest


def test_a16_a_file(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is a file"):
        convert(str(source / TENSORS), tmp_path / "out")


def test_a16_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="an empty folder"):
        convert(str(tmp_path / "empty"), tmp_path / "out")


def test_a16_a_model_instead_of_an_adapter(bases: Any, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="a model checkpoint"):
        convert(str(bases()), tmp_path / "out")


def test_a16_no_weights(source: Path, tmp_path: Path) -> None:
    (source / TENSORS).unlink()
    with pytest.raises(FileError, match="no weights"):
        convert(str(source), tmp_path / "out")


@pytest.mark.parametrize("keep", [0, 4, 200, -100])
def test_a16_truncated_safetensors(keep: int, source: Path, converted: Any) -> None:
    path = source / TENSORS
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(AdapterError, match=TENSORS):
        converted(source)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"peft_type": "LORA",\n  "r": }', "line 2, column 8"),
        ('{"r": 4,\n "peft_type": "LORA",\n "r": 8}', "line 3, column 2"),
        ('{"peft_type": "LORA", "lora_alpha": NaN}', "NaN"),
        ("[]", "list"),
        ("", "line 1, column 1"),
        ('{"r": 8}', "peft_type"),
    ],
)
def test_a16_json_is_located(text: str, where: str, source: Path, converted: Any) -> None:
    (source / CONFIG).write_text(text)
    with pytest.raises(AdapterError) as caught:
        converted(source)
    assert CONFIG in str(caught.value)
    assert where in str(caught.value)


def test_a16_bytes_that_are_not_text(source: Path, converted: Any) -> None:
    (source / CONFIG).write_bytes(b'{"r": "\xff"}')
    with pytest.raises(AdapterError, match="UTF-8"):
        converted(source)


@pytest.mark.parametrize("name", ["no-such-org/no-such-base", "/no/such/folder", "./nowhere"])
def test_a16_a_base_that_does_not_exist(name: str, source: Path, converted: Any) -> None:
    edit_config(source, base_model_name_or_path=name)
    with pytest.raises(PreftError) as caught:
        converted(source)
    assert name in str(caught.value)
    assert "--base" in (caught.value.hint or "")
    with pytest.raises(PreftError):
        converted(source, base=name)


def test_a16_no_base_is_named(source: Path, converted: Any) -> None:
    with pytest.raises(UsageError, match="names no base") as caught:
        converted(edit_config(source, base_model_name_or_path=None))
    assert "--base" in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["no-such-org/no-such-adapter", "/no/such", "../nope", "", "a b", "x\0y"])
def test_a16_a_source_that_does_not_exist(name: str, tmp_path: Path) -> None:
    with pytest.raises(PreftError):
        convert(name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", ["f0", "", "prefill", "f1+", "l1+f1", "ALL"])
def test_positions_are_checked_before_anything_is_read(bad: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="position policy"):
        convert(str(tmp_path / "nothing"), tmp_path / "out", positions=bad)


@pytest.mark.parametrize(("given", "recorded"), [(None, "prompt"), ("f3+l3", "f3+l3"), ("all", "all"), ("l1", "l1")])
def test_positions_are_recorded(given: str | None, recorded: str, source: Path, converted: Any) -> None:
    report, adapter = converted(source, positions=given)
    assert str(adapter.manifest.positions) == recorded
    assert report.to_dict()["positions"] == recorded


def test_a_source_that_is_ours_already(source: Path, tmp_path: Path) -> None:
    convert(str(source), tmp_path / "one")
    with pytest.raises(AdapterError, match="already"):
        convert(str(tmp_path / "one"), tmp_path / "two")


def test_a_pyreft_checkpoint_is_told_apart(tmp_path: Path, bases: Any) -> None:
    folder = tmp_path / "reft"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    torch.save({}, folder / "intkey_comp.model.layers[1].output#0.bin")
    assert detect(folder) is SourceKind.PYREFT
    with pytest.raises(PreftError) as caught:
        convert(str(folder), tmp_path / "out", positions="f1+l1", base=str(bases()))
    assert isinstance(caught.value, UnsupportedError | AdapterError)


def test_a17_a_taken_target_needs_force(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    first = convert(str(source), target)
    with pytest.raises(UsageError, match="not empty"):
        convert(str(source), target, positions="all")
    second = convert(str(source), target, positions="all", force=True)
    assert first.manifest.digest != second.manifest.digest == load_adapter(target).digest


def test_a17_force_never_replaces_a_folder_that_is_not_ours(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "thesis"
    target.mkdir()
    (target / "chapter-1.tex").write_text("years of work")
    with pytest.raises(UsageError, match="does not replace"):
        convert(str(source), target, force=True)
    with pytest.raises(UsageError):
        convert(str(source), source, force=True)
    assert (target / "chapter-1.tex").exists()


def test_a17_a_target_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises((UsageError, FileError)):
            convert(str(source), target)
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), FileError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), MemoryError),
    ],
)
@pytest.mark.parametrize("moment", ["tensors", "manifest", "swap"])
@pytest.mark.parametrize("force", [False, True])
def test_a17_half_way_leaves_the_old_adapter_or_nothing(
    failure: BaseException,
    expected: type[BaseException],
    moment: str,
    force: bool,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tmp_path / "adapters" / "out"
    before = convert(str(source), target).manifest.digest if force else None

    def fail(*_: Any, **__: Any) -> None:
        raise failure

    def write_some_then_fail(tensors: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise failure

    if moment == "tensors":
        monkeypatch.setattr("safetensors.torch.save_file", write_some_then_fail)
    elif moment == "manifest":
        monkeypatch.setattr(Path, "write_text", fail)
    else:
        monkeypatch.setattr(store, "_swap_in", fail)
    with pytest.raises(expected):
        convert(str(source), target, positions="all", force=force)
    monkeypatch.undo()
    if force:
        assert sorted(entry.name for entry in target.parent.iterdir()) == ["out"]
        assert load_adapter(target).digest == before
    else:
        assert list(target.parent.iterdir()) == []


def test_a18_rank_above_the_limit_names_both(source: Path, converted: Any) -> None:
    with pytest.raises(AdapterError, match="rank 4") as caught:
        converted(source, max_rank=3)
    assert "at most 3" in str(caught.value)
    converted(source, max_rank=4)


def test_a18_no_site_at_all(source: Path, converted: Any) -> None:
    save_file({}, source / TENSORS)
    with pytest.raises(AdapterError, match="do nothing"):
        converted(source)


def test_a18_a_configuration_that_wraps_nothing(source: Path, converted: Any) -> None:
    with pytest.raises(AdapterError):
        converted(edit_config(source, target_modules=["no_such_module"]))


def test_a9_same_shapes_other_weights_need_the_flag_and_are_recorded(source: Path, bases: Any, converted: Any) -> None:
    other = str(bases("other-weights"))
    with pytest.raises(BaseMismatchError, match="other weights") as caught:
        converted(source, base=other)
    assert "--allow-base-mismatch" in (caught.value.hint or "")
    report, adapter = converted(source, base=other, allow_base_mismatch=True)
    assert adapter.manifest.base.mismatch_allowed
    assert any("recorded in the manifest" in warning for warning in report.warnings)


def test_a9_another_architecture_is_never_overridden(source: Path, bases: Any, converted: Any) -> None:
    with pytest.raises(BaseMismatchError, match="another architecture"):
        converted(source, base=str(bases("wider")), allow_base_mismatch=True)


def test_a_base_named_by_the_source_that_is_not_here_is_warned_of(source: Path, bases: Any, converted: Any) -> None:
    edit_config(source, base_model_name_or_path="org/some-model")
    report, adapter = converted(source, base=str(bases()))
    assert any("org/some-model" in warning for warning in report.warnings)
    edit_config(source, base_model_name_or_path="org/llama")
    report, _ = converted(source, base=str(bases()))
    assert report.warnings == ()
    assert any("org/llama" in note for note in report.notes)
    assert not adapter.manifest.base.mismatch_allowed


def test_a21_names_in_a_configuration_are_never_imported_or_fetched(
    source: Path, tmp_path: Path, converted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "modules"
    package.mkdir()
    (package / "payload_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(package))

    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("fetched")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    auto = {"base_model_class": "Payload", "parent_library": "payload_module"}
    _, adapter = converted(edit_config(source, auto_mapping=auto, revision="main"))
    assert adapter.manifest.sites
    with pytest.raises(PreftError):
        converted(edit_config(source, base_model_name_or_path="https://example.org/model"))


def test_the_folder_written_is_complete_and_readable(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    report = convert(str(source), target)
    assert sorted(entry.name for entry in target.iterdir()) == ["README.md", "preft.json", "preft.safetensors"]
    card = (target / "README.md").read_text()
    assert report.manifest.digest in card
    assert "$" not in card
    umask = os.umask(0)
    os.umask(umask)
    for entry in target.iterdir():
        assert entry.stat().st_mode & 0o777 == 0o666 & ~umask


def test_the_chat_template_beside_an_adapter_is_recorded(source: Path, converted: Any) -> None:
    _, without = converted(source)
    assert without.manifest.chat_template_sha256 is None
    (source / "chat_template.jinja").write_text("{{ messages }}")
    _, beside = converted(source)
    assert len(beside.manifest.chat_template_sha256 or "") == 64
    assert beside.digest == without.digest


class _Recorder:
    def __init__(self) -> None:
        self.labels: list[str] = []
        self.open = 0

    def start(self, label: str, total: int | None) -> None:
        self.labels.append(label)
        self.open += 1

    def advance(self, amount: int = 1) -> None: ...

    def finish(self) -> None:
        self.open -= 1


def test_progress_reports_every_stage_and_closes_each(source: Path, tmp_path: Path) -> None:
    progress = _Recorder()
    convert(str(source), tmp_path / "out", progress=progress)
    assert [label.split()[0] for label in progress.labels] == ["Reading", "Checking", "Writing"]
    assert progress.open == 0
    with pytest.raises(AdapterError):
        convert(str(source), tmp_path / "again", max_rank=1, progress=progress)
    assert progress.open == 0


def test_a_hub_adapter_prefers_safetensors(source: Path, bases: Any, tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def fake(repository: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repository, revision, allow_patterns))
        return str(source)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
    report = convert("org/adapter@v1", tmp_path / "out", base=str(bases()))
    assert asked == [("org/adapter", "v1", [CONFIG, TENSORS])]
    assert report.source == "org/adapter@v1"


def test_make_peft_premise_differs_by_seed(bases: Any, tmp_path: Path) -> None:
    one, two = (load_file(make_peft(bases(), tmp_path / str(seed), seed=seed) / TENSORS) for seed in (1, 2))
    assert not torch.equal(one[FIRST], two[FIRST])


def test_adapters_in_subfolders_are_pointed_at(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    source.rename(run / "checkpoint-20")
    with pytest.raises(FileError) as caught:
        convert(str(run), tmp_path / "out")
    assert "checkpoint-20" in (caught.value.hint or "")


def test_the_report_holds_rank_and_scale_of_every_site(source: Path, tmp_path: Path) -> None:
    document = convert(str(source), tmp_path / "out").to_dict()
    assert len(document["sites"]) == document["num_sites"] == 6
    assert document["sites"][0] == {"path": "model.layers.0.self_attn.q_proj", "rank": 4, "scale": 2.0}


def test_names_of_others_cannot_break_the_card(source: Path, bases: Any, tmp_path: Path) -> None:
    import yaml

    base = bases().rename(bases().with_name('odd: "name"'))
    try:
        edit_config(source, base_model_name_or_path=str(base))
        convert(str(source), tmp_path / "out")
    finally:
        base.rename(bases())
    front = (tmp_path / "out" / "README.md").read_text().split("---\n")[1]
    assert yaml.safe_load(front)["base_model"] == str(base)

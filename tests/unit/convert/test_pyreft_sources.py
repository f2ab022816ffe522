"""What the reader of pyreft checkpoints refuses, and that it never runs, imports or fetches what a file names."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from preft.convert.detect import SourceKind, detect
from preft.convert.run import convert
from preft.errors import AdapterError, BaseMismatchError, FileError, PreftError, UnsupportedError, UsageError

WIDTH, RANK = 64, 4
FILE = "intkey_layer_{layer}_comp_block_output_unit_pos_nunit_1#0.bin"
DIREFT = "<class 'pyreft.interventions.DireftIntervention'>"
NODIREFT = "<class 'pyreft.interventions.NodireftIntervention'>"
FIELDS = 14


def representation(layer: Any, component: Any = "block_output", **fields: Any) -> list[Any]:
    """A representation as pyvene serialises it."""
    values: list[Any] = [layer, component, "pos", 1, RANK, *[None] * (FIELDS - 5)]
    for index, value in fields.items():
        values[int(index.removeprefix("field"))] = value
    return values


def nodireft(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed_dim": torch.tensor(WIDTH),
        "interchange_dim": torch.tensor(WIDTH),
        "proj_layer.weight": torch.randn(RANK, WIDTH, generator=generator),
        "learned_source.weight": torch.randn(RANK, WIDTH, generator=generator),
        "learned_source.bias": torch.randn(RANK, generator=generator),
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint as pyreft does; its configuration and tensors may be changed."""

    def write(tensors: dict[str, Any] | None = None, *, layer: int = 1, name: str = FILE, **config: Any) -> Path:
        folder = tmp_path / "reft"
        folder.mkdir()
        document = {
            "intervention_types": [NODIREFT],
            "mode": "parallel",
            "representations": [representation(layer)],
            "sorted_keys": [Path(FILE.format(layer=layer)).stem.removeprefix("intkey_")],
            "transformers_version": "4.45.1",
            **config,
        }
        (folder / "config.json").write_text(json.dumps({key: v for key, v in document.items() if v is not ...}))
        torch.save(nodireft() if tensors is None else tensors, folder / name.format(layer=layer))
        return folder

    return write


@pytest.fixture
def run(bases: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    def run(folder: Path, **options: Any) -> Any:
        return convert(str(folder), tmp_path / "out", **{"base": str(bases()), "positions": "prompt", **options})

    return run


def test_the_checkpoint_these_tests_damage_converts(checkpoint: Any, run: Any) -> None:
    folder = checkpoint()
    assert detect(folder) is SourceKind.PYREFT
    assert run(folder).manifest.label == "DiReFTP"


def test_positions_are_required_with_the_reason(checkpoint: Any, run: Any) -> None:
    with pytest.raises(UsageError, match="--positions") as caught:
        run(checkpoint(), positions=None)
    assert "do not record" in (caught.value.got or "")
    assert "f3+l3" in (caught.value.accepted or "")


def test_the_base_is_required(checkpoint: Any, run: Any) -> None:
    with pytest.raises(UsageError, match="names no base model"):
        run(checkpoint(), base=None)


@pytest.mark.parametrize(
    "name",
    [
        "intkey_layer.{layer}.comp.block_output.unit.pos.nunit.1#0.bin",
        "intkey_layer.{layer}.repr.block_output.unit.pos.nunit.1#0.bin",
    ],
)
def test_names_of_older_pyvene_releases(name: str, checkpoint: Any, run: Any) -> None:
    assert [site.path for site in run(checkpoint(name=name)).manifest.sites] == ["model.layers.1"]


# ------------------------------------------------------------------ nothing is run, imported or fetched


@pytest.mark.parametrize(
    "named",
    [
        "<class 'canary_module.DireftIntervention'>",
        "<class 'pyreft.interventions.SteeringIntervention'>",
        "<class 'os.system'>",
        "https://example.invalid/DireftIntervention",
        "<class 'pyreft.interventions.DireftIntervention'> or canary_module.x",
        7,
        None,
        ["pyreft.interventions.DireftIntervention"],
    ],
)
def test_a21_a_class_or_url_is_never_imported_or_fetched(
    named: Any, checkpoint: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "canary_module.py").write_text(f"open({str(tmp_path / 'fired')!r}, 'w')\nclass DireftIntervention: ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was opened"))

    with pytest.raises(UnsupportedError, match="never imported") as caught:
        run(checkpoint(intervention_types=[named]))

    assert str(named)[:40] in (caught.value.got or "")
    assert not (tmp_path / "fired").exists()
    assert "canary_module" not in sys.modules


@pytest.mark.parametrize("key", ["auto_map", "custom_pipelines"])
def test_a21_settings_that_could_name_code_are_refused(key: str, checkpoint: Any, run: Any) -> None:
    with pytest.raises(UnsupportedError, match="settings that pyreft does not write"):
        run(checkpoint(**{key: {"AutoConfig": "https://example.invalid/x.py"}}))


class _Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_a15_a_pickle_that_would_run_code_is_not_run(checkpoint: Any, run: Any, tmp_path: Path) -> None:
    folder = checkpoint({**nodireft(), "learned_source.bias": _Canary(tmp_path / "fired")})
    with pytest.raises(AdapterError, match="not a plain dictionary of tensors") as caught:
        run(folder)
    assert "ReftModel.save" in (caught.value.hint or "")
    assert not (tmp_path / "fired").exists()


def test_a_model_file_is_read_as_tensors_alone(checkpoint: Any, run: Any, tmp_path: Path) -> None:
    folder = checkpoint()
    torch.save({"x": _Canary(tmp_path / "fired")}, folder / "pytorch_model.bin")
    with pytest.raises(AdapterError, match="not a plain dictionary"):
        run(folder)
    assert not (tmp_path / "fired").exists()


# ------------------------------------------------------------------ refused by name


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mode": "serial"}, "in parallel"),
        ({"act_fn": "relu"}, "non-linear activation"),
        ({"representations": [representation(1, "mlp_output")]}, "component other than a block's output"),
        ({"representations": [representation(1, "block_input")]}, "component other than a block's output"),
        ({"representations": [representation(1, "model.layers[1].mlp.output")]}, "component other than"),
        ({"representations": [representation(1, field2="h.pos")]}, "other than positions"),
        ({"representations": [representation(1, field7=[[0, 2], [2, 4]])]}, "`subspace_partition`"),
        ({"representations": [representation(1, field8=0)]}, "`group_key`"),
        ({"representations": [representation(1, field5="canary.Thing")]}, "`intervention_type`"),
        ({"representations": [representation(1, field11="source")]}, "`field 11`"),
    ],
)
def test_what_is_not_a_low_rank_update_is_refused_by_name(
    changes: dict[str, Any], match: str, checkpoint: Any, run: Any
) -> None:
    with pytest.raises(UnsupportedError, match=match):
        run(checkpoint(**changes))


@pytest.mark.parametrize("changes", [{"act_fn": None}, {"act_fn": "linear"}, {"dropout": 0.1}, {"add_bias": False}])
def test_what_changes_no_number_is_let_through(changes: dict[str, Any], checkpoint: Any, run: Any) -> None:
    assert run(checkpoint(**changes)).manifest.sites


def test_a20_several_interventions_on_one_layer_are_refused_by_name(checkpoint: Any, run: Any) -> None:
    folder = checkpoint(intervention_types=[NODIREFT] * 2, representations=[representation(1)] * 2)
    torch.save(nodireft(1), folder / FILE.format(layer=1).replace("#0", "#1"))
    with pytest.raises(UnsupportedError, match="several interventions on one layer") as caught:
        run(folder)
    assert "share_weights" in (caught.value.hint or "")


def test_a_changed_base_is_refused(checkpoint: Any, run: Any) -> None:
    folder = checkpoint()
    torch.save({}, folder / "pytorch_model.bin")
    run(folder)
    torch.save({"model.norm.weight": torch.ones(WIDTH)}, folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match="weights of the base model itself"):
        run(folder, force=True)


# ------------------------------------------------------------------ damaged, or not for this base


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"representations": ...}, "lists no interventions"),
        ({"representations": []}, "lists no interventions"),
        ({"representations": {"layer": 1}}, "lists no interventions"),
        ({"representations": [3]}, "not valid"),
        ({"intervention_types": [NODIREFT] * 2}, "in different numbers"),
        ({"intervention_types": NODIREFT}, "lists no interventions"),
        ({"representations": [representation("1")]}, "`layer` that is not valid"),
        ({"representations": [representation(None)]}, "without a layer"),
        ({"representations": [representation(1, field4=5)]}, "another rank than the configuration"),
        ({"intervention_types": [DIREFT]}, "has no `rotate_layer`"),
    ],
)
def test_a_damaged_configuration_is_an_error(changes: dict[str, Any], match: str, checkpoint: Any, run: Any) -> None:
    with pytest.raises(AdapterError, match=match):
        run(checkpoint(**changes))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"extra": torch.ones(1)}, "tensors that a NodireftIntervention has not"),
        ({"learned_source.weight": torch.ones(RANK + 1, WIDTH)}, "another rank than its partner"),
        ({"learned_source.bias": torch.ones(RANK + 1)}, "wrong shape"),
        ({"proj_layer.weight": torch.ones(RANK)}, "not a matrix"),
        ({"proj_layer.weight": torch.full((RANK, WIDTH), float("nan"))}, "not finite"),
        ({"proj_layer.weight": torch.ones(RANK, WIDTH, dtype=torch.int64)}, "unsupported type"),
        ({"embed_dim": "64"}, "something other than tensors"),
    ],
)
def test_damaged_tensors_are_an_error(change: dict[str, Any], match: str, checkpoint: Any, run: Any) -> None:
    with pytest.raises(AdapterError, match=match):
        run(checkpoint({**nodireft(), **change}))


def test_a_checkpoint_of_another_width_or_depth(checkpoint: Any, run: Any, bases: Any) -> None:
    folder = checkpoint(layer=2)
    with pytest.raises(BaseMismatchError, match="another width"):
        run(folder, base=str(bases("wider")))
    with pytest.raises(BaseMismatchError, match="more layers"):
        run(folder, base=str(bases("shallower")))


def test_a_module_path_of_another_base(checkpoint: Any, run: Any) -> None:
    component = "transformer.h[1].output"
    folder = checkpoint(
        representations=[representation(1, component)],
        name="intkey_comp_transformer_h[1]_output_unit_pos_nunit_1#0.bin",
    )
    with pytest.raises(AdapterError, match="not a decoder block of the base"):
        run(folder)


def test_a16_files_that_are_missing_truncated_or_not_json(checkpoint: Any, run: Any, tmp_path: Path) -> None:
    whole = checkpoint()
    tensors, config = FILE.format(layer=1), "config.json"

    def damaged(change: Callable[[Path], object]) -> Path:
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        change(folder)
        return folder

    cases: list[tuple[Callable[[Path], object], type[PreftError], str]] = [
        (lambda folder: (folder / config).unlink(), FileError, "has no `config.json`"),
        (lambda folder: (folder / config).write_text('{"mode": 1,\n "mode": 2}'), AdapterError, "key `mode` twice"),
        (lambda folder: (folder / config).write_text("{"), AdapterError, "not valid JSON"),
        (
            lambda folder: (folder / tensors).rename(folder / tensors.replace("layer_1", "layer_0")),
            FileError,
            "no tensors for the intervention on layer 1",
        ),
        (
            lambda folder: shutil.copy(folder / tensors, folder / tensors.replace("layer_1", "layer_0")),
            AdapterError,
            "does not list",
        ),
        (lambda folder: (folder / tensors).write_bytes((folder / tensors).read_bytes()[:500]), AdapterError, "damaged"),
        (lambda folder: (folder / tensors).write_bytes(b""), AdapterError, "damaged"),
    ]
    for change, kind, match in cases:
        with pytest.raises(kind, match=match):
            run(damaged(change))


def test_a_file_of_another_folder_is_never_opened(checkpoint: Any, run: Any, tmp_path: Path) -> None:
    """Names in the configuration are compared with the folder's files, never joined to a path."""
    torch.save(nodireft(), tmp_path / "intkey_outside.bin")
    with pytest.raises(PreftError):
        run(checkpoint(representations=[representation(1, "../intkey_outside")]))
    assert not (tmp_path / "out").exists()

"""The notebooks run from top to bottom, as `preft init --notebook` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preft_cli.app import run

ALWAYS = ("plan-capacity",)
WITH_MODEL = ("quickstart", "convert-and-serve", "train-and-compare")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert run(["init", str(tmp_path / "n"), "--notebook", "--quiet"]) == 0
    return tmp_path / "n"


def execute(path: Path) -> Any:
    """Runs a notebook in its own folder, by its own kernel; an error in a cell is an error here."""
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra `notebook`)")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (extra `notebook`)")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(path.parent)}}).execute()
    return notebook


def shown(notebook: Any) -> str:
    """Everything that its cells show as markup."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("data", {}).get("text/html", "") for output in outputs)


def test_there_are_these(folder: Path) -> None:
    assert {path.stem for path in folder.iterdir()} == {*ALWAYS, *WITH_MODEL}
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra `notebook`)")
    for path in folder.iterdir():
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


@pytest.mark.parametrize("name", ALWAYS)
def test_it_runs(folder: Path, name: str) -> None:
    assert shown(execute(folder / f"{name}.ipynb")).count("<table") >= 3


def test_a_failing_cell_is_an_error(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra `notebook`)")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (extra `notebook`)")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    nbformat.write(notebook, tmp_path / "x.ipynb")
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        execute(tmp_path / "x.ipynb")


@pytest.mark.full
@pytest.mark.smollm2
@pytest.mark.parametrize("name", WITH_MODEL)
def test_it_runs_on_the_embedded_model(folder: Path, name: str) -> None:
    text = shown(execute(folder / f"{name}.ipynb"))
    assert "<table" in text
    if name == "quickstart":
        assert 'class="on"' in text
        assert "<svg" in text

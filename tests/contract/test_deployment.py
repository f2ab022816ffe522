"""The files for production: they parse, and what they call exists."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from preft_cli.app import app, run

FILES = {"Containerfile", "grafana.json", "kubernetes.yaml", "nginx.conf", "preft.service"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert run(["init", str(tmp_path / "d"), "--deploy", "--quiet"]) == 0
    return tmp_path / "d"


def parse_serve(arguments: list[str]) -> dict[str, Any]:
    """The parameters of `preft serve` as these arguments set them; raises on one that does not exist."""
    root: Any = typer.main.get_command(app)
    return root.get_command(None, "serve").make_context("serve", arguments).params


def test_init_writes_them_and_replaces_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.name for path in folder.iterdir()} == FILES
    assert run(["init", str(folder), "--deploy"]) == 2
    assert "replaces nothing" in capsys.readouterr().err
    assert run(["init", str(folder / "x"), "--deploy", "--notebook"]) == 2
    assert not (folder / "x").exists()


def test_the_unit_starts_a_server_that_exists(folder: Path) -> None:
    text = (folder / "preft.service").read_text().replace("\\\n", " ")
    line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    program, command, *arguments = shlex.split(line.removeprefix("ExecStart="))
    assert program.endswith("/preft")
    assert command == "serve"
    parameters = parse_serve(arguments)
    assert parameters["host"] == "127.0.0.1"
    assert parameters["api_key_file"] == Path("%d/api-key")


def test_systemd_accepts_the_unit(folder: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (folder / "preft.service").read_text()
    unit = folder / "preft.service"
    unit.write_text(text.replace("/srv/preft/.venv/bin/preft", shutil.which("true") or "/bin/true"))
    answer = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert not re.search(r"preft\.service:\d+:", answer.stderr), answer.stderr
    unit.write_text(text.replace("Restart=on-failure", "Restart=perhaps"))
    answer = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert re.search(r"preft\.service:\d+:", answer.stderr)


def test_the_manifest_starts_the_same_server(folder: Path) -> None:
    deployment, service = yaml.safe_load_all((folder / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]
    parameters = parse_serve(container["args"])
    assert parameters["port"] == container["ports"][0]["containerPort"]
    assert str(parameters["api_key_file"]).startswith("/run/secrets/preft/")
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]


def test_the_container_serves(folder: Path) -> None:
    text = (folder / "Containerfile").read_text()
    entry = json.loads(
        next(line for line in text.splitlines() if line.startswith("ENTRYPOINT ")).removeprefix("ENTRYPOINT ")
    )
    arguments = json.loads(next(line for line in text.splitlines() if line.startswith("CMD ")).removeprefix("CMD "))
    assert entry[1:] == ["serve"]
    assert parse_serve(arguments)["adapters"] == Path("/adapters")


def test_the_proxy_keeps_tenant_names_inside(folder: Path) -> None:
    text = (folder / "nginx.conf").read_text()
    assert text.count("{") == text.count("}")
    assert re.search(r"location /v1/preft/ \{ return 404; \}", text)
    for path in ("/metrics", "/preft"):
        assert f"location = {path} {{ return 404; }}" in text
    assert "proxy_buffering off;" in text


def test_the_dashboard_asks_for_metrics_that_exist(folder: Path) -> None:
    """Every `vllm:` name in it is made by vLLM's own loggers, every other by ours."""
    loggers = pytest.importorskip("vllm.v1.metrics.loggers")
    source = Path(loggers.__file__).read_text()
    made = set(re.findall(r'"(vllm:[a-z_]+)"', source))
    assert len(made) > 20
    dashboard = json.loads((folder / "grafana.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"vllm:[a-z_]+", target["expr"])
    }
    assert len(asked) >= 8
    own = pytest.importorskip("preft.serve.backend.stat_logger")
    ours = set(re.findall(r'"(?:preft_)?([a-z_]+)", "', Path(own.__file__).read_text()))
    wanted = re.findall(r"preft_([a-z_]+?)(?:_total|_bucket)?\b(?=[\[\)])", json.dumps(dashboard))
    assert len(set(wanted)) >= 8
    assert set(wanted) <= ours, set(wanted) - ours
    for name in asked:
        base = re.sub(r"_(bucket|total)$", "", name)
        assert base in made or name in made, name

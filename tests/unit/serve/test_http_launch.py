"""From options to a command line, an environment and an address; nothing is started."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from preft.errors import EngineError, FileError, PreftError, UnsupportedError, UsageError
from preft.serve.http.launch import ServeOptions, collect_adapters, default_name, plan_launch, read_key
from preft.serve.http.plan import DESCRIPTOR_VARIABLE, ServePlan, take_plan
from preft.serve.settings import EngineSettings

ENVIRONMENT = {"PATH": "/bin", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def launch(tmp_path: Path, adapters: dict[str, Path] | None = None, environment=None, **options: object):
    settings = options.pop("settings", EngineSettings(slots=3, dtype="float32"))
    return plan_launch(
        str(tmp_path),
        lambda: tmp_path,
        adapters or {},
        settings,  # type: ignore[arg-type]
        ServeOptions(port=0, **options),  # type: ignore[arg-type]
        {**ENVIRONMENT, **(environment or {})},
    )


def value(command: tuple[str, ...], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_the_command_runs_vllms_server_with_our_classes(tmp_path: Path) -> None:
    made = launch(tmp_path, passthrough=("--seed", "1"))
    assert made.command[:3] == (sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry")
    assert value(made.command, "--model") == str(tmp_path)
    assert value(made.command, "--max-loras") == "3"
    assert value(made.command, "--host") == "127.0.0.1"
    assert "PreftScheduler" in value(made.command, "--scheduler-cls")
    assert json.loads(value(made.command, "--additional-config"))["preft"]["slots"] == 3
    assert made.command[-2:] == ("--seed", "1")
    assert made.address.port == int(value(made.command, "--port")) > 0
    assert made.address.url == f"http://127.0.0.1:{made.address.port}/v1"


def test_a_default_gives_way_to_the_users_option(tmp_path: Path) -> None:
    made = launch(tmp_path, passthrough=("--max_num_seqs=5", "--no-enforce-eager"))
    assert "--max-num-seqs" not in made.command
    assert "--enforce-eager" not in made.command
    assert "--max_num_seqs=5" in made.command


def test_the_environment_keeps_the_users_plugins(tmp_path: Path) -> None:
    assert launch(tmp_path).environment["VLLM_PLUGINS"] == "preft"
    kept = launch(tmp_path, environment={"VLLM_PLUGINS": "theirs,preft"}).environment
    assert kept["VLLM_PLUGINS"] == "theirs,preft"
    assert launch(tmp_path, environment={"VLLM_PLUGINS": "a,b"}).environment["VLLM_PLUGINS"] == "a,b,preft"
    assert kept["VLLM_NO_USAGE_STATS"] == "1"
    assert kept["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert launch(tmp_path, verbose=True).environment["VLLM_LOGGING_LEVEL"] == "INFO"
    assert launch(tmp_path, environment={"VLLM_LOGGING_LEVEL": "DEBUG"}).environment["VLLM_LOGGING_LEVEL"] == "DEBUG"


@pytest.mark.parametrize("name", ["VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE"])
def test_a_variable_that_opens_a_hole_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        launch(tmp_path, environment={name: "1"})


def test_the_key_is_in_the_environment_only(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sesame-open\n")
    made = launch(tmp_path, api_key_file=file)
    assert made.environment["VLLM_API_KEY"] == made.api_key == "sesame-open"
    assert not any("sesame" in word for word in made.command)
    assert b"sesame" not in made.plan.encode()
    assert launch(tmp_path, environment={"VLLM_API_KEY": "from-outside"}).api_key == "from-outside"
    assert launch(tmp_path).api_key is None


@pytest.mark.parametrize("text", ["", " \n", "a b", "a\nb", "schlüssel"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(UsageError, match="does not hold a key"):
        read_key(tmp_path / "key")
    with pytest.raises(FileError, match="cannot be read"):
        read_key(tmp_path / "none")


def test_the_base_models_names_are_reserved(tmp_path: Path) -> None:
    assert default_name(str(tmp_path)) == tmp_path.name
    assert default_name("smollm2-135m-instruct") == "smollm2-135m-instruct"
    assert launch(tmp_path).plan.names == (tmp_path.name,)
    with pytest.raises(UsageError, match="`Base` is reserved"):
        launch(tmp_path, {"Base": tmp_path}, names=("other", "base"))
    with pytest.raises(UsageError, match="base model's name is not valid"):
        launch(tmp_path, names=("-x",))


@pytest.mark.parametrize("name", ["../x", "/etc", "a/b", "a\0b", "x" * 300, "..%2f", "аlice"])
def test_an_adapter_name_that_is_not_valid_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="adapter name is not valid"):
        collect_adapters(None, [f"{name}={tmp_path}"])
    with pytest.raises(UsageError, match="adapter name is not valid"):
        launch(tmp_path, {name: tmp_path})


def test_adapters_come_from_the_root_and_from_flags(tmp_path: Path) -> None:
    (tmp_path / "root" / "one").mkdir(parents=True)
    (tmp_path / "root" / "one" / "preft.json").write_text("{}")
    (tmp_path / "root" / "not-an-adapter").mkdir()
    found = collect_adapters(tmp_path / "root", [f"two={tmp_path}"])
    assert found == {"one": tmp_path / "root" / "one", "two": tmp_path}
    with pytest.raises(UsageError, match="`ONE` is given twice"):
        collect_adapters(tmp_path / "root", [f"ONE={tmp_path}"])
    with pytest.raises(UsageError, match="NAME=PATH"):
        collect_adapters(None, ["two"])


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        options = ServeOptions(port=taken.getsockname()[1])
        with pytest.raises(UsageError, match=r"cannot listen on 127\.0\.0\.1, port"):
            plan_launch("m", lambda: tmp_path, {}, EngineSettings(), options, ENVIRONMENT)


def test_the_address_by_which_this_machine_reaches_it(tmp_path: Path) -> None:
    made = launch(tmp_path, host="0.0.0.0", passthrough=("--ssl-keyfile", "k", "--ssl-certfile", "c"))
    assert value(made.command, "--host") == "0.0.0.0"
    assert made.address.url.startswith("https://127.0.0.1:")


def test_the_time_to_end_grows_with_the_users(tmp_path: Path) -> None:
    drained = launch(tmp_path, passthrough=("--shutdown-timeout", "60"))
    assert drained.stop_s == launch(tmp_path).stop_s + 60


def test_a_plan_survives_its_pipe() -> None:
    plan = ServePlan("model", ("a", "b"), {"x": "/somewhere/x"})
    assert ServePlan.decode(plan.encode()) == plan
    assert plan.instance != ServePlan("model", ("a",), {}).instance
    for line in (b"", b"{}", b"[]", b"null"):
        with pytest.raises(EngineError, match="not told what to serve"):
            ServePlan.decode(line)
    with pytest.raises(EngineError, match="not started by preft"):
        take_plan({})
    assert DESCRIPTOR_VARIABLE.startswith("_")


def test_the_admins_key_travels_in_the_plan_alone(tmp_path: Path) -> None:
    assert launch(tmp_path).plan.admin_key is None
    made = launch(tmp_path, environment={"PREFT_ADMIN_KEY": "of-the-environment"})
    assert made.plan.admin_key == "of-the-environment"
    (tmp_path / "admin").write_text("of-the-file\n")
    also = launch(tmp_path, environment={"PREFT_ADMIN_KEY": "of-the-environment"}, admin_key_file=tmp_path / "admin")
    assert also.plan.admin_key == "of-the-file"
    for found in (made, also):
        assert not any("of-the" in text for text in (*found.command, *found.environment.values(), repr(found.plan)))


def test_keys_for_some_adapters_replace_vllms_gate(tmp_path: Path) -> None:
    """VLLM would refuse every key but its own."""
    (tmp_path / "keys").write_text('{"one": ["alice"], "two": "*"}')
    made = launch(tmp_path, environment={"VLLM_API_KEY": "whole"}, keys_file=tmp_path / "keys")
    assert made.plan.keys == {"one": ["alice"], "two": "*", "whole": "*"}
    assert "VLLM_API_KEY" not in made.environment
    assert made.api_key == made.plan.instance_key
    assert launch(tmp_path, environment={"VLLM_API_KEY": "whole"}).api_key == "whole"
    assert launch(tmp_path).api_key is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"": ["a"]}',
        '{"two words": ["a"]}',
        '{"key": "alice"}',
        '{"key": [1]}',
        '{"key": ["../a"]}',
    ],
)
def test_a_file_that_holds_no_keys_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(UsageError):
        launch(tmp_path, keys_file=tmp_path / "keys")
    with pytest.raises(FileError):
        launch(tmp_path, keys_file=tmp_path / "nowhere")


def test_what_changes_while_it_runs_needs_a_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--watch"):
        launch(tmp_path, watch=True)
    made = launch(tmp_path, watch=True, root=tmp_path, access_log=tmp_path / "log", max_push_mib=3).plan
    assert (made.watch, made.root, made.access_log) == (True, str(tmp_path), str(tmp_path / "log"))
    assert made.max_push_bytes == 3 << 20
    with pytest.raises(FileError, match="access log"):
        launch(tmp_path, access_log=tmp_path)


def test_a_key_that_is_given_twice_is_refused_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text('{"the-key": ["alice"], "the-key": "*"}')
    with pytest.raises(UsageError, match="is not valid") as caught:
        launch(tmp_path, keys_file=tmp_path / "keys")
    assert "the-key" not in str(caught.value)


def test_one_key_is_not_for_two_things(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text('{"for-alice": ["alice"], "for-all": "*"}')
    files = {"keys_file": tmp_path / "keys.json"}
    with pytest.raises(UsageError, match="for some adapters only") as caught:
        launch(tmp_path, environment={"VLLM_API_KEY": "for-alice"}, **files)
    assert "for-alice" not in str(caught.value)
    assert launch(tmp_path, environment={"VLLM_API_KEY": "for-all"}, **files).plan.keys["for-all"] == "*"
    for variables in ({"PREFT_ADMIN_KEY": "for-alice"}, {"PREFT_ADMIN_KEY": "for-all"}):
        with pytest.raises(UsageError, match="clients could change adapters"):
            launch(tmp_path, environment=variables, **files)
    with pytest.raises(UsageError, match="clients could change adapters"):
        launch(tmp_path, environment={"VLLM_API_KEY": "one", "PREFT_ADMIN_KEY": "one"})
    assert launch(tmp_path, environment={"PREFT_ADMIN_KEY": "own"}, **files).plan.admin_key == "own"


def test_stored_responses_do_not_go_with_keys_for_some_adapters(tmp_path: Path) -> None:
    some, all_of = tmp_path / "some.json", tmp_path / "all.json"
    some.write_text('{"for-alice": ["alice"]}')
    all_of.write_text('{"for-all": "*"}')
    stored = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    with pytest.raises(UnsupportedError, match="any stored response"):
        launch(tmp_path, environment=stored, keys_file=some)
    launch(tmp_path, environment=stored, keys_file=all_of)
    launch(tmp_path, environment=stored)
    launch(tmp_path, environment={"VLLM_ENABLE_RESPONSES_API_STORE": "0"}, keys_file=some)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"admin_key_file": Path("absent")}, "absent"),
        ({"api_key_file": Path("absent")}, "absent"),
        ({"keys_file": Path("absent")}, "absent"),
        ({"watch": True}, "--watch"),
        ({"access_log": Path("no/such/folder/log")}, "log"),
        ({"passthrough": ("--lora-modules", "a=b")}, "lora-modules"),
    ],
)
def test_what_is_refused_is_refused_before_the_model_is_fetched(options: dict[str, object], refused: str) -> None:
    def fetch() -> Path:
        raise AssertionError("the model was fetched first")

    with pytest.raises(PreftError, match=refused):
        plan_launch("m", fetch, {}, EngineSettings(), ServeOptions(port=0, **options), ENVIRONMENT)  # type: ignore[arg-type]

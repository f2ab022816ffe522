"""vLLM options after `--`: what is refused by name, in every spelling vLLM's parser would take, and what passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from preft.errors import UnsupportedError, UsageError
from preft.serve.http import passthrough
from preft.serve.http.passthrough import option_names, option_value, require_passable, to_flags


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        ["--max-num-seqs", "128"],
        ["--max_num_seqs=128"],
        ["--seed", "-1"],
        ["--chat-template", "template.jinja", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"],
        ["-tp", "2"],
        ["--distributed-executor-backend", "mp"],
        ["--no-enable-prefix-caching", "--block-size", "32"],
        ["--speculative-config.method", "ngram"],
        ["--runner", "generate"],
    ],
)
def test_other_options_pass(tokens: list[str]) -> None:
    require_passable(tokens)


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (["--lora-modules", "a=b"], "lora-modules"),
        (["--lora_modules=a=b"], "lora-modules"),
        (["--lora-mod", "a=b"], "lora-modules"),
        (["--default-mm-loras", "{}"], "default-mm-loras"),
        (["--enable-lora"], "enable-lora"),
        (["--no-enable-lora"], "enable-lora"),
        (["--no-enable-l"], "enable-lora"),
        (["--scheduler-cls", "x"], "scheduler-cls"),
        (["--worker-cls", "x"], "worker-cls"),
        (["--worker-extension-cls", "x"], "worker-extension-cls"),
        (["--additional-config", "{}"], "additional-config"),
        (["--additional-config.preft.slots", "9"], "additional-config"),
        (["--block-size", "32", "--api-server-count", "2"], "api-server-count"),
        (["-asc", "2"], "api-server-count"),
        (["--data-parallel-size", "2"], "data-parallel-size"),
        (["-dp", "2"], "data-parallel-size"),
        (["-dpl=2"], "data-parallel-size"),
        (["-pp", "2"], "pipeline-parallel-size"),
        (["--pipeline-parallel-size", "2"], "pipeline-parallel-size"),
        (["--distributed-executor-backend", "ray"], "distributed-executor-backend"),
        (["--distributed-executor-backend=ray"], "distributed-executor-backend"),
        (["--kv-transfer-config", "{}"], "kv-transfer-config"),
        (["--enable-tower-connector-lora"], "enable-tower-connector-lora"),
        (["--fully-sharded-loras"], "fully-sharded-loras"),
        (["--specialize-active-lora"], "specialize-active-lora"),
        (["--model", "x"], "model"),
        (["--port", "1"], "port"),
        (["--host=0.0.0.0"], "host"),
        (["--served-model-name", "x"], "served-model-name"),
        (["--max-lora-rank", "8"], "max-lora-rank"),
        (["--api-key", "secret"], "api-key"),
        (["--runner", "pooling"], "runner"),
        (["--grpc"], "grpc"),
        (["--uds", "/tmp/x"], "uds"),
    ],
)
def test_options_that_would_act_wrongly_are_refused_by_name(tokens: list[str], name: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        require_passable(tokens)
    assert f"`--{name}` is not passed on: " in refused.value.what
    assert refused.value.hint


def test_the_hint_names_our_own_flag() -> None:
    with pytest.raises(UnsupportedError, match=r"hint: give `--slots` before `--` instead"):
        require_passable(["--max-loras", "4"])
    with pytest.raises(UnsupportedError, match="VLLM_API_KEY"):
        require_passable(["--api-key", "x"])


def test_a_word_that_is_no_option_is_refused() -> None:
    with pytest.raises(UsageError, match="Only vLLM's options may follow the model"):
        require_passable(["other-model"])


def test_a_configuration_file_is_held_to_the_same_rules(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("max-num-seqs: 8\n")
    require_passable(["--config", str(file)])
    file.write_text("max-num-seqs: 8\nenable_lora: true\n")
    with pytest.raises(UnsupportedError, match="`--enable-lora` is not passed on"):
        require_passable(["--config", str(file)])
    with pytest.raises(UsageError, match="two words"):
        require_passable([f"--config={file}"])
    file.write_text("[1, 2")
    with pytest.raises(UsageError, match="cannot be read"):
        require_passable(["--config", str(file)])
    with pytest.raises(UsageError, match="cannot be read"):
        require_passable(["--config", str(tmp_path / "none.yaml")])


def test_flags_are_spelled_as_vllm_reads_them() -> None:
    flags = to_flags({"max_loras": 2, "enable_lora": True, "async_scheduling": False, "additional_config": {"a": [1]}})
    assert flags == ["--max-loras", "2", "--enable-lora", "--no-async-scheduling", "--additional-config", '{"a": [1]}']


def test_names_and_values_of_options() -> None:
    tokens = ["--max_num_seqs=8", "--no-enforce-eager", "-tp", "2", "--shutdown-timeout", "7"]
    assert option_names(tokens) == {"max-num-seqs", "enforce-eager", "shutdown-timeout"}
    assert option_value(tokens, "shutdown-timeout") == "7"
    assert option_value(tokens, "seed") is None


def test_every_refused_name_exists_and_no_other_option_is_hit() -> None:
    """Against vLLM's real parser: no refusal is out of date, none has an alias we miss, none hits a bystander."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    refused = set(passthrough._REFUSED)
    seen = set()
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        name = action.dest.replace("_", "-")
        for option in action.option_strings:
            is_refused = passthrough._refused_name(option, "") is not None
            assert is_refused == (name in refused), option
        if action.option_strings:
            seen.add(name)
    assert refused <= seen
    assert {option for option, _ in passthrough._REFUSED_VALUES} <= seen
    assert seen >= passthrough.OVERRIDABLE

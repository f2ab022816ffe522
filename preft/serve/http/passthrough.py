"""vLLM options that a user appends to `preft serve`: which are passed on, and which are refused by name and why.

The check runs before anything heavy is imported, so it works on names alone: exact names, the abbreviations that
vLLM's parser would accept, short forms, negations, dotted forms, and the keys of a `--config` file. The engine checks
its effective configuration again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from preft.errors import UnsupportedError, UsageError
from preft.serve.settings import OURS

_OUR_FLAGS = {
    "host": "--host",
    "port": "--port",
    "served-model-name": "--served-model-name",
    "dtype": "--dtype",
    "max-model-len": "--max-model-len",
    "kv-cache-memory-bytes": "--kv-cache-gib",
    "max-loras": "--slots",
    "max-lora-rank": "--max-rank",
    "max-cpu-loras": "--adapter-cache-gib",
    "lora-modules": "--adapter",
}
_MANY_SERVERS = "several engines or API servers would each need the adapters; not supported yet"
_NOT_HTTP = "preft's routes and checks are part of the HTTP server"
_NOT_TESTED = "not tested with prefill-only adapters yet"
_CONNECTOR = "connectors that key by tokens alone would hand one adapter's cache to another"
_LORA = "it changes how vLLM holds LoRA adapters, which preft does itself"

_REFUSED = {
    **{name.replace("_", "-"): "preft sets it itself" for name in sorted(OURS)},
    "lora-modules": "vLLM's own LoRA arguments would serve adapters on every token",
    "default-mm-loras": "vLLM would add an adapter that preft did not register",
    "enable-tower-connector-lora": "encoder tokens have no position in the prompt",
    "fully-sharded-loras": "sharded ranks are not supported",
    "specialize-active-lora": "unadapted rows count as one adapter, so the last real one would be skipped",
    "enable-mixed-moe-lora-format": _LORA,
    "enable-moe-shared-loras": _LORA,
    "max-lora-cls-labels": _LORA,
    "host": "preft must know where the server listens",
    "port": "preft must know where the server listens",
    "uds": "preft must know where the server listens",
    "served-model-name": "adapters must not take a name of the base model",
    "dtype": "preft sets it itself",
    "max-model-len": "preft sets it itself",
    "kv-cache-memory-bytes": "preft sets it itself",
    "api-key": "a key on the command line is shown to every user of the machine",
    "api-server-count": _MANY_SERVERS,
    "data-parallel-size": _MANY_SERVERS,
    "data-parallel-size-local": _MANY_SERVERS,
    "data-parallel-rank": _MANY_SERVERS,
    "data-parallel-start-rank": _MANY_SERVERS,
    "data-parallel-address": _MANY_SERVERS,
    "data-parallel-rpc-port": _MANY_SERVERS,
    "data-parallel-backend": _MANY_SERVERS,
    "data-parallel-hybrid-lb": _MANY_SERVERS,
    "data-parallel-external-lb": _MANY_SERVERS,
    "data-parallel-multi-port-external-lb": _MANY_SERVERS,
    "data-parallel-supervisor-port": _MANY_SERVERS,
    "enable-elastic-ep": _MANY_SERVERS,
    "nnodes": _MANY_SERVERS,
    "node-rank": _MANY_SERVERS,
    "master-addr": _MANY_SERVERS,
    "master-port": _MANY_SERVERS,
    "headless": _NOT_HTTP,
    "grpc": _NOT_HTTP,
    "grpc-port": _NOT_HTTP,
    "tokens-only": _NOT_HTTP,
    "enable-scale-out": _NOT_TESTED,
    "pipeline-parallel-size": _NOT_TESTED,
    "prefill-context-parallel-size": "it reorders a step's tokens behind the adapters' row plan",
    "enable-dbo": "it splits a step's tokens behind the adapters' row plan",
    "kv-transfer-config": _CONNECTOR,
    "ec-transfer-config": _CONNECTOR,
    "kv-offloading-size": _CONNECTOR,
}
_REFUSED_VALUES = {
    ("distributed-executor-backend", "ray"): _NOT_TESTED,
    ("runner", "pooling"): "pooling and embedding models are not supported yet",
}
_SHORT = {
    "-asc": "api-server-count",
    "-dp": "data-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-n": "nnodes",
    "-r": "node-rank",
}
"""Short forms; `-dp` stands for the whole `-dp*` family."""

OVERRIDABLE = frozenset({"max-num-seqs", "max-num-batched-tokens", "enforce-eager"})
"""Options that preft has a default for and that a user may name after `--`."""


def require_passable(tokens: Sequence[str]) -> None:
    """Checks what a user wants passed on to vLLM's server.

    Args:
        tokens: The command line after `--`.

    Raises:
        UnsupportedError: An option that would make an adapter act wrongly, or that preft decides.
        UsageError: Something that is no option, or a `--config` file that cannot be read.
    """
    if tokens and not tokens[0].startswith("-"):
        raise UsageError(
            "Only vLLM's options may follow the model",
            got=f"`{tokens[0]}`",
            accepted="`preft serve MODEL [preft's options] [-- vLLM's options]`",
        )
    for token, value in _options(tokens):
        _require_option(token, value)
        if token == "--config":
            for key, inner in _read_config(value):
                _require_option(f"--{key}", inner, origin=f" in `{value}`")
        elif token.startswith("--config="):
            raise UsageError("vLLM reads a configuration file only as two words", accepted="`--config FILE`")


def option_names(tokens: Sequence[str]) -> set[str]:
    """The long option names among `tokens`, without dashes, negation or value."""
    return {_long_name(token).removeprefix("no-") for token, _ in _options(tokens) if token.startswith("--")}


def option_value(tokens: Sequence[str], name: str) -> str | None:
    """The value of an option in `tokens`, or None."""
    found = None
    for token, value in _options(tokens):
        if token.startswith("--") and _long_name(token) == name:
            found = value
    return found


def to_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments by their Python names, as vLLM's command line spells them."""
    flags = []
    for key, value in arguments.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, dict | list | tuple):
            flags += [f"--{name}", json.dumps(value)]
        else:
            flags += [f"--{name}", str(value)]
    return flags


def _options(tokens: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each option word with the value that follows it, if any."""
    for index, token in enumerate(tokens):
        if not token.startswith("-") or token[1:2].isdigit():
            continue
        if "=" in token:
            yield token, token.partition("=")[2]
        else:
            following = tokens[index + 1] if index + 1 < len(tokens) else ""
            yield token, "" if following.startswith("--") else following


def _long_name(token: str) -> str:
    name = token.removeprefix("--").partition("=")[0].partition(".")[0]
    return name.removesuffix("+").replace("_", "-")


def _require_option(token: str, value: str, *, origin: str = "") -> None:
    refused = _refused_name(token, value)
    if refused is None:
        return
    name, reason = refused
    own = _OUR_FLAGS.get(name)
    hint = f"give `{own}` before `--` instead" if own else "leave it out"
    if name == "api-key":
        hint = "use `--api-key-file`, or the environment variable `VLLM_API_KEY`"
    raise UnsupportedError(
        f"The vLLM option `--{name}` is not passed on: {reason}", got=f"`{token}`{origin}", hint=hint
    )


def _refused_name(token: str, value: str) -> tuple[str, str] | None:
    if not token.startswith("--"):
        short = token.partition("=")[0]
        for alias, name in _SHORT.items():
            if short.startswith(alias) or (len(short) > 1 and alias.startswith(short)):
                return name, _REFUSED[name]
        return None
    name = _long_name(token)
    for (option, refused_value), reason in _REFUSED_VALUES.items():
        if name and option.startswith(name) and value.strip("'\"").lower() == refused_value:
            return option, reason
    if name in _REFUSED:
        return name, _REFUSED[name]
    # vLLM's parser takes any unambiguous beginning of an option for the option.
    for option, reason in _REFUSED.items():
        if name and (option.startswith(name) or f"no-{option}".startswith(name)) and name != "no":
            return option, reason
    return None


def _read_config(path: str) -> Iterator[tuple[str, str]]:
    import yaml

    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"vLLM's configuration file `{path}` cannot be read", got=str(error).splitlines()[0]) from None
    if not isinstance(document, dict):
        raise UsageError(f"vLLM's configuration file `{path}` is not a mapping of options to values")
    for key, value in document.items():
        yield str(key), str(value)

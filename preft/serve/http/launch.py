"""How vLLM's server is started: its command line, its environment, and the address it will answer at."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preft.errors import AdapterError, FileError, UnsupportedError, UsageError
from preft.serve.backend import guard
from preft.serve.http.passthrough import OVERRIDABLE, option_names, option_value, require_passable, to_flags
from preft.serve.http.plan import EVERYTHING, ServePlan
from preft.serve.settings import EngineSettings, bind_all_cores

PLUGIN = "preft"
ADMIN_KEY_VARIABLE = "PREFT_ADMIN_KEY"
"""Holds the key for changes of adapters where no file does; the server's own processes do not get it."""
STORE_VARIABLE = "VLLM_ENABLE_RESPONSES_API_STORE"
"""Makes vLLM keep what `/v1/responses` answers; whoever knows, or has chosen, an id may read it."""
SERVER_MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""vLLM's own server. Its program `vllm serve` cannot be used: it asks for a distribution named `vllm`, which the CPU
build does not have."""

_STOP_S = 20.0


@dataclass(frozen=True)
class Address:
    """Where the server listens.

    Attributes:
        host: Interface, as given.
        port: Port; never 0.
        tls: Whether it speaks HTTPS.
    """

    host: str
    port: int
    tls: bool = False

    @property
    def reachable_host(self) -> str:
        """A host by which this machine reaches the server."""
        return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        """The base URL for OpenAI clients on this machine."""
        host = f"[{self.reachable_host}]" if ":" in self.reachable_host else self.reachable_host
        return f"http{'s' * self.tls}://{host}:{self.port}/v1"


@dataclass(frozen=True)
class Launch:
    """Everything needed to start one server.

    Attributes:
        command: The program and its arguments; no secret is in it.
        environment: Its whole environment.
        plan: What the plugin is told.
        address: Where it will listen.
        api_key: Key by which the server recognises this process, or None where it asks for none.
        stop_s: Seconds that it may take to end once asked to.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    plan: ServePlan
    address: Address
    api_key: str | None
    stop_s: float = _STOP_S


@dataclass(frozen=True)
class ServeOptions:
    """What a user chose for the server, beside the engine's settings.

    Attributes:
        host: Interface to listen on.
        port: Port; 0 takes a free one.
        names: Names of the base model; empty for one taken from the model.
        api_key_file: File that holds the API key, or None.
        keys_file: File of further API keys with the adapters of each, or None.
        admin_key_file: File that holds the key for changes of adapters, or None.
        root: Folder of adapters, for changes while the server runs, or None.
        watch: Take up what changes in `root`.
        access_log: File for one line a request, or None.
        max_push_mib: Largest adapter accepted over HTTP, in MiB.
        status_page: Answer `/preft` with the status page.
        passthrough: vLLM's own options.
        verbose: Leave vLLM's log at its usual level.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    api_key_file: Path | None = None
    keys_file: Path | None = None
    admin_key_file: Path | None = None
    root: Path | None = None
    watch: bool = False
    access_log: Path | None = None
    max_push_mib: int = 1024
    status_page: bool = True
    passthrough: tuple[str, ...] = ()
    verbose: bool = False


def plan_launch(
    model: str,
    find: Callable[[], Path],
    adapters: Mapping[str, Path],
    settings: EngineSettings,
    options: ServeOptions,
    environment: Mapping[str, str] | None = None,
) -> Launch:
    """Works out a launch; starts nothing, imports neither torch nor vllm.

    Args:
        model: The base model as the user named it.
        find: Returns its checkpoint; called last, since it may fetch one.
        adapters: Adapter folders by name.
        settings: Of the engine.
        options: Of the server.
        environment: To derive the server's from; this process's by default.

    Raises:
        PreftError: An option, variable, name, key file or port cannot be used; the message says why.
    """
    environment = dict(os.environ if environment is None else environment)
    require_passable(options.passthrough)
    require_environment(environment)
    names = options.names or (default_name(model),)
    require_names(names, adapters)
    keys = read_keys(options.keys_file) if options.keys_file else {}
    admin_key = read_key(options.admin_key_file) if options.admin_key_file else environment.get(ADMIN_KEY_VARIABLE)
    if options.watch and options.root is None:
        raise UsageError("`--watch` needs a folder to watch", hint="name it with `--adapters ROOT`")
    key = read_key(options.api_key_file) if options.api_key_file else environment.get("VLLM_API_KEY") or None
    environment.pop(ADMIN_KEY_VARIABLE, None)
    require_separate(key, keys, admin_key)
    if any(names != EVERYTHING for names in keys.values()):
        require_no_store(environment)
    if keys and key is not None:
        # vLLM knows whole keys only and would refuse the others; preft's gate takes all of them.
        keys[key], key = EVERYTHING, None
        environment.pop("VLLM_API_KEY", None)
    tls = {"ssl-keyfile", "ssl-certfile"} <= option_names(options.passthrough)
    address = Address(options.host, _free_port(options.host, options.port), tls)
    plan = ServePlan(
        model,
        tuple(names),
        {name: str(path.absolute()) for name, path in adapters.items()},
        root=str(options.root.absolute()) if options.root is not None else None,
        watch=options.watch,
        admin_key=admin_key or None,
        keys=keys,
        access_log=_writable(options.access_log) if options.access_log is not None else None,
        max_push_bytes=options.max_push_mib << 20,
        status_page=options.status_page,
    )
    command = (
        sys.executable,
        "-m",
        SERVER_MODULE,
        *_engine_flags(find(), settings, options.passthrough),
        *("--served-model-name", *names),
        *("--host", address.host, "--port", str(address.port)),
        *_quiet_flags(options),
        *options.passthrough,
    )
    drain_s = option_value(options.passthrough, "shutdown-timeout") or "0"
    stop_s = _STOP_S + (float(drain_s) if drain_s.isdigit() else 0.0)
    own_key = plan.instance_key if keys else key
    return Launch(command, server_environment(environment, key, options), plan, address, own_key, stop_s)


def require_environment(environment: Mapping[str, str]) -> None:
    """Refuses variables under which the server would not be what preft promises.

    Raises:
        UnsupportedError: One of them is set.
    """
    guard.require_cpu_build()
    guard.require_safe_environment(environment)
    if environment.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0"):
        raise UnsupportedError(
            "`VLLM_SERVER_DEV_MODE` is set, which preft does not allow: its routes let any client call the workers",
            hint="unset `VLLM_SERVER_DEV_MODE`, then start again",
        )


def server_environment(environment: Mapping[str, str], key: str | None, options: ServeOptions) -> dict[str, str]:
    """The server's environment: the user's, with preft's plugin added and the key in it."""
    made = dict(environment)
    plugins = [name for name in made.get("VLLM_PLUGINS", "").split(",") if name]
    made["VLLM_PLUGINS"] = ",".join([*plugins, *([] if PLUGIN in plugins else [PLUGIN])])
    made.setdefault("VLLM_NO_USAGE_STATS", "1")
    made.setdefault("VLLM_LOGGING_LEVEL", "INFO" if options.verbose else "WARNING")
    bind_all_cores(made)
    if key is not None:
        made["VLLM_API_KEY"] = key
    return made


def default_name(model: str) -> str:
    """The base model's name for clients: a folder's own name, never its path."""
    path = Path(model).expanduser()
    return (path.resolve().name or "base") if path.is_dir() else model


def require_names(names: Sequence[str], adapters: Mapping[str, Path]) -> None:
    """Checks the base model's names, and that no adapter takes one.

    Raises:
        UsageError: A name is empty, looks like an option, or means two things.
    """
    from preft.adapters.catalog import require_name

    for name in names:
        if not name or name.startswith("-") or not name.isprintable():
            raise UsageError("The base model's name is not valid", got=ascii(name), hint="see `--served-model-name`")
    for name in adapters:
        require_name(name, reserved=names)


def collect_adapters(root: Path | None, named: Sequence[str]) -> dict[str, Path]:
    """Adapter folders by name, from a root folder and from `NAME=PATH` flags.

    Raises:
        UsageError: A name is not valid, or is given twice, or differs from another in case alone.
        FileError: The root cannot be read.
    """
    from preft.adapters.catalog import scan_root, split_name_path

    adapters = dict(scan_root(root)) if root is not None else {}
    for text in named:
        name, path = split_name_path(text)
        twin = next((other for other in adapters if other.casefold() == name.casefold()), None)
        if twin is not None:
            raise UsageError(f"The adapter name `{name}` is given twice", got=f"`{adapters[twin]}` and `{path}`")
        adapters[name] = path
    return adapters


def read_key(path: Path) -> str:
    """Reads an API key: the only line of a file.

    Raises:
        FileError: The file cannot be read.
        UsageError: It does not hold one line of visible characters.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"The API key file `{path}` cannot be read", got=getattr(error, "strerror", None) or str(error)
        ) from None
    key = text.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            f"The API key file `{path}` does not hold a key", accepted="one line of visible ASCII characters"
        )
    return key


def require_separate(key: str | None, keys: Mapping[str, object], admin_key: str | None) -> None:
    """Refuses a key that is given for two things: its holder could do the greater of them.

    Raises:
        UsageError: The clients' key is in the file of keys, or the admin key is one of clients.
    """
    if key is not None and keys.get(key, EVERYTHING) != EVERYTHING:
        raise UsageError(
            "The API key is in the file of keys too, where it is for some adapters only",
            hint="give one of them another key",
        )
    if admin_key and (admin_key == key or admin_key in keys):
        raise UsageError(
            "The key for changes of adapters is a client's key too, so that clients could change adapters",
            hint="give the admin another key",
        )


def require_no_store(environment: Mapping[str, str]) -> None:
    """Refuses vLLM's store of responses beside keys that are for some adapters.

    Raises:
        UnsupportedError: It is on.
    """
    if environment.get(STORE_VARIABLE, "0") not in ("", "0"):
        raise UnsupportedError(
            f"`{STORE_VARIABLE}` is set beside keys that are for some adapters: any key could read any stored response",
            hint=f"unset `{STORE_VARIABLE}`, or give whole keys only",
        )


def read_keys(path: Path) -> dict[str, list[str] | str]:
    """Reads a file of API keys: a JSON object of key to list of adapter names, or to `*` for all of them.

    Raises:
        FileError: The file cannot be read.
        UsageError: It does not hold that.
    """
    from preft.adapters.catalog import require_name
    from preft.adapters.jsonfile import parse_json_object

    accepted = 'a JSON object such as {"KEY": ["alice", "bob"], "OTHER-KEY": "*"}'
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"The file of keys `{path}` cannot be read", got=error.strerror) from None
    try:
        document = parse_json_object(data, str(path))
    except AdapterError as error:
        # Which key is given twice is not to be shown.
        got = None if "twice" in error.what else error.got
        raise UsageError(f"The file of keys `{path}` is not valid", got=got, accepted=accepted) from None
    if not document:
        raise UsageError(f"The file of keys `{path}` holds no keys", accepted=accepted)
    for number, (key, names) in enumerate(document.items(), 1):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(f"Key {number} in `{path}` is not one word of visible ASCII characters")
        if names != EVERYTHING and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise UsageError(f"Key {number} in `{path}` has no list of adapter names", accepted=accepted)
        for name in names if names != EVERYTHING else ():
            require_name(name)
    return document


def _writable(path: Path) -> str:
    """The absolute path of a log, once it is known that it can be appended to."""
    try:
        with path.open("ab"):
            return str(path.absolute())
    except OSError as error:
        raise FileError(f"The access log `{path}` cannot be written", got=error.strerror) from None


def _engine_flags(folder: Path, settings: EngineSettings, passthrough: Sequence[str]) -> list[str]:
    given = option_names(passthrough) & OVERRIDABLE
    arguments: dict[str, Any] = replace(settings, vllm={}).engine_arguments(str(folder.absolute()), server=True)
    return to_flags({key: value for key, value in arguments.items() if key.replace("_", "-") not in given})


def _quiet_flags(options: ServeOptions) -> list[str]:
    given = option_names(options.passthrough)
    if options.verbose:
        return []
    flags = [] if "uvicorn-log-level" in given else ["--uvicorn-log-level", "warning"]
    return flags if "disable-uvicorn-access-log" in given else [*flags, "--disable-uvicorn-access-log"]


def _free_port(host: str, port: int) -> int:
    """Checks that the address can be listened on, and chooses a port for 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
            return int(probe.getsockname()[1])
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"The server cannot listen on {host or 'any interface'}, port {port}",
            got=getattr(error, "strerror", None) or str(error),
            hint="choose another `--port`, or 0 for a free one",
        ) from None

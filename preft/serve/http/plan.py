"""What the process that starts a server tells the plugin inside it.

The plan travels through an inherited pipe, not on the command line, so that thousands of adapters fit and no other
user of the machine sees them or the keys. The pipe stays open afterwards: its end tells the server that its parent is
gone.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from preft.errors import EngineError

DESCRIPTOR_VARIABLE = "_PREFT_PLAN_FD"
"""Set by the parent, in the child's environment only."""
EVERYTHING = "*"
"""In place of a key's list of adapters: all of them."""


@dataclass(frozen=True)
class ServePlan:
    """What a server is to serve.

    Attributes:
        model: The base model as the user named it.
        names: Model names that mean the base model.
        adapters: Adapter folders by name.
        instance: Random text by which the parent recognises this server's answers.
        instance_key: Key by which the server recognises its parent.
        root: The folder that adapters are loaded from and written to while the server runs, or None.
        watch: Take up what changes in `root`.
        admin_key: Key for changes of adapters, or None: no changes.
        keys: Further API keys with the adapters that each may use, or `*`.
        access_log: File for one line a request, or None.
        max_push_bytes: Largest adapter that is accepted over HTTP.
        status_page: Answer `/preft` with the status page.
    """

    model: str
    names: tuple[str, ...]
    adapters: Mapping[str, str]
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    instance_key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    root: str | None = None
    watch: bool = False
    admin_key: str | None = field(default=None, repr=False)
    keys: Mapping[str, list[str] | str] = field(default_factory=dict, repr=False)
    access_log: str | None = None
    max_push_bytes: int = 1 << 30
    status_page: bool = True

    def encode(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> ServePlan:
        """Reads what `encode` wrote.

        Raises:
            EngineError: It is something else.
        """
        try:
            document = json.loads(line)
            if set(document) != {field.name for field in fields(cls)}:
                raise ValueError(f"fields {sorted(document)}")
            return cls(**{**document, "names": tuple(document["names"])})
        except (ValueError, TypeError) as error:
            raise EngineError("The server was not told what to serve", got=str(error)) from None


def take_plan(environment: Mapping[str, str] | None = None) -> ServePlan:
    """Reads the plan in the server's process, once, and watches the pipe from then on.

    Raises:
        EngineError: There is none: the server was not started by preft.
    """
    environment = os.environ if environment is None else environment
    number = environment.get(DESCRIPTOR_VARIABLE)
    if number is None:
        raise EngineError(
            "vLLM's server loaded preft's endpoints but was not started by preft",
            hint="start it with `preft serve`, or take `preft` out of `VLLM_PLUGINS`",
        )
    stream = os.fdopen(int(number), "rb")
    plan = ServePlan.decode(stream.readline())

    def wait_for_end() -> None:
        stream.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_end, name="preft-parent", daemon=True).start()
    return plan

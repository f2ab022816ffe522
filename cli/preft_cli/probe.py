"""Imports libraries one after another and prints what came of it, one JSON object a line.

`preft doctor` runs this in a process of its own (`python -m preft_cli.probe NAME...`): a library that takes the
process down, as a build for another processor does, is then a finding and not the end of the report.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def probe(name: str) -> dict[str, Any]:
    """Imports one library.

    Returns:
        Its `version`, and what else decides how it runs; or the `error` of the import.
    """
    try:
        module = importlib.import_module(name)
        facts: dict[str, Any] = {"version": str(getattr(module, "__version__", "unknown"))}
        if name == "torch":
            facts["cuda_build"] = module.version.cuda
            facts["threads"] = module.get_num_threads()
            facts["gpus"] = [
                module.cuda.get_device_name(index)
                for index in range(module.cuda.device_count() if module.cuda.is_available() else 0)
            ]
        if name == "vllm":
            facts["device"] = importlib.import_module("vllm.platforms").current_platform.device_type
            _require_seams()
        return facts
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def _require_seams() -> None:
    """Raises what the backend would raise at start: the version, and the private parts of vLLM it reaches into."""
    from preft.serve.backend import guard

    guard.require_scheduler_seams()
    guard.require_worker_seams()


def main() -> None:
    """Probes the libraries named on the command line."""
    for name in sys.argv[1:]:
        print(json.dumps({"name": name, "started": True}), flush=True)
        print(json.dumps({"name": name, **probe(name)}), flush=True)


if __name__ == "__main__":
    main()

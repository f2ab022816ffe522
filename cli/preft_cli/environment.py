"""Environment variables: the ones `preft` reads, and the ones that quieten the libraries beneath it."""

from __future__ import annotations

import difflib
import logging
import os
import warnings
from collections.abc import Mapping

VARIABLES = {
    "PREFT_ADMIN_KEY": "key for changes of adapters on a running `preft serve`; see `--admin-key-file`",
    "PREFT_CACHE": "folder for fetched models; default `preft` under the user's cache directory",
    "PREFT_EXPERIMENTAL_GPU": "1 lets an engine start on vLLM's GPU builds, whose worker is not verified on any GPU",
    "PREFT_TRACEBACK": "1 prints the traceback of an internal error instead of writing it to a file",
}
"""Every PREFT_* variable that any part of `preft` reads, with its meaning."""

_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "GLOO_LOG_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}
_ALWAYS = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """One message for each PREFT_* variable that nothing reads: most likely a misspelling."""
    messages = []
    for name in sorted(os.environ if environment is None else environment):
        if name.startswith("PREFT_") and name not in VARIABLES:
            known_ends = [known.removeprefix("PREFT_") for known in VARIABLES]
            near = difflib.get_close_matches(name.removeprefix("PREFT_"), known_ends, n=1)
            known = f"did you mean PREFT_{near[0]}?" if near else f"known: {', '.join(VARIABLES)}"
            messages.append(f"environment variable {name} is not known and has no effect; {known}")
    return messages


def hush(*, verbose: bool) -> None:
    """Sets the libraries' own switches before they are imported. What the user has set stays as it is.

    Args:
        verbose: Leave the libraries' logs and progress bars on.
    """
    for name, value in {**_ALWAYS, **({} if verbose else _QUIET)}.items():
        os.environ.setdefault(name, value)
    if not verbose:
        warnings.simplefilter("ignore")
        # It speaks while it is imported, before it has set up its own logging.
        logging.getLogger("vllm").setLevel(logging.ERROR)

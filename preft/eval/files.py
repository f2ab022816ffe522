"""What an evaluation leaves in a folder: `results.json`, and samples as the harness writes them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from preft.errors import FileError
from preft.eval.run import Evaluation

RESULTS = "results.json"


def require_free(folder: Path, *, force: bool = False) -> None:
    """Checks, before anything is computed, that results can be written.

    Raises:
        FileError: There are results already, or the folder cannot be made.
    """
    if (folder / RESULTS).exists() and not force:
        raise FileError(
            "The folder holds the results of an earlier evaluation",
            got=f"`{folder / RESULTS}`",
            hint="name another folder, or replace them with `--force`",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError("The folder cannot be made", got=f"`{folder}`: {error.strerror}") from None


def save_evaluation(evaluation: Evaluation, folder: Path, *, log_samples: bool = False) -> list[Path]:
    """Writes the results, and the samples if they are wanted.

    Returns:
        The files.

    Raises:
        FileError: A file cannot be written.
    """
    texts = {}
    if log_samples:
        for arm, tasks in evaluation.samples.items():
            for task, samples in tasks.items():
                name = f"samples_{arm}_{re.sub(r'[^A-Za-z0-9._-]', '_', task)}.jsonl"
                texts[name] = "".join(dump(_sample(dict(sample))) + "\n" for sample in samples)
    # Last, and old ones go first: who finds results finds all that belongs to them.
    texts[RESULTS] = dump(evaluation.document, indent=2) + "\n"
    try:
        (folder / RESULTS).unlink(missing_ok=True)
        for name, text in texts.items():
            partial = folder / f".{name}.partial"
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, folder / name)
    except OSError as error:
        raise FileError("The results cannot be written", got=f"`{folder}`: {error.strerror}") from None
    return [folder / name for name in texts]


def dump(value: Any, *, indent: int | None = None) -> str:
    """JSON of what the harness reports, which holds functions and numbers of other libraries.

    Numbers that JSON does not have, such as an infinite perplexity, become null.
    """
    from lm_eval.utils import handle_non_serializable

    text = json.dumps(value, default=handle_non_serializable, ensure_ascii=False)
    return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=indent, ensure_ascii=False)


def _sample(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample in the form of the harness's own files.

    Source: EleutherAI/lm-evaluation-harness `lm_eval/loggers/evaluation_tracker.py`, `save_results_samples`.
    """
    from lm_eval.utils import sanitize_list

    arguments = {
        f"gen_args_{index}": {f"arg_{place}": value for place, value in enumerate(values)}
        for index, values in enumerate(sample["arguments"])
    }
    return {
        **sample,
        "resps": sanitize_list(sample["resps"]),
        "filtered_resps": sanitize_list(sample["filtered_resps"]),
        "arguments": arguments,
        "target": str(sample["target"]),
    }

"""Finding the harness's tasks by name, and loading them before an engine is started."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager

from preft.errors import FileError, UnsupportedError, UsageError
from preft.eval.suites import PREFIX, task_manager

_NEAR = 5
SAMPLING_TEMPERATURE = 0.8
"""Where several answers are asked for and no temperature is named; equal answers would say nothing."""


def find_tasks(names: Sequence[str], include_path: Path | None = None) -> tuple[TaskManager, list[str]]:
    """Resolves names and patterns of tasks, groups and tags.

    Packaged tasks and those of `include_path` come first. The harness's own tens of thousands of definitions are read
    only if a name is not found there.

    Args:
        names: As the harness takes them; `*` matches.
        include_path: A folder of further task definitions.

    Raises:
        UsageError: There is no task of a name; names that are near are given.
        FileError: `include_path` is not a folder.
    """
    if not names:
        raise UsageError("No task is named", accepted="names of lm-evaluation-harness tasks, separated by commas")
    if include_path is not None and not include_path.is_dir():
        raise FileError("The folder of tasks cannot be read", got=f"`{include_path}`", accepted="a folder")
    manager = task_manager(include_path)
    found = _match(manager, names)
    if all(found.values()):
        return manager, _flat(found)
    manager = task_manager(include_path, include_defaults=True)
    found = _match(manager, names)
    unknown = [name for name, matches in found.items() if not matches]
    if unknown:
        near = difflib.get_close_matches(unknown[0], manager.all_tasks, n=_NEAR, cutoff=0.5)
        raise UsageError(
            "There is no such task",
            got=f"`{unknown[0]}`",
            accepted=", ".join(near) or "a task of lm-evaluation-harness, or one in `--include-path`",
            hint="`lm-eval ls tasks` lists them all",
        )
    return manager, _flat(found)


def load_tasks(manager: TaskManager, names: Sequence[str], *, allow_code_execution: bool = False) -> dict[str, Any]:
    """Loads tasks with their data, and refuses those that cannot run here.

    Args:
        manager: Knows the tasks.
        names: Of tasks, groups and tags.
        allow_code_execution: Run what the model writes, in a sandbox, in packaged tasks that score it so.

    Returns:
        What the harness's `evaluate` takes: tasks and groups by name.

    Raises:
        FileError: The data of a task cannot be reached.
        UnsupportedError: A task runs code that the model writes, and that is not allowed or has no sandbox.
        UsageError: A definition is not valid.
    """
    # Before loading: what scores such a task is itself code that the harness would fetch.
    _refuse_code((name for name in names if _says_unsafe(manager, name)), allow=allow_code_execution)
    try:
        loaded: dict[str, Any] = manager.load(list(names))
    except OSError as error:
        raise FileError(
            "The data of a task cannot be reached",
            got=_first_line(error),
            accepted=f"a network connection, data that was fetched before, or a task that needs none: `{PREFIX}...`",
            hint="fetch it once where there is a network; packaged and local tasks: see docs/guides/eval.md",
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise UsageError("A task cannot be loaded", got=_first_line(error)) from error
    _refuse_code(
        (name for name, task in loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False)),
        allow=allow_code_execution,
    )
    return loaded


def _says_unsafe(manager: TaskManager, name: str) -> bool:
    """Whether a task's own definition says that it runs code; groups are seen when they are loaded."""
    definition = getattr(manager.task_index.get(name), "cfg", None) or {}
    return bool(definition.get("unsafe_code"))


def _refuse_code(names: Iterable[str], *, allow: bool) -> None:
    found = sorted(names)
    foreign = [name for name in found if not name.startswith(PREFIX)]
    if foreign:
        raise UnsupportedError(
            "The task runs code that the model writes, outside the sandbox of preft",
            got=", ".join(f"`{name}`" for name in foreign),
            accepted="`preft_humaneval` with `--allow-code-execution`",
            hint="or generate with `preft generate`, and run the code where it can do no harm",
        )
    if found and not allow:
        raise UnsupportedError(
            "The task runs code that the model writes",
            got=", ".join(f"`{name}`" for name in found),
            hint="`--allow-code-execution` runs it in a sandbox with limits; read what they are in docs/guides/eval.md",
        )


def require_several(loaded: Mapping[str, Any]) -> None:
    """Checks that every task scores several answers to one example.

    Raises:
        UsageError: One would keep the first and drop the others.
    """
    single = sorted(
        name for name, task in loaded["tasks"].items() if not (task.config.metadata or {}).get("several_answers")
    )
    if single:
        raise UsageError(
            "The task scores one answer an example",
            got=", ".join(f"`{name}`" for name in single),
            accepted=f"packaged tasks, `{PREFIX}...`, or tasks whose metadata says `several_answers: true`",
            hint="leave `--samples` out",
        )


def prepare_tasks(
    loaded: Mapping[str, Any],
    *,
    num_fewshot: int | None,
    seed: int,
    samples: int = 1,
    temperature: float = SAMPLING_TEMPERATURE,
) -> None:
    """Sets every task to its first state, so that each arm gets the same prompts.

    Args:
        loaded: From `load_tasks`.
        num_fewshot: Examples in the prompt, or None for each task's own number. A task that says 0 keeps it, as in
            the harness.
        seed: Of the choice of examples.
        samples: Answers to each example; more than one are sampled.
        temperature: Of that sampling, from the whole distribution: no `top_k`, no `top_p`.
    """
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if num_fewshot is not None and own != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=seed)
        if samples > 1:
            task.set_config(key="repeats", value=samples)
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            task.set_config(key="generation_kwargs", value=sampling, update=True)


def _match(manager: TaskManager, names: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        is_file = name.endswith((".yaml", ".yml")) and Path(name).is_file()
        found[name] = [name] if is_file else list(manager.match_tasks([name]))
    return found


def _flat(found: dict[str, list[str]]) -> list[str]:
    return list(dict.fromkeys(name for matches in found.values() for name in matches))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {lines[0][:200]}"

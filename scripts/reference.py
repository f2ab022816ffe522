"""Writes the generated pages of docs/reference; `--check` says instead which are not current."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import re
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH = 100
FOLDER = Path(__file__).parents[1] / "docs" / "reference"
GENERATED = "This page is generated: `make docs-reference`.\n"


def help_page(words: list[str]) -> str:
    """What `preft WORDS --help` prints at the page's width."""
    from preft_cli.app import run

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = run([*words, "--help"])
    if status:
        raise RuntimeError(f"`preft {' '.join(words)} --help` ended with {status}")
    return "\n".join(line.rstrip() for line in printed.getvalue().strip("\n").splitlines())


def commands() -> list[list[str]]:
    """Every command and every group, as words, in the order of `preft --help`."""
    import typer

    from preft_cli.app import COMMANDS, app

    root: Any = typer.main.get_command(app)
    found: list[list[str]] = []
    for name in COMMANDS:
        found.append([name])
        found += [[name, child] for child in getattr(root.get_command(None, name), "commands", {})]
    return found


def command_line() -> str:
    """Every help page, and the environment variables."""
    from preft_cli.environment import VARIABLES

    os.environ.update(COLUMNS=str(WIDTH), TERMINAL_WIDTH=str(WIDTH), LANG="C.UTF-8")
    sections = [
        "# Command line\n\nEvery page of `preft COMMAND --help`. Data goes to stdout, everything else to stderr; exit "
        f"status 0 is ok, 1 failed,\n2 wrong usage. {GENERATED}",
        f"```text\n{help_page([])}\n```\n",
    ]
    sections += [f"## preft {' '.join(words)}\n\n```text\n{help_page(words)}\n```\n" for words in commands()]
    rows = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in VARIABLES.items())
    sections.append(f"## Environment variables\n\n| variable | meaning |\n|---|---|\n{rows}")
    return "\n".join(sections)


def attribute_texts(kind: type) -> dict[str, str]:
    """The `Attributes:` section of a class's docstring, by name."""
    section = (kind.__doc__ or "").partition("Attributes:")[2]
    found: dict[str, str] = {}
    for name, text in re.findall(r"^        (\w+): (.*(?:\n {12}.*)*)", section, flags=re.MULTILINE):
        found[name] = " ".join(text.split())
    return found


def setting_rows(kind: type, prefix: str = "") -> str:
    """One table row for each key of a recipe's class and of those nested in it."""
    texts, hints, rows = attribute_texts(kind), typing.get_type_hints(kind), []
    for field in dataclasses.fields(kind):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            rows.append(setting_rows(hints[field.name], f"{name}."))
            continue
        default = "required" if field.default is dataclasses.MISSING else f"`{shown(field.default)}`"
        choices = field.metadata.get("choices")
        accepted = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
        rows.append(f"| `{name}` | {default} | {texts[field.name].replace('|', chr(92) + '|')}{accepted} |\n")
    return "".join(rows)


def shown(value: Any) -> str:
    """A default as a recipe would write it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "[]" if value == () else str(value)


def recipes() -> str:
    """Every key of every recipe."""
    from preft.config.grpo import GrpoRecipe
    from preft.config.train import SftRecipe

    head = "| key | default | meaning |\n|---|---|---|\n"
    return (
        "# Recipe keys\n\nA recipe is YAML; `--set KEY=VALUE` overrides any key, `a.b=1` one inside another. Unknown "
        f"keys are refused. {GENERATED}\n## preft train sft\n\n{head}{setting_rows(SftRecipe)}\n"
        f"## preft train grpo\n\n{head}{setting_rows(GrpoRecipe)}"
    )


def peft_fields() -> str:
    """What conversion does with each field of PEFT's configuration."""
    from preft.convert.lora_fields import LORA_FIELDS

    rows = []
    for row in LORA_FIELDS.values():
        instead = f" Instead: {row.instead}." if row.instead else ""
        rows.append(f"| `{row.name}` | {row.effect.value} | {row.why[0].upper()}{row.why[1:]}.{instead} |\n")
    return (
        "# PEFT fields\n\nEvery field of PEFT's `LoraConfig`, up to 0.21, and what `preft convert` does about it: "
        "*honoured* fields decide sites, ranks\nor scales; *irrelevant* ones change no number at inference; *refused* "
        f"ones are refused when their value takes effect. A field\nthat is not listed is refused. {GENERATED}\n"
        f"| field | effect | why |\n|---|---|---|\n{''.join(rows)}"
    )


PAGES: dict[str, Callable[[], str]] = {"cli.md": command_line, "recipes.md": recipes, "peft-fields.md": peft_fields}


def outdated() -> list[str]:
    """Names of the pages that are not what would be written now."""
    current = {name: FOLDER / name for name in PAGES}
    return [
        name
        for name, path in current.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != PAGES[name]()
    ]


def main() -> int:
    """Writes the pages, or compares them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is not current")
    if not parser.parse_args().check:
        for name, page in PAGES.items():
            (FOLDER / name).write_text(page(), encoding="utf-8")
        return 0
    names = outdated()
    if names:
        print(f"not current: {', '.join(names)}; run `make docs-reference`", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())

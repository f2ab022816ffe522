"""What `preft generate` does: rows to requests, requests to an engine, results back in the rows' order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from preft.adapters.catalog import split_name_path
from preft.config.progress import Progress, stage
from preft.data.encode import GenerationDefaults, encode_rows, load_tokenizer
from preft.data.requests import GenerationRequest, GenerationResult
from preft.data.rows import RowError, read_rows
from preft.errors import UsageError
from preft.models.locate import locate_model
from preft_cli.console import Session
from preft_cli.engines import DTYPES, open_vllm, require_choice

ENGINES = ("vllm", "hf")
STANDARD_INPUT = Path("/dev/stdin")


@dataclass(frozen=True)
class Job:
    """One call of `preft generate`; the fields are its options."""

    model: str
    prompts: str
    adapters: tuple[str, ...]
    engine: str
    dtype: str
    slots: int
    max_model_len: int | None
    allow_base_mismatch: bool
    compiled: bool
    max_tokens: int
    temperature: float
    seed: int | None
    logprobs: bool


class OpenEngine(Protocol):
    """What both engines have."""

    def generate(
        self, requests: Sequence[GenerationRequest], *, progress: Progress | None = None
    ) -> list[GenerationResult]:
        """Completes prompts; a bad request fails alone, in its result."""

    def close(self) -> None:
        """Frees what it holds."""


def run_job(job: Job, session: Session) -> bool:
    """Reads the rows, generates, prints the results.

    Returns:
        Whether every row succeeded.

    Raises:
        PreftError: An option cannot be meant, the rows or the model cannot be read, or the engine fails as a whole.
    """
    adapters = named_adapters(job.adapters)
    require_choice("--engine", job.engine, ENGINES)
    require_choice("--dtype", job.dtype, DTYPES)
    defaults = GenerationDefaults(
        max_tokens=job.max_tokens,
        temperature=job.temperature,
        seed=job.seed,
        num_logprobs=0 if job.logprobs else None,
    )
    progress = session.progress()
    given = list(read_rows(STANDARD_INPUT if job.prompts == "-" else Path(job.prompts)))
    folder = locate_model(job.model, progress=progress)
    with session.diverted(), stage(progress, "Loading the tokenizer and the prompts"):
        rows = list(encode_rows(given, load_tokenizer(folder), defaults))
    requests = [row for row in rows if isinstance(row, GenerationRequest)]
    answers = _answers(job, folder, adapters, requests, session) if requests else {}
    results = [row.to_result() if isinstance(row, RowError) else answers[row.id] for row in rows]
    for result in results:
        _print(result, session)
    return all(result.error is None for result in results)


def named_adapters(texts: Sequence[str]) -> dict[str, Path]:
    """Reads repeated `NAME=PATH`.

    Raises:
        UsageError: One is malformed, or a name is given twice.
    """
    found: dict[str, Path] = {}
    for text in texts:
        name, path = split_name_path(text)
        if name in found:
            raise UsageError(f"The adapter name `{name}` is given twice", got=f"`{found[name]}` and `{path}`")
        found[name] = path
    return found


def _answers(
    job: Job, folder: Path, adapters: Mapping[str, Path], requests: Sequence[GenerationRequest], session: Session
) -> dict[str, GenerationResult]:
    """Results by id. The libraries beneath print to stdout as they please, so it is diverted meanwhile."""
    progress = session.progress()
    with session.diverted():
        with stage(progress, f"Starting the {job.engine} engine"):
            engine = _open(job, folder, adapters, loud=session.verbose)
        try:
            for entry in getattr(engine, "unavailable", ()):
                session.warn(f"the adapter `{entry.name}` is not available: {entry.error.what}")
            results = engine.generate(requests, progress=progress)
        finally:
            engine.close()
    return {result.id: result for result in results}


def _open(job: Job, folder: Path, adapters: Mapping[str, Path], *, loud: bool) -> OpenEngine:
    if job.engine == "hf":
        from preft.serve.hf_engine import HFEngine

        return HFEngine(
            folder,
            adapters,
            dtype=job.dtype,
            max_model_len=job.max_model_len,
            allow_base_mismatch=job.allow_base_mismatch,
        )
    return open_vllm(
        folder,
        adapters,
        loud=loud,
        slots=job.slots,
        dtype=job.dtype,
        max_model_len=job.max_model_len,
        allow_base_mismatch=job.allow_base_mismatch,
        compiled=job.compiled,
    )


def _print(result: GenerationResult, session: Session) -> None:
    if session.as_json:
        session.emit(result.to_dict())
        return
    if result.error is not None:
        who = f"[{result.id}]" + (f" {result.adapter}" if result.adapter else "")
        told = "".join(f"\n  {key}: {result.error[key]}" for key in ("got", "accepted", "hint") if key in result.error)
        session.err.print(f"error: {who}: {result.error['message']}{told}")
        return
    who = f"[{result.id}] {result.adapter or 'base'}"
    session.show(f"{who} ({len(result.token_ids)} tokens, {result.finish_reason})", result.text, "")

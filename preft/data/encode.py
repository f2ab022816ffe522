"""From rows to requests: prompts become token ids, exactly as the model's own tokenizer and chat template make them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from preft.data.requests import GenerationRequest
from preft.data.rows import PromptRow, RowError
from preft.errors import FileError, PreftError, RequestError, UsageError
from preft.positions import resolve_boundary


@dataclass(frozen=True)
class GenerationDefaults:
    """What holds for every row that does not say otherwise.

    Attributes:
        max_tokens: Output tokens at most, at least 1.
        temperature: 0 is greedy.
        seed: Seed of the sampling, or None.
        ignore_eos: Go on to `max_tokens` whatever is generated.
        num_logprobs: Alternatives to report for each output token, or None for no log-probabilities.
        want_prompt_logprobs: Report the log-probability of each prompt token.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    num_logprobs: int | None = None
    want_prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError("`max_tokens` is not valid", got=str(self.max_tokens), accepted="at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise UsageError("The temperature is not valid", got=str(self.temperature), accepted="0 or more")


def has_tokenizer(folder: Path) -> bool:
    """Whether a checkpoint folder holds a tokenizer."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "tekken.json")
    return any((folder / name).is_file() for name in names)


def load_tokenizer(folder: Path) -> Any:
    """Loads a checkpoint's tokenizer, or returns None where the folder has none.

    Raises:
        FileError: There is one, and it cannot be read.
    """
    from transformers import AutoTokenizer

    if not has_tokenizer(folder):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise FileError(f"The tokenizer in `{folder}` cannot be read", got=lines[0][:200]) from None


def encode_row(
    row: PromptRow, tokenizer: Any, defaults: GenerationDefaults | None = None, *, vocab_size: int | None = None
) -> GenerationRequest:
    """Makes a request of a row.

    A conversation is rendered with the tokenizer's chat template and the opening of the answer; that text is the
    prompt, to the token.

    Args:
        row: The row.
        tokenizer: A Transformers tokenizer; None serves only rows that hold token ids.
        defaults: What the row does not say.
        vocab_size: Number of token ids that the model has, or None not to check.

    Raises:
        RequestError: There is no tokenizer or chat template, the template refuses the conversation, the prompt is
            empty, or a token id is out of range.
        UsageError: The boundary lies beyond the prompt.
    """
    defaults = defaults or GenerationDefaults()
    tokens = _tokens(row, tokenizer)
    if not tokens:
        raise RequestError("The prompt is empty", accepted="at least one token")
    outside = [token for token in tokens if vocab_size is not None and token >= vocab_size]
    if outside:
        raise RequestError(
            "The prompt holds a token id that the model does not have",
            got=str(outside[0]),
            accepted=f"0 to {cast(int, vocab_size) - 1}",
        )
    if row.adapter is not None:
        resolve_boundary(len(tokens), row.boundary)
    return GenerationRequest(
        id=row.id,
        prompt_token_ids=tokens,
        adapter=row.adapter,
        boundary=row.boundary,
        max_tokens=row.max_tokens or defaults.max_tokens,
        temperature=defaults.temperature,
        seed=defaults.seed,
        ignore_eos=defaults.ignore_eos,
        num_logprobs=defaults.num_logprobs,
        want_prompt_logprobs=defaults.want_prompt_logprobs,
    )


def encode_rows(
    rows: Iterable[PromptRow | RowError],
    tokenizer: Any,
    defaults: GenerationDefaults | None = None,
    *,
    vocab_size: int | None = None,
) -> Iterator[GenerationRequest | RowError]:
    """Makes requests of rows, one by one and in order; a row that cannot be one becomes a `RowError`."""
    for row in rows:
        if isinstance(row, RowError):
            yield row
            continue
        try:
            yield encode_row(row, tokenizer, defaults, vocab_size=vocab_size)
        except PreftError as error:
            yield RowError(row.id, row.line, error.to_dict(), row.adapter)


def _tokens(row: PromptRow, tokenizer: Any) -> tuple[int, ...]:
    if row.prompt_token_ids is not None:
        return row.prompt_token_ids
    if tokenizer is None:
        raise RequestError(
            "The model has no tokenizer",
            got="a prompt in words",
            accepted="`prompt_token_ids`",
            hint="put the model's tokenizer files into its folder",
        )
    if row.prompt is not None:
        return tuple(tokenizer(row.prompt).input_ids)
    return _render(row, tokenizer)


def _render(row: PromptRow, tokenizer: Any) -> tuple[int, ...]:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise RequestError(
            "The model has no chat template", got="`messages`", accepted="`prompt`", hint="render the conversation"
        )
    messages = [dict(message) for message in row.messages or ()]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise RequestError("The chat template refuses the conversation", got=f"{error}"[:200]) from None
    # The template has written the special tokens already.
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)

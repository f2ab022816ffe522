"""Conversations to training examples, through the tokenizer's own chat template, with an exact boundary.

The prompt of an example is the very text that a server would render for the conversation so far; the completion is
what the template adds when the answer is there. Both are turned into tokens on their own, so no token can straddle
the boundary, and the prompt's tokens are those of serving. A template under which the prompt is not the beginning of
the whole text cannot be used, and is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from preft.errors import RequestError, UnsupportedError, UsageError

ROLES = ("system", "user", "assistant", "tool")
_NOT_RENDERED = ("tool_calls", "function_call", "reasoning_content", "thinking")
"""Parts of messages that templates render at serving, and that are not learnt from; other keys say nothing."""

_PROBE = (
    {"role": "user", "content": "First question?"},
    {"role": "assistant", "content": "First answer."},
    {"role": "user", "content": "Second question?"},
    {"role": "assistant", "content": "Second answer."},
)

Message = Mapping[str, str]


class ChatEncoder:
    """Makes prompts and completions of conversations.

    Args:
        tokenizer: A Transformers tokenizer.
        end_ids: Token ids that end an answer, beside the tokenizer's own end of sequence; see `end_ids`.

    Raises:
        UsageError: The tokenizer has no end of sequence, or none that is known.
    """

    def __init__(self, tokenizer: Any, *, end_ids: Collection[int] = ()) -> None:
        own = tokenizer.eos_token_id
        self._tokenizer = tokenizer
        self._ends = frozenset(end_ids) | ({own} if own is not None else set())
        self._is_checked = False
        if not self._ends:
            raise UsageError(
                "The tokenizer has no end-of-sequence token, so an answer would never end",
                hint="set `eos_token` in the model's tokenizer",
            )
        self._end: int = own if own is not None else min(self._ends)

    @property
    def template_sha256(self) -> str | None:
        """Digest of the chat template, or None where there is none."""
        template = self._tokenizer.chat_template
        return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None

    def require_usable(self) -> None:
        """Checks the chat template on a conversation of two turns.

        Raises:
            UnsupportedError: There is no template, it fails, or the boundary would not be exact under it.
        """
        if self._is_checked:
            return
        if not self._tokenizer.chat_template:
            raise UnsupportedError(
                "The model has no chat template",
                got="rows with `messages`",
                accepted="rows with `prompt` and `completion`",
                hint="put a `chat_template.jinja` into the model's folder, or render the conversations yourself",
            )
        try:
            self.encode(_PROBE, turns="each")
        except RequestError as error:
            raise UnsupportedError(
                f"The model's chat template cannot be trained with: {error.what}",
                got=error.got,
                accepted="a template that writes an answer after what it writes to ask for one",
                hint="give the model another `chat_template.jinja`, or rows with `prompt` and `completion`",
            ) from None
        self._is_checked = True

    def encode(
        self, messages: Sequence[Message], *, turns: str, first: int = 0
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Prompt and completion of the assistant turns of a conversation.

        Each turn's prompt holds the earlier answers, as a server's prompt will: they are prompt tokens there.

        Args:
            messages: Checked by `require_conversation`.
            turns: `each`, or `last` for the last assistant turn only.
            first: Turns before this message are context, never examples.

        Raises:
            RequestError: The template refuses the conversation, or does not begin the whole text with the prompt.
        """
        numbers = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n >= first]
        return [self._turn(messages[: number + 1]) for number in (numbers[-1:] if turns == "last" else numbers)]

    def encode_text(self, prompt: str, completion: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Prompt and completion of plain texts; the end of sequence is added to the completion."""
        tokens = self._tokenizer(completion, add_special_tokens=False).input_ids
        return tuple(self._tokenizer(prompt).input_ids), self._ended(tokens)

    def _turn(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        prompt = self._render(messages[:-1], ask=True)
        whole = self._render(messages, ask=False)
        if not whole.startswith(prompt):
            same = next((n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole))
            raise RequestError(
                "the prompt is not the beginning of the whole conversation",
                got=f"{prompt[same : same + 40]!r} in the prompt, {whole[same : same + 40]!r} in the whole text",
            )
        completion = self._tokenizer(whole[len(prompt) :], add_special_tokens=False).input_ids
        # The template has written the special tokens already.
        return tuple(self._tokenizer(prompt, add_special_tokens=False).input_ids), self._ended(completion)

    def _ended(self, completion: Sequence[int]) -> tuple[int, ...]:
        """The completion up to its last end token, or with one added.

        A server stops at the end token, so what a template writes after it is not learnt.
        """
        last = max((n for n, token in enumerate(completion) if token in self._ends), default=None)
        return (*completion, self._end) if last is None else tuple(completion[: last + 1])

    def _render(self, messages: Sequence[Message], *, ask: bool) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=ask, tokenize=False
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError("the chat template refuses the conversation", got=f"{error}"[:120]) from None
        return str(text)


def end_ids(model_config: Any) -> frozenset[int]:
    """The end-of-sequence ids of a configuration of Transformers': none, one or several."""
    found = getattr(model_config, "eos_token_id", None)
    values = found if isinstance(found, list | tuple) else [found]
    return frozenset(value for value in values if isinstance(value, int) and not isinstance(value, bool))


def require_conversation(value: object, *, first: int = 0) -> tuple[Message, ...]:
    """Checks that a value is a conversation with something to learn.

    Args:
        value: What a row holds.
        first: The number of the first message that may be an example's answer.

    Raises:
        RequestError: It is not; the message alone is the reason that rows are counted by.
    """
    if not isinstance(value, list) or not value:
        raise RequestError("the conversation is not a list of messages", got=repr(value)[:60])
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise RequestError("a message has no text", got=f"message {number}: {message!r}"[:80])
        if message.get("role") not in ROLES:
            raise RequestError("a message has an unknown role", got=f"message {number}: {message.get('role')!r}")
        beside = next((key for key in _NOT_RENDERED if message.get(key)), None)
        if beside is not None:
            raise RequestError("a message holds more than text", got=f"message {number}: `{beside}`")
        if not message["content"].strip():
            raise RequestError("a message is empty", got=f"message {number}, of the {message['role']}")
    roles = [message["role"] for message in value]
    if "system" in roles[1:]:
        two = roles.count("system") > 1
        raise RequestError("there are two system turns" if two else "the system turn is not the first", got=str(roles))
    if next((role for role in roles if role != "system"), None) == "assistant":
        raise RequestError("the assistant comes first, so there is no prompt", got=str(roles))
    if "assistant" not in roles[first:]:
        raise RequestError("there is no assistant turn to learn", got=str(roles))
    return tuple({"role": message["role"], "content": message["content"]} for message in value)

"""What a request may ask for, checked in the front end, where a refusal is a 400 with its reason.

The engine can only fail a request without saying why. So the boundary is compared with the real number of prompt
tokens at two seams of vLLM: after a prompt is rendered, before a response is begun, and once more where every request
becomes the engine's, which catches the routes that render in other ways. Both objects keep their identity, since
vLLM's handlers hold them; their classes change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from vllm.renderers.inputs.preprocess import extract_prompt_len
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.utils.async_utils import make_async
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from preft.errors import PreftError, RequestError, UnsupportedError
from preft.positions import Policy, resolve_boundary
from preft.serve.backend.reference import AdapterReference
from preft.serve.backend.request import BOUNDARY_ARGUMENT
from preft.serve.http.names import raise_for_client
from preft.serve.http.notes import current_note

_OURS = "preft"

FindPolicy = Callable[[object], Policy | None]
"""From a request's `model` to the position policy of its adapter, or None for the base model."""


def check_length(prompt_length: int, max_model_len: int) -> None:
    """Checks a prompt's length.

    Raises:
        RequestError: It is empty, or leaves no room for a token.
    """
    if not prompt_length:
        raise RequestError("The prompt is empty", accepted="at least one token")
    if prompt_length >= max_model_len:
        raise RequestError(
            "The prompt does not fit the context",
            got=f"{prompt_length} tokens",
            accepted=f"at most {max_model_len - 1}",
        )


def check_boundary(arguments: Mapping[str, object] | None, policy: Policy | None, prompt_length: int) -> None:
    """Checks what a request says of its boundary.

    Args:
        arguments: The request's extra arguments (`vllm_xargs`).
        policy: Of its adapter, or None for the base model.
        prompt_length: Number of prompt tokens.

    Raises:
        RequestError: It names an argument that preft does not know, or a boundary with the base model.
        UsageError: The boundary is not an integer from 0 to the prompt's length.
    """
    arguments = arguments or {}
    for key in arguments:
        if _is_ours(key) and key != BOUNDARY_ARGUMENT:
            raise RequestError(f"The argument `{key}` is not known", accepted=f"`{BOUNDARY_ARGUMENT}`")
    if BOUNDARY_ARGUMENT not in arguments:
        return
    if policy is None:
        raise RequestError(
            f"`{BOUNDARY_ARGUMENT}` was given without an adapter", hint="name an adapter as `model`, or leave it out"
        )
    resolve_boundary(prompt_length, arguments[BOUNDARY_ARGUMENT])


def check_raw_boundary(arguments: Mapping[str, object] | None, body: bytes | bytearray, prompt_length: int) -> None:
    """Refuses a boundary of `true` or `false`, which vLLM's reading of the body turns into 1 or 0.

    Args:
        arguments: The request's extra arguments, as vLLM read them.
        body: The request's body as it came in; empty where it is not known.
        prompt_length: Number of prompt tokens.

    Raises:
        UsageError: The boundary is not an integer.
    """
    if not body or (arguments or {}).get(BOUNDARY_ARGUMENT) not in (0, 1):
        return
    try:
        given = json.loads(body)["vllm_xargs"][BOUNDARY_ARGUMENT]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    if isinstance(given, bool):
        resolve_boundary(prompt_length, given)


def check_fields(extra: Mapping[str, object] | None) -> None:
    """Checks the fields of a body that vLLM does not know, which it would ignore.

    Args:
        extra: Those fields.

    Raises:
        RequestError: One was meant for preft: a boundary in the wrong place would be no boundary.
    """
    for key in extra or {}:
        if _is_ours(key) or key == "boundary":
            raise RequestError(
                f"The field `{key}` is not known",
                hint=f'give the boundary as "vllm_xargs": {{"{BOUNDARY_ARGUMENT}": N}}',
            )


def _is_ours(key: str) -> bool:
    return key.casefold().startswith(_OURS)


def check_beam_search(policy: Policy | None) -> None:
    """Refuses beam search under a prompt-only adapter.

    Raises:
        UnsupportedError: vLLM's beam search submits generated tokens as prompt, so the adapter would act on them.
    """
    if policy is not None and policy.is_prompt_only:
        raise UnsupportedError(
            "Beam search is not served with an adapter that acts on prompt tokens only: it submits generated tokens "
            "as prompt",
            hint="leave `use_beam_search` out",
        )


def count_adapted(policy: Policy | None, prompt_length: int, boundary: object) -> int:
    """Prompt tokens that an adapter acts on; 0 for the base model."""
    if policy is None:
        return 0
    if not policy.is_prompt_only:
        return prompt_length
    return sum(stop - start for start, stop in policy.spans(resolve_boundary(prompt_length, boundary)))


class PreftInputProcessor(InputProcessor):
    """VLLM's input processor, which every request passes, with preft's checks behind it."""

    def process_inputs(self, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        """Makes the engine's request, then checks it. Raises a client error (4xx)."""
        request = super().process_inputs(*args, **kwargs)
        try:
            check_engine_request(request)
        except PreftError as error:
            raise_for_client(error)
        return request

    def _validate_lora(self, lora_request: Any) -> None:
        """Nothing to do: vLLM warns of adapters with tokenizers of their own, which preft's do not have."""


def check_engine_request(request: EngineCoreRequest) -> None:
    """Checks a request on its way into the engine.

    Raises:
        PreftError: Its adapter was not registered with preft, or its boundary or its kind cannot be served.
    """
    policy = None
    if request.lora_request is not None:
        policy = AdapterReference.decode(request.lora_request.lora_path).policy
    length = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
    arguments = request.sampling_params.extra_args if request.sampling_params is not None else None
    check_boundary(arguments, policy, length)
    if request.resumable and policy is not None and policy.is_prompt_only:
        raise UnsupportedError(
            "Streaming input is not served with an adapter that acts on prompt tokens only: it turns generated "
            "tokens into prompt",
            hint="send each turn as a request of its own",
        )


class PreftOnlineRenderer(OnlineRenderer):
    """VLLM's renderer of requests into prompts, with preft's checks behind it.

    Attributes:
        preft_policy: Finds a request's policy.
    """

    preft_policy: FindPolicy

    async def render_chat(self, request: Any, **kwargs: Any) -> Any:
        """Renders a chat, then checks the request."""
        result = await super().render_chat(request, **kwargs)
        if isinstance(result, tuple):
            self._preft_check(request, result[1])
        return result

    async def render_completion(self, request: Any, **kwargs: Any) -> Any:
        """Renders prompts, then checks the request against each."""
        result = await super().render_completion(request, **kwargs)
        if isinstance(result, list):
            self._preft_check(request, result)
        return result

    async def render_responses(self, request: Any, **kwargs: Any) -> Any:
        """Renders a conversation, then checks the request."""
        result = await super().render_responses(request, **kwargs)
        if hasattr(result, "engine_input"):
            self._preft_check(request, [result.engine_input])
        return result

    def _preft_check(self, request: Any, prompts: list[Any]) -> None:
        policy = self.preft_policy(getattr(request, "model", None))
        note = current_note()
        arguments = getattr(request, "vllm_xargs", None)
        try:
            check_fields(getattr(request, "model_extra", None))
            if getattr(request, "use_beam_search", False):
                check_beam_search(policy)
            for prompt in prompts:
                length = extract_prompt_len(self.model_config, prompt)
                check_length(length, self.model_config.max_model_len)
                check_boundary(arguments, policy, length)
                if note is not None:
                    note.prompt_tokens += length
                    note.adapted_tokens += count_adapted(policy, length, (arguments or {}).get(BOUNDARY_ARGUMENT))
            if note is not None and prompts:
                # Once a request and not once a prompt: a body may hold thousands of prompts, and this reads all of it.
                check_raw_boundary(arguments, note.body, length)
        except PreftError as error:
            raise_for_client(error)
        if note is not None:
            note.body.clear()


def install_checks(processor: InputProcessor, renderer: OnlineRenderer, find_policy: FindPolicy) -> None:
    """Puts preft's checks into a running front end."""
    processor.__class__ = PreftInputProcessor
    # Bound to the class's own method when the processor was built.
    processor.process_inputs_async = make_async(processor.process_inputs, executor=processor.renderer._executor)
    renderer.__class__ = PreftOnlineRenderer
    assert isinstance(renderer, PreftOnlineRenderer)
    renderer.preft_policy = find_policy

"""The gate: which tokens of a Hugging Face forward pass are adapted.

It is decided once, where the model is called, from what the caller says: `preft_boundary` (the number of leading
prompt tokens that may be adapted), or `preft_mask` (the adapted tokens themselves), or a call of `generate`, whose
input is the prompt. The decision then travels as a keyword argument to each decoder block, where a hook takes it up;
a block that gradient checkpointing runs again gets the same argument again. Nothing is inferred from the model's mode,
from the number of tokens in a step, or from labels: a forward pass that does not say where the prompt ends is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from preft.errors import BoundaryUnknownError, UnsupportedError, UsageError
from preft.positions import Policy
from preft.tuners.generation import GenerationPrompt, read_prompt
from preft.tuners.layers import GatedBlock, GatedLayer, GatedLinear, adapters_in_use
from preft.tuners.masks import (
    ALL_ADAPTED,
    StepMask,
    policy_mask,
    request_positions,
    row_boundaries,
)
from preft.tuners.sites import decoder_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STEP = "preft_step"
_HINT = "pass `preft_boundary=` with the number of prompt tokens, or `preft_mask=` with the adapted tokens"


class PositionGate:
    """Hooks on one model that tell its adapted layers which tokens to act on.

    All its callbacks are bound methods, so a deep copy of the model gets a gate of its own.

    Args:
        model: A Hugging Face causal language model.
        policies: Position policy of each adapter, by name.
    """

    def __init__(self, model: PreTrainedModel, policies: Mapping[str, Policy] | None = None) -> None:
        self.model = model
        self.policies: dict[str, Policy] = dict(policies or {})
        self._layers: list[GatedLayer] = []
        self._parameters: tuple[str, ...] = ()
        self._generation: GenerationPrompt | None = None
        self._block_step: StepMask | None = None
        self._model_step: StepMask | None = None
        self._head_step: StepMask | None = None

    def bind(self) -> None:
        """Finds the model's adapted layers and installs the hooks; call it again after layers were added."""
        self.unbind()
        blocks = decoder_blocks(self.model)
        prefixes = tuple(f"{path}." for path in blocks)
        for path, module in self.model.named_modules():
            if isinstance(module, GatedLinear | GatedBlock):
                module.preft_gate = self
                module.preft_is_head = not path.startswith(prefixes)
                self._layers.append(module)
        self._parameters = tuple(inspect.signature(self.model.forward).parameters)
        self.model.register_forward_pre_hook(self._enter_model, with_kwargs=True)
        self.model.register_forward_hook(self._leave_model, always_call=True)
        for block in blocks.values():
            block.register_forward_pre_hook(self._enter_block, with_kwargs=True, prepend=True)
            # Hooks run in order: the update of the block's output must come before the step is forgotten.
            update = next((child for child in block.children() if isinstance(child, GatedBlock)), None)
            if update is not None:
                block.register_forward_hook(update.on_block_output)
            block.register_forward_hook(self._leave_block)
        self.model.__dict__["generate"] = self._generate

    def unbind(self) -> None:
        """Removes the hooks; the layers stay, and refuse to run until they are bound again."""
        for module in self.model.modules():
            # Not by removable handles: those of a deep copy would not remove the copy's hooks.
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, hook in hooks.items() if self._is_own(hook)]:
                    del hooks[key]
        for layer in self._layers:
            layer.preft_gate = None
        self._layers = []
        self.model.__dict__.pop("generate", None)

    def _is_own(self, hook: Any) -> bool:
        owner = getattr(hook, "__self__", None)
        return owner is self or (isinstance(owner, GatedBlock) and owner in self._layers)

    def step(self, *, is_head: bool) -> StepMask:
        """Which tokens are adapted in the block, or the output head, that is running.

        Raises:
            BoundaryUnknownError: Nobody said.
        """
        step = self._head_step if is_head else self._block_step
        if step is None:
            raise BoundaryUnknownError("An adapted layer runs outside a forward pass of its model", hint=_HINT)
        return step

    def active_policy(self) -> Policy | None:
        """The policy of the adapter in use, or None if no adapter acts.

        Raises:
            UnsupportedError: Several adapters with different policies are active at once.
        """
        in_use = adapters_in_use(self._layers[0]) if self._layers else []
        names = [name for name in in_use if name in self.policies]
        found = {self.policies[name] for name in names}
        if len(found) > 1:
            raise UnsupportedError(
                "Adapters with different position policies are active at once",
                got=", ".join(f"`{name}` ({self.policies[name]})" for name in names),
                accepted="one active adapter",
            )
        return found.pop() if found else None

    # ------------------------------------------------------------------ hooks

    def _enter_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._block_step = self._model_step = self._head_step = None
        given = {key: kwargs.pop(key, None) for key in ("preft_boundary", "preft_mask")}
        policy = self.active_policy()
        if policy is None:
            return args, kwargs
        inputs = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        step = self._resolve(policy, inputs, given["preft_boundary"], given["preft_mask"])
        self._model_step = step
        self._head_step = step.window(inputs.get("logits_to_keep") or 0)
        kwargs[_STEP] = step
        return args, kwargs

    def _leave_model(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        self._block_step = self._model_step = self._head_step = None

    def _enter_block(self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # An architecture that does not hand keyword arguments on still runs, except where the block is run again
        # after the forward pass: then there is no step, and the layers refuse.
        self._block_step = kwargs.pop(_STEP, None) or self._model_step
        if self._block_step is None and self.active_policy() is not None:
            raise BoundaryUnknownError("A decoder block runs without knowing where the prompt ends", hint=_HINT)
        return args, kwargs

    def _leave_block(self, _block: nn.Module, _args: Any, _output: Any) -> None:
        self._block_step = None

    # ------------------------------------------------------------------ resolution

    def _resolve(self, policy: Policy, inputs: Mapping[str, Any], boundary: object, mask: object) -> StepMask:
        """Decides the adapted tokens of one forward pass."""
        if boundary is not None and mask is not None:
            raise UsageError("`preft_boundary` and `preft_mask` exclude each other", accepted="one of them")
        tokens = inputs.get("input_ids")
        tokens = inputs["inputs_embeds"][..., 0] if tokens is None else tokens
        num_rows, num_tokens = tokens.shape
        past = _cached_length(inputs.get("past_key_values"))
        if mask is not None:
            return StepMask.of(_read_mask(mask, num_rows, num_tokens, past).to(tokens.device))
        if not policy.is_prompt_only:
            return ALL_ADAPTED
        if self._generation is not None and boundary is None:
            boundaries, positions = self._generation.columns(num_rows, past, num_tokens)
            return StepMask.of(policy_mask(policy, boundaries, positions.to(tokens.device)))
        if boundary is None:
            raise BoundaryUnknownError(
                "A prompt-only adapter is active and this forward pass does not say where the prompt ends",
                got=f"{num_rows} x {num_tokens} tokens after {past} cached ones, no boundary and no mask",
                hint=_HINT,
            )
        positions = _positions(inputs, tokens, past)
        return StepMask.of(policy_mask(policy, row_boundaries(boundary, num_rows), positions))

    # ------------------------------------------------------------------ generate

    def _generate(self, *args: Any, preft_boundary: object = None, **kwargs: Any) -> Any:
        """`generate` of the model's class, with the boundary of each row known throughout."""
        plain: Callable[..., Any] = type(self.model).generate  # type: ignore[attr-defined]
        policy = self.active_policy()
        if policy is None or not policy.is_prompt_only:
            return plain(self.model, *args, **kwargs)
        if self._generation is not None:
            raise UnsupportedError(
                "Generation inside generation cannot be told its prompt", hint="generate without early-exit drafts"
            )
        prompt, kwargs = read_prompt(self.model, args, kwargs, preft_boundary)
        with self._generating(prompt):
            return plain(self.model, **kwargs)

    @contextmanager
    def _generating(self, prompt: GenerationPrompt) -> Iterator[None]:
        self._generation = prompt
        try:
            yield
        finally:
            self._generation = None


def _cached_length(cache: Any) -> int:
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except (AttributeError, TypeError, ValueError):
        raise BoundaryUnknownError(
            "The cache does not say how many tokens it holds, so positions are unknown",
            got=type(cache).__name__,
            hint="pass `preft_mask=` with the adapted tokens of each forward pass",
        ) from None


def _read_mask(mask: object, num_rows: int, num_tokens: int, past: int) -> torch.Tensor:
    accepted = f"a bool tensor of shape ({num_rows}, {num_tokens})"
    accepted += f" or ({num_rows}, {past + num_tokens})" if past else ""
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim() == 2 and mask.shape[0] == num_rows:
        if mask.shape[1] == num_tokens:
            return mask
        if mask.shape[1] == past + num_tokens:
            return mask[:, past:]
    got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else repr(mask)
    raise UsageError("`preft_mask` is not valid", got=got, accepted=accepted)


def _positions(inputs: Mapping[str, Any], tokens: torch.Tensor, past: int) -> torch.Tensor:
    """Absolute positions [B, T] of this forward pass's tokens, from the attention mask if there is one."""
    num_rows, num_tokens = tokens.shape
    attention = inputs.get("attention_mask")
    if attention is None:
        positions = torch.arange(past, past + num_tokens, device=tokens.device).expand(num_rows, -1)
    elif (
        isinstance(attention, torch.Tensor)
        and attention.dim() == 2
        and attention.shape == (num_rows, past + num_tokens)
    ):
        positions = request_positions(attention)[:, past:].to(tokens.device)
    else:
        shape = tuple(attention.shape) if isinstance(attention, torch.Tensor) else type(attention).__name__
        raise BoundaryUnknownError(
            "The attention mask does not say which tokens are padding, so positions are unknown",
            got=str(shape),
            accepted=f"shape ({num_rows}, {past + num_tokens})",
            hint="pass `preft_mask=` with the adapted tokens",
        )
    given = inputs.get("position_ids")
    if isinstance(given, torch.Tensor) and given.dim() == 2:
        real = (positions >= 0).expand(num_rows, -1)
        restarts = (given.to(tokens.device).expand(num_rows, -1).diff(dim=-1) < 0) & real[:, 1:] & real[:, :-1]
        if bool(restarts.any()):
            raise BoundaryUnknownError(
                "Rows hold several packed examples, which one boundary cannot describe",
                got="position ids that start over inside a row",
                hint="pass `preft_mask=` with the adapted tokens of every example",
            )
    return positions

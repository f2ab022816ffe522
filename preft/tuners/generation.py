"""What a call of Hugging Face's `generate` says about its prompts, so that every later step is decided by position."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from preft.errors import BoundaryUnknownError, UnsupportedError
from preft.positions import resolve_boundary
from preft.tuners.masks import request_positions, row_boundaries

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel


@dataclass(frozen=True)
class GenerationPrompt:
    """The prompts of one call.

    Attributes:
        positions: [B, P] absolute position of each prompt column; padding is below 0.
        boundaries: One for each row.
    """

    positions: torch.Tensor
    boundaries: tuple[int, ...]

    def columns(self, num_rows: int, start: int, num_columns: int) -> tuple[list[int], torch.Tensor]:
        """Boundaries and positions [num_rows, num_columns] of a step over the columns from `start`.

        Beams and several sequences for one prompt stand next to each other, so rows are repeated.

        Raises:
            BoundaryUnknownError: The step's rows are not a multiple of the prompts.
        """
        num_prompts, width = self.positions.shape
        if num_rows % num_prompts:
            raise BoundaryUnknownError(
                "A step of `generate` has rows that belong to no prompt", got=f"{num_rows} rows, {num_prompts} prompts"
            )
        lengths = self.positions.max(dim=-1).values + 1
        generated = torch.arange(max(0, start + num_columns - width), device=self.positions.device)
        row = torch.cat([self.positions, lengths[:, None] + generated], dim=-1)[:, start : start + num_columns]
        repeat = num_rows // num_prompts
        boundaries = [boundary for boundary in self.boundaries for _ in range(repeat)]
        return boundaries, row.repeat_interleave(repeat, dim=0)


def read_prompt(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any], boundary: object
) -> tuple[GenerationPrompt, dict[str, Any]]:
    """Finds the prompts of a call of `generate` and their boundaries.

    Args:
        model: The model.
        args: Positional arguments of the call.
        kwargs: Its keyword arguments.
        boundary: What the caller named, or None for whole prompts.

    Returns:
        The prompts, and the call's arguments by name with the attention mask made explicit.

    Raises:
        BoundaryUnknownError: The call does not say what its prompt is.
        UnsupportedError: It runs the model on other prompts than the ones it is given.
        UsageError: `boundary` is not valid.
    """
    plain: Any = type(model).generate  # type: ignore[attr-defined]
    named = dict(inspect.signature(plain).bind_partial(model, *args).arguments)
    named.pop("self", None)
    call = {**named, **kwargs}
    _refuse_unknowable(call, model)
    inputs = call.get("inputs") if call.get("inputs") is not None else call.get("input_ids")
    embeds = call.get("inputs_embeds")
    tokens = embeds[..., 0] if embeds is not None else inputs
    if tokens is None or tokens.shape[-1] == 0:
        raise BoundaryUnknownError(
            "`generate` is called without a prompt, so there is nothing for a prompt-only adapter to act on",
            accepted="`input_ids` or `inputs_embeds`",
        )
    attention = call.get("attention_mask")
    if attention is None:
        attention = _infer_attention(model, tokens, call, is_ids=embeds is None)
        call["attention_mask"] = attention
    if attention.shape != tokens.shape[:2]:
        raise BoundaryUnknownError(
            "The attention mask does not fit the prompt",
            got=str(tuple(attention.shape)),
            accepted=str(tuple(tokens.shape[:2])),
        )
    positions = request_positions(attention)
    lengths = (positions.max(dim=-1).values + 1).tolist()
    requested = [None] * len(lengths) if boundary is None else row_boundaries(boundary, len(lengths))
    boundaries = tuple(resolve_boundary(length, value) for length, value in zip(lengths, requested, strict=True))
    return GenerationPrompt(positions, boundaries), call


def _refuse_unknowable(call: Mapping[str, Any], model: PreTrainedModel) -> None:
    if call.get("preft_mask") is not None:
        raise UnsupportedError("`generate` takes no `preft_mask`", accepted="`preft_boundary`, or nothing")
    config = call.get("generation_config") or model.generation_config
    guidance = call.get("guidance_scale", getattr(config, "guidance_scale", None))
    if call.get("negative_prompt_ids") is not None or guidance not in (None, 1, 1.0):
        raise UnsupportedError(
            "Classifier-free guidance under a prompt-only adapter",
            got="`guidance_scale` or `negative_prompt_ids`",
            hint="it runs the model on a second prompt whose boundary cannot be known",
        )
    cache = call.get("past_key_values")
    if cache is not None and int(cache.get_seq_length()) > 0:
        raise BoundaryUnknownError(
            "`generate` is called with a cache that already holds tokens",
            got=f"{int(cache.get_seq_length())} cached tokens",
            accepted="an empty cache",
            hint="pass the whole conversation as the prompt: the earlier answer is adapted there, and was not when "
            "it was generated",
        )


def _infer_attention(
    model: PreTrainedModel, tokens: torch.Tensor, call: Mapping[str, Any], *, is_ids: bool
) -> torch.Tensor:
    """The attention mask that Transformers infers where none is given; refuses where it would have to guess."""
    ones = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    if not is_ids:
        return ones
    config = call.get("generation_config") or model.generation_config
    pad = call.get("pad_token_id", config.pad_token_id)
    eos = call.get("eos_token_id", config.eos_token_id)
    if pad is None:
        return ones
    is_pad: torch.Tensor = tokens == pad
    ends = eos if isinstance(eos, list | tuple) else [eos]
    if pad not in ends:
        return torch.where(is_pad, 0, ones)
    if len(tokens) > 1 and bool((is_pad[:, 0] | is_pad[:, -1]).any()):
        raise BoundaryUnknownError(
            "The prompts may be padded with the end-of-sequence token, and there is no attention mask to tell",
            got=f"token {pad} at the edge of a row",
            hint="pass the tokenizer's `attention_mask`",
        )
    return ones

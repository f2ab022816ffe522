"""What an engine's output must be, worked out twice in plain Hugging Face and float32, with no code of the product.

Oracle 1 (`oracle_two_phase`) prefills under forward hooks that add the low-rank updates, keeps the KV cache, removes
the hooks and decodes with the pristine model. Oracle 2 (`oracle_masked`) makes one forward pass over prompt and
output with the updates masked by position. They share only the rule, which is spelled out position by position.

Negative controls: `rescaled`, `all_token` and `oracle_phase_rule` compute what a faulty engine would answer, so that
a test can show that it would notice.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

NEAR_TIE = 1e-3
"""Top-2 logit gap, in float32, below which two right implementations may pick different tokens."""
ROWS_PER_NEAR_TIE = 50
"""At most one row in this many may diverge at a near tie."""


@dataclass(frozen=True)
class OracleSite:
    """One low-rank update: `y += scale * up(down(x) + bias)` at a module's output (and input, for a linear one)."""

    path: str
    is_block: bool
    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor | None
    scale: float


@dataclass(frozen=True)
class OracleSpec:
    """An adapter as the oracles see it."""

    positions: str
    sites: tuple[OracleSite, ...]


@dataclass(frozen=True)
class OracleRun:
    """What the oracle answers.

    Attributes:
        tokens: The most likely token at each step.
        runners_up: The second most likely one.
        gaps: Difference of their logits.
        logprobs: Log-probability of each token.
    """

    tokens: tuple[int, ...]
    runners_up: tuple[int, ...]
    gaps: tuple[float, ...]
    logprobs: tuple[float, ...]


def spec_from_adapter(adapter: Any) -> OracleSpec:
    """Reads the numbers of an `Adapter`."""
    sites = []
    for site in adapter.manifest.sites:
        is_block = str(site.kind) == "block"
        prefix = f"{site.path}.block" if is_block else site.path
        down, up = (adapter.tensors[f"{prefix}.{part}"].float() for part in ("down", "up"))
        bias = adapter.tensors.get(f"{prefix}.bias")
        sites.append(OracleSite(site.path, is_block, down, up, None if bias is None else bias.float(), site.scale))
    return OracleSpec(str(adapter.manifest.positions), tuple(sites))


def spec_from_peft(folder: Path, *, positions: str = "prompt", prefix: str = "base_model.model.") -> OracleSpec:
    """Reads a PEFT LoRA folder: ranks from the tensors, scales from the configuration."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    sites = []
    for name in sorted(name for name in tensors if name.endswith(".lora_A.weight")):
        path = name.removeprefix(prefix).removesuffix(".lora_A.weight")
        down, up = tensors[name].float(), tensors[name.replace(".lora_A.", ".lora_B.")].float()
        alphas = config.get("alpha_pattern") or {}
        match = next((key for key in alphas if re.match(rf"(.*\.)?({key})$", path)), None)
        alpha = config["lora_alpha"] if match is None else alphas[match]
        rank = down.shape[0]
        scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        sites.append(OracleSite(path, False, down, up, None, scale))
    return OracleSpec(positions, tuple(sites))


def rescaled(spec: OracleSpec, factor: float = 0.5) -> OracleSpec:
    """Negative control: the same adapter with every update multiplied."""
    return replace(spec, sites=tuple(replace(site, scale=site.scale * factor) for site in spec.sites))


def all_token(spec: OracleSpec) -> OracleSpec:
    """Negative control: the same adapter acting on generated tokens as well."""
    return replace(spec, positions="all")


def is_adapted(positions: str, boundary: int, position: int) -> bool:
    """The rule for one position."""
    if positions == "all":
        return True
    if position >= boundary:
        return False
    if positions == "prompt":
        return True
    found = {kind: int(count) for kind, count in re.findall(r"([fl])(\d+)", positions)}
    first, last = (min(found.get(kind, 0), boundary // 2) for kind in "fl")
    return position < first or position >= boundary - last


@contextlib.contextmanager
def _hooked(model: torch.nn.Module, spec: OracleSpec | None, flags: Sequence[bool]) -> Iterator[None]:
    """Adds the updates to the flagged tokens of the forward passes inside the block."""
    handles = []
    if spec is not None and any(flags):
        chosen = torch.tensor(list(flags), device=next(model.parameters()).device)

        def update(site: OracleSite, x: torch.Tensor) -> torch.Tensor:
            inner = x @ site.down.to(x).T
            if site.bias is not None:
                inner = inner + site.bias.to(x)
            return site.scale * (inner @ site.up.to(x).T)

        def hook_for(site: OracleSite) -> Any:
            def hook(_module: Any, args: Any, output: Any) -> Any:
                if site.is_block:
                    hidden = output[0] if isinstance(output, tuple) else output
                    hidden = hidden.clone()
                    hidden[:, chosen] += update(site, hidden[:, chosen])
                    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
                if output.dim() == 2:
                    # A module that flattens its input still sees one row a token.
                    flat = output.clone()
                    flat[chosen] += update(site, args[0][chosen])
                    return flat
                out = output.clone()
                # lm_head may be computed for the last tokens only.
                window = chosen[-out.shape[1] :]
                out[:, window] += update(site, args[0][:, window])
                return out

            return hook

        handles = [model.get_submodule(site.path).register_forward_hook(hook_for(site)) for site in spec.sites]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _flags(spec: OracleSpec | None, boundary: int, start: int, stop: int) -> list[bool]:
    return [spec is not None and is_adapted(spec.positions, boundary, position) for position in range(start, stop)]


def _summary(logits: torch.Tensor) -> OracleRun:
    """Reads tokens, gaps and log-probabilities off `logits` [steps, V]."""
    values, indices = logits.float().topk(2, dim=-1)
    logprobs = logits.float().log_softmax(-1).gather(-1, indices[:, :1])[:, 0]
    return OracleRun(
        tuple(indices[:, 0].tolist()),
        tuple(indices[:, 1].tolist()),
        tuple((values[:, 0] - values[:, 1]).tolist()),
        tuple(logprobs.tolist()),
    )


class _Stepper:
    """A sequence under way: feeds tokens with explicit flags and keeps the cache."""

    def __init__(self, model: torch.nn.Module, spec: OracleSpec | None) -> None:
        self.model, self.spec, self.cache, self.length = model, spec, None, 0

    def feed(self, tokens: Sequence[int], flags: Sequence[bool]) -> torch.Tensor:
        """Logits [V] after the last of `tokens`."""
        ids = torch.tensor([list(tokens)], device=next(self.model.parameters()).device)
        positions = torch.arange(self.length, self.length + len(tokens), device=ids.device)[None]
        with torch.no_grad(), _hooked(self.model, self.spec, flags):
            output = self.model(input_ids=ids, position_ids=positions, past_key_values=self.cache, use_cache=True)
        self.cache, self.length = output.past_key_values, self.length + len(tokens)
        logits: torch.Tensor = output.logits[0, -1]
        return logits


def oracle_two_phase(
    model: torch.nn.Module,
    spec: OracleSpec | None,
    prompt_ids: Sequence[int],
    num_tokens: int,
    boundary: int | None = None,
    *,
    eos_id: int | None = None,
) -> OracleRun:
    """Oracle 1: adapted prefill, pristine decode, greedy.

    Args:
        model: A Hugging Face causal language model in float32 and evaluation mode.
        spec: The adapter, or None for base.
        prompt_ids: The prompt.
        num_tokens: How many tokens to generate.
        boundary: Number of leading prompt tokens that may be adapted; all of them by default.
        eos_id: Stop after this token; None goes on to `num_tokens`.
    """
    boundary = len(prompt_ids) if boundary is None else boundary
    stepper = _Stepper(model, spec)
    rows = [stepper.feed(prompt_ids, _flags(spec, boundary, 0, len(prompt_ids)))]
    while len(rows) < num_tokens and int(rows[-1].argmax()) != eos_id:
        token = int(rows[-1].argmax())
        rows.append(stepper.feed([token], _flags(spec, boundary, stepper.length, stepper.length + 1)))
    return _summary(torch.stack(rows))


def oracle_phase_rule(
    model: torch.nn.Module,
    spec: OracleSpec | None,
    prompt_ids: Sequence[int],
    num_tokens: int,
    *,
    chunk: int | None = None,
    resume_at: int | None = None,
) -> OracleRun:
    """Negative control: an engine that takes every step of more than one token for a prefill and adapts it.

    Args:
        model: As for `oracle_two_phase`.
        spec: The adapter.
        prompt_ids: The prompt.
        num_tokens: How many tokens to generate.
        chunk: Tokens in a prefill step; the whole prompt by default. A last chunk of one token goes unadapted.
        resume_at: After this many outputs everything is recomputed in one step, as after a preemption.
    """
    stepper, rows, outputs = _Stepper(model, spec), [], []
    size = chunk or len(prompt_ids)
    for start in range(0, len(prompt_ids), size):
        part = prompt_ids[start : start + size]
        last = stepper.feed(part, [len(part) > 1] * len(part))
    rows.append(last)
    while len(rows) < num_tokens:
        outputs.append(int(rows[-1].argmax()))
        if len(outputs) == resume_at:
            stepper = _Stepper(model, spec)
            tokens = [*prompt_ids, *outputs]
            rows.append(stepper.feed(tokens, [True] * len(tokens)))
        else:
            rows.append(stepper.feed(outputs[-1:], [False]))
    return _summary(torch.stack(rows))


def masked_logits(
    model: torch.nn.Module, spec: OracleSpec | None, token_ids: Sequence[int], boundary: int
) -> torch.Tensor:
    """Logits [T, V] of one forward pass over all the tokens, the updates masked by the rule."""
    stepper_ids = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
    with torch.no_grad(), _hooked(model, spec, _flags(spec, boundary, 0, len(token_ids))):
        logits: torch.Tensor = model(input_ids=stepper_ids, use_cache=False).logits[0]
    return logits


def oracle_masked(
    model: torch.nn.Module,
    spec: OracleSpec | None,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    boundary: int | None = None,
) -> OracleRun:
    """Oracle 2: one masked forward pass over prompt and output; its answer at each step, given the output so far."""
    boundary = len(prompt_ids) if boundary is None else boundary
    logits = masked_logits(model, spec, [*prompt_ids, *output_ids[:-1]], boundary)
    return _summary(logits[len(prompt_ids) - 1 :])


def oracle_prompt_logprobs(
    model: torch.nn.Module, spec: OracleSpec | None, prompt_ids: Sequence[int], boundary: int | None = None
) -> tuple[float, ...]:
    """Log-probability of each prompt token but the first, with the tokens from `boundary` on unadapted."""
    boundary = len(prompt_ids) if boundary is None else boundary
    logprobs = masked_logits(model, spec, prompt_ids, boundary)[:-1].float().log_softmax(-1)
    targets = torch.tensor(list(prompt_ids[1:]), device=logprobs.device)
    return tuple(logprobs.gather(-1, targets[:, None])[:, 0].tolist())


def assert_tokens_equal(results: Sequence[tuple[str, Sequence[int], OracleRun]], *, oracle: str = "oracle") -> None:
    """Requires each row's tokens to be the oracle's.

    A first divergence counts as equal only where the oracle's top-2 logit gap is under `NEAR_TIE` and the token is the
    oracle's runner-up; such rows are printed, and at most one in `ROWS_PER_NEAR_TIE` is let through.

    Args:
        results: For each row its name, its tokens, and the oracle's answer.
        oracle: What to call the oracle in a failure.
    """
    assert results, "no rows to compare"
    ties, failures = [], []
    for name, tokens, run in results:
        step = next((at for at, pair in enumerate(zip(tokens, run.tokens, strict=False)) if pair[0] != pair[1]), None)
        if step is None:
            if len(tokens) != len(run.tokens):
                failures.append(f"{name}: {len(tokens)} tokens, {oracle} has {len(run.tokens)}")
            continue
        line = f"{name}: step {step}: got {tokens[step]}, {oracle} {run.tokens[step]}, gap {run.gaps[step]:.2e}"
        is_tie = run.gaps[step] < NEAR_TIE and tokens[step] == run.runners_up[step]
        (ties if is_tie else failures).append(line)
    for line in ties:
        print(f"near tie: {line}")
    if len(ties) * ROWS_PER_NEAR_TIE > len(results):
        failures += [f"too many near ties ({len(ties)} of {len(results)} rows): {line}" for line in ties]
    assert not failures, "\n".join(failures)

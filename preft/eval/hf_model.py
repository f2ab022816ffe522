"""`preft-hf`: lm-evaluation-harness on plain Transformers, with adapters that act by position.

Everything that does not concern the boundary is the harness's own `hf` model: tokens, batches, truncation, stop
sequences. For the base arm, and for an adapter that acts on every token, its code runs unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from preft.errors import UsageError
from preft.eval.arms import BASE, Failure, adapter_of, read_adapters, require_arm
from preft.eval.windows import Window, scoring_window
from preft.serve.hf_engine import HFEngine
from preft.tuners.attach import attached


@register_model("preft-hf")
class PreftHFLM(HFLM):
    """A base model and its adapters as a model of the harness; one arm answers at a time.

    Args:
        pretrained: Checkpoint folder, known name, or hub id.
        adapter: One adapter's folder; it is then the arm that answers.
        adapters: Adapter folders by name, instead.
        arm: Which arm answers: a name, or `base`; by default the one adapter, else base. See `use_arm`.
        dtype: Of weights and activations: `float32`, `bfloat16`, `float16`, or `auto`.
        device: PyTorch device, or None for a GPU where there is one.
        max_length: Tokens of input, or None for the model's own limit.
        rolling_boundary: Leading tokens of each window that an adapter may act on when whole texts are scored.
            0 by default: a text without a prompt has nothing for a prompt-only adapter to act on.
        allow_base_mismatch: Accept adapters made for other weights of the same architecture.
        settings: Further arguments of the harness's `hf` model, such as `batch_size`.

    Attributes:
        failures: Requests that failed alone; none on this engine, where an error ends the run.

    Raises:
        PreftError: The model or an adapter cannot be used.
    """

    def __init__(
        self,
        pretrained: str | Path,
        *,
        adapter: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        arm: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        max_length: int | None = None,
        rolling_boundary: int = 0,
        allow_base_mismatch: bool = False,
        **settings: Any,
    ) -> None:
        refused = sorted({"peft", "delta"} & set(settings))
        if refused:
            raise UsageError(
                "preft-hf takes adapters of its own format only",
                got=", ".join(f"`{name}`" for name in refused),
                hint="convert it with `preft convert`, and pass `adapter=`",
            )
        self._paths = read_adapters(adapter, adapters)
        arm = require_arm(arm or (next(iter(self._paths)) if adapter is not None else BASE), self._paths)
        self._engine = HFEngine(
            pretrained, self._paths, dtype=dtype, device=device, allow_base_mismatch=allow_base_mismatch
        )
        for entry in self._engine.unavailable:
            raise entry.error
        super().__init__(
            pretrained=self._engine.model, tokenizer=self._engine.tokenizer, max_length=max_length, **settings
        )
        self.failures: list[Failure] = []
        self._rolling_boundary = rolling_boundary
        self._is_rolling = False
        self._boundaries: list[int] | None = None
        self.use_arm(arm)

    def use_arm(self, arm: str) -> None:
        """Chooses the arm that answers from now on.

        Raises:
            UsageError: There is no such arm.
        """
        self.arm = require_arm(arm, self._paths)
        self._engine.use(adapter_of(arm))
        handle = attached(self._engine.model)
        policy = handle.policies[handle.active] if handle.active is not None else None
        self._is_prompt_only = policy is not None and policy.is_prompt_only

    def close(self) -> None:
        """Frees the model."""
        self._model = None
        self._engine.close()

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results; asks no hub."""
        return {"model_dtype": str(self._engine.model.dtype), "arm": self.arm}

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Scores whole texts; see `rolling_boundary`."""
        self._is_rolling = True
        try:
            scores: list[float] = super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self._is_rolling = False
        return scores

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if not self._is_prompt_only:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)  # type: ignore[no-any-return]
        limit = self._rolling_boundary if self._is_rolling else None
        windows = [
            scoring_window(context, continuation, self.max_length, boundary=limit)
            for _, context, continuation in requests
        ]
        size = override_bs or self.batch_size
        if size == "auto":
            size = self._detect_batch_size()
        # Longest first: a batch that does not fit the memory fails at once.
        order = sorted(range(len(windows)), key=lambda index: -len(windows[index].tokens))
        scores: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            scores.update(zip(batch, self._score([windows[index] for index in batch]), strict=True))
        for index, (key, _, _) in enumerate(requests):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, scores[index])
        return [scores[index] for index in range(len(windows))]

    def _score(self, windows: Sequence[Window]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding would have made it."""
        width = max(len(window.tokens) for window in windows) - 1
        # Padding on the right is beyond every boundary, and no earlier token sees it.
        rows = [[*window.tokens[:-1], *[0] * (width + 1 - len(window.tokens))] for window in windows]
        self._boundaries = [window.boundary for window in windows]
        try:
            logits = self._model_call(torch.tensor(rows, device=self.device))  # [B, T, V]
        finally:
            self._boundaries = None
        found = []
        for window, row in zip(windows, logits, strict=True):
            stop = len(window.tokens) - 1
            scored = row[stop - window.num_scored : stop].log_softmax(-1, dtype=self.softmax_dtype)
            targets = torch.tensor(window.tokens[-window.num_scored :], device=scored.device)
            total = float(scored.gather(-1, targets[:, None]).sum())
            found.append((total, bool((scored.argmax(-1) == targets).all())))
        return found

    def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
        if not self._is_prompt_only:
            plain: torch.Tensor = super()._model_call(inps, attn_mask, labels)
            return plain
        # The harness calls without a request only to find how large a batch may be.
        boundaries = self._boundaries or [inps.shape[1]] * len(inps)
        mixed = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype=mixed, enabled=mixed is not None):
            logits: torch.Tensor = self.model(inps, preft_boundary=boundaries).logits
        return logits

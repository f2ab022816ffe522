"""The roofline: bytes, arithmetic and time of one step, and of a batch from its first prompt to its last token.

A model of what cannot be beaten, not of what an engine does. Adapters are priced as a perfect kernel would run them,
so that the gain over all-token LoRA is what bytes alone give; an engine that wastes more on adapters gains more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from preft.errors import UsageError
from preft.plan.gpus import STATE_BYTES, WEIGHT_BYTES, Machine
from preft.plan.shapes import Linear, ModelShape
from preft.plan.workload import Assumptions, Workload

LORA_LAUNCHES = 3
"""Launches a group of linears: clear the buffer, shrink, expand."""
PROMPT_ONLY = ("lorap", "direftp")


@dataclass(frozen=True)
class Step:
    """One step of the model on one GPU of the machine.

    Attributes:
        weight_bytes: Read of the base weights.
        kv_bytes: Read and written of the KV cache.
        adapter_bytes: Read of the adapters' weights.
        adapter_state_bytes: Read and written of activations by adapter kernels.
        flops: Of the base model, attention included.
        adapter_flops: Of the adapters.
        base_s: Time of the base model.
        attention_s: Of it, that of attention.
        adapter_s: Time that adapters add.
        bound: What limits the base model: `memory` or `compute`.
    """

    weight_bytes: float
    kv_bytes: float
    adapter_bytes: float
    adapter_state_bytes: float
    flops: float
    adapter_flops: float
    base_s: float
    attention_s: float
    adapter_s: float
    bound: str

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return self.base_s + self.adapter_s


@dataclass(frozen=True)
class BatchTime:
    """A batch of requests from the first prompt to the last token.

    Attributes:
        batch: Requests in it.
        prefill_s: Time of all prompt steps.
        decode_s: Time of all decode steps.
        prefill_step: A prompt step of mean size.
        decode_step: A decode step at mean context; None for one output token, which prefill gives.
        output_tokens_per_s: Output tokens over the whole time.
    """

    batch: int
    prefill_s: float
    decode_s: float
    prefill_step: Step
    decode_step: Step | None
    output_tokens_per_s: float


@dataclass(frozen=True)
class Roofline:
    """A model on a machine.

    Attributes:
        shape: The model.
        machine: The GPUs.
        workload: What runs.
        assumptions: What the prediction rests on.
    """

    shape: ModelShape
    machine: Machine
    workload: Workload
    assumptions: Assumptions

    def __post_init__(self) -> None:
        heads, count = self.shape.num_heads, self.machine.count
        if heads % count:
            fitting = [str(number) for number in range(1, heads + 1) if heads % number == 0]
            raise UsageError(
                f"`{self.shape.name}` cannot be split over {count} GPUs",
                got=f"{heads} attention heads",
                accepted=f"{', '.join(fitting)} GPUs",
            )
        length = self.workload.input_len + self.workload.output_len
        if self.shape.max_length is not None and length > self.shape.max_length:
            raise UsageError(
                "The requests are longer than the model's context",
                got=f"{length} tokens",
                accepted=f"--input-len and --output-len of at most {self.shape.max_length} together",
            )

    @property
    def bandwidth(self) -> float:
        """Achieved bytes/s of one GPU."""
        return self.machine.gpu.bandwidth * self.assumptions.bandwidth_efficiency

    @property
    def compute(self) -> float:
        """Achieved FLOP/s of one GPU."""
        return self.machine.gpu.flops_for(self.workload.dtype) * self.assumptions.compute_efficiency

    @property
    def weight_bytes(self) -> float:
        """Memory that the weights take on one GPU."""
        return self.shape.total_values * WEIGHT_BYTES[self.workload.dtype] / self.machine.count

    @property
    def kv_bytes_per_token(self) -> float:
        """KV cache of one token on one GPU. KV heads that do not divide are kept on several GPUs."""
        shape = self.shape
        whole = shape.kv_values_per_token * STATE_BYTES[self.workload.dtype]
        return whole / min(self.machine.count, max(1, shape.num_kv_heads))

    def adapter_bytes(self, arm: str) -> float:
        """Memory that one adapter takes on one GPU."""
        size = STATE_BYTES[self.workload.dtype]
        if arm == "base":
            return 0.0
        if arm == "direftp":
            values = self.workload.direft_rank * (2 * self.shape.hidden_size + 1) * self.shape.num_layers
            return float(values * size)
        return self.workload.rank * size * sum(sum(self._split(linear)) * linear.count for linear in self._targets())

    def adapter_bytes_whole(self, arm: str) -> float:
        """Bytes of one adapter in a file."""
        size = STATE_BYTES[self.workload.dtype]
        if arm in ("base", "direftp"):
            return self.adapter_bytes(arm)
        widths = sum((linear.in_features + linear.out_features) * linear.count for linear in self._targets())
        return float(self.workload.rank * size * widths)

    def _targets(self) -> tuple[Linear, ...]:
        return self.shape.targets(self.workload.targets)

    def _split(self, linear: Linear) -> tuple[float, float]:
        """Input and output width of a linear on one GPU; the adapter's other side is whole on each."""
        count = self.machine.count
        if linear.is_row_parallel:
            return linear.in_features / count, float(linear.out_features)
        return float(linear.in_features), linear.out_features / count

    def step(
        self,
        arm: str,
        *,
        tokens: float,
        outputs: float,
        context_tokens: float,
        pairs: float,
        adapted: float,
        distinct: float,
    ) -> Step:
        """One step.

        Args:
            arm: `base`, `lora`, `lorap` or `direftp`.
            tokens: Tokens that pass the model.
            outputs: Of them, those whose logits are computed.
            context_tokens: Tokens whose KV is read or written.
            pairs: Query-key pairs of attention.
            adapted: Tokens that an adapter acts on.
            distinct: Distinct adapters among them.
        """
        shape, count = self.shape, self.machine.count
        values = shape.linear_values + shape.experts_read(tokens) + shape.head_values * (outputs > 0)
        weight_bytes = values * WEIGHT_BYTES[self.workload.dtype] / count
        products = (shape.linear_values + shape.experts_used) * tokens + shape.head_values * outputs
        matrix_flops = 2 * products / count
        attention_flops = 4 * pairs * shape.num_heads * shape.head_dim * shape.num_layers / count
        kv_bytes = context_tokens * self.kv_bytes_per_token
        matrices_s = max(weight_bytes / self.bandwidth, matrix_flops / self.compute)
        attention_s = max(kv_bytes / self.bandwidth, attention_flops / self.compute)
        flops, state_bytes, launches = self._adapter_work(arm, adapted)
        adapter_bytes = self.adapter_bytes(arm) * distinct if adapted else 0.0
        adapter_s = max((adapter_bytes + state_bytes) / self.bandwidth, flops / self.compute)
        return Step(
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
            adapter_bytes=adapter_bytes,
            adapter_state_bytes=state_bytes,
            flops=matrix_flops + attention_flops,
            adapter_flops=flops,
            base_s=matrices_s + attention_s + self.assumptions.step_overhead_s,
            attention_s=attention_s,
            adapter_s=adapter_s + launches * self.assumptions.launch_us * 1e-6,
            bound="memory" if weight_bytes / self.bandwidth >= matrix_flops / self.compute else "compute",
        )

    def _adapter_work(self, arm: str, tokens: float) -> tuple[float, float, int]:
        """FLOP, bytes of activations, and launches of the adapter kernels over so many adapted tokens."""
        if arm == "base" or not tokens:
            return 0.0, 0.0, 0
        size, layers = STATE_BYTES[self.workload.dtype], self.shape.num_layers
        if arm == "direftp":
            width = self.shape.hidden_size * layers
            # Reads both halves of the residual stream, writes one.
            return 4.0 * tokens * self.workload.direft_rank * width, 3.0 * tokens * width * size, layers
        targets = self._targets()
        widths = {linear: self._split(linear) for linear in targets}
        flops = 2.0 * tokens * self.workload.rank * sum(sum(widths[linear]) * linear.count for linear in targets)
        inputs = {linear.group: widths[linear][0] * linear.count for linear in targets}
        row_outputs = sum(widths[linear][1] * linear.count for linear in targets)
        state_bytes = tokens * size * (sum(inputs.values()) + 2 * row_outputs)
        return flops, state_bytes, LORA_LAUNCHES * len(inputs) * layers

    def prefill_step(self, arm: str, batch: int, *, slots: int | None = None) -> tuple[Step, float]:
        """A prompt step of mean size, and how many of them the batch's prompts take.

        Args:
            arm: Which.
            batch: Requests.
            slots: Adapters that a step may hold, or None for any number.
        """
        load, length = self.workload, self.workload.input_len
        tokens = float(min(load.step_tokens, batch * length))
        if slots is not None and arm != "base":
            tokens = min(tokens, slots * load.requests_per_adapter * length)
        steps = batch * length / tokens
        sharing = min(float(batch), max(1.0, tokens / length))
        step = self.step(
            arm,
            tokens=tokens,
            outputs=tokens / length,
            context_tokens=tokens,
            pairs=tokens * (length + 1) / 2,
            adapted=tokens if arm != "base" else 0.0,
            distinct=min(float(load.adapters), sharing),
        )
        return step, steps

    def decode_step(self, arm: str, batch: int, context: float) -> Step:
        """A decode step of a batch whose requests are `context` tokens long."""
        adapted = batch if arm == "lora" else 0
        return self.step(
            arm,
            tokens=batch,
            outputs=batch,
            context_tokens=batch * context,
            pairs=batch * context,
            adapted=adapted,
            distinct=min(self.workload.adapters, batch),
        )

    def batch(self, arm: str, batch: int, *, slots: int | None = None) -> BatchTime:
        """A batch from its first prompt to its last token.

        Args:
            arm: Which.
            batch: Requests.
            slots: Adapters that a step may hold, or None for any number.
        """
        load = self.workload
        prefill, prefill_steps = self.prefill_step(arm, batch, slots=slots)
        decode_steps = load.output_len - 1
        decode = self.decode_step(arm, batch, load.input_len + (load.output_len + 1) / 2) if decode_steps else None
        prefill_s = prefill.seconds * prefill_steps
        decode_s = decode.seconds * decode_steps if decode else 0.0
        speed = batch * load.output_len / (prefill_s + decode_s)
        return BatchTime(batch, prefill_s, decode_s, prefill, decode, speed)

    def highest_ratio(self, arm: str, *, batches: Sequence[int]) -> float:
        """No batch and no output length gives more, over all-token LoRA, at this rank and prompt length.

        A run is a sum of prompt steps and decode steps, and the ratio of two sums is at most the largest ratio of
        their terms. Decode contexts are at least the prompt, and the ratio falls with the context.
        """
        best = 1.0
        for batch in batches:
            slow, fast = self.prefill_step("lora", batch)[0], self.prefill_step(arm, batch)[0]
            best = max(best, slow.seconds / fast.seconds)
            context = self.workload.input_len
            slow, fast = self.decode_step("lora", batch, context), self.decode_step(arm, batch, context)
            best = max(best, slow.seconds / fast.seconds)
        return best

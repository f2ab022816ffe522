"""What a plan is for: adapters, requests, and how fast the hardware is taken to be."""

from __future__ import annotations

from dataclasses import dataclass

from preft.errors import UsageError
from preft.plan.gpus import DTYPES

ARMS = ("base", "lora", "lorap", "direftp")
TARGETS = ("all", "attention")


@dataclass(frozen=True)
class Workload:
    """Requests of one length over adapters of one rank, spread evenly.

    Attributes:
        adapters: Distinct adapters in use.
        rank: Of the LoRA adapters.
        direft_rank: Of the DiReFT adapters.
        input_len: Prompt tokens a request.
        output_len: Output tokens a request, at least 1.
        requests: Requests that want to run at once.
        targets: Linears that LoRA acts on: `all` or `attention`.
        dtype: Type of the weights; see `preft.plan.gpus`.
        step_tokens: Prompt tokens that one prefill step takes at most.
    """

    adapters: int
    rank: int
    direft_rank: int
    input_len: int
    output_len: int
    requests: int
    targets: str = "all"
    dtype: str = "bfloat16"
    step_tokens: int = 8192

    def __post_init__(self) -> None:
        for name in ("adapters", "rank", "direft_rank", "input_len", "output_len", "requests", "step_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"`{flag}` is not valid", got=f"{value}", accepted="a whole number of at least 1")
        for name, choices in (("targets", TARGETS), ("dtype", DTYPES)):
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"`--{name}` is not valid", got=f"`{getattr(self, name)}`", accepted=", ".join(choices)
                )

    @property
    def requests_per_adapter(self) -> float:
        """Requests that share an adapter; at least 1."""
        return max(1.0, self.requests / self.adapters)


@dataclass(frozen=True)
class Assumptions:
    """Everything a prediction rests on beside the data sheets.

    Attributes:
        bandwidth_efficiency: Share of peak bandwidth that kernels reach.
        compute_efficiency: Share of peak arithmetic that matrix products reach.
        memory_utilisation: Share of memory that the engine may use.
        reserve_bytes: Memory of each GPU for activations and the runtime.
        host_link: Bytes/s from host memory to one GPU.
        launch_us: Microseconds that one adapter kernel launch costs; 0 leaves launches out.
        step_overhead_s: Seconds that a step costs beside bytes and arithmetic; 0 unless calibrated.
    """

    bandwidth_efficiency: float = 0.90
    compute_efficiency: float = 0.75
    memory_utilisation: float = 0.90
    reserve_bytes: float = 2e9
    host_link: float = 50e9
    launch_us: float = 0.0
    step_overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bandwidth_efficiency", "compute_efficiency", "memory_utilisation"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise UsageError(
                    f"`--{name.replace('_', '-')}` is not valid", got=f"{value}", accepted="above 0, at most 1"
                )
        if not 0 <= self.launch_us < float("inf"):
            raise UsageError("`--launch-us` is not valid", got=f"{self.launch_us}", accepted="0 or more")
        if not 0 < self.host_link < float("inf"):
            raise UsageError("`--host-link-gbs` is not valid", got=f"{self.host_link / 1e9:g}", accepted="above 0")

    def to_dict(self, workload: Workload) -> dict[str, object]:
        """The `assumptions` object of a plan."""
        return {
            "bandwidth_efficiency": self.bandwidth_efficiency,
            "compute_efficiency": self.compute_efficiency,
            "memory_utilisation": self.memory_utilisation,
            "reserve_bytes_per_gpu": self.reserve_bytes,
            "host_link_bytes_per_s": self.host_link,
            "launch_us": self.launch_us,
            "step_overhead_s": self.step_overhead_s,
            "prefill_step_tokens": workload.step_tokens,
            "targets": workload.targets,
            "notes": list(NOTES)
            + ([] if self.launch_us else ["kernel launches cost nothing; give --launch-us to count them"]),
        }


NOTES = (
    "a step takes the larger of bytes/bandwidth and FLOP/compute, apart for matrices, attention and adapters, in turn",
    "prefill and decode steps do not overlap; requests run in waves of one batch",
    "requests are spread evenly over the adapters, all of one rank",
    "adapter kernels touch each weight, input and output once: a perfect kernel, so all-token LoRA is not slowed",
    "lora acts on every token; lorap and direftp on prompt tokens only; direftp on every block's output",
    "under tensor parallelism a rank holds the whole A of column-parallel and the whole B of row-parallel modules, "
    "and a whole copy of each DiReFT adapter",
    "communication between GPUs, sampling, the host and base activations cost nothing",
    "every layer keeps all of its KV cache; the prefix cache never hits",
    "within memory, an adapter without a slot is loaded from the host, in turn with everything else; slots keep "
    "an even share of the adapters",
)

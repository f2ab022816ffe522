"""How much of an engine's time its adapter kernels take, on devices where a call returns when its work is done."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any


class KernelClock:
    """Seconds spent in methods of one class since they were watched.

    Args:
        owner: The class.
        names: Its methods, none of which calls another of them.
    """

    def __init__(self, owner: type, names: tuple[str, ...]) -> None:
        self.seconds = 0.0
        self.num_calls = 0
        for name in names:
            setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self.num_calls += 1

        return timed


def watch_preft() -> KernelClock:
    """Watches the adapter kernels of preft's engine in this process. The watch stays for the life of the process."""
    from preft.serve.backend.sites import StepState

    return KernelClock(StepState, ("update",))


def watch_stock() -> KernelClock:
    """Watches those of stock vLLM on CPU."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    return KernelClock(PunicaWrapperCPU, ("add_lora_linear", "add_lora_embedding", "add_lora_logits"))


def unmeasured(facts: Mapping[str, Any]) -> str | None:
    """Why the time of adapter kernels cannot be taken in this process, or None.

    Args:
        facts: See `preft.serve.stock.execution_facts`.
    """
    if facts["device"] != "cpu":
        return "kernels run behind the host's clock on this device"
    if facts["workers"] > 1:
        return "kernels run in other processes"
    return None

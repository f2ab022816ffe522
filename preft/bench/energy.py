"""Energy of the GPUs, where NVIDIA's management library counts it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any


class EnergyMeter:
    """Joules that the visible GPUs have used.

    Args:
        nvml: The module `pynvml`, or a stand-in.
        reason: Why there is no energy to read, or None.
        handles: Of the devices.
    """

    def __init__(self, nvml: Any = None, reason: str | None = None, handles: tuple[Any, ...] = ()) -> None:
        self._nvml, self.reason, self._handles = nvml, reason, handles

    @classmethod
    def open(cls, load: Callable[[str], Any] = importlib.import_module) -> EnergyMeter:
        """Finds the visible devices; without them the meter says why."""
        try:
            nvml = load("pynvml")
        except ImportError:
            return cls(reason="pynvml is not installed")
        try:
            nvml.nvmlInit()
            handles = tuple(_handle(nvml, name) for name in _visible(nvml.nvmlDeviceGetCount()))
            for handle in handles:
                nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except nvml.NVMLError as error:
            return cls(reason=f"NVML: {error}")
        return cls(nvml, None, handles) if handles else cls(reason="no GPU is visible")

    def joules(self) -> float | None:
        """Used since the driver was loaded, by all visible devices; None where nothing counts it."""
        if self.reason is not None:
            return None
        millijoules = [self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles]
        return float(sum(millijoules)) / 1e3

    def facts(self, before: float | None, output_tokens: int) -> dict[str, Any]:
        """Energy since `before`, of a run that gave so many tokens, or the reason why there is none."""
        now = self.joules()
        used = now - before if now is not None and before is not None else None
        return {
            "joules": used,
            "joules_per_output_token": used / output_tokens if used is not None else None,
            "reason": self.reason,
        }


def _visible(count: int) -> list[str]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(index) for index in range(count)] if chosen is None else [part for part in chosen.split(",") if part]


def _handle(nvml: Any, name: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)

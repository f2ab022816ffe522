"""Energy, with a stand-in for NVIDIA's library."""

from __future__ import annotations

from typing import Any

import pytest

from preft.bench.energy import EnergyMeter


class FakeNvml:
    class NVMLError(Exception):
        pass

    def __init__(self, devices: int, *, counts: bool = True) -> None:
        self.devices, self.counts, self.used, self.asked = devices, counts, 1000, []  # type: ignore[var-annotated]

    def nvmlInit(self) -> None:  # noqa: N802
        return None

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.devices

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self.asked.append(index)
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        if not self.counts:
            raise self.NVMLError("Not Supported")
        self.used += 500
        return self.used


def test_joules_of_all_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = FakeNvml(2)
    meter = EnergyMeter.open(lambda name: nvml)
    assert nvml.asked == [0, 1]
    before = meter.joules()
    assert before == (2500 + 3000) / 1e3
    found = meter.facts(before, 4)
    assert found == {"joules": 2.0, "joules_per_output_token": 0.5, "reason": None}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    only = FakeNvml(2)
    EnergyMeter.open(lambda name: only)
    assert only.asked == [1]


def missing(name: str) -> Any:
    raise ImportError(name)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (missing, "pynvml is not installed"),
        (lambda name: FakeNvml(0), "no GPU is visible"),
        (lambda name: FakeNvml(1, counts=False), "NVML: Not Supported"),
    ],
)
def test_without_a_counter_it_says_why(load: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    meter = EnergyMeter.open(load)
    assert meter.facts(meter.joules(), 4) == {"joules": None, "joules_per_output_token": None, "reason": reason}

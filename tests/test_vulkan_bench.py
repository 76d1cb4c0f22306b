"""The device's bench: what it counts, on a small expert."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu_fallback.reference import ReferenceOps
from mimo_vk import bench
from mimo_vk.errors import MimoError
from mimo_vk.formats import U8, Expert
from mimo_vk.vulkan import bench_device, bench_overlap
from mimo_vk.vulkan.bench_device import HEADER, DeviceResult, measure
from mimo_vk.vulkan.bench_overlap import Overlap
from mimo_vk.vulkan.layout import SlotLayout
from mimo_vk.vulkan.listing import Listing
from tests.matrices import random_expert
from tests.vulkan_device import software_device
from tools import gpu_check


def test_every_kernel_with_its_bytes() -> None:
    results = measure(software_device(), 256, 64)
    matrix = 256 * 64 // 2 + 256 * 64 // 32
    assert [(r.name, r.pairs, r.bytes) for r in results] == [
        ("expert_gate_up_mxfp4", 1, 2 * matrix),
        ("expert_down_mxfp4", 1, matrix),
        ("expert_gate_up_mxfp4", 8, 16 * matrix),
        ("expert_down_mxfp4", 8, 8 * matrix),
    ]
    assert all(r.seconds > 0 and r.copy_gbps > 0 for r in results)


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    result = DeviceResult("expert_down_mxfp4", 8, 0.002, 8_000_000, 16.0)
    assert result.gbps == 4.0
    assert result.line().split() == ["expert_down_mxfp4", "8", "2.000", "4.0", "16.0", "25%"]
    assert len(result.line()) == len(HEADER)
    shown: list[str] = []
    monkeypatch.setattr(bench_device, "measure", lambda _: [result])
    (report,) = bench.device_kernels(software_device(), shown.append)
    assert (
        report["gbps"] == 4.0
        and shown[0] == f"device {software_device().describe()}"
        and shown[1:] == [HEADER, result.line()]
    )


def test_a_device_that_crashes_is_an_error_with_its_name() -> None:
    lost = replace(software_device(), index=9, name="nobody's")
    with pytest.raises(MimoError, match="device 9: nobody's"):
        measure(lost, 256, 64)


def test_side_by_side() -> None:
    rng = np.random.default_rng(0)
    result = bench_overlap.measure(software_device(), ReferenceOps(), [random_expert(rng, 256, 64) for _ in range(2)])
    assert result.held == 2 and result.cold >= 1
    assert min(result.cpu, result.device, result.together) > 0
    line = Overlap(3, 2, 0.010, 0.020, 0.021).line()
    assert "3 experts on the CPU 10.0 ms, 2 on the device 20.0 ms, side by side 21.0 ms" in line
    assert "(the larger 20.0, the sum 30.0)" in line


def test_the_check_of_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Right, and with one expert's bits changed on their way; and where there is no GPU."""
    monkeypatch.setattr(gpu_check, "SHAPES", ((256, 64),))
    monkeypatch.setattr(bench_device, "measure", lambda _: [DeviceResult("expert_down_mxfp4", 1, 0.1, 100, 1.0)])
    assert gpu_check.main(["llvmpipe"]) == 0
    assert "experts   256 x    64, 15 pairs: the same bits" in capsys.readouterr().out
    store = SlotLayout.store

    def changed(self: SlotLayout, expert: Expert, stored: U8) -> None:
        store(self, expert, stored)
        stored[0] ^= 0x40

    monkeypatch.setattr(SlotLayout, "store", changed)
    assert gpu_check.main(["llvmpipe"]) == 1
    assert "DIFFER" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "list_devices", lambda: Listing((software_device(),), ""))
    assert gpu_check.main([]) == 1
    assert "no GPU is listed" in capsys.readouterr().out

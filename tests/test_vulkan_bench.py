"""The device's bench: what it counts, on a small expert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpu_fallback.reference import ReferenceOps
from mimo_vk import bench
from mimo_vk.errors import MimoError
from mimo_vk.formats import U8, Expert
from mimo_vk.vulkan import bench_device, bench_overlap
from mimo_vk.vulkan.bench_device import HEADER, DenseSizes, DeviceResult, measure
from mimo_vk.vulkan.bench_overlap import Overlap, Trace
from mimo_vk.vulkan.layout import SlotLayout
from mimo_vk.vulkan.listing import Listing
from tests.engines import open_engine
from tests.matrices import random_expert
from tests.vulkan_device import software_device
from tools import gpu_check


def test_every_kernel_with_its_bytes() -> None:
    results = measure(software_device(), 256, 64, SIZES)
    matrix = 256 * 64 // 2 + 256 * 64 // 32
    assert [(r.name, r.pairs, r.bytes) for r in results[:4]] == [
        ("expert_gate_up_mxfp4", 1, 2 * matrix),
        ("expert_down_mxfp4", 1, matrix),
        ("expert_gate_up_mxfp4", 8, 16 * matrix),
        ("expert_down_mxfp4", 8, 8 * matrix),
    ]
    assert all(r.seconds > 0 and r.copy_gbps > 0 for r in results)
    assert [(r.name, r.pairs, r.bytes) for r in results[4:]] == dense_rows()


# qkv is 4*36 + 2*(36 + 32) = 280 rows, o_proj 4*32 = 128 columns.
SIZES = DenseSizes(
    hidden=256, inner=64, heads=4, kv_heads=2, head_dim=36, v_dim=32, rope_dim=8, window=16, experts=16, chosen=2,
    keys=40, many=3,
)  # fmt: skip


def dense_rows() -> list[tuple[str, int, int]]:
    """Names, rows and bytes by hand: activations and cached rows 4 bytes each."""
    rows = []
    for n in (1, 3):
        own = 4 * n * (4 * 36 + 2 * 36 + 2 * 32 + 4 * 32)  # q, k, v and the result
        rows += [
            ("linear_fp8 280x256", n, 280 * 256 + 280 * 4 + 3 * 2 * 4 + 4 * n * (256 + 280)),
            ("linear_bf16 256x128", n, 2 * 256 * 128 + 4 * n * (128 + 256)),
            ("linear_int8 256x128", n, 256 * 128 + 4 * 256 + 4 * n * (128 + 256)),
            ("linear_f32 256x256", n, 4 * 256 * 256 + 4 * n * (256 + 256)),
            ("attention 40 keys", n, own + 4 * 40 * 2 * (36 + 32) + 4 * 4),
            ("attention 16 keys", n, own + 4 * 16 * 2 * (36 + 32) + 4 * 4),
        ]
    return [
        *rows,
        ("rms_norm 256", 1, 4 * 3 * 256),
        ("add 256", 1, 4 * 3 * 256),
        ("swiglu 64", 1, 4 * 3 * 64),
        ("weighted_sum 2x256", 1, 4 * (2 * 256 + 2 + 256)),
        ("embed 256", 1, 4 + 2 * 256 + 4 * 256),
        ("split_rope 280", 1, 4 * (280 + 8 + 280)),
        ("kv_append 136", 1, 2 * 4 * 136),
        ("route 16", 1, 4 * (16 + 16 + 2 + 2)),
    ]


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


def test_slow_kernels_are_run_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    class Program:
        runs = 0

        def run(self) -> None:
            self.runs += 1

    monkeypatch.setattr(bench_device, "SHORTEST", 0.0)
    for longest, runs in ((0.0, 2), (1000.0, 1 + bench_device.FEWEST)):  # the first is not counted
        monkeypatch.setattr(bench_device, "LONGEST", longest)
        program = Program()
        assert bench_device.timed(program) > 0  # type: ignore[arg-type]
        assert program.runs == runs


def test_a_device_that_crashes_is_an_error_with_its_name() -> None:
    lost = replace(software_device(), index=9, name="nobody's")
    with pytest.raises(MimoError, match="device 9: nobody's"):
        measure(lost, 256, 64)


def test_side_by_side() -> None:
    """The device process ran its step within the time that the program measured, on the same clock."""
    rng = np.random.default_rng(0)
    half, balanced = bench_overlap.measure(
        software_device(), ReferenceOps(), [random_expert(rng, 256, 64) for _ in range(4)]
    )
    assert (half.cold, half.held, balanced.held) == (2, 2, 2) and balanced.cold >= 1
    for result in (half, balanced):
        assert min(result.cpu, result.device, result.together) > 0
        for first, last in vars(result.trace).values():
            assert 0 <= first < last <= result.together


def test_waiting_for_the_device_is_a_part(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PROMPTS", (4,))
    monkeypatch.setattr(bench, "DECODE", 2)
    changes = {"cpu": False, "device": "llvmpipe", "tier_gb": 0.01, "tier_rate": 1000, "backend": "numpy"}
    with open_engine(tiny_checkpoint, **changes) as engine:
        runner = bench._Bench(engine, 1)
        runner.warm_up()
        phase = runner.decode(cold=False)
    assert phase["parts"]["device"] > 0
    assert sum(phase["parts"].values()) == pytest.approx(phase["seconds"])


def test_the_side_by_side_lines() -> None:
    result = Overlap(3, 2, 0.010, 0.020, 0.021, Trace(cpu=(0.001, 0.011), device=(0.002, 0.0205)))
    assert result.trace.both == pytest.approx(0.009)
    assert Trace(cpu=(0.0, 1.0), device=(1.5, 2.0)).both == 0
    assert result.lines() == [
        "one row: 3 experts on the CPU 10.0 ms, 2 on the device 20.0 ms, side by side 21.0 ms (the larger 20.0, "
        "the sum 30.0)",
        "  trace: cpu at work from 1.0 to 11.0 ms; device at work from 2.0 to 20.5 ms; both for 9.0 ms",
    ]


def test_the_check_of_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Right; with a test that fails; with one expert's bits changed on their way; and where there is no GPU."""
    outcome = [(True, "9 passed in 1.00s")]
    monkeypatch.setattr(gpu_check, "SHAPES", ((256, 64),))
    monkeypatch.setattr(gpu_check, "tests_of_bits", lambda info, files: outcome[0])
    monkeypatch.setattr(bench_device, "measure", lambda _: [DeviceResult("expert_down_mxfp4", 1, 0.1, 100, 1.0)])
    assert gpu_check.main(["llvmpipe"]) == 0
    out = capsys.readouterr().out
    assert "experts   256 x    64, 15 pairs: the same bits" in out and "every bit is the CPU's" in out
    outcome[0] = (False, "1 failed in 1.00s")
    assert gpu_check.main(["llvmpipe"]) == 1
    assert "NOT THE SAME BITS" in capsys.readouterr().out
    outcome[0] = (True, "")
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


def test_the_check_runs_the_tests_on_the_device_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = software_device()
    text = f"""
import pytest
from tests.vulkan_device import software_device

@pytest.mark.bits
def test_device():
    assert software_device().index == WANTED and software_device().uuid == "{info.uuid}"

def test_of_something_else():
    raise AssertionError
"""
    for name, wanted, expected in (("right", info.index, True), ("wrong", 77, False)):
        file = tmp_path / f"test_{name}.py"
        file.write_text(text.replace("WANTED", str(wanted)))
        passed, last = gpu_check.tests_of_bits(info, [str(file)])
        assert passed == expected and last.startswith("1 passed" if expected else "1 failed"), last
    assert "::test_device - AssertionError" in capsys.readouterr().out
    assert "tests/test_vulkan_kernels.py" in gpu_check.files_of_tests()

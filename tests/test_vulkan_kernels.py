"""The shaders: what the host believes of them, what their SPIR-V says, and every bit of their results against numpy."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu_fallback import elementary
from mimo_vk.formats import MatrixMXFP4
from mimo_vk.vulkan import expert_slabs
from mimo_vk.vulkan.arena import TierShape
from mimo_vk.vulkan.device import Device, DeviceError, Program, view
from mimo_vk.vulkan.device_check import Arithmetic, check_arithmetic, expected_results, run_probe, subnormal
from mimo_vk.vulkan.expert_slabs import ExpertSlabs
from mimo_vk.vulkan.kernels import KERNELS, PROBE, Kernel, shader_folder, source_files, source_hash
from tests.matrices import random_expert, random_x
from tests.vulkan_device import assert_same_bits, permuted, reference, software_device

USUAL = Arithmetic()
BUILDS = (".spv", ".denorm.spv")
MOVES_WORDS = {"copy_items", "embed", "kv_append", "fill_words", "copy_ring"}  # and does nothing else
FLOAT_OPERATIONS = r"OpFMul|OpFAdd|OpFSub|OpVectorTimesScalar|OpFDiv|OpFMod|OpFRem|OpDot|OpMatrixTimes\w+"
EXACT_FUNCTIONS = {"Floor", "UnpackHalf2x16", "UMin", "UMax"}  # the last two of integers


def by_name(kernel: Kernel) -> str:
    return kernel.name


def test_every_shader_has_a_row() -> None:
    assert sorted(kernel.name for kernel in KERNELS) == sorted(path.stem for path in shader_folder().glob("*.comp"))


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_the_row_is_the_glsl(kernel: Kernel) -> None:
    source = "\n".join(path.read_text() for path in source_files(kernel.name))
    bindings = re.findall(r"layout\(std430, binding = (\d+)\) \w+ buffer (\w+)", source)
    assert [name for _, name in sorted(bindings, key=lambda b: int(b[0]))] == list(kernel.bindings)
    assert sorted(int(number) for number, _ in bindings) == list(range(len(kernel.bindings)))
    push = re.search(r"push_constant\) uniform Push \{(.*?)\}", source, flags=re.DOTALL)
    assert re.findall(r"^    (\w+) (\w+);", push[1] if push else "", flags=re.MULTILINE) == [
        ("uint", name) for name in kernel.push
    ]
    assert re.findall(r"layout\(local_size_x = (\d+)\) in", source) == [str(kernel.local_size)]
    constants = re.findall(r"layout\(constant_id = (\d+)\) const uint (\w+)", source)
    assert sorted(constants) == [(str(i), name) for i, name in enumerate(kernel.constants)]


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_the_builds_are_of_these_sources(kernel: Kernel) -> None:
    """``make shaders`` writes the hashes; a source that was changed since, or a build that was, shows here."""
    lines = dict(line.split(" ", 1) for line in (shader_folder() / "hashes.txt").read_text().splitlines())
    builds = [hashlib.sha256((shader_folder() / (kernel.name + end)).read_bytes()).hexdigest() for end in BUILDS]
    assert lines[kernel.name].split(" ") == [source_hash(kernel.name), *builds]


def disassemble(path: Path) -> str:
    return subprocess.run(["spirv-dis", "--raw-id", str(path)], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.parametrize("build", BUILDS)
def test_no_operation_may_be_fused(kernel: Kernel, build: str) -> None:
    """NoContraction on every add, subtract and multiply; no division, no function that is not exact."""
    text = disassemble(shader_folder() / (kernel.name + build))
    exact = set(re.findall(r"OpDecorate (%\d+) NoContraction", text))
    operations = re.findall(rf"(%\d+) = ({FLOAT_OPERATIONS})\b", text)
    assert {name for _, name in operations} <= {"OpFMul", "OpFAdd", "OpFSub", "OpVectorTimesScalar"}
    assert [result for result, _ in operations if result not in exact] == []
    assert set(re.findall(r"OpExtInst %\d+ %\d+ (\w+)", text)) <= EXACT_FUNCTIONS
    if kernel.name in MOVES_WORDS:
        assert not operations
    else:
        assert len(operations) >= {"add": 1, "add_row": 1, "weighted_sum": 2, "split_rope": 7}.get(kernel.name, 8)
        modes = set(re.findall(r"OpExecutionMode %\d+ (\w+) 32\n", text))
        expected = {"RoundingModeRTE", "SignedZeroInfNanPreserve"}
        assert modes == (expected | {"DenormPreserve"} if build == ".denorm.spv" else expected)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    device = Device(software_device())
    yield device
    device.close()


@pytest.mark.bits
def test_arithmetic_is_the_cpus(device: Device) -> None:
    """Random bits and ordinary numbers through every operation of the probe, elementary functions included."""
    flushes = check_arithmetic(device).flushes
    rng = np.random.default_rng(8)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    usual = rng.uniform(-70, 90, 100_000).astype(np.float32)
    for a, b in ((bits, usual), (usual, bits)):
        results = run_probe(device, a, b, usual)
        all_excused = subnormal(a, b, usual)
        for found, expected, excused in zip(results, expected_results(a, b, usual), all_excused, strict=False):
            assert excused.sum() < len(a) / 20
            assert_same_bits(np.where(excused & flushes, expected, found), expected)


def test_a_device_with_other_arithmetic_is_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(DeviceError, match="exp\\(a\\) for a="):
        patch.setattr(elementary, "EXP_E4", np.float32(0.05))
        check_arithmetic(device)


@pytest.mark.bits
@pytest.mark.parametrize("kind", ["CPU", "discrete GPU"])
@pytest.mark.parametrize(("shape", "sizes"), [((32, 32), [15]), ((256, 64), [3, 15]), ((288, 544), [3, 15])], ids=str)
def test_every_bit_of_an_experts_results(
    device: Device, kind: str, shape: tuple[int, int], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several slabs of 2 slots, one row and several, programs of one size and of two, both ways of filling a slab."""
    monkeypatch.setattr(expert_slabs, "SMALL_STEP", 20_000)  # 15 pairs of 256 + 32 floats, but not of 256 + 256
    hidden, inner = shape
    rng = np.random.default_rng(hidden)
    tier = TierShape(hidden, inner, top_k=3, max_rows=5, staging=1)
    small = replace(device.info, kind=kind, max_buffer=max(2 * tier.layout.slot_bytes, 1 << 16))
    slabs, experts = filled(device, small, tier, 5, rng)
    assert [buffers.pairs for buffers in slabs.buffers] == sizes
    x = random_x(rng, 5, hidden)
    x[1, :7] = [0.0, -0.0, 1e-42, -3e-39, 1e-20, 2.0**100, -1.0]
    every = np.array([(slot, row) for slot in range(5) for row in range(5)], np.uint32)
    for pairs in (every[:1], every[13:15], every[[0, 7, 9, 24]], every[:15], every[5:20], every[:0]):
        y = np.full((len(pairs), hidden), np.nan, np.float32)
        slabs.step(permuted(x, tier), pairs, y)
        assert_same_bits(y, reference(experts, pairs, x)) if len(pairs) else None


def filled(
    device: Device, info: Any, tier: TierShape, count: int, rng: Any, arithmetic: Arithmetic = USUAL
) -> tuple[ExpertSlabs, list]:
    """Slabs with ``count`` random experts, on the device as if it were the one that ``info`` says."""
    device.info = info
    slabs = ExpertSlabs(device, tier, count, arithmetic)
    experts = [random_expert(rng, tier.hidden, tier.inner) for _ in range(count)]
    stored = np.empty(tier.layout.expert_bytes, np.uint8)
    for slot, expert in enumerate(experts):
        while slabs.slots <= slot:
            before = slabs.slots
            assert slabs.grow() > before
        tier.layout.store(expert, stored)
        slabs.upload(slot, stored)
    return slabs, experts


@pytest.mark.bits
@pytest.mark.parametrize(("select", "subgroup"), [(1, 8), (0, 4), (1, 4)])
def test_other_decodings_give_the_same_bits(device: Device, select: int, subgroup: int) -> None:
    """Without subnormal halves, and where subgroups are too small to share loads."""
    rng = np.random.default_rng(1)
    tier = TierShape(288, 96, top_k=2, max_rows=2, staging=1)
    device.info = replace(software_device(), subgroup_size=subgroup)
    slabs = ExpertSlabs(device, tier, 1, Arithmetic(select))
    slabs.grow()
    codes = np.arange(256, dtype=np.uint8)
    expert = random_expert(rng, 288, 96)
    for matrix in (expert.gate, expert.up, expert.down):
        matrix.codes.ravel()[:256] = codes  # every pair of codes
    stored = np.empty(tier.layout.expert_bytes, np.uint8)
    tier.layout.store(expert, stored)
    slabs.upload(0, stored)
    x = random_x(rng, 2, 288)
    pairs = np.array([(0, 0), (0, 1)], np.uint32)
    y = np.empty((2, 288), np.float32)
    slabs.step(permuted(x, tier), pairs, y)
    assert_same_bits(y, reference([expert], pairs, x))


@pytest.mark.bits
def test_the_smallest_and_largest_scales(device: Device) -> None:
    """Byte 0 is a subnormal scale; sums that overflow are infinite or NaN, as on the CPU."""
    rng = np.random.default_rng(2)
    tier = TierShape(256, 64, top_k=2, max_rows=2, staging=1)
    device.info = software_device()
    slabs, (expert,) = filled(device, device.info, tier, 1, rng)
    for low, high in ((0, 3), (250, 254), (0, 254)):
        for matrix in (expert.gate, expert.up, expert.down):
            matrix.scales[...] = rng.integers(low, high + 1, matrix.scales.shape)
        stored = np.empty(tier.layout.expert_bytes, np.uint8)
        tier.layout.store(expert, stored)
        slabs.upload(0, stored)
        x = random_x(rng, 2, 256)
        pairs = np.array([(0, 0), (0, 1)], np.uint32)
        y = np.empty((2, 256), np.float32)
        slabs.step(permuted(x, tier), pairs, y)
        assert_same_bits(y, reference([expert], pairs, x))


@pytest.mark.bits
def test_a_flash_experts_bits(device: Device) -> None:
    rng = np.random.default_rng(6)
    tier = TierShape(4096, 2048, top_k=1, max_rows=3, staging=1)
    slabs, experts = filled(device, software_device(), tier, 1, rng)
    x = random_x(rng, 3, 4096)
    pairs = np.array([(0, 0), (0, 1), (0, 2)], np.uint32)
    y = np.empty((3, 4096), np.float32)
    slabs.step(permuted(x, tier), pairs, y)
    assert_same_bits(y, reference(experts, pairs, x))
    assert isinstance(experts[0].gate, MatrixMXFP4)


def test_limits_are_checked_before_kp_sees_them(device: Device) -> None:
    device.info = software_device()
    with pytest.raises(DeviceError, match="134217728"):
        device.storage((128 << 20) // 4 + 1)
    tensors = [device.host(4) for _ in range(3)] + [device.device(32)]
    with pytest.raises(DeviceError, match="65536"):
        device.pipeline(PROBE, tensors, (65536, 1, 1), {"n": 4})
    with pytest.raises(AssertionError, match="3"):
        device.pipeline(PROBE, tensors[:3], (1, 1, 1), {"n": 4})
    slabs = ExpertSlabs(device, TierShape(256, 64, 2, 2, 1), 3, USUAL)
    slabs.grow()
    for pairs, message in (([(9, 0)], "slot 9 of 3"), ([(0, 2)], "row 2 of 2")):
        with pytest.raises(DeviceError, match=message):
            slabs.step(np.zeros((2, 256), np.float32), np.array(pairs, np.uint32), np.zeros((1, 256), np.float32))


def test_a_slab_that_does_not_fit_is_halved(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    device.info = software_device()
    tier = TierShape(256, 64, 2, 2, 1)
    room = [5 * tier.layout.slot_bytes]

    def fits(nbytes: int, host: bool) -> bool:
        return nbytes <= room[0] or nbytes < 32 << 10

    monkeypatch.setattr(device, "fits", fits)
    slabs = ExpertSlabs(device, tier, 16, USUAL)
    assert slabs.grow() == 4
    room[0] = 2 * tier.layout.slot_bytes
    assert slabs.grow() == 5  # of the 12 that are left: 6, 3, 1
    room[0] = 0
    assert slabs.grow() == 5


def test_the_ordering_rule(device: Device) -> None:
    """Within a program no tensor is written twice, nor after it was read; what is written is a device tensor."""
    device.info = software_device()
    a, b, c, out = (device.device(n) for n in (4, 4, 4, 32))
    first = device.pipeline(PROBE, [a, b, c, out], (1, 1, 1), {"n": 4})
    with pytest.raises(AssertionError, match="written twice"):
        Program(device).dispatch(first, [out]).dispatch(first, [out])
    writes_a = device.pipeline(PROBE, [out, b, c, a], (1, 1, 1), {"n": 1})
    with pytest.raises(AssertionError, match="after it was read"):
        Program(device).dispatch(first, [out]).dispatch(writes_a, [a])
    host = device.host(32)
    to_host = device.pipeline(PROBE, [a, b, c, host], (1, 1, 1), {"n": 4})
    with pytest.raises(AssertionError, match="device tensors"):
        Program(device).dispatch(to_host, [host])
    given = [device.host(4) for _ in range(3)]
    for tensor, values in zip(given, ([1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1]), strict=True):
        view(tensor)[:] = values
    first = device.pipeline(PROBE, [*given, out], (1, 1, 1), {"n": 4})
    bigger = device.device(32)
    second = device.pipeline(PROBE, [out, *given[1:], bigger], (1, 1, 1), {"n": 4})
    Program(device).dispatch(first, [out]).dispatch(second, [bigger]).run()
    assert view(bigger)[:4].tolist() == [25, 72, 147, 256]  # a*b*b

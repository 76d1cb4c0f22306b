"""A device that takes subnormal floats for zero: what it may compute, and that the CPU computes the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cpu_fallback.reference import ReferenceOps
from mimo_vk.config import load_config
from mimo_vk.formats import F32
from mimo_vk.vulkan import device_check, setup, tiered_experts, worker
from mimo_vk.vulkan.arena import Arena, DenseArena, TierShape
from mimo_vk.vulkan.device import Device, DeviceError
from mimo_vk.vulkan.device_check import Arithmetic, check_arithmetic
from mimo_vk.vulkan.expert_slabs import ExpertSlabs
from mimo_vk.vulkan.subnormals import LEAST, flushes, meets_subnormals
from tests.engines import PROMPT, open_engine
from tests.matrices import E2M1, random_expert, random_x
from tests.test_vulkan_dense_plan import shape_of
from tests.vulkan_device import assert_same_bits, permuted, reference, software_device

SMALLEST = np.float32(2.0**-126)
FLUSHING = Arithmetic(0, True)
Step = Callable[[F32], F32]


def flushed(x: F32) -> F32:
    return np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x)


def word_sums(values: F32, x: F32, step: Step) -> F32:
    """values . x [words, 8] by word, every operation's result through ``step``."""
    p = step(values[:, 0] * x[:, 0])
    for column in range(1, 8):
        p = step(p + step(values[:, column] * x[:, column]))
    return p


def dot(values: F32, x: F32, scale: F32, step: Step) -> F32:
    """The whole product, with a scale for each word."""
    words = step(word_sums(values, x, step) * scale).reshape(-1, 32)
    lanes = words[0]
    for following in words[1:]:
        lanes = step(lanes + following)
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = step(lanes[:half] + lanes[half:])
    return lanes


def random_case(rng: np.random.Generator, least: np.float32) -> tuple[F32, F32, F32]:
    """Codes; neighbours of ``least`` of both signs, which leave little of each other; scales that make LEAST of it."""
    values = rng.choice(np.array(E2M1[:3], np.float32), (64, 8))
    x = least * (1 + rng.integers(0, 3, (64, 8)) * np.float32(2.0**-23)) * rng.choice([-1, 1], (64, 8))
    x = x.astype(np.float32)
    exponents = np.frexp(word_sums(values, x, lambda y: y))[1]  # of twice what the sums are at least
    return values, x, np.ldexp(LEAST, 1 - exponents)


def test_nothing_subnormal_comes_of_what_complies() -> None:
    """And of half of it there does, which is then lost."""
    rng = np.random.default_rng(3)
    for least, comply in ((LEAST, True), (LEAST / np.float32(2), False)):
        same = []
        for _ in range(300):
            case = random_case(rng, least)
            same.append(dot(*case, lambda x: x).tobytes() == dot(*case, flushed).tobytes())
        assert all(same) == comply, least


def test_which_rows_comply() -> None:
    below = np.nextafter(LEAST, np.float32(0))
    x = np.array([[0, LEAST], [-LEAST, -0.0], [1, below], [-below, 3], [1e-42, 0], [np.nan, np.inf]], np.float32)
    assert meets_subnormals(x).tolist() == [False, False, True, True, True, False]


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    device = Device(software_device())
    yield device
    device.close()


def test_no_driver_flushes_that_is_known_not_to() -> None:
    """The tests of dense layers are skipped where one does: a check that is wrong must not pass for that."""
    info = software_device()
    mesa = re.search(r"llvmpipe Mesa (\d+)", info.driver)
    assert not flushes(info) or mesa is None or int(mesa[1]) >= 26


def test_flushing_is_told_from_other_differences(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_probe(_: Device, a: F32, b: F32, c: F32) -> F32:
        a, b, c = flushed(a), flushed(b), flushed(c)
        product = flushed(a * b)
        with np.errstate(all="ignore"):
            rows = [product, flushed(a + b), flushed(a - b), flushed(product + c)]
            rows += device_check.expected_results(a, b, c)[4:]
        codes = np.zeros(len(a), np.float32)
        codes[:16] = np.array([*E2M1, *(-v for v in E2M1)], np.float32) * np.float32(2.0**-14)
        return np.stack([*rows, codes]) * factor

    monkeypatch.setattr(device_check, "run_probe", run_probe)
    factor = np.float32(1)
    with np.errstate(all="ignore"):
        assert check_arithmetic(device) == FLUSHING
        factor = np.float32(1 + 2**-23)
        with pytest.raises(DeviceError, match="its arithmetic differs"):
            check_arithmetic(device)


@pytest.mark.bits
def test_pairs_that_may_meet_one_are_nan(device: Device) -> None:
    """All of a pair's results where an activation is small, some where a scale is; all others have the CPU's bits."""
    rng = np.random.default_rng(5)
    tier = TierShape(256, 64, top_k=4, max_rows=12, staging=1)
    slabs = ExpertSlabs(device, tier, 4, FLUSHING)
    slabs.grow()
    experts = [random_expert(rng, 256, 64) for _ in range(4)]
    for expert in experts[2:]:
        expert.down.scales[7, 1] = 2
    experts[3].down.codes[7, 16:] = 0x80  # zeros, half of them negative
    stored = np.empty(tier.layout.expert_bytes, np.uint8)
    for slot, expert in enumerate(experts):
        tier.layout.store(expert, stored)
        slabs.upload(slot, stored)
    x = random_x(rng, 12, 256) * (np.float32(10.0) ** (-2 * np.arange(12, dtype=np.float32)))[:, None]
    x[3] = 0  # whose activations are zeros, of zeros
    pairs = np.array([(slot, row) for slot in range(4) for row in range(12)], np.uint32)
    y = np.empty((48, 256), np.float32)
    slabs.step(permuted(x, tier), pairs, y)
    slots, rows = pairs.T.astype(np.int32)
    act = ReferenceOps().expert_gate_up(experts, slots, rows, x)
    small = ((act != 0) & (np.abs(act) < LEAST)).any(axis=1)
    assert 12 < small.sum() < 36 and np.isnan(y[small]).all()
    scaled = ~small & (slots == 2) & (rows != 3)
    assert scaled.any() and np.isnan(y[scaled, 7]).all()
    usual = ~scaled & ((act == 0) | (np.abs(act) > 1e-20)).all(axis=1)
    assert usual.sum() > 10 and np.isfinite(y[usual]).all()
    expected = reference(experts, pairs, x)
    assert_same_bits(np.where(np.isnan(y), expected, y), expected)


def test_the_cpu_computes_what_the_device_may_not(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    with open_engine(tiny_checkpoint) as engine:
        found.append(engine.session().prompt(PROMPT, all_logits=True))
    with open_engine(tiny_checkpoint, cpu=False, device="llvmpipe", tier_gb=0.01, tier_rate=100) as engine:
        assert engine.tier is not None
        engine.tier.client.flushes = True
        hits = []
        for rule in (meets_subnormals, lambda x: np.arange(len(x)) % 2 == 0, lambda x: np.ones(len(x), bool)):
            monkeypatch.setattr(tiered_experts, "meets_subnormals", rule)
            found += [engine.session().prompt(PROMPT, all_logits=True) for _ in range(2)]
            hits.append(engine.tier.stats.hits)
        assert hits[0] > 10 and hits[1] > hits[0] + 10 and hits[2] == hits[1]
    assert len({logits.tobytes() for logits in found}) == 1


def test_dense_layers_stay_on_the_cpu(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "flushes", lambda info: True)
    changes = {"cpu": False, "device": "llvmpipe", "dense": "device"}
    with open_engine(tiny_checkpoint, **changes, tier_gb=0.01) as engine:
        assert engine.tier is not None and engine.dense is None
        assert engine.notices[0].endswith("; it takes subnormal floats for zero, so dense layers stay on the CPU")
    with open_engine(tiny_checkpoint, **changes, tier_gb=0) as engine:
        assert engine.tier is None and engine.dense is None
        assert "is not used: it takes subnormal floats for zero" in engine.notices[0]


def test_the_device_process_refuses_dense_layers(
    device: Device, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "check_arithmetic", lambda device: FLUSHING)
    tier, dense = TierShape(32, 32, 1, 1, 1), shape_of(load_config(tiny_checkpoint / "config.json")[0])
    arenas = Arena(tier), DenseArena(dense)
    with pytest.raises(DeviceError, match="subnormal floats for zero"):
        worker.Worker(device, (arenas[0].fd, tier.as_json()), 1, (arenas[1].fd, dense.as_json()))

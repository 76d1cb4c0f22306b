"""The device's work under the Khronos validation layer with its synchronization check: nothing to report.

kp orders dispatches only where it is told to, and the software device gives right results all the same.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from mimo_vk.vulkan.subnormals import flushes
from tests.vulkan_device import software_device

LAYER = "VK_LAYER_KHRONOS_validation"
SETTINGS = """khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG
khronos_validation.report_flags = error,warn
khronos_validation.log_filename = {log}
"""
SYNC = "khronos_validation.enables = VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT\n"
# Layers since 1.4. They look at whole buffers: dispatches that each write a part of one tensor count as a hazard, and
# that no tensor is written twice otherwise is Program's own to refuse.
SYNC_SINCE_1_4 = """khronos_validation.validate_sync = true
khronos_validation.syncval_shader_accesses_heuristic = true
khronos_validation.message_id_filter = SYNC-HAZARD-WRITE-AFTER-WRITE
"""

# Without the layer an empty log would say nothing.
LOADED = """
assert "khronos_validation" in open("/proc/self/maps").read(), "the validation layer is not installed"
print("done")
"""

# The device's work: the start-up check, several slabs, uploads, steps of both sizes. One device a process, as each
# instance of the layer begins its log anew.
WORK = """
from dataclasses import replace
import numpy as np
from tests.matrices import random_x
from tests.test_vulkan_kernels import filled
from tests.vulkan_device import permuted, software_device
from mimo_vk.vulkan.arena import TierShape
from mimo_vk.vulkan.device import Device
from mimo_vk.vulkan.device_check import check_arithmetic

tier = TierShape(288, 96, top_k=3, max_rows=4, staging=1)
device = Device(software_device())
check_arithmetic(device)
info = replace(device.info, kind="KIND", max_buffer=max(2 * tier.layout.slot_bytes, 1 << 16))
slabs, _ = filled(device, info, tier, 4, np.random.default_rng(0))
slabs.warm_up()
x = permuted(random_x(np.random.default_rng(1), 4, 288), tier)
every = np.array([(slot, row) for slot in range(4) for row in range(3)], np.uint32)
for pairs in (every[:2], every[4:7], every, every[:1]):
    slabs.step(x, pairs, np.zeros((len(pairs), 288), np.float32))
device.close()
"""

# The same in a device process, with a model: what users run.
MODEL = """
from pathlib import Path
from tests.engines import PROMPT, open_engine
from mimo_vk.sampling import Sampler

changes = {"cpu": False, "device": "llvmpipe", "tier_gb": 0.002, "tier_rate": 20, "threads": 1, "backend": "numpy"}
with open_engine(Path("MODEL"), **changes) as engine:
    session = engine.session()
    for _ in session.generate(session.prompt(PROMPT), max_tokens=10, sampler=Sampler(), stop_ids=frozenset()):
        pass
    assert engine.tier.stats.hits > 10 and not engine.tier.gone
    assert "khronos_validation" in open(f"/proc/{engine.tier.client.pid}/maps").read()
print("done")
"""

# Dense layers, the head, the picture tower and experts on the device: blocks of every class, rings that wrap, a
# snapshot and the way back.
DENSE = """
from dataclasses import replace
from pathlib import Path
from tests.engines import open_engine
from tests.picture_files import png
from tests.vulkan_device import software_device
from mimo_vk.sampling import Sampler
from mimo_vk.vulkan import dense_plan, setup
from mimo_vk.vulkan.placed_tower import PlacedTower
from mimo_vk.vulkan.listing import Listing

info = replace(software_device(), kind="KIND")
setup.list_devices = lambda: Listing((info,), "")
dense_plan.OWN_SLAB = dense_plan.SHARED_SLAB = 1 << 18
dense_plan.MOST_PATCHES = 256  # whose keys fit such a slab
changes = {"cpu": False, "device": "llvmpipe", "dense": "device", "tier_gb": 0.002, "tier_rate": 20, "chunk": 20}
with open_engine(Path("MODEL"), **changes, threads=1, backend="numpy") as engine:
    session, tools = engine.session(), engine.picture_tools
    seen = tools.place([5, tools.pad_id, 6], [tools.picture(png("blue", 160, 96))])
    text = [i % 500 for i in range(21)]
    logits = session.prompt(text)
    session.pin()
    for _ in session.generate(logits, max_tokens=4, sampler=Sampler(), stop_ids=frozenset()):
        pass
    session.prompt([*text, 5, 6], live=False)
    session.prompt([7, 8, 9], all_logits=True)
    session.prompt(seen[0], pictures=seen[1])
    assert engine.stats.reused_tokens == 21
    assert engine.tier.stats.hits > 10 and not engine.dense.gone and len(engine.dense.layers) == 6
    assert isinstance(engine.tower, PlacedTower) and engine.stats.pictures == 1
    assert "khronos_validation" in open(f"/proc/{engine.dense.client.pid}/maps").read()
print("done")
"""

# Two dependent dispatches, in order and (with the sync left out) not.
UNORDERED = """
from tests.vulkan_device import software_device
from mimo_vk.vulkan.device import Device, Program
from mimo_vk.vulkan.kernels import PROBE

class Unordered(Program):
    def _sync(self, tensors):
        pass

device = Device(software_device())
given = [device.host(4) for _ in range(3)]
out, last = device.device(32), device.device(32)
first = device.pipeline(PROBE, [*given, out], (1, 1, 1), {"n": 4})
second = device.pipeline(PROBE, [out, *given[1:], last], (1, 1, 1), {"n": 4})
PROGRAM(device).dispatch(first, [out]).dispatch(second, [last]).run()
device.close()
"""


@cache
def layer_settings() -> str:
    """The settings that the installed layer's version takes."""
    size, count = 520, ctypes.c_uint32()  # of VkLayerProperties: a name, two versions, a description
    ask = ctypes.CDLL("libvulkan.so.1").vkEnumerateInstanceLayerProperties
    ask(ctypes.byref(count), None)
    found = ctypes.create_string_buffer(size * count.value)
    ask(ctypes.byref(count), found)
    layers = [found.raw[i : i + size] for i in range(0, len(found), size)]
    versions = {layer[:256].split(b"\0")[0]: layer[256:260] for layer in layers}
    since_1_4 = int.from_bytes(versions[LAYER.encode()], sys.byteorder) >= 1 << 22 | 4 << 12
    return SETTINGS + (SYNC_SINCE_1_4 if since_1_4 else SYNC)


def validated(program: str, root: Path, directory: Path) -> str:
    """What the layer logged while a program ran."""
    log = directory / "log.txt"
    settings = directory / "vk_layer_settings.txt"
    settings.write_text(layer_settings().format(log=log))
    environment = {"VK_INSTANCE_LAYERS": LAYER, "VK_LAYER_SETTINGS_PATH": str(settings), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "done\n" in done.stdout, done.stderr  # some layers print a line of their own at the end
    return log.read_text()


@pytest.mark.parametrize("kind", ["CPU", "discrete GPU"])
def test_the_device_works_without_a_hazard(kind: str, project_root: Path, tmp_path: Path) -> None:
    assert validated(WORK.replace("KIND", kind) + LOADED, project_root, tmp_path) == ""


def test_a_model_runs_without_a_hazard(tiny_checkpoint: Path, project_root: Path, tmp_path: Path) -> None:
    assert validated(MODEL.replace("MODEL", str(tiny_checkpoint)), project_root, tmp_path) == ""


@pytest.mark.parametrize("kind", ["CPU", "discrete GPU"])
def test_dense_layers_run_without_a_hazard(
    kind: str, tiny_checkpoint: Path, project_root: Path, tmp_path: Path
) -> None:
    if flushes(software_device()):
        pytest.skip("this device takes subnormal floats for zero: dense layers stay on the CPU")
    program = DENSE.replace("MODEL", str(tiny_checkpoint)).replace("KIND", kind)
    assert validated(program, project_root, tmp_path) == ""


def test_the_check_can_fail(project_root: Path, tmp_path: Path) -> None:
    (tmp_path / "ordered").mkdir()
    assert validated(UNORDERED.replace("PROGRAM", "Program") + LOADED, project_root, tmp_path / "ordered") == ""
    log = validated(UNORDERED.replace("PROGRAM", "Unordered") + LOADED, project_root, tmp_path)
    assert log.count("[ SYNC-HAZARD-READ-AFTER-WRITE ]") == 1, log

"""Which dense layers are put on a device, where their bytes lie there, and what users are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo_vk import cli
from mimo_vk.config import Config, load_config
from mimo_vk.doctor import check_placement
from mimo_vk.settings import Settings
from mimo_vk.vulkan import dense_plan, setup
from mimo_vk.vulkan.dense_layers import fitting
from mimo_vk.vulkan.dense_layout import DenseLayout, DenseShape, MatrixPlace
from mimo_vk.vulkan.dense_plan import device_bytes, fit_dense, fits, wants_dense
from mimo_vk.vulkan.device import DeviceError
from mimo_vk.vulkan.listing import Listing
from tests.build import SMALL_CONFIG
from tests.vulkan_device import software_device

GPU = replace(software_device(), kind="discrete GPU")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Two layers: a full one with a dense MLP, one with a window of 5 and experts."""
    path = tmp_path_factory.mktemp("small") / "config.json"
    path.write_text(json.dumps(SMALL_CONFIG))
    return load_config(path)[0]


def shape_of(config: Config, **changes: Any) -> DenseShape:
    sizes = {"dense_bits": 0, "ctx": 64, "max_rows": 8, "saves": 2, "slab_words": 1 << 20}
    return DenseShape.of(config, **{**sizes, **changes})


def test_the_words_of_each_slab(config: Config) -> None:
    """Rows are whole uvec4, places whole 64 words; sizes of the small model worked out by hand."""
    first = 288 * 160 // 4 + 160 * 144 // 2 + 2 * (200 * 160 // 4) + 160 * 13 * 4  # qkv, o_proj, gate and up, down
    second = 432 * 160 // 4 + 160 * 144 // 2 + 256  # qkv, o_proj, the router's 3 rows of 80 words
    head = 40 * 160 // 2
    layout = DenseLayout(shape_of(config))
    assert layout.slabs["W"] == [first + second + head]
    rows = 2 * 64 * 36 + 4 * 12 * 36  # the ring has room for the window's last 4 rows, and a block of 8
    assert layout.slabs["K"] == [rows] and layout.slabs["V"] == [rows]
    assert [place.cache.rows for place in layout.layers.values()] == [64, 12]
    in_int8 = DenseLayout(shape_of(config, dense_bits=8))
    o_proj = in_int8.layers[0].o_proj
    assert (o_proj.format, o_proj.items) == ("int8", 9) and in_int8.layers[1].router.format == "bf16"  # type: ignore[union-attr]
    both = DenseShape.from_json(shape_of(config).as_json())
    assert both == shape_of(config) and DenseLayout(both).slabs == layout.slabs


def test_no_two_places_overlap(config: Config) -> None:
    """Small slabs: matrices are cut between rows, and every part lies within its slab."""
    layout = DenseLayout(shape_of(config, slab_words=1 << 13))
    taken = {kind: [np.zeros(words, bool) for words in sizes] for kind, sizes in layout.slabs.items()}
    count = 0
    for place in places(layout):
        part = taken[place.kind][place.slab][place.at : place.at + place.words]
        assert len(part) == place.words and not part.any() and place.at % 4 == 0
        part[:] = True
        count += 1
    assert all(part.all() for parts in taken.values() for part in parts)
    assert count > 20 and len(layout.layers[1].qkv.parts) == 3
    assert sum(part.rows for part in layout.layers[1].qkv.parts) == 432


def places(layout: DenseLayout) -> list[Any]:
    assert layout.head is not None
    found = [layout.head.norm, *parts_of(layout.head.matrix)]
    for place in layout.layers.values():
        found += [place.input_norm, place.post_norm, place.cache.keys, place.cache.values]
        found += [place.sink] if place.sink is not None else []
        for matrix in (place.qkv, place.o_proj, place.gate, place.up, place.down, place.router):
            found += parts_of(matrix) if matrix is not None else []
    return found


def parts_of(matrix: MatrixPlace) -> list[Any]:
    return [p for part in matrix.parts for p in (part.place, part.scales) if p is not None]


def fit(config: Config, room: int, **changes: Any) -> tuple[list[int], bool]:
    shape = fit_dense(replace(GPU, **changes), config, Settings(chunk=8), 64, 8, room)
    return [spec.index for spec in shape.layers], shape.head


def test_layers_come_whole_in_their_order_then_the_head(config: Config) -> None:
    whole = shape_of(config, saves=Settings().pin_slots + 1)
    every, no_head = device_bytes(DenseLayout(whole)), device_bytes(DenseLayout(replace(whole, head=False)))
    first = device_bytes(DenseLayout(replace(whole, layers=whole.layers[:1], head=False)))
    second = device_bytes(DenseLayout(replace(whole, layers=whole.layers[1:], head=False)))
    assert second < first < no_head < every
    assert fit(config, every) == ([0, 1], True)
    assert fit(config, every - 1) == ([0, 1], False)
    assert fit(config, no_head) == ([0, 1], False)
    assert fit(config, first) == ([0], False)
    assert fit(config, first - 1) == ([1], True)  # the first layer is too large, the second is not
    assert fit(config, 1000) == ([], False)
    assert fit(config, every, max_buffer=16_000) == ([1], True)  # the first layer's keys are 18,432 bytes
    assert fit(config, 2 * every, max_buffer=32_000) == ([0, 1], True)


def test_a_shared_device_gets_half_of_what_is_free(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    every = device_bytes(DenseLayout(shape_of(config, saves=Settings().pin_slots + 1)))
    monkeypatch.setattr(dense_plan, "memory_available", lambda: 2 * every - 2)
    assert fit(config, 10 * every, kind="integrated GPU") == ([0, 1], False)
    assert fit(config, 10 * every) == ([0, 1], True)


@pytest.mark.parametrize(
    ("dense", "kind", "wanted"),
    [
        ("auto", "discrete GPU", True), ("auto", "integrated GPU", False), ("auto", "CPU", False),
        ("cpu", "discrete GPU", False), ("device", "CPU", True),
    ],
)  # fmt: skip
def test_where_dense_products_run(dense: str, kind: str, wanted: bool) -> None:
    assert wants_dense(Settings(dense=dense), replace(GPU, kind=kind)) == wanted


class SmallDevice:
    """A device whose allocations fail beyond so many words."""

    def __init__(self, words: int) -> None:
        self.info = software_device()
        self.left = words
        self.made = 0

    def host(self, count: int, dtype: type = np.float32) -> SmallTensor:
        if count > self.left:
            raise DeviceError("it is full")
        self.left -= count
        self.made += 1
        return SmallTensor(self, count)

    storage = host


class SmallTensor:
    def __init__(self, device: SmallDevice, count: int) -> None:
        self.device, self.count = device, count

    def destroy(self) -> None:
        self.device.left += self.count
        self.device.made -= 1


def test_a_device_that_is_full_keeps_what_fitted(config: Config) -> None:
    """Without the head, then with half of the layers, and so on; nothing of a try that failed stays."""
    shape = shape_of(config)
    for kept in (shape, replace(shape, head=False), replace(shape, head=False, layers=shape.layers[:1])):
        words = DenseLayout(kept).nbytes // 4 + 4  # and the step's
        device: Any = SmallDevice(words)
        layout, slabs = fitting(device, shape)
        assert layout.shape == kept and device.left == 0
        assert device.made == sum(map(len, slabs.tensors.values())) + 1


def test_fits_within_slabs(config: Config) -> None:
    shape = shape_of(config)
    nbytes = device_bytes(DenseLayout(shape))
    assert fits(shape, nbytes) and not fits(shape, nbytes - 1) and not fits(replace(shape, slab_words=1 << 11), nbytes)


def run_program(root: Path, model: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mimo_vk", "run", "--model", str(model), "--ids", "1 2 3 4 5", "--ngen", "4"]
    return subprocess.run(
        [*command, *flags],
        cwd=root,
        env={**os.environ, "MIMO_BACKEND": "numpy", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_command_line(project_root: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The same output and logits; without a GPU to take by itself it says so and runs on the CPU."""
    dumps = [tmp_path / name for name in ("cpu.npy", "device.npy", "none.npy")]
    cpu = run_program(project_root, tiny_checkpoint, "--cpu", "--dump-logits", str(dumps[0]))
    by_index = ["--device", str(software_device().index), "--dense", "device", "--ctx", "64"]
    device = run_program(project_root, tiny_checkpoint, *by_index, "--dump-logits", str(dumps[1]))
    only = {"VK_ICD_FILENAMES": os.environ.get("VK_ICD_FILENAMES", lavapipe()), "MIMO_VK_DENSE": "device"}
    none = run_program(project_root, tiny_checkpoint, "--dump-logits", str(dumps[2]), **only)
    assert (cpu.returncode, device.returncode, none.returncode) == (0, 0, 0), device.stderr + none.stderr
    assert cpu.stdout == device.stdout == none.stdout != ""
    assert dumps[0].read_bytes() == dumps[1].read_bytes() == dumps[2].read_bytes()
    assert "6 of 6 dense layers and the head (" in device.stderr and "room for 80 experts" in device.stderr
    assert "mimo-vk: no GPU for --dense device (" in none.stderr


def lavapipe() -> str:
    """The software driver's file, so that a GPU that happens to be there isn't found."""
    return str(next(Path("/usr/share/vulkan/icd.d").glob("lvp*.json")))


def test_the_plan_shows_what_is_on_the_device(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["plan", "--model", str(tiny_checkpoint), "--cap", "4", "--ctx", "512"]
    monkeypatch.setattr(setup, "list_devices", lambda: Listing((GPU,), ""))
    assert cli.main([*flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["device_layers"], plan["device_head"], plan["tier_slots"]) == (6, True, 80)
    assert plan["tier"] == 150_000_000 + 2 * (16 << 20)  # of this machine's memory: the weights on their way
    assert cli.main(flags) == 0
    shown = capsys.readouterr().out
    assert "6 dense layers and the head" in shown and "with their KV rows" in shown


def test_the_doctor_says_what_would_be_on_the_device(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = load_config(tiny_checkpoint / "config.json")

    def said(*devices: Any, **changes: Any) -> list[str]:
        monkeypatch.setattr(setup, "list_devices", lambda: Listing(devices, "there is none"))
        return [str(finding) for finding in check_placement(config, Settings(**changes))]

    (line,) = said(GPU)
    assert line.startswith("ok  placement: device ") and "; 6 of 6 dense layers and the head (" in line
    assert said() == ["--  placement: there is none; running on the CPU"]
    assert said(software_device()) == ["ok  placement: everything runs on the CPU"]
    (line,) = said(software_device(), dense="device")
    assert line.startswith("--  placement: no GPU for --dense device (")
    assert said(GPU, device="77") == []

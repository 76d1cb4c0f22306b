"""Experts laid out in real files in two ways, and what tests ask of a cache over them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from mimo_vk.expert_table import ExpertLocation
from mimo_vk.experts import ExpertCache
from mimo_vk.formats import Expert
from mimo_vk.safetensors_header import TensorInfo

H, INNER = 96, 64  # an expert's input and inner width: parts of 3072 and 192 bytes
SHAPES = {
    "down_proj.weight": (H, INNER // 2),
    "down_proj.weight_scale": (H, INNER // 32),
    "gate_proj.weight": (INNER, H // 2),
    "gate_proj.weight_scale": (INNER, H // 32),
    "up_proj.weight": (INNER, H // 2),
    "up_proj.weight_scale": (INNER, H // 32),
}
BYTES = 3 * (3072 + 192)
LAYERS = (1, 2)


class Disk:
    """Experts written to files: ``table`` says where, ``content[layer, expert]`` what, as six arrays."""

    def __init__(self, directory: Path, count: int) -> None:
        self.directory = directory
        self.count = count
        self.content: dict[tuple[int, int], list[np.ndarray]] = {}
        self.table: dict[int, list[ExpertLocation]] = {layer: [] for layer in LAYERS}
        self._rng = np.random.default_rng(11)

    def expert(self, layer: int, expert: int) -> list[np.ndarray]:
        parts = [self._rng.integers(0, 255, shape, dtype=np.uint8) for shape in SHAPES.values()]  # never 255
        self.content[layer, expert] = parts
        return parts

    def name(self, layer: int, expert: int, part: str) -> str:
        return f"model.layers.{layer}.mlp.experts.{expert}.{part}"


def contiguous(directory: Path, count: int = 8, lead: int = 1001) -> Disk:
    """One file a layer; the experts back to back from an odd offset to the file's last byte."""
    disk = Disk(directory, count)
    for layer in LAYERS:
        path, at = directory / f"layer{layer}.bin", lead
        written = [b"\xee" * lead]
        for expert in range(count):
            infos = []
            for part, array in zip(SHAPES, disk.expert(layer, expert), strict=True):
                infos.append(TensorInfo(disk.name(layer, expert, part), path, at, array.nbytes, "U8", array.shape))
                written.append(array.tobytes())
                at += array.nbytes
            disk.table[layer].append(ExpertLocation(tuple(infos), True))
        path.write_bytes(b"".join(written))
    return disk


def scattered(directory: Path, count: int = 8) -> Disk:
    """Weights and scales in files of their own, with gaps of odd lengths between the tensors."""
    disk = Disk(directory, count)
    files: dict[Path, bytearray] = {}
    for layer in LAYERS:
        for expert in range(count):
            infos = []
            for i, (part, array) in enumerate(zip(SHAPES, disk.expert(layer, expert), strict=True)):
                path = directory / f"part{i % 3}.bin"
                data = files.setdefault(path, bytearray())
                data += b"\xee" * (expert * 7 + i * 3 + 1)
                infos.append(
                    TensorInfo(disk.name(layer, expert, part), path, len(data), array.nbytes, "U8", array.shape)
                )
                data += array.tobytes()
            disk.table[layer].append(ExpertLocation(tuple(infos), False))
    for path, data in files.items():
        path.write_bytes(data)
    return disk


def arrays(expert: Expert) -> list[np.ndarray]:
    return [a for matrix in (expert.down, expert.gate, expert.up) for a in (matrix.codes, matrix.scales)]


def equal(expert: Expert, parts: list[np.ndarray]) -> bool:
    return all(a.shape == b.shape and np.array_equal(a, b) for a, b in zip(arrays(expert), parts, strict=True))


def fetch(cache: ExpertCache, layer: int, ids: list[int]) -> list[list[int]]:
    """Lease, and return the batches of ids."""
    with cache.lease(layer, ids) as batches:
        return [[expert for expert, _ in batch] for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [expert for batch in batches for expert in batch]


def check_all(cache: ExpertCache, disk: Disk, ids: list[int], layer: int = 1) -> None:
    """Every byte of the experts is right while they are leased."""
    with cache.lease(layer, ids) as batches:
        held = [pair for batch in batches for pair in batch]
        assert sorted(expert for expert, _ in held) == sorted(set(ids))
        assert all(equal(expert, disk.content[layer, i]) for i, expert in held)


def descriptors(directory: Path) -> int:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(str(directory))
        except OSError:
            continue  # the listing's own descriptor
    return found

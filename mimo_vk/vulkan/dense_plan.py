"""Which dense layers are to live on the device: each whole or not at all, in their order, and the head after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mimo_vk.config import Config, LayerSpec
from mimo_vk.machine import memory_available
from mimo_vk.settings import GB, Settings
from mimo_vk.tensor_names import qkv_rows
from mimo_vk.vulkan.dense_layout import DenseLayout, DenseShape
from mimo_vk.vulkan.listing import DeviceInfo

SHARED_SLAB = 256 << 20  # bytes of a slab that the host writes: its memory is taken when it is made
OWN_SLAB = 1 << 30
SHARED_PART = 0.5  # of the available memory, on a device that shares it
MOST_ROWS = 512  # of a block: the activations of more would take the place of layers


def wants_dense(settings: Settings, info: DeviceInfo) -> bool:
    """Whether dense products are to run on the device."""
    return settings.dense == "device" or (settings.dense == "auto" and info.kind == "discrete GPU")


def fit_dense(info: DeviceInfo, config: Config, settings: Settings, ctx: int, chunk: int, room: int) -> DenseShape:
    """The shape of what fits ``room`` bytes; it may have no layer."""
    slab = min(info.max_buffer, info.max_allocation, SHARED_SLAB if info.shares_memory else OWN_SLAB)
    if info.shares_memory:
        room = min(room, int(SHARED_PART * memory_available()))
    whole = DenseShape.of(
        config, dense_bits=settings.dense_bits, ctx=ctx, max_rows=min(chunk, MOST_ROWS), saves=settings.pin_slots + 1,
        slab_words=slab // 4,
    )  # fmt: skip
    shape = replace(whole, layers=(), head=False)
    for wider in _wider(whole):
        larger = replace(shape, layers=shape.layers + wider) if wider else replace(shape, head=True)
        if fits(larger, room):
            shape = larger
    return shape


def _wider(whole: DenseShape) -> Iterator[tuple[LayerSpec, ...]]:
    """What to try to add, one after the other: each layer, then (as nothing) the head."""
    yield from ((spec,) for spec in whole.layers)
    yield ()


def fits(shape: DenseShape, room: int) -> bool:
    """Whether a shape takes no more than ``room`` bytes, in slabs that may be made."""
    layout = DenseLayout(shape)
    largest = max((words for sizes in layout.slabs.values() for words in sizes), default=0)
    return largest <= shape.slab_words and device_bytes(layout) <= room


def device_bytes(layout: DenseLayout) -> int:
    """All that the layers take of the device's memory."""
    return layout.nbytes + saved_bytes(layout.shape) + activation_bytes(layout.shape)


def saved_bytes(shape: DenseShape) -> int:
    """Of all snapshots of the rings."""
    rings = sum(
        spec.window * spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) for spec in shape.layers if spec.window
    )
    return 4 * shape.saves * rings


def activation_bytes(shape: DenseShape) -> int:
    """Of one block of the largest size (smaller ones have tensors of their own: twice that is enough for all)."""
    qkv = max((qkv_rows(spec) for spec in shape.layers), default=0)
    heads = max((spec.num_heads * spec.v_head_dim for spec in shape.layers), default=0)
    inner = max((shape.inner for spec in shape.layers if not spec.moe), default=0)
    row = 7 * shape.hidden + 2 * qkv + heads + 3 * inner + shape.experts
    return 2 * 4 * shape.max_rows * row + (2 * 4 * 16 * shape.vocab if shape.head else 0)


def describe(layout: DenseLayout, layers: int) -> str:
    """For a person: how much of a model of ``layers`` layers."""
    head = " and the head" if layout.head is not None else ""
    return f"{len(layout.layers)} of {layers} dense layers{head} ({device_bytes(layout) / GB:.3f} GB)"

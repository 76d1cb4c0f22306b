"""Which dense layers are to live on the device: each whole or not at all, in their order; then the head, the tower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from mimo_vk.config import Config
from mimo_vk.machine import memory_available
from mimo_vk.settings import GB, Settings
from mimo_vk.tensor_names import qkv_rows
from mimo_vk.vision import ROWS
from mimo_vk.vulkan.dense_layout import DenseLayout, DenseShape, TowerShape
from mimo_vk.vulkan.listing import DeviceInfo

SHARED_SLAB = 256 << 20  # bytes of a slab that the host writes: its memory is taken when it is made
OWN_SLAB = 1 << 30
SHARED_PART = 0.5  # of the available memory, on a device that shares it
MOST_PATCHES = 1 << 14  # of a picture: the tower sees larger ones on the CPU
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
    whole = replace(whole, tower=_tower(config, settings, ctx))
    shape = replace(whole, layers=(), head=False, tower=None)
    for widen in _wider(whole):
        if fits(wider := widen(shape), room):
            shape = wider
    return shape


def _wider(whole: DenseShape) -> Iterator[Callable[[DenseShape], DenseShape]]:
    """What to try to add, one after the other: each layer, the head, the tower."""
    for spec in whole.layers:
        yield lambda shape, spec=spec: replace(shape, layers=(*shape.layers, spec))  # type: ignore[misc]
    yield lambda shape: replace(shape, head=True)
    yield lambda shape: replace(shape, tower=whole.tower)


def _tower(config: Config, settings: Settings, ctx: int) -> TowerShape | None:
    """The tower, for any picture that the context has room for, up to a size."""
    if config.tower is None:
        return None
    tokens = min(ctx, settings.max_image_tokens or ctx)
    return TowerShape(config.tower, settings.vision_sink, min(tokens * config.tower.merge_unit, MOST_PATCHES))


def fits(shape: DenseShape, room: int) -> bool:
    """Whether a shape takes no more than ``room`` bytes, in slabs that may be made."""
    layout = DenseLayout(shape)
    largest = max((words for sizes in layout.slabs.values() for words in sizes), default=0)
    return largest <= shape.slab_words and device_bytes(layout) <= room


def device_bytes(layout: DenseLayout) -> int:
    """All that the layers take of the device's memory."""
    return layout.nbytes + saved_bytes(layout.shape) + activation_bytes(layout.shape) + tower_bytes(layout.shape.tower)


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


def tower_bytes(tower: TowerShape | None) -> int:
    """Of the tower's activations, which have a copy for the host each."""
    if tower is None:
        return 0
    config, joined = tower.config, tower.config.merge_unit * tower.config.hidden_size
    heads, kv = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
    row = config.patch_values + 10 * config.hidden_size + 4 * heads + 6 * kv + 5 * config.intermediate_size
    return 2 * 4 * ROWS * (row + 4 * joined + config.out_hidden_size + 8 * 16)  # rows are whole uvec4


def describe(layout: DenseLayout, layers: int) -> str:
    """For a person: how much of a model of ``layers`` layers."""
    head = " and the head" if layout.head is not None else ""
    tower = ", with the picture tower" if layout.tower is not None else ""
    return f"{len(layout.layers)} of {layers} dense layers{head} ({device_bytes(layout) / GB:.3f} GB{tower})"

"""Each operation once on small zeros, so that what has to be compiled at the first start is compiled here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from mimo_vk.config import Config
from mimo_vk.formats import F32, Expert, MatrixBF16, MatrixMXFP4
from mimo_vk.ops import Ops, QkvLayout, VisionOps
from mimo_vk.vision_config import VisionConfig

WIDE = 1 << 15  # numbers: enough for an operation to share its work between threads
LONG = 1 << 8  # keys, likewise


def warm_up(ops: VisionOps, config: Config) -> None:
    """Run every operation on one thread and on several."""
    steps = [*_row_steps(ops), *_attention_steps(ops, config), *_product_steps(ops)]
    if config.tower is not None:
        steps += _vision_steps(ops, config.tower)
    for step in steps:
        step()


def _zeros(*shape: int) -> F32:
    return np.zeros(shape, np.float32)


def _row_steps(ops: Ops) -> list[Callable[[], object]]:
    table = np.zeros((1, 32), np.uint16)
    table.flags.writeable = False  # as a mapped file is, which is another type to the compiler
    rows = (_zeros(1, 32), _zeros(2, WIDE))
    pairs = (_zeros(1, 2, 32), _zeros(2, 2, WIDE))
    layout = QkvLayout(chunks=1, num_heads=1, num_kv_heads=1, head_dim=4, v_head_dim=4)
    return [
        partial(ops.embed, MatrixBF16(table), np.zeros(1, np.int64)),
        *(partial(ops.rms_norm, x, _zeros(x.shape[1]), 1e-6) for x in rows),
        *(partial(ops.swiglu, x, x) for x in rows),
        *(partial(ops.weighted_sum, y, _zeros(len(y), 2)) for y in pairs),
        partial(ops.add, rows[0], rows[0]),
        partial(ops.split_qkv, _zeros(1, 12), layout, 1.0),
        partial(ops.rope, _zeros(1, 1, 4), _zeros(1, 1), _zeros(1, 1)),
        partial(ops.route, _zeros(1, 4), _zeros(4), 2, 1.0),
    ]


def _attention_steps(ops: Ops, config: Config) -> list[Callable[[], object]]:
    """One pair a kind of head: its size is compiled in."""
    sizes = {(spec.head_dim, spec.v_head_dim) for spec in config.layers}
    return [
        partial(
            ops.attention,
            _zeros(1, 8, size),
            _zeros(1, 1, size),
            _zeros(1, 1, v_size),
            _zeros(1, keys, size),
            _zeros(1, keys, v_size),
            keys,
            None,
            _zeros(8),
        )
        for size, v_size in sizes
        for keys in (1, LONG)
    ]


def _product_steps(ops: Ops) -> list[Callable[[], object]]:
    matrix = MatrixMXFP4(np.zeros((32, 16), np.uint8), np.zeros((32, 1), np.uint8))
    one = np.zeros(1, np.int32)
    expert = Expert(matrix, matrix, matrix)
    return [
        partial(ops.linear, matrix, _zeros(1, 32)),
        partial(ops.expert_gate_up, [expert], one, one, _zeros(1, 32)),
        partial(ops.expert_down, [expert], one, _zeros(1, 32)),
    ]


def _vision_steps(ops: VisionOps, tower: VisionConfig) -> list[Callable[[], object]]:
    rows = (_zeros(1, 32), _zeros(2, WIDE))
    keys = _zeros(LONG, 1, tower.head_dim)
    queries = (_zeros(1, 8, tower.head_dim), _zeros(LONG, 8, tower.head_dim))
    return [
        partial(ops.add_row, rows[0], _zeros(32)),
        partial(ops.layer_norm, rows[0], _zeros(32), 1e-6),
        *(partial(ops.gelu, x) for x in rows),
        *(partial(ops.patch_attention, q, keys, keys, 0, 1, _zeros(8), "key0") for q in queries),
    ]

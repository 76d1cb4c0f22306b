"""The picture tower in the device process, as recorded programs for up to ROWS patches at a time.

Each block has two. ``keys`` puts patches' keys and values into a cache with room for a whole picture's; once it has
gone over all of them, ``block`` takes patches through the block. Both begin with the norm, and multiply with their own
rows of the fused matrix. Patches come from the arena and go back there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mimo_vk.formats import F32
from mimo_vk.vision import ROWS
from mimo_vk.vision_config import FULL
from mimo_vk.vulkan.arena import DenseArena
from mimo_vk.vulkan.dense_layout import (
    BiasedPlace,
    DenseLayout,
    Place,
    TowerBlockPlace,
    TowerPlace,
    TowerShape,
    row_width,
)
from mimo_vk.vulkan.dense_programs import Pipelines, Programs, bits
from mimo_vk.vulkan.dense_slabs import DenseSlabs
from mimo_vk.vulkan.device import Device, DeviceError, Program, view
from mimo_vk.vulkan.kernels import ADD_ROW, GELU, KV_APPEND, LAYER_NORM, PATCH_ATTENTION, SPLIT_ROPE

EVERYWHERE = 2**32 - 1  # patch_attention's reach over all patches


class TowerRecorder(Programs):
    """Records the tower's programs. ``turns`` [rows, head_dim]: the patches' cosines, then their sines."""

    def __init__(
        self, device: Device, shape: TowerShape, place: TowerPlace, slabs: DenseSlabs, pipelines: Pipelines
    ) -> None:
        super().__init__(device, slabs, pipelines, ROWS, shape.config.hidden_size, shape.config.norm_eps)
        self._shape = shape
        self._config = config = shape.config
        self._place = place
        self.q_width, self.kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.turns = device.host(ROWS * config.head_dim)
        self.pixels = self.activations.get("pixels", row_width(config.patch_values))
        self.x, self.out = self.tensor("x"), self.tensor("out")
        self.joined = self.activations.get("joined", config.merge_unit * self.width)
        self.rows = self.activations.get("rows", row_width(config.out_hidden_size))

    def embed(self) -> Program:
        """Patches' pixels to ``out``."""
        program = Program(self._device)
        self._linear(
            program, self.pixels, row_width(self._config.patch_values), self._place.embed, self.out, self.width
        )
        return program

    def keys(self, place: TowerBlockPlace) -> Program:
        """Of ``x``, turned, and the values, into the cache."""
        program, normed = Program(self._device), self.tensor("normed")
        self._norm(program, self.x, place.norm1, normed)
        kv = self._product(program, normed, self._hidden, place.kv, "kv")
        k, v = self.activations.get("k", self.kv_width), self.activations.get("v", self.kv_width)
        self._split(program, kv, 2 * self.kv_width, 0, self._config.num_kv_heads, [k, v])
        self._append(program, k, v)
        return program

    def block(self, place: TowerBlockPlace) -> Program:
        """The block's residual ``x`` to ``out``, once all keys are there."""
        program, inner = Program(self._device), self._config.intermediate_size
        names = ("normed", "h", "normed_h")
        normed, h, normed_h = (self.tensor(name) for name in names)
        q, mixed = self.activations.get("q", self.q_width), self.activations.get("mixed", row_width(self.q_width))
        self._norm(program, self.x, place.norm1, normed)
        qs = self._product(program, normed, self._hidden, place.q, "qs")
        self._split(program, qs, self.q_width, self._config.num_heads, 0, [q])
        self._attention(program, place, q, mixed)
        self._add(program, self.x, self._product(program, mixed, self.q_width, place.proj, "o"), h)
        self._norm(program, h, place.norm2, normed_h)
        gate = self._product(program, normed_h, self._hidden, place.gate, "gate")
        up = self._product(program, normed_h, self._hidden, place.up, "up")
        act = self.activations.get("act", row_width(inner))
        self._swiglu(program, gate, up, act, inner)
        self._add(program, h, self._product(program, act, inner, place.down, "down"), self.out)
        return program

    def merge(self) -> Program:
        """Units of patches, ``joined``, to ``rows`` of the prompt."""
        program, config, place = Program(self._device), self._config, self._place
        joined = config.merge_unit * self._hidden
        width = row_width(joined)
        normed, up, act = (self.activations.get(name, width) for name in ("units", "units_up", "units_act"))
        push = {
            "width": self._hidden, "unit": config.merge_unit, "x_stride": self.width, "y_stride": width,
            "w_at": place.norm.at, "eps_bits": bits(self._eps), "inverse_width_bits": bits(1 / self._hidden),
        }  # fmt: skip
        tensors = [self._slabs.step, self.joined, self._slabs.at(place.norm), normed]
        self._run(program, LAYER_NORM, tensors, (self._by_row, 1), push, [normed])
        self._linear(program, normed, width, place.up, up, width)
        over = self._across, self._by_row
        self._run(program, GELU, [self._slabs.step, up, act], over, {"width": joined, "stride": width}, [act])
        self._linear(program, act, width, place.down, self.rows, row_width(config.out_hidden_size))
        return program

    def _product(self, program: Program, x: Any, columns: int, place: BiasedPlace, name: str) -> Any:
        """The matrix times rows of x, and the bias: a tensor of its own."""
        outputs = place.matrix.rows
        width = row_width(outputs)
        product, y = (self.activations.get(part, width) for part in (name, name + "_biased"))
        self._linear(program, x, row_width(columns), place.matrix, product, width)
        push = {"width": outputs, "stride": width, "row_at": place.bias.at}
        tensors = [self._slabs.step, product, self._slabs.at(place.bias), y]
        self._run(program, ADD_ROW, tensors, (self._across, self._by_row), push, [y])
        return y

    def _split(self, program: Program, x: Any, columns: int, heads: int, kv_heads: int, writes: Sequence[Any]) -> None:
        """Turn q's heads, or k's and leave v's."""
        push = {
            "stride": row_width(columns), "chunks": 1, "heads": heads, "kv_heads": kv_heads,
            "head_dim": self._config.head_dim, "v_dim": self._config.head_dim, "turned": self._config.head_dim // 2,
            "value_scale_bits": bits(1.0),
        }  # fmt: skip
        out = [self.activations.get("q", self.q_width), *(self.activations.get(n, self.kv_width) for n in ("k", "v"))]
        tensors = [self._slabs.step, x, self.turns, *out]
        self._run(program, SPLIT_ROPE, tensors, (self._across, self._by_row), push, writes)

    def _append(self, program: Program, k: Any, v: Any) -> None:
        cache, config = self._place.cache, self._config
        keys, values = self._slabs.at(cache.keys), self._slabs.at(cache.values)
        push = {
            "kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "v_dim": config.head_dim,
            "cache_rows": cache.rows, "keys_at": cache.keys.at, "values_at": cache.values.at,
        }  # fmt: skip
        tensors = [self._slabs.step, k, v, keys, values]
        self._run(program, KV_APPEND, tensors, (self._across, self._by_row), push, [keys, values])

    def _attention(self, program: Program, place: TowerBlockPlace, q: Any, mixed: Any) -> None:
        cache, config, at = self._place.cache, self._config, place.sinks
        sinks: Place = place.norm1 if at is None else at  # some slab has to be bound
        push = {
            "heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_dim": config.head_dim,
            "v_dim": config.head_dim, "out_stride": row_width(self.q_width),
            "reach": EVERYWHERE if place.kind == FULL else config.reach, "cache_rows": cache.rows,
            "keys_at": cache.keys.at, "values_at": cache.values.at,
            "has_sink": int(at is not None and self._shape.sink == "denominator"),
            "key0": int(at is not None and self._shape.sink == "key0"),
            "sinks_at": sinks.at, "scale_bits": bits(config.head_dim**-0.5),
        }  # fmt: skip
        tensors = [self._slabs.step, q, self._slabs.at(cache.keys), self._slabs.at(cache.values), self._slabs.at(sinks)]
        group = config.num_heads // config.num_kv_heads
        heads = 2 if group > 1 else 1
        groups = config.num_kv_heads * -(-group // heads), self._by_row
        steps = -(-config.head_dim // 32)
        self._run(program, PATCH_ATTENTION, [*tensors, mixed], groups, push, [mixed], HEADS=heads, STEPS=steps)


class DeviceTower:
    """The tower's programs, run for some patches at a time; see ``messages``."""

    def __init__(
        self, device: Device, layout: DenseLayout, slabs: DenseSlabs, pipelines: Pipelines, arena: DenseArena
    ) -> None:
        assert layout.tower is not None and layout.shape.tower is not None
        self._config = layout.shape.tower.config
        self._slabs = slabs
        self._arena = arena
        self._recorder = recorder = TowerRecorder(device, layout.shape.tower, layout.tower, slabs, pipelines)
        self._embed, self._merge = recorder.embed(), recorder.merge()
        self._blocks = [(recorder.keys(place), recorder.block(place)) for place in layout.tower.blocks]
        tensors = recorder.pixels, recorder.x, recorder.joined
        self._send = {id(tensor): device.upload([tensor]) for tensor in tensors}

    def run(self, step: list[Any], rows: int, start: int, patches: int) -> None:
        """``rows`` rows, from the picture's row ``start`` on, of a picture of ``patches``."""
        config, recorder = self._config, self._recorder
        hidden, unit = config.hidden_size, config.merge_unit
        view(self._slabs.step)[:] = rows, start, 0, patches
        match step:
            case ["embed"]:
                self._put(recorder.pixels, self._arena.patches[:rows, : config.patch_values])
                self._embed.run()
                self._take(recorder.out, rows, hidden)
            case ["keys" | "block" as part, index]:
                view(recorder.turns)[: rows * config.head_dim] = self._arena.turns[:rows].ravel()
                self._put(recorder.x, self._arena.patches[:rows, :hidden])
                self._blocks[index][part == "block"].run()
                if part == "block":
                    self._take(recorder.out, rows, hidden)
            case ["merge"]:
                self._put(recorder.joined, self._arena.patches[:rows, : unit * hidden].reshape(rows * unit, hidden))
                self._merge.run()
                self._take(recorder.rows, rows, config.out_hidden_size)
            case []:
                pass
            case _:
                raise DeviceError(f"unknown step {step}")

    def _put(self, tensor: Any, values: F32) -> None:
        width = row_width(values.shape[1])
        view(tensor)[: len(values) * width].reshape(len(values), width)[:, : values.shape[1]] = values
        self._send[id(tensor)].eval()

    def _take(self, tensor: Any, rows: int, columns: int) -> None:
        width = row_width(columns)
        self._arena.patches[:rows, :columns] = view(tensor)[: rows * width].reshape(rows, width)[:, :columns]

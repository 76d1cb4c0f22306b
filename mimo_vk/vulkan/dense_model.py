"""The model with some of its layers, and perhaps the head, on the device; every other line of it stays ``Model``'s."""

from __future__ import annotations

from mimo_vk.formats import F32
from mimo_vk.kv_cache import KvCache, LayerCache, RowsLost
from mimo_vk.model import Experts, Model
from mimo_vk.ops import Ops
from mimo_vk.vulkan.client import TierGone
from mimo_vk.vulkan.dense_cache import DeviceKvCache
from mimo_vk.vulkan.dense_device import Block, DenseDevice
from mimo_vk.weights import LayerWeights, Weights


class PlacedModel(Model):
    """``Model`` beside a ``DenseDevice``. ``forward`` raises RowsLost where the device is lost, or its rows are."""

    def __init__(self, weights: Weights, ops: Ops, experts: Experts, device: DenseDevice) -> None:
        super().__init__(weights, ops, experts)
        self._device = device
        self._first = min(device.layers, default=-1)
        self._block: Block | None = None

    def logits(self, h: F32) -> F32:
        """As ``Model.logits``. A device that is lost here is noticed by the next block."""
        if self._device.has_head and not self._device.gone:
            try:
                return self._device.logits(h)
            except TierGone as error:
                self._device.lost(error)
        return super().logits(h)

    def _layer(self, layer: LayerWeights, h: F32, start: int, cache: KvCache, rows: LayerCache) -> F32:
        """As ``Model._layer``. What is returned is the residual, except where the next layer is on the device too."""
        assert isinstance(cache, DeviceKvCache)
        index = layer.spec.index
        if not cache.on_device or index not in self._device.layers:
            return super()._layer(layer, h, start, cache, rows)
        try:
            return self._on_device(layer, h, start, cache)
        except TierGone as error:
            self._device.lost(error)
            raise RowsLost from error

    def _on_device(self, layer: LayerWeights, h: F32, start: int, cache: DeviceKvCache) -> F32:
        index = layer.spec.index
        if index == self._first:
            self._block = self._device.block(start, len(h))
        assert self._block is not None
        block = self._block
        if index - 1 not in self._device.layers:
            block.enter(h)
        cache.stage_on_device(index, len(h))
        block.layer(index)
        if layer.router is not None:
            x, scores = block.for_experts()
            block.add(index, self._routed(index, layer.router, x, scores))
        return h if index + 1 in self._device.layers else block.leave()

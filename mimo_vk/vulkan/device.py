"""The one file that imports kp: tensors, pipelines and recorded programs on a device, with every limit checked first.

kp checks nothing: a buffer that is too large, a tensor too few, a failed allocation are accepted in silence or end the
process. So each size is held against the device's limits here, and each allocation is tried before kp makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kp
import numpy as np
from numpy.typing import NDArray

from mimo_vk.errors import MimoError
from mimo_vk.vulkan.kernels import Kernel, spirv
from mimo_vk.vulkan.listing import DeviceInfo
from mimo_vk.vulkan.loader import Trial

KP_MAX_BYTES = 2**32 - 4  # kp counts a tensor's bytes in 32 bits
WORD_TYPES = (np.dtype(np.float32), np.dtype(np.uint32))


class DeviceError(MimoError):
    """The device can't do what was asked: a limit, an allocation, arithmetic that differs."""


class Device:
    """A device through kp. ``denorm_preserve`` chooses the second build of every shader."""

    def __init__(self, info: DeviceInfo) -> None:
        if not info.float_controls:
            raise DeviceError("it can't promise rounding to nearest and signed zeros (VK_KHR_shader_float_controls)")
        if not info.subgroup_size:
            raise DeviceError("its compute shaders have no subgroup broadcast")
        self.info = info
        self._trial = Trial(info.index)
        # The extension must be named, or the shaders' declarations are invalid.
        self.manager = kp.Manager(info.index, [], ["VK_KHR_shader_float_controls"])

    @property
    def max_bytes(self) -> int:
        """Of one tensor."""
        return min(self.info.max_buffer, self.info.max_allocation, KP_MAX_BYTES)

    def host(self, count: int, dtype: type = np.float32) -> Any:
        """A zeroed tensor that both sides see: ``view`` writes and reads it, no copy is needed."""
        self._check(count, True)
        return self.manager.tensor_t(np.zeros(count, dtype), kp.host)

    def device(self, count: int, dtype: type = np.float32) -> Any:
        """A tensor in the device's own memory with a staging copy: for what one dispatch writes and another reads."""
        self._check(count, False)
        return self.manager.tensor_t(np.zeros(count, dtype), kp.device)

    def storage(self, count: int, dtype: type = np.uint32) -> Any:
        """A tensor in the device's own memory that only shaders fill. The array that kp asks for is never touched."""
        self._check(count, False)
        return self.manager.tensor_t(np.empty(count, dtype), kp.storage)

    def fits(self, nbytes: int, host: bool) -> bool:
        """Whether a tensor of so many bytes may be made now."""
        return nbytes <= self.max_bytes and self._trial.fits(nbytes, host)

    def _check(self, count: int, host: bool) -> None:
        nbytes = 4 * count
        if not 0 < nbytes <= self.max_bytes:
            raise DeviceError(f"a buffer of {nbytes} bytes: the device takes 4 to {self.max_bytes}")
        if not self._trial.fits(nbytes, host):
            raise DeviceError(f"{nbytes} bytes of memory can't be had on the device")

    def pipeline(
        self,
        kernel: Kernel,
        tensors: Sequence[Any],
        groups: tuple[int, int, int],
        push: dict[str, int],
        constants: dict[str, int] | None = None,
    ) -> Pipeline:
        """A kernel bound to its tensors (in the order of its bindings), with its fixed group counts and constants."""
        constants = constants or {}
        assert len(tensors) == len(kernel.bindings), (kernel.name, len(tensors), kernel.bindings)
        assert tuple(push) == kernel.push, (kernel.name, tuple(push), kernel.push)
        assert tuple(constants) == kernel.constants, (kernel.name, tuple(constants), kernel.constants)
        info = self.info
        for count, most in zip(groups, info.max_groups, strict=True):
            if not 0 < count <= most:
                raise DeviceError(f"{kernel.name}: {groups} groups, the device takes {info.max_groups}")
        if kernel.local_size > info.max_group_size or 4 * len(push) > info.push_bytes:
            raise DeviceError(f"{kernel.name}: a group of {kernel.local_size}, {4 * len(push)} bytes of push constants")
        if len(tensors) > info.storage_buffers:
            raise DeviceError(f"{kernel.name}: {len(tensors)} buffers, the device takes {info.storage_buffers}")
        code = spirv(kernel, info.denorm_preserve)
        # Both kinds of constants as contiguous uint32 arrays: as lists they would arrive as the bits of floats.
        words = np.array(list(constants.values()), np.uint32), np.array(list(push.values()), np.uint32)
        return Pipeline(kernel, tuple(tensors), self.manager.algorithm(list(tensors), code, list(groups), *words))

    def upload(self, tensors: Sequence[Any]) -> Any:
        """A sequence that copies the staging side of ``device`` tensors to the device; ``eval()`` it alone.

        In one sequence with a dispatch that reads them it would be a race: kp records no barrier for that.
        """
        sequence = self.manager.sequence()
        sequence.record(kp.OpTensorSyncDevice(list(tensors)))
        return sequence

    def close(self) -> None:
        """Free everything; views of tensors must not be read any more."""
        self.manager.destroy()


class Pipeline:
    """An Algorithm of kp's with what it is bound to."""

    def __init__(self, kernel: Kernel, tensors: tuple[Any, ...], algorithm: Any) -> None:
        self.kernel = kernel
        self.tensors = tensors
        self.algorithm = algorithm

    def operation(self, push: dict[str, int] | None = None) -> Any:
        """A dispatch to record, with push constants of its own: they are fixed when it is recorded."""
        if push is None:
            return kp.OpAlgoDispatch(self.algorithm)
        assert tuple(push) == self.kernel.push, (self.kernel.name, tuple(push), self.kernel.push)
        return kp.OpAlgoDispatch(self.algorithm, np.array(list(push.values()), np.uint32))


class Program:
    """Dispatches recorded once, in order, and run any number of times.

    **The ordering rule.** kp records no barrier between two dispatches, and its barriers cover shader reads only. Hence
    in one program a tensor is written by one dispatch at most, and not after another has read it; and what a dispatch
    writes is a ``device`` tensor that is copied to its staging side at once (OpTensorSyncLocal): that records the
    write's barrier, and the next dispatch the other half. The copy takes the whole tensor: activations, never weights.
    A ``storage`` tensor may be written by the last dispatch alone: nothing reads it before the next run.
    """

    def __init__(self, device: Device) -> None:
        self._sequence = device.manager.sequence()
        self._read: list[Any] = []
        self._written: list[Any] = []
        self._sealed = False

    def dispatch(self, pipeline: Pipeline, writes: Sequence[Any], push: dict[str, int] | None = None) -> Program:
        """Record one dispatch that writes ``writes``, some of its tensors, and reads its others.

        ``push``: constants of this dispatch alone, instead of the pipeline's own.
        """
        return self.dispatch_parts([(pipeline, push)], writes)

    def dispatch_parts(self, parts: Sequence[tuple[Pipeline, dict[str, int] | None]], writes: Sequence[Any]) -> Program:
        """Record dispatches that each write a part of their own of the same tensors, and read none that another wrote.

        They count as one: nothing orders them among themselves, and nothing has to.
        """
        assert not self._sealed, "nothing may follow a dispatch that wrote storage"
        name = parts[0][0].kernel.name
        for tensor in writes:
            assert not _among(tensor, self._written), f"{name}: a tensor is written twice"
            assert not _among(tensor, self._read), f"{name}: a tensor is written after it was read"
        for pipeline, push in parts:
            assert writes and all(_among(tensor, pipeline.tensors) for tensor in writes), name
            self._sequence.record(pipeline.operation(push))
            self._read += [tensor for tensor in pipeline.tensors if not _among(tensor, writes)]
        self._written += writes
        self._order(writes)
        return self

    def _order(self, writes: Sequence[Any]) -> None:
        for tensor in writes:
            kind = tensor.tensor_type()
            assert kind in (kp.device, kp.storage), "a dispatch writes device tensors, or a slab"
            self._sealed |= kind == kp.storage
        self._sync([tensor for tensor in writes if tensor.tensor_type() == kp.device])

    def _sync(self, tensors: list[Any]) -> None:
        if tensors:
            self._sequence.record(kp.OpTensorSyncLocal(tensors))

    def run(self) -> None:
        """Submit and wait."""
        self._sequence.eval()


def _among(tensor: Any, tensors: Sequence[Any]) -> bool:
    return any(tensor is other for other in tensors)


def view(tensor: Any) -> NDArray[Any]:
    """The tensor's host side, live; valid as long as its device."""
    data: NDArray[Any] = tensor.data()
    assert data.dtype in WORD_TYPES and data.strides == (4,), "this kp reads arrays wrong (numpy 2?)"
    return data

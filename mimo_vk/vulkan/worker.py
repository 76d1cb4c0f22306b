"""The device process: owns kp and the device, does what the packets say, and ends with its parent.

kp holds the GIL while the device works and turns some failures into crashes: in a process of its own neither matters.
"""

from __future__ import annotations

import signal
import socket
import time
from typing import Any

from mimo_vk.vulkan.arena import Arena, DenseArena, TierShape
from mimo_vk.vulkan.dense_layers import DenseLayers
from mimo_vk.vulkan.dense_layout import DenseShape
from mimo_vk.vulkan.device import Device, DeviceError
from mimo_vk.vulkan.device_check import check_arithmetic
from mimo_vk.vulkan.expert_slabs import ExpertSlabs
from mimo_vk.vulkan.listing import DeviceInfo
from mimo_vk.vulkan.messages import Message, receive, send


def main(connection_fd: int, info: str, tier: tuple[int, str], max_slots: int, dense: tuple[int, str] | None) -> None:
    """The process's whole life. ``info`` is JSON, ``tier`` and ``dense`` an arena's descriptor and its shape's JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches this process too: the parent decides
    with socket.socket(fileno=connection_fd) as connection:
        try:
            worker = Worker(Device(DeviceInfo.from_json(info)), tier, max_slots, dense)
            send(connection, [0, *worker.ready()])
            while (message := receive(connection)) is not None:
                send(connection, worker.answer(message))
        except ConnectionError:
            return  # the parent is gone
        except Exception as error:
            text = str(error) or type(error).__name__
            send(connection, ["failed", text if isinstance(error, DeviceError) else f"{type(error).__name__}: {text}"])


class Worker:
    """What the process has on the device: the tier's slabs, where it is to have slots, and the dense layers."""

    def __init__(self, device: Device, tier: tuple[int, str], max_slots: int, dense: tuple[int, str] | None) -> None:
        """Check the arithmetic, make what was asked for, and run each program once: a driver compiles at the first run.

        Errors: DeviceError.
        """
        arithmetic = check_arithmetic(device)
        self._flushes = arithmetic.flushes
        shape = TierShape.from_json(tier[1])
        self._arena = Arena(shape, tier[0])
        self._dense = None
        if dense is not None:
            if arithmetic.flushes:
                raise DeviceError("it takes subnormal floats for zero, with which dense layers are not the CPU's")
            dense_shape = DenseShape.from_json(dense[1])
            self._dense = DenseLayers(device, dense_shape, DenseArena(dense_shape, dense[0]), arithmetic.select_decode)
        self._slabs = ExpertSlabs(device, shape, max_slots, arithmetic) if max_slots else None
        if self._slabs is not None:
            if not self._slabs.grow():
                raise DeviceError(f"not even one expert of {shape.layout.slot_bytes} bytes fits")
            self._slabs.warm_up()

    def ready(self) -> list[Any]:
        """What there is: slots, whether subnormals count as zero; layers, and whether there is a head and a tower."""
        slots = self._slabs.slots if self._slabs is not None else 0
        return [slots, self._flushes, *(self._dense.held if self._dense is not None else [])]

    def answer(self, message: Message) -> Message:
        """Do what one packet asks for. Errors: DeviceError, and whatever kp raises."""
        number, *request = message
        if self._slabs is not None:
            match request:
                case ["step", rows, pairs]:
                    began = time.monotonic()
                    self._slabs.step(self._arena.x[:rows], self._arena.pairs[:pairs], self._arena.y[:pairs])
                    return [number, began, time.monotonic()]
                case ["upload", slot, staging]:
                    self._slabs.upload(slot, self._arena.staging[staging])
                    return [number]
                case ["grow"]:
                    return [number, self._slabs.grow()]
        if self._dense is not None:
            return [number, *self._dense_answer(self._dense, request)]
        raise DeviceError(f"unknown message {message}")

    def _dense_answer(self, dense: DenseLayers, request: Message) -> list[Any]:
        match request:
            case ["layers", rows, start, steps]:
                dense.run(rows, start, steps)
            case ["head", rows]:
                dense.head(rows)
            case ["fill", kind, slab, at, count, half]:
                dense.fill(kind, slab, at, count, half)
            case ["tower", step, rows, start, patches] if dense.tower is not None:
                dense.tower.run(step, rows, start, patches)
            case ["save", slot, length]:
                return [dense.save(slot, length)]
            case ["restore", slot, length]:
                dense.restore(slot, length)
            case _:
                raise DeviceError(f"unknown message {request}")
        return []

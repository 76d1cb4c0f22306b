"""The device process: owns kp and the device, does what the packets say, and ends with its parent.

kp holds the GIL while the device works and turns some failures into crashes: in a process of its own neither matters.
"""

from __future__ import annotations

import signal
import socket
import time

from mimo_vk.vulkan.arena import Arena, TierShape
from mimo_vk.vulkan.device import Device, DeviceError
from mimo_vk.vulkan.device_check import check_arithmetic
from mimo_vk.vulkan.expert_slabs import ExpertSlabs
from mimo_vk.vulkan.listing import DeviceInfo
from mimo_vk.vulkan.messages import Message, receive, send


def main(connection_fd: int, arena_fd: int, info: str, shape: str, max_slots: int) -> None:
    """The process's whole life. ``info`` and ``shape`` are JSON; the descriptors are inherited."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches this process too: the parent decides
    with socket.socket(fileno=connection_fd) as connection:
        arena = Arena(TierShape.from_json(shape), arena_fd)
        try:
            device = Device(DeviceInfo.from_json(info))
            slabs = open_slabs(device, arena, TierShape.from_json(shape), max_slots)
            send(connection, [0, slabs.slots])
            serve(connection, arena, slabs)
        except ConnectionError:
            return  # the parent is gone
        except Exception as error:
            text = str(error) or type(error).__name__
            send(connection, ["failed", text if isinstance(error, DeviceError) else f"{type(error).__name__}: {text}"])


def open_slabs(device: Device, arena: Arena, shape: TierShape, max_slots: int) -> ExpertSlabs:
    """Check the arithmetic, make the first slab, and run both programs once: a driver compiles at the first run."""
    slabs = ExpertSlabs(device, shape, max_slots, check_arithmetic(device))
    if not slabs.grow():
        raise DeviceError(f"not even one expert of {shape.layout.slot_bytes} bytes fits")
    slabs.warm_up()
    return slabs


def serve(connection: socket.socket, arena: Arena, slabs: ExpertSlabs) -> None:
    """Answer packets until the parent closes its end."""
    while (message := receive(connection)) is not None:
        send(connection, answer(message, arena, slabs))


def answer(message: Message, arena: Arena, slabs: ExpertSlabs) -> Message:
    """Do what one packet asks for. Errors: DeviceError, and whatever kp raises."""
    match message:
        case [number, "step", rows, pairs]:
            began = time.monotonic()
            slabs.step(arena.x[:rows], arena.pairs[:pairs], arena.y[:pairs])
            return [number, began, time.monotonic()]
        case [number, "upload", slot, staging]:
            slabs.upload(slot, arena.staging[staging])
            return [number]
        case [number, "grow"]:
            return [number, slabs.grow()]
    raise DeviceError(f"unknown message {message}")

"""What the program and its device process say to each other: JSON lists, one a packet; bulk goes through the arena.

The program sends ``[number, "grow"]``, ``[number, "step", rows, pairs]``, ``[number, "upload", slot, staging]``, and
counts the numbers from 1. Each is answered in order by its number and what came of it: the slots that there are, when
the step began and ended (seconds of the system's monotonic clock), nothing. The process's first packet is
``[0, slots]``; when something fails ``["failed", why]`` is its last.
"""

from __future__ import annotations

import json
import socket
from typing import Any

PACKET = 1 << 16

Message = list[Any]


def send(connection: socket.socket, message: Message) -> None:
    """Send one packet."""
    connection.send(json.dumps(message).encode())


def receive(connection: socket.socket) -> Message | None:
    """The next packet; None when the other side is gone. BlockingIOError and TimeoutError as the socket is set."""
    packet = connection.recv(PACKET)
    return json.loads(packet) if packet else None

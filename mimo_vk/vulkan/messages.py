"""What the program and its device process say to each other: JSON lists, one a packet; bulk goes through the arena.

The program sends ``["grow"]``, ``["step", rows, pairs]``, ``["upload", slot, staging]``; each is answered in order by
``["grown", slots]``, ``["stepped", seconds]``, ``["uploaded"]``, or by ``["failed", why]``, which is the last.
The first packet the process sends is ``["ready", slots]``.
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

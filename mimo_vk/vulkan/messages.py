"""What the program and its device process say to each other: JSON lists, one a packet; bulk goes through the arenas.

The program's messages begin with a number, counted from 1. Each is answered in order by its number and what came of it.
The process's first packet is ``[0, slots]``, with the dense layers that fitted and whether the head did where it was
asked for any, and whether the tower did; when something fails ``["failed", why]`` is its last.

The tier: ``"grow"`` (the slots that there are), ``"step", rows, pairs`` (when it began and ended, seconds of the
system's monotonic clock), ``"upload", slot, staging``. Dense layers: ``"fill", kind, slab, at, words, half`` of the
bulk; ``"layers", rows, start, steps``, each step ``["enter"]`` with h, ``["layer", index]`` up to the experts (x and
scores are there then) or to the end, ``["add", index]`` with y, or ``["leave"]``, which gives h; ``"head", rows``
of h; ``"save", slot, length`` (whether there was room) and ``"restore", slot, length``. The picture tower:
``"tower", step, rows, start, patches``, some rows of a picture of so many patches, from ``start`` on; the step
is ``["embed"]``, ``["keys", block]``, ``["block", block]`` or ``["merge"]`` (all but ``keys`` give rows), or ``[]``.
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

"""A program on a terminal of its own, driven as a person would: type, wait for text, press Ctrl-C."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

CTRL_C, CTRL_D = "\x03", "\x04"
TIMEOUT = 60.0  # seconds; loaded machines are slow


class Terminal:
    """``seen`` is all that the program wrote so far. As a context manager it ends the program."""

    def __init__(self, command: list[str], cwd: Path) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            command, cwd=cwd, env={"TERM": "xterm", **os.environ}, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""
        self._waited = 0

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self, line: str = "") -> None:
        """Type ``line`` and then Ctrl-C, once the program sleeps: Python notices one that comes between two keys, while
        readline works on the first, only at the next key."""
        self.type(line)
        asleep = 0
        while asleep < 5:
            time.sleep(0.05)
            state = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            asleep = asleep + 1 if state == "S" else 0
        self.type(CTRL_C)

    def wait_for(self, text: str) -> str:
        """Read until ``text`` comes, after what was waited for before; returns what came up to its end."""
        end = time.monotonic() + TIMEOUT
        while (at := self.seen.find(text, self._waited)) < 0:
            assert self._read(end), f"waited for {text!r}, got {self.seen[self._waited :]!r}"
        came = self.seen[self._waited : at + len(text)]
        self._waited = at + len(text)
        return came

    def status(self) -> int:
        """Read to the end; the program's exit status."""
        end = time.monotonic() + TIMEOUT
        while self._read(end):
            pass
        return self._process.wait(timeout=TIMEOUT)

    def _read(self, end: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
        try:
            data = os.read(self._master, 4096) if ready else b""
        except OSError:  # the program closed its end
            data = b""
        self.seen += data.decode("utf-8", "replace")
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        os.close(self._master)


def _own_terminal() -> None:
    """Make the slave, standard input by now, the controlling terminal, so that Ctrl-C becomes a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

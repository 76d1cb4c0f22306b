"""Stop strings: found across pieces of text; no part of one is ever let out."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Push text, get what can no longer belong to a stop string; ``stopped`` once one was found, and nothing more.

    The string that is found is the one that is complete first; of several at once, the one that began first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stopped = False
        self.released = 0  # characters let out so far
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str) -> str:
        """More text; what of the text so far may be shown. The same, joined, whatever the pieces."""
        if self.stopped or not text:
            return ""
        if not self._stops:
            return self._release(text)
        known = len(self._held)
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            assert min(found)[0] > known, "what was held back holds no whole stop string"
            self.stopped = True
            shown, self._held = self._held[: min(found)[1]], ""
            return self._release(shown)
        keep = self._possible_start()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return self._release(shown)

    def flush(self) -> str:
        """The end of the text: what was held back."""
        shown, self._held = self._held, ""
        return self._release(shown)

    def _possible_start(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0

    def _release(self, text: str) -> str:
        self.released += len(text)
        return text

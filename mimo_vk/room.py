"""What would make room for a prompt that the context can't hold: settings, with numbers that would do."""

from __future__ import annotations

from mimo_vk.pictures import NONE, Pictures

ANSWER = 256  # tokens that an answer is left where no one says how many it may have
STEP = 1024  # contexts are proposed in multiples of it


def ways(tokens: int, answer: int, ctx: int, longest: int | None, pictures: Pictures = NONE) -> list[str]:
    """Settings with which a prompt of ``tokens`` and an answer of that many would fit; none where nothing helps.

    longest: what the checkpoint's positions allow, None where that isn't known: no context is proposed then.
    """
    found = []
    if pictures:
        each = (ctx - answer - (tokens - len(pictures.positions))) // len(pictures.items)
        if each >= 1:
            found.append(f"MIMO_MAX_IMAGE_TOKENS={each}")
    need = tokens + answer
    if longest is not None and ctx < need <= longest:
        found.append(f"--ctx {min(-(-need // STEP) * STEP, longest)}")
    return found


def advice(found: list[str]) -> str:
    """The same as the end of a message, "" for none."""
    return f": {' or '.join(found)} would make room" if found else ""

"""What would make room: each proposal, taken, does."""

from __future__ import annotations

import re

import pytest

from mimo_vk.pictures import NONE, Picture, Pictures
from mimo_vk.room import advice, ways


def seen(*tokens: int) -> Pictures:
    return Pictures(tuple(Picture(b"", count) for count in tokens), tuple(range(sum(tokens))))


@pytest.mark.parametrize(
    ("text", "pictures", "answer", "ctx", "longest"),
    [
        (19, (11750,), 256, 8192, 65536),
        (100, (900, 1400), 0, 2000, 262144),
        (3, (), 8190, 8192, 262144),
        (9000, (), 256, 8192, 9256),
    ],
)
def test_each_way_makes_room(text: int, pictures: tuple[int, ...], answer: int, ctx: int, longest: int) -> None:
    tokens = text + sum(pictures)
    assert tokens + answer > ctx
    found = ways(tokens, answer, ctx, longest, seen(*pictures))
    assert len(found) == (2 if pictures else 1)
    if pictures:
        most = int(found[0].removeprefix("MIMO_MAX_IMAGE_TOKENS="))
        assert text + sum(min(count, most) for count in pictures) + answer <= ctx
        assert text + len(pictures) * (most + 1) + answer > ctx, "and one token more would not"
    (larger,) = (int(number) for number in re.findall(r"--ctx (\d+)", " ".join(found)))
    assert tokens + answer <= larger <= longest


def test_nothing_is_proposed_that_would_not_help() -> None:
    assert ways(9000, 256, 8192, 9255) == []  # the checkpoint's positions end there
    assert ways(9000, 256, 8192, None) == []
    assert ways(9000, 0, 8192, 8192, seen(100)) == []  # the text alone is too long
    assert ways(100, 256, 8192, 65536, NONE) == []  # it fits
    assert advice([]) == ""
    assert advice(["--ngen 3", "--ctx 1024"]) == ": --ngen 3 or --ctx 1024 would make room"

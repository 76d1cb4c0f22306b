"""Where each code, scale and element of x lies, element by element, from the words of the order of addition."""

from __future__ import annotations

import numpy as np
import pytest

from mimo_vk.vulkan.arena import Arena, TierShape
from mimo_vk.vulkan.layout import SlotLayout, permute_rows
from tests.matrices import random_expert, random_x

TREE = [0, 4, 2, 6, 1, 5, 3, 7]  # lane quads so that l and l+16 meet first, then l+8, then l+4


@pytest.mark.parametrize(("hidden", "inner"), [(32, 32), (256, 64), (288, 544)])
def test_every_code_and_scale_of_a_slot(hidden: int, inner: int) -> None:
    layout = SlotLayout(hidden, inner)
    expert = random_expert(np.random.default_rng(3), hidden, inner)
    slot = np.full(layout.slot_bytes, 0xEE, np.uint8)
    layout.pack(expert, slot)
    codes, scales = 0, layout.code_bytes
    for matrix in (expert.gate, expert.up, expert.down):
        rows, columns = matrix.shape
        rounds = -(-columns // 256)
        words = np.zeros((rows, rounds * 32, 4), np.uint8)  # a word's 8 codes
        words[:, : columns // 8] = matrix.codes.reshape(rows, -1, 4)
        blocks = np.zeros((rows, rounds * 8), np.uint8)
        blocks[:, : columns // 32] = matrix.scales
        for row, word in [(0, 0), (1, 5), (rows - 1, rounds * 32 - 1), (rows // 2, 17), (rows - 5, 30), (7, 16)]:
            place, round_ = TREE.index(word % 32 // 4), word // 32
            run = ((row // 32) * 8 + place) * rounds + round_
            invocation, r = row % 32 // 4, row % 4
            at = codes + 16 * (run * 32 + r * 8 + invocation) + 4 * (word % 4)
            assert slot[at : at + 4].tolist() == words[row, word].tolist(), (row, word)
            assert slot[scales + run * 32 + invocation * 4 + r] == blocks[row, word // 4], (row, word)
        codes += rows * rounds * 128
        scales += rows * rounds * 8
    assert codes == layout.code_bytes and scales <= layout.slot_bytes < scales + 64


def test_a_flash_experts_slot_is_no_larger_than_the_expert() -> None:
    layout = SlotLayout(4096, 2048)
    assert layout.slot_bytes == layout.expert_bytes == 3 * 4096 * 2048 * 17 // 32  # 4 bits a code, 8 for each 32


@pytest.mark.parametrize("columns", [32, 256, 288])
def test_every_element_of_x(columns: int) -> None:
    x = random_x(np.random.default_rng(4), 3, columns)
    rounds = -(-columns // 256)
    out = np.full((3, rounds * 256), np.nan, np.float32)
    permute_rows(x, out)
    for row in range(3):
        for column in range(rounds * 256):
            word, c = column // 8, column % 8
            at = ((word // 32 * 8 + word % 32 // 4) * 8 + c) * 4 + word % 4
            assert out[row, at] == (x[row, column] if column < columns else 0), (row, column)


def test_an_expert_is_stored_and_found_again() -> None:
    layout = SlotLayout(288, 96)
    expert = random_expert(np.random.default_rng(5), 288, 96)
    stored = np.zeros(layout.expert_bytes, np.uint8)
    layout.store(expert, stored)
    again = layout.parts(stored)
    for a, b in ((expert.gate, again.gate), (expert.up, again.up), (expert.down, again.down)):
        assert np.array_equal(a.codes, b.codes) and np.array_equal(a.scales, b.scales)


def test_both_ends_of_an_arena_see_the_same_bytes() -> None:
    shape = TierShape(64, 32, 2, 3, 2)
    mine = Arena(shape)
    theirs = Arena(TierShape.from_json(shape.as_json()), mine.fd)
    for i, name in enumerate(("x", "pairs", "y", "staging")):
        getattr(mine, name)[...] = i + 1
    assert [int(getattr(theirs, name).min()) for name in ("x", "pairs", "y", "staging")] == [1, 2, 3, 4]
    assert [int(getattr(theirs, name).max()) for name in ("x", "pairs", "y", "staging")] == [1, 2, 3, 4]
    mine.close()

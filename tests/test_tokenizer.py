"""The tokenizer against the tokenizers package on the same file, and the escapes against users' control tokens."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_vk.errors import CheckpointError, UsageError
from mimo_vk.tokenizer import LONG, Escapes, Tokenizer
from tests.small_tokenizer import SPECIAL, TAGS, ordinary, small_tokenizer, tokenizer_data

CONTROL = SPECIAL + TAGS
TOKENIZER = small_tokenizer()
PRIVATE = "".join(map(chr, range(0x10F800, 0x10F808)))

plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
pieces = st.one_of(
    plain_text,
    st.sampled_from([*CONTROL, "<|im_", "start|>", "<", "|", ">", "</", "think>", " ", "\n", "e\u0301", *PRIVATE]),
)
messy_text = st.lists(pieces, max_size=12).map("".join)


def package_ids(text: str) -> list[int]:
    return list(ordinary().encode(text, add_special_tokens=False).ids)


@settings(max_examples=300, deadline=None)
@given(messy_text)
def test_control_tokens_count_where_asked(text: str) -> None:
    assert TOKENIZER.encode(text, special=True) == package_ids(text)


@settings(max_examples=300, deadline=None)
@given(messy_text)
def test_a_users_text_never_makes_a_control_token(text: str) -> None:
    ids = TOKENIZER.encode(text)
    control = {token.id for token in TOKENIZER.control.values()}
    assert not control & set(ids)
    if not any(token in text for token in CONTROL):
        assert ids == package_ids(text)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*CONTROL, "", "\n", "a"]), messy_text), max_size=6))
def test_rendered_text_has_the_templates_control_tokens_and_no_others(turns: list[tuple[str, str]]) -> None:
    rendered = "".join(own + TOKENIZER.escapes.escape(users) for own, users in turns)
    ids = TOKENIZER.encode_rendered(rendered)
    control = {token.id: token.text for token in TOKENIZER.control.values()}
    assert [control[i] for i in ids if i in control] == [own for own, _ in turns if own in CONTROL]
    whole = "".join(own + users for own, users in turns)
    if sum(whole.count(token) for token in CONTROL) == sum(own in CONTROL for own, _ in turns):
        assert ids == package_ids(whole)


@settings(max_examples=300, deadline=None)
@given(messy_text)
def test_escapes_are_undone(text: str) -> None:
    escaped = TOKENIZER.escapes.escape(text)
    assert TOKENIZER.escapes.unescape(escaped) == text
    assert not set(escaped) & {"<", ">"}
    as_json = TOKENIZER.escapes.ascii_json(json.dumps(escaped, ensure_ascii=False))
    assert TOKENIZER.escapes.unescape(as_json) == json.dumps(text)


def test_escapes_of_no_characters_change_nothing() -> None:
    assert Escapes("").escape("<|im_start|>") == "<|im_start|>"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.size - 1), max_size=60), st.booleans())
def test_a_stream_joins_to_the_whole_and_the_whole_is_the_packages(ids: list[int], keep: bool) -> None:
    stream = TOKENIZER.stream(keep_special=keep)
    parts = [stream.push(i) for i in ids]
    whole = TOKENIZER.decode(ids, keep_special=keep)
    assert "".join(parts) + stream.flush() == whole
    assert whole == ordinary().decode(ids, skip_special_tokens=not keep)


@settings(max_examples=100, deadline=None)
@given(messy_text)
def test_a_valid_text_streams_without_replacement_characters(text: str) -> None:
    stream = TOKENIZER.stream(keep_special=True)
    parts = [stream.push(i) for i in TOKENIZER.encode(text, special=True)]
    assert stream.flush() == ""
    assert "".join(parts) == ordinary().normalizer.normalize_str(text)


def test_a_character_comes_out_with_its_last_byte() -> None:
    stream = TOKENIZER.stream()
    ids = [TOKENIZER.token_id(chars) for chars in ("ð", "Ł", "ĺ", "Ģ")]  # f0 9f 98 80 in the byte alphabet
    assert None not in ids
    assert [stream.push(i) for i in ids if i is not None] == ["", "", "", "\U0001f600"]
    stream.push(ids[0] or 0)
    assert stream.flush() == "\ufffd"


def test_special_tokens_are_left_out_and_tags_are_kept() -> None:
    text = "<|im_start|><think>a</think><|im_end|>"
    ids = TOKENIZER.encode(text, special=True)
    assert TOKENIZER.decode(ids) == "<think>a</think>"
    assert TOKENIZER.decode(ids, keep_special=True) == text
    stream = TOKENIZER.stream(keep=["<|im_end|>", "<absent>"])
    assert "".join(stream.push(i) for i in ids) == "<think>a</think><|im_end|>"


def test_an_id_without_a_token_is_no_text() -> None:
    assert TOKENIZER.decode([TOKENIZER.size, 10**6, -1]) == ""


def test_size_and_token_id() -> None:
    assert TOKENIZER.size == ordinary().get_vocab_size() == max(ordinary().get_vocab().values()) + 1
    for text in [*CONTROL, "a", "Ġthe"]:
        assert TOKENIZER.token_id(text) == ordinary().token_to_id(text)
    assert TOKENIZER.token_id("<|nothing|>") is None


def test_a_hole_in_the_ids_counts_towards_the_size() -> None:
    data = tokenizer_data()
    data["added_tokens"][-1]["id"] = 900
    assert Tokenizer(json.dumps(data).encode(), "t").size == 901


def test_white_space_beside_a_stripping_token_goes_as_in_the_package() -> None:
    data = tokenizer_data()
    for token in data["added_tokens"]:
        token["lstrip"], token["rstrip"] = token["content"] == "<think>", token["content"] == "</think>"
    import tokenizers

    package = tokenizers.Tokenizer.from_str(json.dumps(data))
    text = "a \n<think> \nb \n</think> \nc<think>"
    assert (
        Tokenizer(json.dumps(data).encode(), "t").encode(text, special=True)
        == package.encode(text, add_special_tokens=False).ids
    )


def test_truncation_padding_and_added_words_of_the_file_do_not_reach_the_text() -> None:
    data = tokenizer_data()
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    data["added_tokens"].append({**data["added_tokens"][0], "content": "foxtrot", "id": 800, "special": False})
    made = Tokenizer(json.dumps(data).encode(), "t")
    assert "foxtrot" not in made.control
    assert made.encode("quick foxtrot")[-1] == 800
    assert len(made.encode("abcdefgh 1 2 3")) > 5
    assert made.decode([800]) == "foxtrot"


def test_a_long_text_has_the_package_s_ids_too() -> None:
    text = "Grüße, e\u0301 🙂 <|im_end|>\n" * (LONG // 20)
    assert len(text) > LONG
    assert TOKENIZER.encode(text, special=True) == package_ids(text)
    with pytest.raises(UsageError, match=rf"U\+D83D at character {LONG}"):
        TOKENIZER.encode("a" * LONG + "\ud83d")


def test_other_threads_run_while_a_long_text_is_read() -> None:
    """A server answers /health meanwhile: in one call that kept all others waiting the steps would be the first's."""
    steps, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            steps[0] += 1
            time.sleep(0.0005)

    other = threading.Thread(target=count)
    other.start()
    try:
        before = steps[0]
        TOKENIZER.encode("word " * 60_000, special=True)
        assert steps[0] - before > 10
    finally:
        done.set()
        other.join()


@pytest.mark.parametrize("special", [False, True])
def test_a_lone_surrogate_is_an_error_with_its_place(special: bool) -> None:
    with pytest.raises(UsageError, match=r"U\+D83D at character 2"):
        TOKENIZER.encode("ab\ud83d", special=special)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder": {"type": "Metaspace"}}, "decoder.type: expected ByteLevel, found Metaspace"),
        ({"decoder": None}, "decoder.type: expected ByteLevel, found None"),
        ({"added_tokens": [{"id": 1}]}, r"added_tokens\[0\]"),
        ({"added_tokens": 3}, "added_tokens: expected a list"),
        ({"model": {"type": "BPE"}}, "model.vocab: expected an object of tokens, found NoneType"),
        ({"pre_tokenizer": {"type": "Nothing"}}, "tokenizer.json: "),
    ],
)
def test_a_faulty_file_is_named_with_its_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({**tokenizer_data(), **change}))
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"\xff\xfe"])
def test_a_missing_or_broken_file(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)

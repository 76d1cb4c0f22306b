"""A System One request's body: compressed, as a form, and everything that can be wrong with either."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typesafe_sdk._core.multipart import Part, encode_multipart

from mimo_vk.server.errors import ApiError
from mimo_vk.server.systemone_body import MAX_FRAMES, MAX_PARTS, decoded, decompressed, parse_json, split_form, zstd
from mimo_vk.systemone_request import InvalidRequest

BODY = {"state": "Grüße 🙂", "questions": {}}
JSON = json.dumps(BODY, ensure_ascii=False).encode()


def form(*parts: Part) -> tuple[dict[str, str], bytes]:
    """A form as the public client writes it."""
    content_type, data = encode_multipart(parts)
    return {"content-type": content_type}, data


REQUEST = Part("request", "application/json", JSON)
PICTURE = Part("asset-0", "image/png", b"\x89PNG\r\n\x1a\n--\r\n\r\n\x00", "asset-0")


def test_plain_compressed_and_as_a_form() -> None:
    assert decoded({"content-type": "application/json"}, JSON) == (BODY, {})
    assert decoded({}, JSON) == (BODY, {})
    assert decoded({"content-encoding": "ZSTD"}, zstd.compress(JSON)) == (BODY, {})
    assert decoded({"content-encoding": "identity"}, JSON) == (BODY, {})
    headers, data = form(REQUEST)
    assert decoded(headers, data) == (BODY, {})
    assert decoded({**headers, "content-encoding": "zstd"}, zstd.compress(data)) == (BODY, {})


def test_a_form_with_pictures_gives_the_request_that_names_them() -> None:
    body = {**BODY, "assets": {"x": {"type": "image", "part": "asset-0"}}}
    headers, data = form(Part("request", "application/json", json.dumps(body).encode()), PICTURE)
    assert decoded(headers, data) == (body, {"asset-0": PICTURE.content})


def test_several_frames_are_one_body() -> None:
    assert decompressed("zstd", zstd.compress(b"one ") + zstd.compress(b"") + zstd.compress(b"two")) == b"one two"
    assert decompressed("zstd", zstd.compress(b"")) == b""


def test_a_body_in_more_pieces_than_anyone_sends_is_refused() -> None:
    """Each frame's rest is copied, each part's head parsed: a small body of many would keep the server for hours."""
    empty = zstd.compress(b"")
    assert decompressed("zstd", zstd.compress(JSON) + empty * (MAX_FRAMES - 1)) == JSON
    with pytest.raises(InvalidRequest, match=f"the body has more than {MAX_FRAMES} zstd frames"):
        decompressed("zstd", empty * (MAX_FRAMES + 1))
    headers, data = form(REQUEST, *(Part(f"p{i}", "image/png", b"") for i in range(MAX_PARTS - 1)))
    assert len(decoded(headers, data)[1]) == MAX_PARTS - 1
    headers, data = form(REQUEST, *(Part(f"p{i}", "image/png", b"") for i in range(MAX_PARTS)))
    with pytest.raises(InvalidRequest, match=f"the form has more than {MAX_PARTS} parts"):
        decoded(headers, data)


def test_the_limit_holds_for_what_comes_out() -> None:
    bomb = zstd.compress(bytes(2**20))
    assert len(bomb) < 200
    assert len(decompressed("zstd", bomb, limit=2**20)) == 2**20
    for data in (bomb, zstd.compress(bytes(2**19)) * 3):
        with pytest.raises(ApiError, match="larger than 1048575 bytes") as caught:
            decompressed("zstd", data, limit=2**20 - 1)
        assert caught.value.status == 413


def test_a_window_larger_than_any_body_is_refused() -> None:
    options = {int(zstd.CompressionParameter.window_log): 27, int(zstd.CompressionParameter.content_size_flag): 0}
    compressor = zstd.ZstdCompressor(options=options)
    frame = compressor.compress(b"x" * 1000) + compressor.flush()
    with pytest.raises(InvalidRequest, match="not valid zstd"):
        decompressed("zstd", frame)


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(ApiError, match="'gzip' is not supported, only zstd is") as caught:
        decompressed("gzip", b"")
    assert caught.value.status == 415


@pytest.mark.parametrize(
    ("headers", "data", "kind", "words"),
    [
        ({}, b"", "json_invalid", "the body is empty"),
        ({}, b"{'a': 1}", "json_invalid", "not valid JSON"),
        ({}, b'{"state": "\xff"}', "json_invalid", "not UTF-8: byte 11"),
        ({}, b'{"state": NaN}', "json_invalid", "NaN"),
        ({}, b'{"state": 1, "state": 2}', "json_invalid", "two values named 'state'"),
        ({}, b"[" * 100_000, "json_invalid", "nested too deeply"),
        ({}, b"9" * 5000, "json_invalid", "not valid JSON"),
        ({"content-encoding": "zstd"}, JSON, "zstd_invalid", "not valid zstd"),
        ({"content-encoding": "zstd"}, zstd.compress(JSON)[:-3], "zstd_invalid", "ends too early"),
        ({"content-encoding": "zstd"}, zstd.compress(JSON) + b"more", "zstd_invalid", "not valid zstd"),
        ({"content-encoding": "zstd"}, b"", "zstd_invalid", "ends too early"),
        ({"content-type": "multipart/form-data"}, JSON, "multipart_invalid", "no boundary"),
        ({"content-type": "multipart/form-data; boundary=x"}, JSON, "multipart_invalid", "cut off"),
        ({"content-type": "multipart/form-data; boundary=x"}, b"--x--\r\n", "multipart_invalid", "named request"),
        (*form(PICTURE, REQUEST), "multipart_invalid", "named request"),
        (*form(REQUEST, PICTURE, PICTURE), "multipart_invalid", "two parts of one name"),
        (
            {"content-type": "multipart/form-data; boundary=x"},
            b"--x\r\nContent-Type: a/b\r\n\r\n\r\n--x--",
            "multipart_invalid",
            "without a name",
        ),
    ],
)
def test_a_body_that_is_none(headers: dict[str, str], data: bytes, kind: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decoded(headers, data)
    (fault,) = caught.value.faults
    assert (fault.loc, fault.type) == (("body",), kind)
    assert words in fault.msg


@given(st.lists(st.tuples(st.text("abz-_0", min_size=1), st.binary(max_size=200)), max_size=4))
def test_the_client_s_forms_are_cut_where_it_joined_them(parts: list[tuple[str, bytes]]) -> None:
    content_type, data = encode_multipart([Part(name, "image/png", content) for name, content in parts])
    boundary = content_type.rpartition("=")[2].encode()
    assert list(split_form(data, boundary)) == parts


@given(st.binary(max_size=300), st.sampled_from(["", "zstd"]), st.sampled_from(["", "multipart/form-data; boundary=a"]))
def test_any_bytes_are_read_or_refused(data: bytes, encoding: str, content_type: str) -> None:
    try:
        decoded({"content-encoding": encoding, "content-type": content_type}, data)
    except InvalidRequest as error:
        assert error.faults


def test_json_of_any_encoding_and_its_values() -> None:
    found: Any = parse_json('{"a": [1, 2.5, "é", null, {"b": true}]}'.encode("utf-16"))
    assert found == {"a": [1, 2.5, "é", None, {"b": True}]}

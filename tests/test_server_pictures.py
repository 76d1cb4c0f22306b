"""Pictures in requests, up to the job that the model gets: places, refusals, and strict base64."""

from __future__ import annotations

import base64
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typesafe_sdk._core.multipart import Part, encode_multipart

from mimo_vk.errors import ImageError, UsageError
from mimo_vk.image_data import from_base64, picture_of
from mimo_vk.server import openai_chat, systemone
from mimo_vk.server.errors import ApiError
from mimo_vk.server.front import Front
from mimo_vk.server.openai_chat import Prepared
from mimo_vk.settings import Settings
from mimo_vk.systemone import Prompts
from mimo_vk.systemone_request import InvalidRequest
from tests.picture_files import png

SMALL, WIDE = png("red"), png("blue", 160, 96)  # 4 and 15 tokens
TYPED = "<|vision_start|><|image_pad|><|vision_end|>"
HEIC = b"\0\0\0\x18ftypheic" + bytes(40)


@pytest.fixture(scope="module")
def front(tiny_checkpoint: Path) -> Front:
    return Front(Settings(model=tiny_checkpoint, ctx=512))


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


def image(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(data), **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def prepared(front: Front, *messages: dict[str, Any], **more: Any) -> Prepared:
    body = {"messages": list(messages), "max_tokens": 8, "enable_thinking": False, **more}
    return openai_chat.check(front, json.dumps(body).encode())[1]


def around(front: Front, ids: list[int]) -> str:
    """The prompt's text with each run of placeholders as one."""
    pad = front.tokenizer.control["<|image_pad|>"].id
    short = [token for i, token in enumerate(ids) if token != pad or i == 0 or ids[i - 1] != pad]
    return front.tokenizer.decode(short, keep_special=True)


def test_pictures_stand_where_their_parts_stood(front: Front) -> None:
    job = prepared(
        front,
        {"role": "system", "content": "Look."},
        user(text("first "), image(WIDE), text(" and "), image(SMALL, detail="high"), text(f"? {TYPED}")),
        {"role": "assistant", "content": "Yes"},
        user(image(WIDE, detail="auto")),
    ).job
    seen = f"first {TYPED} and {TYPED}? {TYPED}"
    assert around(front, job.prompt_ids) == (
        "<|im_start|>system\nLook.<|im_end|>"
        f"<|im_start|>user\n{seen}<|im_end|><|im_start|>assistant\n<think></think>Yes<|im_end|>"
        f"<|im_start|>user\n{TYPED}<|im_end|><|im_start|>assistant\n<think></think>"
    )
    assert [(picture.data, picture.tokens) for picture in job.pictures.items] == [(WIDE, 15), (SMALL, 4), (WIDE, 15)]
    pad = front.tokenizer.control["<|image_pad|>"].id
    assert job.pictures.positions == tuple(i for i, token in enumerate(job.prompt_ids) if token == pad)
    assert len(job.pictures.positions) == 34  # none of them is what the user typed


def test_a_request_without_pictures_is_as_before(front: Front) -> None:
    parts, whole = (
        prepared(front, user(text("a"), text(TYPED))),
        prepared(front, {"role": "user", "content": "a" + TYPED}),
    )
    assert parts.job == whole.job
    assert not parts.job.pictures


def test_the_context_is_checked_with_the_pictures_tokens(front: Front) -> None:
    big = png("red", 640, 640)  # 400 tokens
    assert prepared(front, user(image(big))).job.pictures.items[0].tokens == 400
    with pytest.raises(UsageError, match=r"8\d\d prompt tokens \(800 for pictures\) and max_tokens 8 are") as caught:
        prepared(front, user(image(big), image(big)))
    found = re.search(r"MIMO_MAX_IMAGE_TOKENS=(\d+) or --ctx (\d+) would have it", str(caught.value))
    assert found is not None
    small = Settings(model=front_dir(front), ctx=512)
    for more in (replace(small, max_image_tokens=int(found[1])), replace(small, ctx=int(found[2]))):  # either does
        roomy = Front(more)
        assert prepared(roomy, user(image(big), image(big))).job.choice.max_tokens == 8
    few = Front(Settings(model=front_dir(front), ctx=512, max_image_tokens=10))
    assert prepared(few, user(image(big), image(big))).job.pictures.items[0].tokens <= 10


def front_dir(front: Front) -> Path:
    return Path(front.template.name).parent if front.template else Path()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/a.png", "https: addresses are not fetched, only data: URIs are taken"),
        ("file:///etc/passwd", "file: addresses are not fetched"),
        ("a.png", "expected data:image/TYPE;base64,"),
        ("", "expected data:image/TYPE;base64,"),
        ("data:text/plain;base64,aGVsbG8=", "expected data:image/TYPE;base64,"),
        ("data:image/png,hello", "expected data:image/TYPE;base64,"),
        ("data:image/png;base64,", "the data is empty"),
        ("data:image/png;base64,####", "the data is not base64"),
        (uri(SMALL) + "\n", "the data is not base64"),
        (uri(SMALL).replace("base64,", "base64, "), "the data is not base64"),
        (uri(b"hello"), "expected a picture .*, found a file of unknown format"),
        (uri(HEIC, "heic"), "found a HEIC file"),
        (uri(SMALL[:20]), "header is truncated or damaged"),
        (uri(png("red", 201, 1)), "201x1: a side may be at most 200 times the other"),
    ],
)
def test_what_is_no_picture_is_refused_with_its_field(front: Front, url: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        prepared(front, user(text("x"), {"type": "image_url", "image_url": {"url": url}}))
    assert caught.value.status == 400
    assert caught.value.param == "messages[0].content[1].image_url.url"
    assert caught.value.message.startswith(caught.value.param)


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        (user({"type": "image_url"}), "messages[0].content[0].image_url", "missing"),
        (
            user({"type": "image_url", "image_url": uri(SMALL)}),
            "messages[0].content[0].image_url",
            "expected an object",
        ),
        (user(image(SMALL, detail="low")), "messages[0].content[0].image_url.detail", "'auto' or 'high'"),
        (user(image(SMALL, width=3)), "messages[0].content[0].image_url.width", "not supported"),
        (user({"type": "input_audio"}), "messages[0].content[0]", "only text and, of a user's, image_url"),
        (user({"text": "x"}), "messages[0].content[0]", "only text and"),
        ({"role": "system", "content": [image(SMALL)]}, "messages[0].content[0]", "in the messages of a user only"),
        ({"role": "assistant", "content": [image(SMALL)]}, "messages[0].content[0]", "of a user only"),
    ],
)
def test_parts_of_other_shapes_are_refused_by_name(
    front: Front, message: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        prepared(front, message)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_model_without_a_tower_refuses_pictures_by_name(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(tiny_checkpoint / name, tmp_path)
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_config": None}))
    blind = Front(Settings(model=tmp_path))
    assert prepared(blind, user(text("x"))).job.prompt_ids
    with pytest.raises(ApiError, match="this model has no vision tower") as caught:
        prepared(blind, user(image(SMALL)))
    assert caught.value.code == "unsupported_content"
    (tmp_path / "config.json").write_text(json.dumps(config))  # a tower, but no preprocessor_config.json
    with pytest.raises(ApiError, match="served without pictures") as caught:
        prepared(Front(Settings(model=tmp_path)), user(image(SMALL)))
    assert str(tmp_path) not in caught.value.message


def test_data_uris_as_they_are_written() -> None:
    data = base64.b64encode(SMALL).decode()
    for head in ("data:image/png;base64,", "DATA:image/jpeg;BASE64,", "data:image/*;name=a.png;base64,"):
        assert picture_of(head + data) == SMALL


@given(st.binary(min_size=1, max_size=50))
def test_base64_has_one_spelling(data: bytes) -> None:
    written = base64.b64encode(data).decode()
    assert from_base64(written) == data
    for other in (written.rstrip("=") + "==="[: 3 - written.count("=")], written + "A", " " + written, written + "="):
        if other != written:
            with pytest.raises(ImageError, match="not base64"):
                from_base64(other)
    with pytest.raises(ImageError, match="beyond ASCII"):
        from_base64("é" + written)


def test_spare_bits_of_base64_are_refused() -> None:
    assert from_base64("AA==") == b"\0"
    with pytest.raises(ImageError, match="bits that belong to no byte"):
        from_base64("AB==")


def asked(front: Front, body: dict[str, Any], **parts: bytes) -> Prompts:
    headers, data = {}, json.dumps(body).encode()
    if parts:
        form = [Part("request", "application/json", data)]
        content_type, data = encode_multipart([*form, *(Part(name, "image/png", file) for name, file in parts.items())])
        headers = {"content-type": content_type}
    return systemone.check(front, headers, data)[1]


def asset(data: bytes) -> dict[str, Any]:
    return {"type": "image", "format": "png", "data_base64": base64.b64encode(data).decode()}


YES_NO: dict[str, Any] = {"type": "noul", "instructions": "Is it?"}


def test_placeholders_become_pictures_in_any_text(front: Front) -> None:
    state = {"ticket": ["see <image:1>", {"more": 'a "quoted" <image:12> here'}], "n": 3}
    criteria = {"cat": "like <image:1>", "dog": None}
    body = {
        "state": state,
        "questions": {
            "plain": YES_NO,
            "seen": {"type": "choice", "instructions": "<image:12>", "criteria": criteria},
        },
        "assets": {"<image:1>": asset(SMALL), "<image:12>": asset(WIDE)},
    }
    prompts = asked(front, body)
    before = (
        '<|im_start|>user\n{"ticket": ["see ' + TYPED + '", {"more": "a \\"quoted\\" ' + TYPED + ' here"}], "n": 3}\n\n'
    )
    cue = "<|im_end|><|im_start|>assistant\n<think></think>"
    plain, seen = prompts.questions["plain"], prompts.questions["seen"]
    assert around(front, plain.ids) == f"{before}Is it?\nAnswer yes or no.{cue}"
    assert around(front, seen.ids) == f"{before}{TYPED}\ncat: like {TYPED}\ndog{cue}"
    assert [picture.tokens for picture in plain.pictures.items] == [4, 15]
    assert [picture.tokens for picture in seen.pictures.items] == [4, 15, 15, 4]
    assert (prompts.state, prompts.prefix) == ([], [])  # a prompt with a picture is resumed from nothing
    assert prompts.input_tokens == len(plain.ids) + len(seen.ids)


def test_questions_without_a_picture_still_share_their_state(front: Front) -> None:
    questions = {"a": YES_NO, "b": {**YES_NO, "instructions": "Like X?"}, "c": {**YES_NO, "instructions": "Or?"}}
    words = {"state": "a long state", "questions": questions}
    alone = asked(front, {**words, "questions": {"a": questions["a"], "c": questions["c"]}})
    prompts = asked(front, {**words, "assets": {"X": asset(SMALL)}})
    assert prompts.state == alone.state and len(prompts.state) > 5
    assert (prompts.questions["a"], prompts.questions["c"]) == (alone.questions["a"], alone.questions["c"])
    assert prompts.questions["b"].pictures.items[0].data == SMALL
    assert prompts.input_tokens == alone.input_tokens + len(prompts.questions["b"].ids)


def test_pictures_as_parts_of_a_form(front: Front) -> None:
    body = {"state": "X", "questions": {"q": YES_NO}, "assets": {"X": {"type": "image", "part": "asset-0"}}}
    prompts = asked(front, body, **{"asset-0": WIDE})
    assert prompts.questions["q"].pictures.items[0].data == WIDE
    with pytest.raises(InvalidRequest, match="the form has a part 'more' that no asset names"):
        asked(front, body, **{"asset-0": WIDE, "more": SMALL})


@pytest.mark.parametrize(
    ("data", "words"), [(b"hello", "unknown format"), (HEIC, "a HEIC file"), (png("red", 1, 201), "1x201")]
)
def test_an_asset_that_is_no_picture_is_named(front: Front, data: bytes, words: str) -> None:
    body = {"state": "X Y", "questions": {"q": YES_NO}, "assets": {"X": asset(SMALL), "Y": asset(data)}}
    with pytest.raises(InvalidRequest, match=words) as caught:
        asked(front, body)
    assert [fault.loc for fault in caught.value.faults] == [("body", "assets", "Y")]


def test_a_picture_too_large_for_the_context_is_named(front: Front) -> None:
    body = {"state": "X", "questions": {"q": YES_NO}, "assets": {"X": asset(png("red", 960, 960))}}
    with pytest.raises(InvalidRequest, match=r"questions\.q: 9\d\d prompt tokens \(900 for .* context of 512"):
        asked(front, body)

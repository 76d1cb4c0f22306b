"""A picture through the real tower of the small checkpoint: the command line, the API and both public clients.

The command and the server compute in numpy, the engine they are held to in compiled code.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from engines import open_engine
from PIL import Image as Pillow
from typesafe_sdk import Image, Noul, RetryPolicy, TypeSafeClient

from mimo_vk.engine import Engine
from mimo_vk.image import load_image
from mimo_vk.model import PictureRows, as_ids
from mimo_vk.pictures import Pictures, bare, user_message
from mimo_vk.sampling import Sampler
from mimo_vk.systemone import answer
from mimo_vk.systemone_request import parse_request
from tests.live_server import LiveServer
from tests.picture_files import encoded, png
from tests.test_cli import run_tiny
from tools.make_image_cases import draw


def drawn(height: int, width: int) -> bytes:
    return encoded(Pillow.fromarray(draw(height, width)))


WIDE, SMALL = drawn(64, 128), png("red", 40, 50)  # 8 and 4 tokens
QUESTION = "What colour is it?"


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with open_engine(tiny_checkpoint, threads=1, chunk=5) as opened:
        yield opened


def prompt(engine: Engine, *files: bytes, think: bool | None = False) -> tuple[list[int], Pictures]:
    assert engine.template is not None and engine.tokenizer is not None
    messages, _ = bare([user_message(QUESTION, files)])
    ids = engine.template.prompt_ids(engine.tokenizer, messages, enable_thinking=think)
    return engine.picture_tools.place(ids, [engine.picture_tools.picture(data) for data in files])


def logits(engine: Engine, *files: bytes) -> Any:
    ids, pictures = prompt(engine, *files)
    return engine.session().prompt(ids, pictures=pictures, all_logits=True)


def test_the_towers_rows_stand_in_the_prompt(engine: Engine) -> None:
    """The rows straight from the tower, put into the model by hand, one block for the whole prompt."""
    assert engine.tower is not None
    rows = [engine.tower.forward(load_image(data, engine.picture_tools.limits)) for data in (WIDE, SMALL)]
    assert [len(r) for r in rows] == [8, 4] and len(np.unique(rows[0], axis=0)) == 8
    ids, pictures = prompt(engine, WIDE, SMALL)
    here = PictureRows(np.array(pictures.positions), np.concatenate(rows))
    h = engine.model.forward(as_ids(ids), engine.session()._cache, lambda: None, here)
    assert engine.head(h).tobytes() == logits(engine, WIDE, SMALL).tobytes()
    assert not np.array_equal(logits(engine, SMALL, WIDE)[-1], logits(engine, WIDE, SMALL)[-1])


def run_json(root: Path, model: Path, *args: str | Path) -> dict[str, Any]:
    done = run_tiny(root, model, *args, "--ngen", "3", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_run_with_pictures(engine: Engine, project_root: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "wide one.png").write_bytes(WIDE)
    (tmp_path / "small.png").write_bytes(SMALL)
    images: list[str | Path] = ["--image", tmp_path / "wide one.png", "--image", tmp_path / "small.png"]
    dumps = [tmp_path / "chat.npy", tmp_path / "ids.npy"]
    chat = run_json(project_root, tiny_checkpoint, *images, "--chat", QUESTION, "--dump-logits", dumps[0])
    expected = logits(engine, WIDE, SMALL)
    assert np.load(dumps[0]).tobytes() == expected.tobytes()
    assert chat["prompt_ids"] == prompt(engine, WIDE, SMALL)[0]
    assert (chat["stats"]["prefill_tokens"], chat["stats"]["pictures"]) == (len(expected), 2)
    assert chat["seconds"]["pictures"] > 0
    bare_dir = tmp_path / "bare"  # with ids no tokenizer is needed
    shutil.copytree(tiny_checkpoint, bare_dir, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    written = " ".join(map(str, chat["prompt_ids"]))
    run_json(project_root, bare_dir, *images, "--ids", written, "--dump-logits", dumps[1])
    assert dumps[1].read_bytes() == dumps[0].read_bytes()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--ids", "1 2 3"), "8 times for the pictures (8), found 0"),
        (("--prompt", "<|image_pad|> and <|image_pad|>"), "for each of 1 pictures, found 2"),
        (("--chat", "x", "--image", "gone.png"), "gone.png: no such file"),
        (("--chat", "\udcff"), "--chat: the text is not UTF-8: a lone surrogate U+DCFF at character 0"),
        (("--chat", "x" * 300), "are more than the context of 64"),
    ],
)
def test_run_refuses_what_does_not_fit(
    project_root: Path, tiny_checkpoint: Path, tmp_path: Path, args: tuple[str, ...], words: str
) -> None:
    (tmp_path / "a.png").write_bytes(WIDE)
    done = run_tiny(project_root, tiny_checkpoint, "--image", tmp_path / "a.png", *args, "--ngen", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_run_names_the_damaged_picture(project_root: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Its header is whole: what is wrong shows once the prompt is read."""
    cut = tmp_path / "cut.png"
    cut.write_bytes(WIDE[:-30])
    done = run_tiny(project_root, tiny_checkpoint, "--image", cut, "--chat", "x", "--ngen", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"mimo-vk: {cut}: the PNG picture is truncated or damaged")


@pytest.fixture(scope="module")
def client(tiny_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tiny_server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def greedy(engine: Engine, *files: bytes) -> str:
    """What a cold engine answers."""
    assert engine.tokenizer is not None
    session = engine.session()
    ids, pictures = prompt(engine, *files)
    found = list(session.generate(session.prompt(ids, pictures=pictures), max_tokens=4, sampler=Sampler()))
    return engine.tokenizer.decode(found)


def test_the_openai_client_sends_a_picture(client: openai.OpenAI, engine: Engine, tiny_server: LiveServer) -> None:
    def ask(*files: bytes, **more: Any) -> Any:
        content: list[Any] = [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}
            for data in files
        ]
        content.append({"type": "text", "text": QUESTION})
        return client.chat.completions.create(
            model="checkpoint",
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=4,
            extra_body={"enable_thinking": False},
            **more,
        )

    seen = tiny_server.metric("pictures_total")
    text = ask()
    for files in ((WIDE,), (SMALL,), (WIDE, SMALL)):
        reply = ask(*files)
        assert reply.choices[0].message.content == greedy(engine, *files)
        assert reply.usage.prompt_tokens == len(prompt(engine, *files)[0])
        assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert tiny_server.metric("pictures_total") - seen == 2  # each was looked at once
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(WIDE, stream=True) if chunk.choices)
    assert streamed == greedy(engine, WIDE)
    again = ask()  # what was read before the pictures is as good as ever
    assert again.choices[0].message.content == text.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="the PNG picture is truncated or damaged"):
        ask(WIDE[:-30])


def test_system_one_sees_a_picture(tiny_server: LiveServer, engine: Engine) -> None:
    picture, other = Image(WIDE), Image(SMALL)
    questions = {
        "red": Noul(instructions="Is it red?"),
        "same": Noul(instructions=["Is it like this one?", other]),
    }
    with TypeSafeClient(
        api_key="none", base_url=tiny_server.url, timeout=60, retry=RetryPolicy(max_retries=0)
    ) as client:
        found = client.system_one(state={"photo": picture}, questions=questions)
    body = {
        "state": {"photo": "P"},
        "questions": {
            "red": {"type": "noul", "instructions": "Is it red?"},
            "same": {"type": "noul", "instructions": ["Is it like this one?", "Q"]},
        },
        "assets": {"P": {"part": "p"}, "Q": {"part": "q"}},
    }
    wanted = answer(engine, engine.session(), parse_request(body, {"p": WIDE, "q": SMALL}))
    for name, given in wanted.answers.items():
        assert found.answers[name].model_dump()["noul"] == given["noul"]
    assert found.usage.input_tokens == wanted.input_tokens

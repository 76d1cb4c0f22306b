"""The web page, in a real browser: what a person does with it, and what no text can do to it."""

from __future__ import annotations

import base64
import json
import re
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mimo_vk.server import pages
from tests.browser import Browser, Page
from tests.live_server import LiveServer, serving

ANSWERED = "document.querySelector('.assistant:last-child')?.ariaBusy === 'false'"
HOSTILE = """\
<think>Hm. <b>Really</b>?</think># A *title*
**bold** and `<i>code</i>` and snake_case_name, 2*3*4 and ***both***
<img src=x onerror="window.hacked=1"> <script>window.hacked=2</script> <a href="javascript:hacked=3">x</a>
[good](https://example.com/a_(b)) [bad](javascript:window.hacked=4) ![picture](https://example.com/p.png)

- one
  - nested
- two https://example.org/x.

3. third
4. fourth

> quoted

```html
<p onclick="hacked=5">
```

| a | b |
|---|--:|
| 1 | **2** |
"""
COUNT_CALLS = """
window.bodies = [];
const real = window.fetch;
window.fetch = (path, options) => {
  if (options?.body) window.bodies.push(options.body);
  return window.answer?.(path) ?? real(path, options);
};
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def locked_server(tiny_checkpoint: Path) -> Iterator[LiveServer]:
    """A server with a key."""
    with serving(tiny_checkpoint, "--api-key", "ríght 世", program="tests.echo_model") as server:
        yield server


@pytest.fixture
def page(browser: Browser, echo_server: LiveServer) -> Iterator[Page]:
    """The page, ready; nothing may complain in its console."""
    opened = browser.page(echo_server.url + "/")
    opened.wait("document.title === 'checkpoint - mimo-vk'")
    yield opened
    assert opened.complaints == []
    opened.close()


def ask(page: Page, text: str) -> None:
    page.click("#message")
    page.type(text)
    page.press("Enter")


def answer(page: Page, text: str) -> str:
    """Send a message and wait for the whole answer's text."""
    ask(page, text)
    page.wait(ANSWERED)
    return page.text(".assistant:last-child .text")


# The files


def test_the_page_and_its_files_are_served_without_a_key(locked_server: LiveServer) -> None:
    client = locked_server.client
    for path in pages.files():
        found = client.get(path)
        assert (found.status_code, found.headers["x-content-type-options"]) == (200, "nosniff")
        assert "default-src 'none'" in found.headers["content-security-policy"]
        assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", found.text), "nothing comes from elsewhere"
    assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert client.head("/app.js").headers["content-type"] == "text/javascript; charset=utf-8"
    key = {b"authorization": "Bearer ríght 世".encode()}
    for path in ("/index.html", "/web/app.js", "/../app.py", "/%2e%2e/app.py", "/app.js/"):
        assert client.get(path).status_code == 401, path
        assert client.get(path, headers=key).status_code == 404, path
    assert client.post("/", headers=key).status_code == 405
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403


def test_every_file_of_the_page_is_asked_for(browser: Browser, echo_server: LiveServer) -> None:
    before = len(echo_server.request_lines)
    opened = browser.page(echo_server.url + "/")
    opened.wait("document.title === 'checkpoint - mimo-vk'")
    opened.close()
    echo_server.wait_metric("requests_running", 0)
    assert {line["path"] for line in echo_server.request_lines[before:]} >= set(pages.files())


# A chat


def test_an_answer_s_markdown_is_shown_and_its_html_is_text(page: Page) -> None:
    shown = answer(page, HOSTILE)
    assert '<img src=x onerror="window.hacked=1"> <script>window.hacked=2</script>' in shown
    inside = ".assistant .text "
    assert page.texts(inside + "h2 em") == ["title"]
    assert page.texts(inside + "strong") == ["bold", "both", "2"]
    assert page.texts(inside + "p code") == ["<i>code</i>"]
    assert page.texts(inside + "pre code") == ['<p onclick="hacked=5">']
    assert page.texts(inside + "li li") == ["nested"]
    assert page.texts(inside + "ol[start='3'] li") == ["third", "fourth"]
    assert page.texts(inside + "blockquote p") == ["quoted"]
    assert page.texts(inside + "td.right strong") == ["2"]
    assert "snake_case_name, 2*3*4 and both" in shown
    assert page.evaluate(f"[...document.querySelectorAll('{inside} a')].map((a) => a.href + ' ' + a.rel)") == [
        f"{address} noopener noreferrer"
        for address in ("https://example.com/a_(b)", "https://example.com/p.png", "https://example.org/x")
    ]
    assert page.evaluate("document.querySelectorAll('#turns :is(img, script, i, b, iframe)').length") == 0
    assert page.evaluate("typeof window.hacked") == "undefined"


def test_markup_can_not_be_made_from_text_at_all(page: Page) -> None:
    """The policy has the browser refuse what the page's own code never does."""
    tried = "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'made'; } catch (e) { return e.name; } })()"
    assert page.evaluate(tried) == "TypeError"
    assert page.complaints.pop().startswith("This document requires 'TrustedHTML' assignment")


def test_thinking_is_folded(page: Page) -> None:
    page.click("#think")
    assert answer(page, "<think>deep\nthought</think>Yes") == "Yes"
    assert page.text(".assistant summary") == "Thought"
    assert page.evaluate("document.querySelector('.assistant details').open") is False
    page.click(".assistant summary")
    assert page.text(".assistant .thoughts") == "deep\nthought"


def test_a_second_turn_extends_the_first_and_a_new_chat_forgets(page: Page) -> None:
    page.evaluate(COUNT_CALLS)
    assert answer(page, "One 🙂") == "One 🙂"
    page.click("#message")
    page.type("Two")
    page.press("Enter", shift=True)
    page.type("lines")
    page.press("Enter")
    page.wait("document.querySelectorAll('.assistant').length === 2")
    page.wait(ANSWERED)
    assert page.text(".assistant:last-child .text") == "Two\nlines"
    read, known = re.findall(r"(\d+) tokens read \((\d+) of them known\)", page.text(".assistant:last-child .note"))[0]
    assert 0 < int(known) < int(read)
    roles = [message["role"] for message in json.loads(page.evaluate("bodies.at(-1)"))["messages"]]
    assert roles == ["user", "assistant", "user"]
    page.click("#new-chat")
    assert page.texts(".turn") == []
    assert answer(page, "Three") == "Three"
    assert len(json.loads(page.evaluate("bodies.at(-1)"))["messages"]) == 1


@pytest.mark.parametrize("how", ["button", "key"])
def test_an_answer_is_stopped_and_kept_as_far_as_it_came(page: Page, echo_server: LiveServer, how: str) -> None:
    ask(page, "SLOW " + "word " * 300)
    page.wait("document.querySelector('.assistant .text').innerText.includes('word word')")
    if how == "button":
        page.click("#stop")
    else:
        page.press("Escape")
    page.wait(ANSWERED)
    assert page.text(".assistant .note") == "stopped"
    echo_server.wait_metric("requests_running", 0)
    assert page.evaluate("document.activeElement.id") == "message"
    assert answer(page, "Go on") == "Go on"
    assert page.texts(".assistant .text")[0].startswith("SLOW word word")


def test_a_refused_message_stays_to_be_mended(page: Page) -> None:
    ask(page, "word " * 3000)
    page.wait("!document.querySelector('#chat-error').hidden")
    assert "are more than the context of 2048 tokens" in page.text("#chat-error")
    assert page.evaluate("document.querySelector('#message').value.length") == 5 * 3000 - 1
    assert page.texts(".turn") == []
    page.complaints.clear()  # the browser notes the 400 itself
    page.evaluate("document.querySelector('#message').value = ''")
    assert answer(page, "Short") == "Short"
    assert page.text("#chat-error") == ""


def test_a_picture_is_sent_in_openai_s_form_and_a_refusal_is_shown(page: Page, tmp_path: Path) -> None:
    page.evaluate(COUNT_CALLS)
    refused = {"error": {"message": "messages[0].content[0]: no pictures here", "code": "unsupported_content"}}
    page.evaluate(f"window.answer = () => Response.json({json.dumps(refused)}, {{status: 400}})")
    picture = tmp_path / "dot.png"
    picture.write_bytes(png())
    page.choose_file("#file", picture)
    page.wait("document.querySelector('#pictures img')?.naturalWidth === 2")
    ask(page, "What is this?")
    page.wait("!document.querySelector('#chat-error').hidden")
    assert page.text("#chat-error") == "messages[0].content[0]: no pictures here"
    first, second = json.loads(page.evaluate("bodies.at(-1)"))["messages"][0]["content"]
    assert second == {"type": "text", "text": "What is this?"}
    assert first["type"] == "image_url" and first["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert len(page.texts("#pictures li")) == 1
    assert page.evaluate("document.querySelector('#message').value") == "What is this?"
    page.click("#pictures button")
    assert page.texts("#pictures li") == []


def test_what_is_dropped_anywhere_is_attached_and_text_goes_where_it_falls(page: Page, tmp_path: Path) -> None:
    assert answer(page, "Stay") == "Stay"
    picture = tmp_path / "dot.png"
    picture.write_bytes(png())
    page.drop("#turns", files=[picture])
    page.wait("document.querySelector('#pictures img')?.naturalWidth === 2")
    page.drop("#composer", files=[picture])
    page.wait("document.querySelectorAll('#pictures li').length === 2")
    page.drop("#message", text="dragged")
    page.wait("document.querySelector('#message').value === 'dragged'")
    page.click("#decide-tab")
    page.drop("#decide", files=[picture])
    page.click("#chat-tab")
    assert page.text(".assistant .text") == "Stay", "the page is still there"
    assert len(page.texts("#pictures li")) == 2


def png() -> bytes:
    """A picture of 2 by 1 pixels, red and blue."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 2, 1, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0\xff\0\0\0\0\xff")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_a_question_about_a_chat_with_a_picture_carries_the_picture(page: Page, tmp_path: Path) -> None:
    page.evaluate(COUNT_CALLS)
    said = ['{"choices": [{"delta": {"content": "A dot."}, "finish_reason": "stop"}]}', "[DONE]"]
    stream = "".join(f"data: {line}\n\n" for line in said)
    page.evaluate(f"window.answer = () => new Response({json.dumps(stream)})")
    picture = tmp_path / "dot.png"
    picture.write_bytes(png())
    page.choose_file("#file", picture)
    page.wait("document.querySelector('#pictures img')")
    assert answer(page, "What is this?") == "A dot."
    page.click("#decide-tab")
    page.click("#use-chat")
    page.evaluate("window.answer = () => Response.json({answers: {question: {type: 'noul', noul: 1}}, usage: {}})")
    assert decide(page, answers="yes\nno") == [["yes", "100.0%"], ["no", "0.0%"]]
    body = json.loads(page.evaluate("bodies.at(-1)"))
    [(name, asset)] = body["assets"].items()
    assert body["state"][0] == {"role": "user", "content": name + "What is this?"}
    assert asset == {"type": "image", "format": "png", "data_base64": base64.b64encode(png()).decode()}


def test_options_are_sent(page: Page) -> None:
    page.evaluate(COUNT_CALLS)
    page.click("#options-button")
    page.click("#system")
    page.type("Be brief.")
    page.click("#temperature")
    page.type("0.5")
    answer(page, "Hi")
    body = json.loads(page.evaluate("bodies.at(-1)"))
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (body["temperature"], body["enable_thinking"]) == (0.5, False)


# Closed questions


def decide(page: Page, **fields: str) -> list[list[str]]:
    """Fill in the fields and ask; each bar's label and share."""
    for name, text in fields.items():
        page.evaluate(f"document.querySelector('#{name}').value = ''")
        page.click(f"#{name}")
        page.type(text)
    page.click("#decide-send")
    page.wait("document.querySelector('#result').innerText || !document.querySelector('#decide-error').hidden")
    return [line.split("\n") for line in page.texts(".bars li")]


def test_closed_questions_have_the_api_s_numbers(browser: Browser, tiny_server: LiveServer) -> None:
    def api(question: dict[str, Any]) -> dict[str, Any]:
        response = tiny_server.post("/v1/systemone", state="The sky is blue.", questions={"q": question})
        return dict(response.json()["answers"]["q"])

    def percent(share: float) -> str:
        return f"{100 * share:.1f}%"

    page = browser.page(tiny_server.url + "/")
    page.wait("document.title === 'checkpoint - mimo-vk'")
    page.click("#decide-tab")
    found = decide(page, state="The sky is blue.", question="Which?", answers="red\nblue")
    wanted = api({"type": "choice", "instructions": "Which?", "criteria": {"red": None, "blue": None}})
    shares = sorted(wanted["probabilities"].items(), key=lambda item: -item[1])
    assert found == [[label, percent(share)] for label, share in shares]
    assert f"confidence {percent(wanted['confidence'])}" in page.text("#result .note")
    page.click("[value=noul]")
    assert page.evaluate("document.querySelector('#answers').offsetParent") is None
    yes = api({"type": "noul", "instructions": "Which?"})["noul"]
    assert dict(decide(page)) == {"yes": percent(yes), "no": percent(1 - yes)}
    page.click("[value=score]")
    wanted = api({"type": "score", "instructions": "Which?", "criteria": ["none", "some", "all"]})
    assert decide(page, answers="none\nsome\nall") == [
        [f"{i}: {level}", percent(wanted["probabilities"][str(i)])] for i, level in enumerate(("none", "some", "all"))
    ]
    assert f"expected level {wanted['score']:.2f}" in page.text("#result .note")
    assert page.complaints == []
    page.close()


def test_a_question_about_the_chat_and_a_refused_one(page: Page) -> None:
    page.evaluate(COUNT_CALLS)
    answer(page, "Hello")
    page.click("#decide-tab")
    page.click("#use-chat")
    assert [share for _, share in decide(page, answers="yes\nno")] == ["50.0%", "50.0%"]
    turns = json.loads(page.evaluate("bodies.at(-1)"))["state"]
    assert turns == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
    assert decide(page, answers=" ") == []
    assert page.text("#decide-error").endswith("criteria: expected at least 1 option, found none")
    page.complaints.clear()  # the browser notes the 422 itself


# The key, and a model that is not there yet


def test_the_key_is_asked_for_and_kept_nowhere(browser: Browser, locked_server: LiveServer) -> None:
    page = browser.page(locked_server.url + "/")
    for key, message in (("wrong", "no key was given"), ("ríght 世", "the key is wrong")):
        page.wait(f"document.querySelector('#key-message').innerText.includes({json.dumps(message)})")
        page.wait("document.activeElement.id === 'key'")
        page.type(key)
        page.press("Enter")
    page.wait("document.title === 'checkpoint - mimo-vk'")
    assert answer(page, "Hello") == "Hello"
    kept = "[localStorage.length, sessionStorage.length, document.cookie, document.querySelector('#key').value]"
    assert page.evaluate(kept) == [0, 0, "", ""]
    assert all("401" in complaint for complaint in page.complaints)
    page.close()


def test_a_model_that_is_being_loaded_is_waited_for(browser: Browser, echo_server: LiveServer) -> None:
    loading = {"error": {"message": "the model is being loaded", "code": "unavailable"}}
    stub = f"window.answer = () => window.loaded ? null : Response.json({json.dumps(loading)}, {{status: 503}});"
    page = browser.page(echo_server.url + "/", COUNT_CALLS + stub)
    page.wait("document.querySelector('#model').innerText === 'the model is being loaded…'")
    page.evaluate("window.loaded = true")
    page.wait("document.querySelector('#model').innerText === 'checkpoint'")
    page.close()


def test_a_server_that_is_gone_is_said_so(page: Page) -> None:
    page.offline()
    ask(page, "Hello?")
    page.wait("!document.querySelector('#chat-error').hidden")
    assert page.text("#chat-error") == "The server can't be reached."
    page.complaints.clear()  # the browser notes it itself


# Eyes, ears, keys


def test_every_control_has_a_name_and_the_keyboard_reaches_it(page: Page) -> None:
    answer(page, "[link](https://example.com) `code`")
    page.click("#options-button")
    assert page.nameless() == []
    reached = set()
    for _ in range(25):
        page.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert reached >= {"chat-tab", "turns", "A", "message", "attach", "think", "options-button", "new-chat", "send"}
    page.evaluate("document.querySelector('#chat-tab').focus()")
    page.press("ArrowRight")
    assert page.evaluate("[document.activeElement.id, document.querySelector('#decide').hidden]") == [
        "decide-tab",
        False,
    ]
    assert page.nameless() == []
    assert page.evaluate("document.querySelector('#chat-tab').tabIndex") == -1


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_its_background(page: Page, dark: bool) -> None:
    """The contrast that WCAG 2.2 asks for (4.5 to 1), by its formula."""
    page.dark(dark)
    answer(page, "Hello")
    back = colour(page, "body", "backgroundColor")
    assert (luminance(back) < 0.2) == dark
    for selector in ("body", ".assistant .text", ".assistant .note", "#model"):
        assert contrast(colour(page, selector, "color"), back) >= 4.5, selector
    for selector in (".user", "#send", "#new-chat"):
        own = colour(page, selector, "backgroundColor")
        assert contrast(colour(page, selector, "color"), own) >= 4.5, selector


def colour(page: Page, selector: str, name: str) -> list[int]:
    found = page.evaluate(f"getComputedStyle(document.querySelector({json.dumps(selector)})).{name}")
    return [int(part) for part in re.findall(r"\d+", found)[:3]]


def luminance(rgb: list[int]) -> float:
    shares = [value / 255 for value in rgb]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[int], other: list[int]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_nothing_is_wider_than_a_phone(page: Page) -> None:
    page.resize(360, 640)
    answer(page, "w" * 400 + " ```\n" + "x " * 200 + "\n```")
    for tab in ("#chat-tab", "#decide-tab"):
        page.click(tab)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


# The command


def test_web_opens_the_page_in_a_browser(tiny_checkpoint: Path, tmp_path: Path) -> None:
    opened, script = tmp_path / "opened", tmp_path / "browser"
    script.write_text(f'#!/bin/sh\nprintf %s "$1" >{opened}.new && mv {opened}.new {opened}\n')
    script.chmod(0o755)
    with serving(tiny_checkpoint, env={"BROWSER": str(script)}, program="tests.echo_model", command="web") as server:
        end = time.monotonic() + 30
        while not opened.exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        assert httpx.get(opened.read_text()).text == (Path(pages.__file__).parent / "web/index.html").read_text()
        assert opened.read_text() == server.url

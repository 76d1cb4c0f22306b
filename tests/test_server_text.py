"""From generated ids to what is returned, without a server: any cut into pieces gives the same text."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_vk.server.chooser import Chooser
from mimo_vk.server.completion_text import AnswerText, CompletionText
from mimo_vk.server.logprobs import Scored, TokenLogprob, best, score, token_text
from mimo_vk.server.messages import plain_messages
from mimo_vk.server.schemas import AssistantMessage, CalledFunction, ChatRequest, MessageToolCall, ToolMessage, parse
from mimo_vk.server.stop_strings import StopFilter
from mimo_vk.server.turns import Turns
from mimo_vk.tokenizer import Tokenizer
from tests.small_tokenizer import small_tokenizer

TOKENIZER = small_tokenizer()
BYTE_IDS = {data[0]: i for i in reversed(range(TOKENIZER.size)) if len(data := TOKENIZER.token_bytes(i)) == 1}
LETTERS = st.text(alphabet="ab🙂", max_size=14)


def cut(text: str, sizes: list[int]) -> list[str]:
    """The text in pieces of these sizes, the last one taking what is left."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


def first_stop(text: str, stops: list[str]) -> int:
    """Where the stop string that is complete first begins, by looking at every prefix; the length if there is none."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return len(text)


@given(LETTERS, st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=4), max_size=4), st.lists(st.integers(0, 3)))
def test_stop_strings_are_found_across_any_pieces(text: str, stops: list[str], sizes: list[int]) -> None:
    found = StopFilter(stops)
    shown = ""
    for piece in cut(text, sizes):
        shown += found.push(piece)
        assert text.startswith(shown) and len(shown) <= first_stop(text, stops)
    shown += found.flush()
    assert shown == text[: first_stop(text, stops)]
    assert found.stopped == any(stop in text for stop in stops) and found.released == len(shown)


def test_what_cannot_become_a_stop_string_is_not_held_back() -> None:
    found = StopFilter(["END"])
    assert [found.push(piece) for piece in ("a", "bE", "N", "x", "EN", "D")] == ["a", "b", "", "ENx", "", ""]


ANSWER = st.lists(
    st.sampled_from(["<think>", "</think>", "<tool_call>", "<function=f>", "<parameter=k>", "1", "</parameter>",
                     "</function>", "</tool_call>", "<|vision_start|>", "word ", "é🙂", "\n", "<", "stop", "st"]),
    max_size=12,
)  # fmt: skip


def entry(token: int) -> TokenLogprob:
    data = TOKENIZER.token_bytes(token)
    return TokenLogprob(Scored(token_text(data), data, -1.0), ())


@settings(deadline=None)
@given(ANSWER, st.booleans(), st.integers(0, 12))
def test_deltas_join_to_the_same_message_with_and_without_stops(parts: list[str], single: bool, limit: int) -> None:
    ids = TOKENIZER.encode("".join(parts), special=True)[: limit or None]
    text = AnswerText(TOKENIZER, None, ["stop"], single)
    deltas = []
    for token in ids:
        deltas.append(text.push(token, partial(entry, token)))
        if text.complete:
            break
    deltas.append(text.finish("stop"))
    content = "".join(delta.content for delta in deltas)
    assert "stop" not in content
    calls = [call for delta in deltas for call in delta.calls]
    assert [call.index for call in calls] == list(range(len(calls))) and (not single or len(calls) <= 1)
    assert sum(delta.token for delta in deltas) <= len(ids)
    scores = [one.token for delta in deltas for one in (*delta.logprobs, *delta.reasoning_logprobs)]
    assert all(score.text not in ("<think>", "</think>", "<tool_call>", "</tool_call>") for score in scores)


def message_of(ids: list[int], stops: list[str]) -> tuple[str, str, list[dict[str, Any]], bool]:
    text = AnswerText(TOKENIZER, None, stops)
    deltas = []
    for token in ids:
        deltas.append(text.push(token, None))
        if text.complete:
            break
    deltas.append(text.finish("stop"))
    calls = [vars(call) for delta in deltas for call in delta.calls]
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), calls, text.complete


@settings(deadline=None)
@given(ANSWER, st.sampled_from([[], ["stop"], ["st", "1\n", "🙂"]]))
def test_however_the_text_was_cut_into_tokens_the_message_is_the_same(parts: list[str], stops: list[str]) -> None:
    tags = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<|vision_start|>"}
    long = [token for part in parts for token in TOKENIZER.encode(part, special=True)]
    short = [
        token
        for part in parts
        for piece in ([part] if part in tags else part.encode())
        for token in (TOKENIZER.encode(piece, special=True) if isinstance(piece, str) else [BYTE_IDS[piece]])
    ]
    assert message_of(long, stops) == message_of(short, stops)


def test_a_call_that_was_not_offered_is_text() -> None:
    spelt = [token for char in "a<tool_call><function=f></function></tool_call>" for token in TOKENIZER.encode(char)]
    for may_call, content, calls in ((True, "a", 1), (False, TOKENIZER.decode(spelt), 0)):
        text = AnswerText(TOKENIZER, None, [], may_call=may_call)
        deltas = [text.push(token, None) for token in spelt] + [text.finish("stop")]
        assert ("".join(delta.content for delta in deltas), text.calls) == (content, calls)


def test_an_answers_entries_come_with_their_text() -> None:
    ids = TOKENIZER.encode("<think>mull it</think>say it", special=True)
    text = AnswerText(TOKENIZER, None, [])
    content: list[bytes] = []
    thought: list[bytes] = []
    for token in ids:
        delta = text.push(token, partial(entry, token))
        content += [one.token.bytes for one in delta.logprobs]
        thought += [one.token.bytes for one in delta.reasoning_logprobs]
    last = text.finish("stop")
    content += [one.token.bytes for one in last.logprobs]
    assert (b"".join(thought), b"".join(content)) == (b"mull it", b"say it")
    assert text.reasoning_tokens == len(thought) + 2  # with the two tags


@given(st.lists(st.integers(0, TOKENIZER.size - 1), max_size=20), st.integers(0, 20), st.sampled_from([[], ["e"]]))
def test_offsets_point_at_the_tokens_text(ids: list[int], prompt: int, stops: list[str]) -> None:
    text = CompletionText(TOKENIZER, stops)
    pieces = [text.echo(token, entry(token)) for token in ids[:prompt]]
    for token in ids[prompt:]:
        pieces.append(text.push(token, entry(token)))
        if text.stopped:
            break
    pieces.append(text.finish())
    whole = "".join(piece.text for piece in pieces)
    scores = [one for piece in pieces for one in piece.logprobs]
    assert len(scores) == len(ids) or text.stopped
    for offset, one in scores:
        inside = one.token.bytes.decode("utf-8", "ignore") == one.token.text
        assert not inside or whole[offset:].startswith(one.token.text) or text.stopped
    if not stops:
        assert whole == TOKENIZER.decode(ids, keep_special=True)


def test_token_text() -> None:
    assert token_text("é".encode()) == "é"
    assert token_text(b"\xf0\x9f") == "bytes:\\xf0\\x9f"


def test_the_likeliest_ids_and_the_tokens_own() -> None:
    values = np.array([0.5, 2, 1, 2, -np.inf], np.float32)
    assert best(values, 3) == [1, 3, 2] and best(values, 0) == [] and best(values, 9) == [1, 3, 2, 0, 4]
    found = score(values, 0, 2, 5, TOKENIZER)
    assert [one.bytes for one in found.top] == [TOKENIZER.token_bytes(i) for i in (1, 3, 0)]
    total = sum(np.exp(np.array([0.5, 2, 1, 2])))
    assert found.token.logprob == pytest.approx(0.5 - np.log(total), abs=1e-12)
    assert score(values, 4, 1, 5, TOKENIZER).token.logprob is None  # minus infinity is no JSON number


def chooser(*names: str, think: bool = False, forbidden: list[int] | None = None) -> Chooser:
    stops = frozenset({TOKENIZER.control["<|im_end|>"].id})
    return Chooser(
        0, 1, None, tokenizer=TOKENIZER, stop_ids=stops, call_names=names, may_think=think, forbidden=forbidden or ()
    )


def answered(choose: Chooser, wishes: list[str], steps: int) -> str:
    """What comes out where the model's wishes, one token after the other, are these; the last one is repeated."""
    ids = [token for wish in wishes for token in TOKENIZER.encode(wish, special=True)]
    out = []
    for _ in range(steps):
        logits = np.zeros(TOKENIZER.size, np.float32)
        logits[ids[0]] = 9
        out.append(choose.pick(logits, TOKENIZER.size))
        if len(ids) > 1 and out[-1] == ids[0]:
            ids.pop(0)
    return TOKENIZER.decode(out, keep_special=True)


def test_a_named_call_is_forced_and_the_rest_is_free() -> None:
    opening = "<tool_call><function=get_weather>"
    steps = len(TOKENIZER.encode(opening, special=True)) + 3
    assert answered(chooser("get_weather"), ["!"], steps) == opening + "!!!"


def test_the_call_comes_behind_the_reasoning() -> None:
    for wishes, start in (
        (["<think>", "hm", "</think>", "!"], "<think>hm</think>"),
        (["<think>", "hm", "<|im_end|>", "!"], "<think>hm</think>"),
        (["<think>", "<tool_call>", "!"], "<think>"),
        (["!"], ""),
        (["<|im_end|>", "!"], ""),
    ):
        assert answered(chooser("f", think=True), wishes, 12).startswith(start + "<tool_call><function=f>")


@pytest.mark.parametrize("wish", ["get_weather>", "get_time>", "get>", "zzz"])
def test_one_of_the_names_is_written_whole(wish: str) -> None:
    names = ("get_weather", "get_time", "get")
    text = answered(chooser(*names), ["<tool_call><function=", wish], 40)
    written = text.removeprefix("<tool_call><function=").partition(">")[0]
    assert written in names and (wish == "zzz" or written + ">" == wish)


def test_forbidden_ids_are_never_chosen() -> None:
    token = TOKENIZER.control["<tool_call>"].id
    logits = np.zeros(TOKENIZER.size, np.float32)
    logits[token] = 50
    choose = chooser(forbidden=[token])
    assert choose.pick(logits, TOKENIZER.size) != token
    assert choose.logits is logits and logits[token] == 50  # log-probabilities are of the raw logits


def turns() -> tuple[Turns, Tokenizer]:
    return Turns(TOKENIZER, ["<|im_end|>", "<|endoftext|>"]), TOKENIZER


def test_an_answers_ids_come_back_as_they_were_generated() -> None:
    memory, tokenizer = turns()
    prompt = "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"
    read = tokenizer.encode(prompt, special=True)
    split = [token for char in "hello <b>" for token in tokenizer.encode(char)]
    assert split != tokenizer.encode("hello <b>")
    memory.remember(prompt, read, split)
    shown = tokenizer.escapes.escape("hello <b>")  # as the template writes it
    tail = "<|im_end|><|im_start|>user\nmore<|im_end|>"
    assert memory.prompt_ids(prompt + shown + tail) == read + split + tokenizer.encode(tail, special=True)
    for other in (prompt + shown + "!" + tail, prompt + shown, "x" + prompt + shown + tail):
        assert memory.prompt_ids(other) == tokenizer.encode_rendered(other)


def test_the_longest_remembered_beginning_wins_and_few_are_kept() -> None:
    memory = Turns(TOKENIZER, ["<|im_end|>"], kept=2)
    first = "<|im_start|>a\n"
    second = first + "x<|im_end|><|im_start|>b\n"
    memory.remember(first, [1], TOKENIZER.encode("x"))
    memory.remember(second, [1, 2, 3], TOKENIZER.encode("y"))
    tail = TOKENIZER.encode("<|im_end|>", special=True)
    assert memory.prompt_ids(second + "y<|im_end|>") == [1, 2, 3, *TOKENIZER.encode("y"), *tail]
    assert memory.prompt_ids(first + "x<|im_end|>") == [1, *TOKENIZER.encode("x"), *tail]
    memory.remember("<|im_start|>c\n", [9], [])
    assert memory.prompt_ids(second + "y<|im_end|>")[:3] != [1, 2, 3]  # the least recently used


def test_results_stand_in_the_order_of_their_calls() -> None:
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in "abc"]
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": None, "tool_calls": calls}]
    messages += [{"role": "tool", "tool_call_id": name, "content": name} for name in "cab"]
    wanted = parse(ChatRequest, {"messages": messages})
    assert [message["content"] for message in plain_messages(wanted.messages)] == ["", "a", "b", "c"]


class Counted(str):
    """Counts how often one is compared with another."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)


def test_results_find_their_calls_without_a_search() -> None:
    """A body of 1 MB can hold 20,000 of each: a look at every call for every result would take half a minute."""
    count = 500
    calls = [
        MessageToolCall.model_construct(id=Counted(i), function=CalledFunction(name="f"), type="function")
        for i in range(count)
    ]
    answers = [ToolMessage.model_construct(role="tool", content=str(i), tool_call_id=Counted(i)) for i in range(count)]
    asked = AssistantMessage.model_construct(role="assistant", tool_calls=calls)
    _, *plain = plain_messages([asked, *reversed(answers)])
    assert [message["content"] for message in plain] == [str(i) for i in range(count)]
    assert Counted.compared <= 4 * count

"""Turns on a session: what is read again and what isn't, partial answers, failures, a full context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mimo_vk.conversation import ContextFull, Conversation, text_tools
from mimo_vk.errors import CheckpointError, ReadError
from mimo_vk.sampling import Sampler
from mimo_vk.stream import Content, Event, Reasoning, ToolCall
from tests.engines import open_engine
from tests.fake_engine import FAIL, PICTURE_TOOLS, FakeEngine, FakeSession


def start(answers: list[str], **options: Any) -> tuple[Conversation, FakeSession, FakeEngine]:
    engine = FakeEngine(answers, **options)
    session = engine.session()
    conversation = Conversation(
        session,
        engine.tokenizer,
        engine.template,
        ctx=engine.ctx,
        stop_ids=engine.stop_ids,
        sampler=Sampler(),
        picture_tools=lambda: PICTURE_TOOLS,
    )
    return conversation, session, engine


def ask(conversation: Conversation, text: str, think: bool = False, **options: Any) -> list[Event]:
    return list(conversation.ask(text, think=think, **options))


def read_text(engine: FakeEngine, ids: list[int]) -> str:
    return engine.tokenizer.decode(ids, keep_special=True)


OFF = "<|im_start|>assistant\n<think></think>"


def test_a_turn_extends_what_the_session_holds() -> None:
    conversation, session, engine = start(["Fine, thanks.", "Bye!"])
    assert ask(conversation, "How are you?")[0] == Content("F")
    ask(conversation, "Bye")
    first = f"<|im_start|>user\nHow are you?<|im_end|>{OFF}"
    assert read_text(engine, session.prompts[0]) == first
    whole = f"{first}Fine, thanks.<|im_end|><|im_start|>user\nBye<|im_end|>{OFF}"
    assert read_text(engine, session.prompts[1]) == whole
    assert session.reused[1] == len(session.prompts[0]) + len(engine.tokenizer.encode("Fine, thanks."))
    assert [message["content"] for message in conversation.messages] == ["How are you?", "Fine, thanks.", "Bye", "Bye!"]


def test_ids_stay_as_they_were_generated() -> None:
    """The answer's own tokens, even where the text would be split otherwise."""
    conversation, session, engine = start(["unused", "x"])
    spelled = [engine.tokenizer.token_id(char) for char in "quick"]
    assert spelled != engine.tokenizer.encode("quick") and None not in spelled
    engine.tokenizer = _Spelling(engine.tokenizer, spelled)  # type: ignore[assignment]
    ask(conversation, "a")
    ask(conversation, "b")
    before = len(session.prompts[0])
    assert session.prompts[1][before : before + 5] == spelled


class _Spelling:
    def __init__(self, tokenizer: Any, ids: list[Any]) -> None:
        self._ids = ids
        self.decode = tokenizer.decode

    def encode(self, text: str, special: bool = False) -> list[int]:
        return self._ids


def test_thinking_is_kept_and_can_change_between_turns() -> None:
    conversation, session, engine = start(["<think>hm</think>One.", "Two."])
    assert ask(conversation, "1", think=True) == [
        Reasoning("h"),
        Reasoning("m"),
        Content("O"),
        Content("n"),
        Content("e"),
        Content("."),
    ]
    ask(conversation, "2", think=False)
    first = "<|im_start|>user\n1<|im_end|><|im_start|>assistant\n<think>hm</think>One.<|im_end|>"
    assert read_text(engine, session.prompts[1]) == f"{first}<|im_start|>user\n2<|im_end|>{OFF}"
    assert session.reused[1] > len(session.prompts[0])
    assert conversation.messages[1]["reasoning_content"] == "hm"


def test_a_partial_answer_stays_as_far_as_it_came() -> None:
    conversation, session, engine = start(["one two three four", "Yes."])
    count = iter(range(100))
    events = ask(conversation, "Count", cancel=lambda: next(count) >= 2)
    assert conversation.answer is not None and conversation.answer.finish_reason == "cancelled"
    partial = "".join(event.text for event in events if isinstance(event, Content))
    assert "one two three four".startswith(partial) and 0 < len(partial) < 10
    ask(conversation, "Go on")
    assert f"{partial}<|im_end|><|im_start|>user\nGo on" in read_text(engine, session.prompts[1])
    assert session.reused[1] > len(session.prompts[0])


def test_an_answer_left_by_its_reader_is_kept_too() -> None:
    conversation, _, _ = start(["one two three"])
    events = conversation.ask("Count", think=False)
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


def test_a_prompt_that_was_stopped_leaves_no_turn() -> None:
    conversation, session, engine = start(["Hello.", "never", "Again."])
    ask(conversation, "Hi")
    assert ask(conversation, "long", cancel=lambda: True) == []
    assert conversation.answer is not None and conversation.answer.finish_reason == "cancelled"
    engine.answers.pop(0)
    ask(conversation, "short")
    assert "long" not in read_text(engine, session.prompts[2])
    assert len(conversation.messages) == 4


def test_a_failure_leaves_the_conversation_as_it_was() -> None:
    conversation, session, _ = start(["Hello.", FAIL, "Fine."])
    ask(conversation, "Hi")
    with pytest.raises(ReadError, match="byte 12"):
        ask(conversation, "Trouble")
    ask(conversation, "Again")
    assert [message["content"] for message in conversation.messages] == ["Hi", "Hello.", "Again", "Fine."]
    assert len(session.prompts) == 3


def test_a_full_context_is_said_and_can_be_reset() -> None:
    conversation, session, _ = start(["word " * 100, "Fresh."], ctx=60)
    ask(conversation, "Talk")
    assert conversation.answer is not None and conversation.answer.finish_reason == "length"
    assert len(session.prompts[0]) + len(conversation.answer.ids) == 60 == conversation.length
    with pytest.raises(ContextFull, match=r"has \d+ tokens, and the context holds 60"):
        ask(conversation, "More")
    conversation.reset()
    assert ask(conversation, "More")[-1] == Content(".")
    assert conversation.length < 60 and len(conversation.messages) == 2


def test_calls_of_the_model_are_kept_in_the_history() -> None:
    conversation, _, _ = start(["<tool_call><function=f><parameter=a>1</parameter></function></tool_call>", "ok"])
    assert ask(conversation, "x") == [ToolCall(0, "f", {"a": "1"})]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "1"}}}
    assert conversation.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    ask(conversation, "y")


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}" + TURNS,  # what stands first changes with each turn
        TURNS,  # no reasoning in the history
        TURNS + "{% for m in messages %}{{ m.content }}{% endfor %}",  # an answer twice
        "{% if messages | length == 1 %}" + TURNS + "{% else %}{{ messages[0].content.x.y }}{% endif %}",
    ],
)
def test_where_turns_can_not_be_joined_all_is_read_anew(template: str) -> None:
    conversation, session, engine = start(["<think>t</think>abc", "def"], template=template)
    ask(conversation, "1")
    if "x.y" in template:
        with pytest.raises(Exception, match="UndefinedError"):
            ask(conversation, "2")
        return
    ask(conversation, "2")
    expected = engine.template.prompt_ids(engine.tokenizer, conversation.messages[:3], enable_thinking=False)
    assert session.prompts[1] == expected


def test_a_users_control_tokens_stay_text_in_later_turns() -> None:
    conversation, session, engine = start(["a", "b"])
    ask(conversation, "<|im_end|>")
    ask(conversation, "<|im_end|>")
    end = engine.tokenizer.token_id("<|im_end|>")
    assert [prompt.count(end or 0) for prompt in session.prompts] == [1, 3]


def test_a_chat_needs_a_tokenizer_and_a_template(tmp_path: Any) -> None:
    engine = FakeEngine([])
    assert text_tools(engine) == (engine.tokenizer, engine.template)
    engine.model_dir = tmp_path
    engine.template = None  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: missing"):
        text_tools(engine)
    engine.tokenizer = None  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        text_tools(engine)


def test_on_a_real_engine_a_turn_resumes_and_cancelling_keeps_what_came(tiny_checkpoint: Path) -> None:
    with open_engine(tiny_checkpoint, backend="numpy", ctx=120) as engine:
        session = engine.session()
        tokenizer, template = text_tools(engine)
        stops = frozenset(range(engine.vocab_limit, engine.config.vocab_size))  # none that can be sampled
        conversation = Conversation(
            session,
            tokenizer,
            template,
            ctx=120,
            stop_ids=stops,
            sampler=Sampler(1.0, 1.0, 3),
            picture_tools=lambda: engine.picture_tools,
        )

        def enough() -> bool:
            return conversation.answer is not None and len(conversation.answer.ids) >= 4

        list(conversation.ask("Hello", think=False, cancel=enough))
        first = conversation.answer
        assert first is not None and (first.finish_reason, len(first.ids)) == ("cancelled", 4)
        list(conversation.ask("Go on", think=False, cancel=lambda: conversation.answer is not first and enough()))
        second = conversation.answer
        assert second is not None and second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        assert second.prompt_ids[len(first.prompt_ids) :][:4] == first.ids
        assert engine.snapshot_stats().reused_tokens == len(first.prompt_ids) + 3  # the fourth id was not read yet
        cold = engine.session().prompt(second.prompt_ids)
        warm_session = engine.session()
        warm_session.prompt(second.prompt_ids[:-5])
        assert warm_session.prompt(second.prompt_ids).tobytes() == cold.tobytes()

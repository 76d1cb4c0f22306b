"""Write tests/data/chat_template_cases.json: chats as the transformers package renders them.

Run it by hand with an interpreter that has transformers: python tools/make_chat_cases.py
The cases cover what the release's template can do; the tests hold our own rendering to the stored text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter <jetzt> & \"später\": 'ça va' 天気 🙂",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {
                "zip": {"type": ["string", "null"]},
                "city": {"type": "string", "enum": ["Köln", "São Paulo"]},
                "days": {"type": "integer", "default": 1.0},
            },
        },
    },
}
NOTHING = {"type": "function", "function": {"name": "noop", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = {
    "zip": None,
    "city": 'Köln <b>&\n"x"</b>',
    "days": 3,
    "f": 1.0,
    "on": True,
    "list": [1, "zwei", {"k": None}],
    "object": {"ü": "<&>", "a": {"b": 2.5}},
}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOL_CHAT = [
    {"role": "system", "content": "Be brief."},
    user("Weather?"),
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "look it up\n",
        "tool_calls": [call("get_weather", ARGUMENTS)],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": '{"temp": 21, "text": "<sunny>"}'},
    {"role": "assistant", "content": "21 degrees."},
    user("And now?"),
]

CASES: list[tuple[str, dict[str, Any]]] = [
    ("one user turn", {"messages": [user("Hello")]}),
    ("thinking off", {"messages": [user("Hello")], "enable_thinking": False}),
    ("thinking on", {"messages": [user("Hello")], "enable_thinking": True}),
    ("no cue", {"messages": [user("Hello")], "add_generation_prompt": False}),
    ("no cue, thinking off", {"messages": [user("Hello")], "add_generation_prompt": False, "enable_thinking": False}),
    (
        "system and several turns",
        {
            "messages": [
                {"role": "system", "content": "Du bist höflich."},
                user("Erste Frage"),
                {"role": "assistant", "content": "Erste Antwort\n"},
                user("  zweite Frage\n\n"),
                {"role": "assistant", "content": "noch eine", "reasoning_content": "\nso gedacht\n"},
                user("dritte"),
            ],
            "enable_thinking": False,
        },
    ),
    (
        "characters of HTML, JSON and Jinja",
        {"messages": [user("a < b && c > d \"e\" 'f' {{ x }} {% if %} {# y #} \\n \t &lt;")]},
    ),
    ("scripts", {"messages": [user("héllo 你好 こんにちは مرحبا 🙂‍↔️ e\u0301 \u2028 \u00a0")]}),
    ("empty user turn", {"messages": [user("")]}),
    ("content in parts", {"messages": [user([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}])]}),
    (
        "null content",
        {"messages": [user("x"), {"role": "assistant", "content": None, "tool_calls": [call("noop", {})]}]},
    ),
    ("tools declared", {"messages": [user("Weather?")], "tools": [WEATHER, NOTHING]}),
    ("tools beside a system turn", {"messages": TOOL_CHAT[:2], "tools": [NOTHING], "enable_thinking": False}),
    ("tools used", {"messages": TOOL_CHAT, "tools": [WEATHER]}),
    ("tools used, thinking off", {"messages": TOOL_CHAT, "tools": [WEATHER], "enable_thinking": False}),
    (
        "two calls in a turn",
        {
            "messages": [
                user("both"),
                {
                    "role": "assistant",
                    "content": "Well.",
                    "tool_calls": [call("noop", {}), call("get_weather", {"city": "Köln"})],
                },
                {"role": "tool", "content": "1"},
                {"role": "tool", "content": "2"},
            ],
        },
    ),
    ("tools inside a message", {"messages": [{"role": "system", "content": "S", "tools": [NOTHING]}, user("x")]}),
    (
        "a picture",
        {"messages": [user([{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "?"}])]},
    ),
    (
        "an answered chat",
        {"messages": [user("a"), {"role": "assistant", "content": "b"}], "add_generation_prompt": False},
    ),
]


def main() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    tokenizer.chat_template = (DATA / "chat_template.jinja").read_text(encoding="utf-8")
    out = []
    for name, given in CASES:
        options = {"add_generation_prompt": True, **given}
        text = tokenizer.apply_chat_template(options.pop("messages"), tokenize=False, **options)
        out.append({"name": name, **given, "expected": text})
    path = DATA / "chat_template_cases.json"
    path.write_text(json.dumps(out, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(out)} cases")


if __name__ == "__main__":
    main()

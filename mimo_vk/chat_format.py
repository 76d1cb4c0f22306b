"""Messages to a prompt, through the checkpoint's own chat template (Jinja, sandboxed).

The environment is the one that Hugging Face templates are written for: trim_blocks, lstrip_blocks, loop controls,
``raise_exception``, ``strftime_now`` and a ``tojson`` that keeps key order and escapes nothing for HTML. Every string
of the caller's (roles, contents, names, arguments, declarations, keys too) is escaped before the template sees it,
so that control tokens come from the template only: see ``mimo_vk.tokenizer``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mimo_vk.errors import CheckpointError, UsageError
from mimo_vk.tokenizer import Escapes, Tokenizer, lone_surrogate

Message = Mapping[str, Any]


class _Refused(TemplateError):
    """The template's own ``raise_exception``."""


class ChatTemplate:
    """A compiled chat template; ``variables`` are the token texts (bos_token...) that templates may name."""

    def __init__(self, source: str, name: str, variables: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.variables = dict(variables or {})
        self._source = source
        self._compiled: tuple[Escapes, jinja2.Template] | None = None
        _compile(source, name, Escapes(""))  # a broken template is found when it is loaded

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate:
        """``chat_template.jinja``, else ``chat_template`` of tokenizer_config.json. CheckpointError without either."""
        path, config_path = model_dir / "chat_template.jinja", model_dir / "tokenizer_config.json"
        config = _read_config(config_path)
        variables = {key: text for key, value in config.items() if (text := _token_text(key, value)) is not None}
        if path.exists():
            try:
                return cls(path.read_text(encoding="utf-8"), str(path), variables)
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{path}: {_one_line(error)}") from None
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            raise CheckpointError(f"{path}: missing, and {config_path} has no chat_template")
        return cls(source, f"{config_path}: chat_template", variables)

    @property
    def source(self) -> str:
        """The template's text."""
        return self._source

    @cached_property
    def names(self) -> frozenset[str]:
        """The variables that the template reads: any other name has no effect on it."""
        parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(self._source)
        return frozenset(meta.find_undeclared_variables(parsed))

    def render(
        self,
        escapes: Escapes,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, the caller's strings still escaped. variables: more names for the template.

        UsageError names the faulty field, or gives the template's own refusal.
        """
        given = {**(variables or {}), "messages": _checked(messages), "tools": tools}
        if enable_thinking is not None:
            given["enable_thinking"] = enable_thinking
        try:
            context = {**self.variables, **{key: _escaped(value, escapes, key) for key, value in given.items()}}
            context["add_generation_prompt"] = add_generation_prompt
            return self._template(escapes).render(context)
        except UsageError:
            raise
        except _Refused as error:
            raise UsageError(f"the chat template refuses the messages: {_one_line(error)}") from None
        except SecurityError as error:
            raise CheckpointError(f"{self.name}: not allowed in a template: {_one_line(error)}") from None
        except Exception as error:  # a template is a program of the checkpoint's: whatever it raises is its answer
            kind = type(error).__name__
            raise UsageError(f"the chat template fails on the messages: {kind}: {_one_line(error)}") from None

    def prompt_ids(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt's token ids."""
        text = self.render(
            tokenizer.escapes,
            messages,
            tools=tools,
            enable_thinking=enable_thinking,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
        return tokenizer.encode_rendered(text)

    def _template(self, escapes: Escapes) -> jinja2.Template:
        if self._compiled is None or self._compiled[0] is not escapes:
            self._compiled = (escapes, _compile(self._source, self.name, escapes))
        return self._compiled[1]


def _compile(source: str, name: str, escapes: Escapes) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _json_filter(escapes)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"{name}: line {error.lineno}: {_one_line(error)}") from None


def _json_filter(escapes: Escapes) -> Any:
    """``tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)``."""

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        return escapes.ascii_json(text) if ensure_ascii else text

    return tojson


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _checked(messages: Any) -> list[Message]:
    """Messages whose shape the template can be trusted with, tool call arguments as objects."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise UsageError(f"messages: expected a list, found {type(messages).__name__}")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise UsageError(f"{where}: expected an object, found {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise UsageError(f"{where}.role: expected a string, found {type(message.get('role')).__name__}")
    content = message.get("content")
    if not (content is None or isinstance(content, str | list)):
        raise UsageError(f"{where}.content: expected a string, a list of parts or null, found {type(content).__name__}")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping | str):
            raise UsageError(f"{where}.content[{i}]: expected an object, found {type(part).__name__}")
    calls = message.get("tool_calls")
    if calls is None:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, list):
        raise UsageError(f"{where}.tool_calls: expected a list, found {type(calls).__name__}")
    return {**message, "tool_calls": [_checked_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]}


def _checked_call(call: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(call, Mapping):
        raise UsageError(f"{where}: expected an object, found {type(call).__name__}")
    if "function" in call:
        if not isinstance(call["function"], Mapping):
            raise UsageError(f"{where}.function: expected an object, found {type(call['function']).__name__}")
        return {**call, "function": _checked_function(call["function"], f"{where}.function")}
    return call if "custom" in call else _checked_function(call, where)


def _checked_function(function: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if not isinstance(function.get("name"), str):
        raise UsageError(f"{where}.name: expected a string, found {type(function.get('name')).__name__}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed_arguments(arguments, f"{where}.arguments")
    if not (arguments is None or isinstance(arguments, Mapping)):
        raise UsageError(f"{where}.arguments: expected an object, found {type(arguments).__name__}")
    return {**function, "arguments": arguments or {}}


def _parsed_arguments(text: str, where: str) -> Any:
    if not text.strip():  # how some clients write a call without arguments
        return {}
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: expected a JSON object, found {text[:40]!r}: {_one_line(error)}") from None


def _escaped(value: Any, escapes: Escapes, where: str) -> Any:
    """A deep copy with every string, keys included, escaped."""
    if isinstance(value, str):
        if fault := lone_surrogate(value):
            raise UsageError(f"{where}: {fault}")
        return escapes.escape(value)
    if isinstance(value, Mapping):
        return {_escaped(key, escapes, where): _escaped(item, escapes, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item, escapes, f"{where}[{i}]") for i, item in enumerate(value)]
    return value


def _read_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json, or nothing where there is none."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {_one_line(error)}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _token_text(key: str, value: Any) -> str | None:
    """bos_token and its like: a string, or an added token's object."""
    if not key.endswith("_token"):
        return None
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

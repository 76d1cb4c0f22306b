"""A System One request: JSON to a Request, or every fault in it with the place where it stands.

The shape is that of the public client ``typesafe-sdk`` 0.7.5 (its ``_schemas/models.py``), with ``prefix``,
``pin_state`` and ``normalize`` beside it. Faults are worded and located as FastAPI does, which that client reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mimo_vk.errors import ImageError, UsageError
from mimo_vk.image_data import from_base64
from mimo_vk.tokenizer import lone_surrogate

Content = str | Mapping[str, Any] | Sequence[Any]
Where = tuple[str | int, ...]

MAX_QUESTIONS = 64
MAX_OPTIONS = 255
MAX_ASSETS = 1000  # each is looked for in every text
MAX_DEPTH = 64  # of lists and objects within each other
_FIELDS = ("state", "questions", "model", "prefix", "pin_state", "normalize", "assets")
_HARMLESS = ("user", "metadata", "store")
_TYPES = ("noul", "choice", "score")
_MAX_FAULTS = 100  # enough to mend a request by; a hostile one gets no answer larger than itself
_KINDS = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array", dict: "an object"}


@dataclass(frozen=True)
class Fault:
    """One thing wrong: where (the request's part, then keys and indices), what, and a code for programs."""

    loc: Where
    msg: str
    type: str

    def as_dict(self) -> dict[str, Any]:
        return {"loc": list(self.loc), "msg": self.msg, "type": self.type}

    def __str__(self) -> str:
        path = ".".join(str(step) for step in self.loc if step != "body")
        return f"{path}: {self.msg}" if path else self.msg


class InvalidRequest(UsageError):
    """A request that can't be answered, with all that is wrong with it."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = list(faults)
        super().__init__("; ".join(map(str, self.faults)))

    def __reduce__(self) -> tuple[Any, ...]:
        return InvalidRequest, (self.faults,)


@dataclass(frozen=True)
class Option:
    """One possible answer: its key in the reply, the text that is read, and what it means (None: it says so itself)."""

    key: str
    text: str
    description: Content | None = None


@dataclass(frozen=True)
class Question:
    """A closed question. Its options are in the order in which they are asked."""

    type: Literal["noul", "choice", "score"]
    instructions: Content | None
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Request:
    """What to read and what to ask. pin_state None: the state's snapshot is taken where it is of use.

    assets: pictures' files by the placeholder that stands for each in a text.
    """

    state: Content
    questions: Mapping[str, Question]
    model: str | None = None
    prefix: str = ""
    pin_state: bool | None = None
    normalize: Literal["sum", "mean"] = "sum"
    assets: Mapping[str, bytes] = field(default_factory=dict)


def parse_request(body: Any, parts: Mapping[str, bytes] | None = None) -> Request:
    """A decoded JSON body as a Request. parts: of a form, by name, for the assets.

    InvalidRequest holds every fault; null equals absent in optional fields.
    """
    if not isinstance(body, dict):
        raise InvalidRequest([Fault(("body",), f"expected an object, found {_kind(body)}", "model_attributes_type")])
    reader = _Reader()
    questions = reader.questions(body)
    request = Request(
        state=reader.state(body),
        questions=questions,
        model=reader.optional(body, "model", str, "a string"),
        prefix=reader.optional(body, "prefix", str, "a string") or "",
        pin_state=reader.optional(body, "pin_state", bool, "true or false"),
        normalize=reader.normalize(body),
        assets=reader.assets(body, parts or {}),
    )
    for name in request.assets:
        if not any(_holds(text, name) for text in _texts(request)):
            reader.fault(("body", "assets", name), "no text of the request holds this placeholder", "asset_unused")
    reader.known_only(body, (*_FIELDS, *_HARMLESS), ("body",))
    if reader.faults:
        raise InvalidRequest(reader.faults)
    return request


class _Reader:
    """Reads a body's fields, and collects the faults instead of stopping at the first."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def fault(self, loc: Where, msg: str, kind: str) -> None:
        if len(self.faults) < _MAX_FAULTS:
            self.faults.append(Fault(_printable(loc), msg, kind))

    def state(self, body: dict[str, Any]) -> Content:
        if "state" not in body:
            self.fault(("body", "state"), "Field required", "missing")
            return ""
        return self.content(body["state"], ("body", "state")) or ""

    def optional(self, body: dict[str, Any], key: str, kind: type, name: str) -> Any:
        value = body.get(key)
        if value is None:
            return None
        if not isinstance(value, kind):
            self.fault(("body", key), f"expected {name}, found {_kind(value)}", f"{kind.__name__}_type")
            return None
        self.text_faults(value, ("body", key))
        return value

    def normalize(self, body: dict[str, Any]) -> Literal["sum", "mean"]:
        value = body.get("normalize")
        if value is None or value == "sum":
            return "sum"
        if value != "mean":
            self.fault(("body", "normalize"), f'expected "sum" or "mean", found {_shown(value)}', "literal_error")
        return "mean"

    def assets(self, body: dict[str, Any], parts: Mapping[str, bytes]) -> dict[str, bytes]:
        """Pictures' files by placeholder."""
        loc: Where = ("body", "assets")
        found = {} if body.get("assets") is None else body["assets"]
        if not isinstance(found, dict):
            self.fault(loc, f"expected an object of pictures by placeholder, found {_kind(found)}", "dict_type")
            found = {}
        if len(found) > MAX_ASSETS:
            self.fault(loc, f"expected at most {MAX_ASSETS} pictures, found {len(found)}", "too_long")
            return {}
        used = [item.get("part") for item in found.values() if isinstance(item, dict)]
        for name in parts:
            if name not in used:
                self.fault(("body",), f"the form has a part {name[:40]!r} that no asset names", "multipart_invalid")
        read = {name: self.asset(item, name, (*loc, name), parts) for name, item in found.items()}
        return {name: data for name, data in read.items() if data is not None}

    def asset(self, item: Any, name: str, loc: Where, parts: Mapping[str, bytes]) -> bytes | None:
        """A picture's file, from a form's part or from base64; None after a fault."""
        before = len(self.faults)
        self.text_faults(name, loc)
        if not name:
            self.fault(loc, "expected a placeholder, found nothing", "too_short")
        if not isinstance(item, dict):
            self.fault(loc, f"expected an object, found {_kind(item)}", "model_attributes_type")
            return None
        self.known_only(item, ("type", "format", "data_base64", "part"), loc)
        if item.get("type") not in (None, "image"):
            self.fault((*loc, "type"), f'expected "image", found {_shown(item["type"])}', "literal_error")
        for key in ("format", "data_base64", "part"):  # the format is only a name: the content tells what it is
            if not isinstance(item.get(key), str | None):
                self.fault((*loc, key), f"expected a string, found {_kind(item[key])}", "string_type")
        if len(self.faults) > before:
            return None
        return self.asset_data(item, loc, parts)

    def asset_data(self, item: dict[str, Any], loc: Where, parts: Mapping[str, bytes]) -> bytes | None:
        part, text = item.get("part"), item.get("data_base64")
        if part is not None:
            if part not in parts:
                self.fault((*loc, "part"), f"the request has no part named {_shown(part)}", "value_error")
            return parts.get(part)
        if text is None:
            self.fault(loc, "Field required: data_base64 or part", "missing")
            return None
        try:
            return from_base64(text)
        except ImageError as error:
            self.fault((*loc, "data_base64"), str(error), "value_error")
            return None

    def known_only(self, found: Mapping[str, Any], known: Sequence[str], loc: Where) -> None:
        for key in found:
            if key not in known:
                self.fault((*loc, key), f"unknown field; known are {', '.join(known)}", "extra_forbidden")

    def questions(self, body: dict[str, Any]) -> dict[str, Question]:
        loc: Where = ("body", "questions")
        if "questions" not in body:
            self.fault(loc, "Field required", "missing")
            return {}
        found = body["questions"]
        if not isinstance(found, dict):
            self.fault(loc, f"expected an object of questions by id, found {_kind(found)}", "dict_type")
            return {}
        self.count(len(found), MAX_QUESTIONS, "question", loc)
        questions = {}
        for name, item in found.items():
            self.text_faults(name, loc)
            question = self.question(item, (*loc, name))
            if question is not None:
                questions[name] = question
        return questions

    def count(self, found: int, most: int, name: str, loc: Where) -> None:
        if found == 0:
            self.fault(loc, f"expected at least 1 {name}, found none", "too_short")
        if found > most:
            self.fault(loc, f"expected at most {most} {name}s, found {found}", "too_long")

    def question(self, item: Any, loc: Where) -> Question | None:
        if not isinstance(item, dict):
            self.fault(loc, f"expected an object, found {_kind(item)}", "model_attributes_type")
            return None
        kind = item.get("type")
        if kind == "box":
            self.fault((*loc, "type"), "box questions are not supported by this server", "not_supported")
            return None
        if not isinstance(kind, str) or kind not in _TYPES:
            names = ", ".join(_TYPES)
            if "type" in item:
                self.fault((*loc, "type"), f"expected one of {names}, found {_shown(kind)}", "union_tag_invalid")
            else:
                self.fault((*loc, "type"), f"Field required: one of {names}", "union_tag_not_found")
            return None
        loc = (*loc, kind)
        self.known_only(item, ("type", "instructions", "criteria"), loc)
        instructions = item.get("instructions")
        if instructions is not None:
            instructions = self.content(instructions, (*loc, "instructions"))
        read = {"noul": self.noul_options, "choice": self.choice_options, "score": self.score_options}[kind]
        if item.get("criteria") is None and kind != "noul":
            self.fault((*loc, "criteria"), "Field required", "missing")
            return None
        return Question(kind, instructions, tuple(read(item.get("criteria"), (*loc, "criteria"))))  # type: ignore[arg-type]

    def noul_options(self, criteria: Any, loc: Where) -> Iterator[Option]:
        criteria = {} if criteria is None else criteria
        if not isinstance(criteria, dict):
            self.fault(loc, f"expected an object with true and false, found {_kind(criteria)}", "model_attributes_type")
            criteria = {}
        self.known_only(criteria, ("true", "false"), loc)
        for key, text in (("true", "yes"), ("false", "no")):
            yield Option(key, text, self.description(criteria.get(key), (*loc, key)))

    def choice_options(self, criteria: Any, loc: Where) -> Iterator[Option]:
        if not isinstance(criteria, dict):
            self.fault(loc, f"expected an object of descriptions by label, found {_kind(criteria)}", "dict_type")
            return
        self.count(len(criteria), MAX_OPTIONS, "option", loc)
        for label, description in criteria.items():
            self.text_faults(label, loc)
            yield Option(label, label, self.description(description, (*loc, label)))

    def score_options(self, criteria: Any, loc: Where) -> Iterator[Option]:
        if not isinstance(criteria, list):
            self.fault(loc, f"expected an array of level descriptions, found {_kind(criteria)}", "list_type")
            return
        self.count(len(criteria), MAX_OPTIONS, "level", loc)
        for i, level in enumerate(criteria):
            yield Option(str(i), str(i + 1), self.content(level, (*loc, i)))

    def description(self, value: Any, loc: Where) -> Content | None:
        return None if value is None else self.content(value, loc)

    def content(self, value: Any, loc: Where) -> Content | None:
        """Text, an object or an array, all of it sound."""
        if not isinstance(value, str | dict | list):
            self.fault(loc, f"expected text, an object or an array, found {_kind(value)}", "content_type")
            return None
        self.text_faults(value, loc)
        return value

    def text_faults(self, value: Any, loc: Where) -> None:
        """Whatever in a JSON value has no UTF-8 or no JSON. A loop, since a body may be nested deeply."""
        waiting: list[tuple[Any, Where]] = [(value, loc)]
        while waiting:
            value, where = waiting.pop()
            if isinstance(value, str):
                if fault := lone_surrogate(value):
                    self.fault(where, fault, "string_unicode")
            elif isinstance(value, float) and not math.isfinite(value):
                self.fault(where, "a number out of range", "finite_number")
            elif isinstance(value, dict | list):
                if len(where) - len(loc) >= MAX_DEPTH:
                    self.fault(loc, f"nested more than {MAX_DEPTH} deep", "too_deep")
                    return
                items = value.items() if isinstance(value, dict) else enumerate(value)
                found = [(item, (*where, key)) for key, item in items]
                keys = [(key, where) for key in value] if isinstance(value, dict) else []
                waiting += reversed(keys + found)


def _holds(content: Any, placeholder: str) -> bool:
    """Whether a string in a JSON value holds the placeholder."""
    waiting: list[Any] = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            if placeholder in value:
                return True
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, Sequence):
            waiting += value
    return False


def _texts(request: Request) -> Iterator[Content | None]:
    """Where placeholders count."""
    yield request.state
    for question in request.questions.values():
        yield question.instructions
        yield from (option.description for option in question.options)


def _printable(where: Where) -> Where:
    """A place that can itself be sent as JSON in UTF-8."""
    return tuple(step.encode("utf-8", "replace").decode() if isinstance(step, str) else step for step in where)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return _KINDS[type(value)]


def _shown(value: Any) -> str:
    """A short string as it is, of anything else what it is."""
    if isinstance(value, str) and len(value) <= 40 and not lone_surrogate(value):
        return f'"{value}"'
    return _kind(value)

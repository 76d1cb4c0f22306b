"""The bodies of the OpenAI routes: strict types, unknown fields refused by name, null the same as absent."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from mimo_vk.server.errors import ApiError
from mimo_vk.server.field_faults import refusal, shown

Name = Annotated[str, Field(pattern=r"^[!-;=?-~]{1,64}$")]  # printable ASCII but for what ends a name: < > and space
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Strict(BaseModel):
    """No conversions, no unknown fields; a field that is null is as good as absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    url: str
    detail: Literal["auto", "high"] | None = None  # a picture is never read coarser than the limits ask


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


def _content_tag(value: Any) -> str | None:
    return "<string>" if isinstance(value, str) else ("<parts>" if isinstance(value, list) else None)


# Tags of unions stand in angle brackets, so that they can be taken out of a field's path.
Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[TextPart], Tag("<parts>")],
    Discriminator(
        _content_tag, custom_error_type="content_type", custom_error_message="expected a string or a list of parts"
    ),
]


_PARTS = {"text": "<text>", "image_url": "<image>"}


def _part_tag(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return _PARTS.get(kind) if isinstance(kind, str) else None


UserPart = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image>")],
    Discriminator(_part_tag, custom_error_type="part_type", custom_error_message="expected a text or image_url part"),
]
UserContent = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[UserPart], Tag("<parts>")],
    Discriminator(
        _content_tag, custom_error_type="content_type", custom_error_message="expected a string or a list of parts"
    ),
]


class CalledFunction(Strict):
    name: str
    arguments: str = ""


class MessageToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: Content | None = None
    name: str | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: UserContent | None = None
    name: str | None = None


class AssistantMessage(Strict):
    """What a client sends back of an answer; the fields that OpenAI's answers leave empty must be so."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content | None = None
    tool_call_id: str
    name: str | None = None


_ROLES = {"system": "<system>", "developer": "<system>", "user": "<user>", "assistant": "<assistant>", "tool": "<tool>"}


def _role_tag(value: Any) -> str | None:
    role = value.get("role") if isinstance(value, dict) else None
    return _ROLES.get(role) if isinstance(role, str) else None


Message = Annotated[
    Annotated[SystemMessage, Tag("<system>")]
    | Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")],
    Discriminator(
        _role_tag,
        custom_error_type="message_role",
        custom_error_message="expected an object whose role is system, developer, user, assistant or tool",
    ),
]


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None  # the answer is not bound to the schema


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: Name


class NamedChoice(Strict):
    type: Literal["function"]
    function: FunctionName


def _choice_tag(value: Any) -> str | None:
    return "<word>" if isinstance(value, str) else ("<named>" if isinstance(value, dict) else None)


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<word>")] | Annotated[NamedChoice, Tag("<named>")],
    Discriminator(
        _choice_tag,
        custom_error_type="tool_choice_type",
        custom_error_message="expected auto, none, required or a named function",
    ),
]


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class ResponseFormat(Strict):
    type: Literal["text"]


def _stop_tag(value: Any) -> str | None:
    return "<string>" if isinstance(value, str) else ("<list>" if isinstance(value, list) else None)


StopField = Annotated[
    Annotated[Stop, Tag("<string>")] | Annotated[list[Stop], Field(max_length=4), Tag("<list>")],
    Discriminator(
        _stop_tag, custom_error_type="stop_type", custom_error_message="expected a string or a list of up to four"
    ),
]


class Sampled(Strict):
    """What both routes take. The fields below the line are only accepted where they ask for nothing."""

    model: str | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: StopField | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    # ---
    n: Literal[1] | None = None
    frequency_penalty: Annotated[Number, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[Number, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed where stream is true")
        return self


class ChatRequest(Sampled):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # ---
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only allowed where logprobs is true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_tokens: not the same as max_completion_tokens")
        return self

    @field_validator("tools")
    @classmethod
    def _names_differ(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = Counter(tool.function.name for tool in tools or ())
        again = next((name for name, count in names.items() if count > 1), None)
        if again is not None:
            raise ValueError(f"two functions have the name {again}")
        return tools


TokenId = Annotated[int, Field(ge=0)]


def _prompt_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "<string>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else 0
    return "<strings>" if isinstance(first, str) else ("<lists>" if isinstance(first, list) else "<ids>")


class CompletionRequest(Sampled):
    """``POST /v1/completions``."""

    prompt: Annotated[
        Annotated[str, Tag("<string>")]
        | Annotated[list[str], Field(min_length=1, max_length=128), Tag("<strings>")]
        | Annotated[list[TokenId], Field(min_length=1), Tag("<ids>")]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(max_length=128), Tag("<lists>")],
        Discriminator(
            _prompt_tag,
            custom_error_type="prompt_type",
            custom_error_message="expected a string, token ids, or a list of either",
        ),
    ]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # ---
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _something_to_do(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 is only allowed with echo")
        return self


def parse(model: type[Strict], body: Any) -> Any:
    """A body as ``model``; ApiError 400 with the first faulty field's name."""
    if not isinstance(body, dict):
        raise ApiError(400, f"the body: expected a JSON object, found {shown(body)}", code="invalid_type")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False, include_context=True)) from None

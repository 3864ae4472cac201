"""The bodies that clients send, as pydantic models. Beside the settings the only pydantic in the project.

Strict: no type is bent into another. A field that is known but not supported is refused by name unless its value asks
for nothing; an unknown one is ignored and counted, as are the harmless ones (user, metadata, store ...).
"""

from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.sampling import (
    MAX_BIASED_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)

MAX_STOP_STRINGS = 16
MAX_CHOICES = 8  # each is a request of its own to the workers
MIN_SEED = -(2**63)
MAX_SEED = 2**64 - 1
_MAX_UINT32 = 2**32 - 1
_MAX_KEY_CHARS = 64  # of a client's key in an error message

# Field -> values that ask for nothing. Everything else would be silently dropped, so it is refused.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "conversation_id": (None,),
    "echo": (None, False),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "web_search_options": (None,),
}
_UNSUPPORTED_IN_MESSAGE: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None, ""),
    "tool_call_id": (None,),
    "tool_calls": (None, []),
}


def _join_parts(content: object) -> object:
    """A list of text parts becomes one text, joined by newlines; anything else is left to the type check."""
    if not isinstance(content, list):
        return content
    parts = cast("list[object]", content)
    if not parts:
        raise PydanticCustomError("parts", "must have at least one part")
    texts: list[str] = []
    for number, part in enumerate(parts):
        if not isinstance(part, dict):
            raise PydanticCustomError("parts", "part {number} must be an object", {"number": number})
        fields = cast("dict[str, object]", part)
        if fields.get("type") != "text":
            raise PydanticCustomError("parts", "part {number} must have type 'text'", {"number": number})
        text = fields.get("text")
        if not isinstance(text, str):
            raise PydanticCustomError("parts", "part {number} must have a string 'text'", {"number": number})
        texts.append(text)
    return "\n".join(texts)


def _list_stops(stop: object) -> object:
    """One string or a list of them; null and the empty list mean none."""
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else stop


def _require_text(text: str) -> str:
    """JSON can spell half of a surrogate pair, which has no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "holds half of a surrogate pair, which is no text") from None
    return text


Text = Annotated[str, AfterValidator(_require_text)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    @property
    def extra(self) -> dict[str, Any]:
        return self.model_extra or {}


class Message(_Body):
    """One turn of the conversation."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_join_parts)]


class StreamOptions(_Body):
    """What belongs to the stream rather than to the answer."""

    include_usage: bool | None = None


class GenerationBody(_Body):
    """What both routes know."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=_MAX_UINT32)] | None = None
    seed: Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)] | None = None
    stop: Annotated[
        list[Annotated[Text, Field(min_length=1)]], BeforeValidator(_list_stops), Field(max_length=MAX_STOP_STRINGS)
    ] = []
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    logit_bias: (
        Annotated[
            dict[Text, Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]],
            Field(max_length=MAX_BIASED_TOKENS),
        ]
        | None
    ) = None
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_UINT32)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    ignore_eos: bool | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # seconds, from the request's arrival on
    resumable: bool | None = None  # may be read on after a cut, on any gateway
    cache_salt: Annotated[Text, Field(min_length=1)] | None = None  # whose cached KV this request may share

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Raises INVALID_REQUEST about the first field that is wrong."""
        _refuse_unsupported(body, _UNSUPPORTED, "")
        try:
            parsed = cls.model_validate(body)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            param = _param_of(problem["loc"])
            raise _invalid(f"{param or 'body'}: {problem['msg']}", param or None) from None
        parsed._check_together()
        return parsed

    def _check_together(self) -> None:
        """What one field demands of another."""
        if self.top_logprobs and not self.logprobs:
            raise _invalid("top_logprobs: only with logprobs true", "top_logprobs")
        max_tokens = self.chosen_max_tokens
        if max_tokens is not None and (self.min_tokens or 0) > max_tokens:
            raise _invalid(f"min_tokens: {self.min_tokens} is more than max_tokens, {max_tokens}", "min_tokens")
        if self.best_of is not None and self.best_of != self.num_choices:
            raise _invalid("best_of: only the value of n is supported", "best_of")

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def chosen_max_tokens(self) -> int | None:
        """Raises INVALID_REQUEST where the two names disagree."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise _invalid("max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
        return old if new is None else new

    def num_ignored_fields(self, messages: list[Message]) -> int:
        """Fields that had no effect, of the body and of what it holds."""
        options = self.stream_options.extra if self.stream_options else {}
        return sum(map(len, (self.extra, options, *(message.extra for message in messages))))


class CompletionBody(GenerationBody):
    """POST /v1/chat/completions."""

    model: Text
    messages: Annotated[list[Message], Field(min_length=1)]


class ChatBody(GenerationBody):
    """POST /api/chat: `messages`, or `message` for a single user turn; one answer."""

    model: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    message: Text | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None

    @property
    def turns(self) -> list[Message]:
        """Raises INVALID_REQUEST unless exactly one of the two forms was used."""
        if (self.messages is None) == (self.message is None):
            raise _invalid("give exactly one of messages and message", "messages")
        return self.messages or [Message(role="user", content=self.message or "")]


def refuse_unsupported_messages(messages: list[Message]) -> None:
    """Raises INVALID_REQUEST for a message that asks for more than text."""
    for number, message in enumerate(messages):
        _refuse_unsupported(message.extra, _UNSUPPORTED_IN_MESSAGE, f"messages[{number}].")


def _refuse_unsupported(fields: dict[str, Any], unsupported: dict[str, tuple[object, ...]], path: str) -> None:
    for name, harmless in unsupported.items():
        if name in fields and not any(_is_same(fields[name], value) for value in harmless):
            raise _invalid(f"{path}{name} is not supported", path + name)


def _is_same(given: object, value: object) -> bool:
    """Equal in JSON's sense: Python holds True for 1 and False for 0."""
    return given == value and isinstance(given, bool) == isinstance(value, bool)


def _param_of(loc: tuple[int | str, ...]) -> str:
    """As `messages[0].role`; a key of the client's own is cut."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:_MAX_KEY_CHARS]}" for part in loc)
    return "".join(parts).removeprefix(".")


def _invalid(message: str, param: str | None) -> ServingError:
    return ServingError(ErrorCode.INVALID_REQUEST, message, param=param)

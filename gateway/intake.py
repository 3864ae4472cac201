"""From the bytes of a body to an `Intake`: parsed, checked, rendered, tokenised. After this nothing is unvalidated.

Everything here is synchronous and may take milliseconds for a large body: it runs in the intake executor.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any, NoReturn, cast

from gateway.schemas import ChatBody, CompletionBody, GenerationBody, Message, refuse_unsupported_messages
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestId, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import MAX_SEED, SamplingParams
from shared.text.chat import ChatMessage, ChatTokenizer
from shared.text.detokenizer import Detokenizer

DEFAULT_ALIAS = "default"
_MAX_NAME_CHARS = 64  # of a client's text in an error message


class AnswerForm(Enum):
    """How the client wants its answer."""

    WHOLE = "whole"
    CHUNKS = "chunks"  # OpenAI's event stream
    NAMED_EVENTS = "named_events"


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """A valid question. `max_tokens` None = as many as fit. The detokenizer is fresh and serves this one answer."""

    prompt_ids: tuple[TokenId, ...]
    max_tokens: int | None
    sampling: SamplingParams
    ignore_eos: bool
    has_stop_strings: bool
    detokenizer: Detokenizer
    form: AnswerForm
    include_usage: bool
    num_ignored_fields: int
    window: int

    def spec(self, request_id: RequestId, max_request_tokens: int) -> RequestSpec:
        """What the workers get. `max_request_tokens` is what the largest KV pool holds; 0 = not known.

        A prompt that alone is too long for the pools asks for one token and is left to the scheduler's refusal.
        """
        room = min(self.window, max_request_tokens or self.window) - len(self.prompt_ids)
        return RequestSpec(
            request_id=request_id,
            prompt_ids=self.prompt_ids,
            max_tokens=max(1, room) if self.max_tokens is None else self.max_tokens,
            sampling=self.sampling,
            ignore_eos=self.ignore_eos,
            has_stop_strings=self.has_stop_strings,
            kv_salt=kv_salt(request_id),
        )


def kv_salt(request_id: RequestId) -> int:
    """Each request its own: where KV can be told apart (the scripted generator's), another request's is found out."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little")


class IntakeReader:
    """Knows the model's name and its tokenizer. Thread-safe: it holds nothing that changes."""

    def __init__(self, tokenizer: ChatTokenizer, served_model_name: str) -> None:
        self._tokenizer = tokenizer
        self._names = (served_model_name, DEFAULT_ALIAS)

    def read_completion(self, body: bytes | bytearray) -> Intake:
        """POST /v1/chat/completions. Raises ServingError."""
        parsed = CompletionBody.parse(parse_object(body))
        self.require_model(parsed.model)
        return self._finish(parsed, parsed.messages, AnswerForm.CHUNKS if parsed.stream else AnswerForm.WHOLE)

    def read_chat(self, body: bytes | bytearray) -> Intake:
        """POST /api/chat, which answers with events only. Raises ServingError."""
        parsed = ChatBody.parse(parse_object(body))
        if parsed.model is not None:
            self.require_model(parsed.model)
        if parsed.stream is False:
            _refuse("stream: this route answers with an event stream", "stream")
        return self._finish(parsed, parsed.turns, AnswerForm.NAMED_EVENTS)

    def require_model(self, name: str) -> None:
        """Raises MODEL_NOT_FOUND."""
        if name not in self._names:
            shown = name[:_MAX_NAME_CHARS]
            raise ServingError(ErrorCode.MODEL_NOT_FOUND, f"the model '{shown}' does not exist", param="model")

    def _finish(self, body: GenerationBody, messages: list[Message], form: AnswerForm) -> Intake:
        refuse_unsupported_messages(messages)
        if body.stream_options is not None and form is AnswerForm.WHOLE:
            _refuse("stream_options: only with stream", "stream_options")
        max_tokens = body.chosen_max_tokens
        sampling = _sampling(body)
        prompt_ids = self._tokenizer.render(
            [ChatMessage(role=message.role, content=message.content) for message in messages]
        )
        if not prompt_ids:
            _refuse("messages: the prompt is empty", "messages")
        window = self._tokenizer.window
        _require_room(window, len(prompt_ids), max_tokens)
        return Intake(
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            sampling=sampling,
            ignore_eos=bool(body.ignore_eos),
            has_stop_strings=bool(body.stop),
            detokenizer=self._tokenizer.detokenizer(prompt_ids, body.stop),
            form=form,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            num_ignored_fields=body.num_ignored_fields(messages),
            window=window,
        )


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """JSON text in UTF-8 whose top is an object. Raises INVALID_REQUEST."""
    try:
        value: object = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        _refuse("the body is nested too deeply")
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        at = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        _refuse(f"the body is not valid JSON{at}")
    if not isinstance(value, dict):
        _refuse("the body must be a JSON object")
    return cast("dict[str, Any]", value)


def accepts_event_stream(headers: Mapping[str, str]) -> bool:
    """Is `text/event-stream` itself in Accept, and not ruled out by q=0? `*/*` is no wish for events."""
    for wish in headers.get("accept", "").lower().split(","):
        media_type, *params = (part.strip() for part in wish.split(";"))
        if media_type == "text/event-stream":
            return not any(param.replace(" ", "") in ("q=0", "q=0.0", "q=0.00", "q=0.000") for param in params)
    return False


def _require_room(window: int, num_prompt_tokens: int, max_tokens: int | None) -> None:
    """At least one token must fit; with `max_tokens` all of them. Raises CONTEXT_TOO_LONG."""
    if num_prompt_tokens + (max_tokens or 1) <= window:
        return
    asked = "" if max_tokens is None else f" and {max_tokens} tokens of answer were asked for"
    raise ServingError(
        ErrorCode.CONTEXT_TOO_LONG,
        f"the window of this model is {window} tokens; the prompt has {num_prompt_tokens}{asked}",
        param="messages" if num_prompt_tokens >= window else "max_tokens",
    )


def _sampling(body: GenerationBody) -> SamplingParams:
    # A negative seed counts as the unsigned number with the same 64 bits.
    seed = secrets.randbits(64) if body.seed is None else body.seed & MAX_SEED
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        seed=seed,
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse(message: str, param: str | None = None) -> NoReturn:
    raise ServingError(ErrorCode.INVALID_REQUEST, message, param=param)

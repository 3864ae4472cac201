"""What goes over the wire of one event stream: a machine that makes bytes and knows no socket.

NOT_STARTED -> STREAMING -> DONE | ERRORED. Exactly one terminal (finish or error), nothing after it. Every line end is
LF; all JSON is ASCII, so that U+2028, U+2029 and U+0085 can tear no line splitter. What no reader should act on is a
comment. Streams of `/v1` carry no `event:` or `retry:` line, and an `id:` only where the client asked for an answer
that it can resume: `id: n` = with this event it has the text of tokens 1..n; what is held back to the end counts as
one token more.
"""

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Protocol

from gateway.answer_text import LogprobEntry, TextPart
from shared.domain.errors import ServingError, openai_error
from shared.domain.request import FinishReason, Usage

CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS = {
    "content-type": CONTENT_TYPE,
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",  # nginx
}
KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"


class StreamState(Enum):
    """Where a stream is."""

    NOT_STARTED = "not_started"
    STREAMING = "streaming"
    DONE = "done"
    ERRORED = "errored"


class IllegalEvent(Exception):
    """The stream cannot say this now; a bug of the caller, and nothing was changed."""


class EventEncoder(Protocol):
    """One dialect. The first event of a stream may bring a beginning with it (a role chunk)."""

    def begin(self) -> bytes:
        """Before the first delta or the finish; may be empty."""
        ...

    def delta(self, part: TextPart) -> bytes: ...

    def finish(self, reason: FinishReason, usage: Usage) -> bytes: ...

    def error(self, error: ServingError) -> bytes: ...


class EventStream:
    """The state machine around an encoder."""

    def __init__(self, encoder: EventEncoder, from_index: int | None = None) -> None:
        """`from_index`: deltas carry ids, and the client has those up to this one (0 = none). None: no ids."""
        self._encoder = encoder
        self._from_index = from_index
        self._state = StreamState.NOT_STARTED
        self._has_begun = bool(from_index)

    @property
    def state(self) -> StreamState:
        return self._state

    @property
    def is_over(self) -> bool:
        return self._state in (StreamState.DONE, StreamState.ERRORED)

    def start(self, queue_position: int) -> bytes:
        """The first bytes after the headers: a comment, so that they leave at once."""
        if self._state is not StreamState.NOT_STARTED:
            raise IllegalEvent(f"start while {self._state.value}")
        self._state = StreamState.STREAMING
        return queued_comment(queue_position)

    def delta(self, part: TextPart, index: int = 0) -> bytes:
        """Of token `index`. Nothing for an empty text, nor for one that the client has."""
        self._require_streaming("delta")
        if not part.text:
            return b""
        if self._from_index is None:
            return self._begin() + self._encoder.delta(part)
        if index <= self._from_index:
            return b""
        return self._begin() + b"id: %d\n" % index + self._encoder.delta(part)

    def deltas(self, parts: Sequence[TextPart], first_index: int) -> bytes:
        """Of consecutive tokens, the first of them numbered `first_index`."""
        return b"".join(self.delta(part, index) for index, part in enumerate(parts, first_index))

    def finish(self, reason: FinishReason, usage: Usage) -> bytes:
        self._require_streaming("finish")
        self._state = StreamState.DONE
        return self._begin() + self._encoder.finish(reason, usage)

    def error(self, error: ServingError) -> bytes:
        self._require_streaming("error")
        self._state = StreamState.ERRORED
        return self._encoder.error(error)

    def _require_streaming(self, what: str) -> None:
        if self._state is not StreamState.STREAMING:
            raise IllegalEvent(f"{what} while {self._state.value}")

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._encoder.begin()


class OpenAiEncoder:
    """Chunks of `chat.completion.chunk`, then `[DONE]`.

    `choice` is the number of one answer of several that share a stream: such an encoder writes chunks alone, and leaves
    the end of the stream to whoever writes the stream.
    """

    def __init__(
        self, *, completion_id: str, model: str, created_unix_s: int, include_usage: bool, choice: int | None = None
    ) -> None:
        self._include_usage = include_usage
        self._choice = choice
        fields = {
            "id": completion_id,
            "object": "chat.completion.chunk",
            "created": created_unix_s,
            "model": model,
        }
        # Only the middle differs between the chunks of a stream: the rest is made once.
        self._prefix = b"data: " + json.dumps(fields).encode()[:-1] + b', "choices": '
        self._suffix = b', "usage": null}\n\n' if include_usage else b"}\n\n"

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def delta(self, part: TextPart) -> bytes:
        return self._chunk({"content": part.text}, None, part.logprobs)

    def finish(self, reason: FinishReason, usage: Usage) -> bytes:
        last = self._chunk({}, reason)
        return last if self._choice is not None else last + self.end(usage)

    def end(self, usage: Usage) -> bytes:
        """The end of a stream: usage where it was asked for, `[DONE]`."""
        if not self._include_usage:
            return _DONE
        return self._prefix + b'[], "usage": ' + json.dumps(usage_object(usage)).encode() + b"}\n\n" + _DONE

    def error(self, error: ServingError) -> bytes:
        if self._choice is not None:
            return b""
        return b"data: " + json.dumps(openai_error(error)).encode() + b"\n\n" + _DONE

    def _chunk(
        self, delta: dict[str, str], reason: FinishReason | None, logprobs: Sequence[LogprobEntry] = ()
    ) -> bytes:
        choice = {
            "index": self._choice or 0,
            "delta": delta,
            "logprobs": _logprobs_object(logprobs) if logprobs else None,
            "finish_reason": None if reason is None else reason.value,
        }
        return self._prefix + json.dumps([choice]).encode() + self._suffix


class NamedEventEncoder:
    """`event: delta`, then `event: done` or `event: error`: the stream of `/api/chat`."""

    def __init__(self, *, request_id: str) -> None:
        self._request_id = request_id

    def begin(self) -> bytes:
        return b""

    def delta(self, part: TextPart) -> bytes:
        body: dict[str, object] = {"delta": part.text}
        if part.logprobs:
            body["logprobs"] = _logprobs_object(part.logprobs)
        return _named("delta", body)

    def finish(self, reason: FinishReason, usage: Usage) -> bytes:
        body = {"finish_reason": reason.value, "usage": usage_object(usage), "request_id": self._request_id}
        return _named("done", body)

    def error(self, error: ServingError) -> bytes:
        return _named("error", openai_error(error))


def queued_comment(position: int) -> bytes:
    """Says how many requests are in front; clients skip it."""
    return b": queued %d\n\n" % position


def usage_object(usage: Usage) -> dict[str, object]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def choice_object(
    index: int, parts: Sequence[TextPart], reason: FinishReason, *, has_logprobs: bool
) -> dict[str, object]:
    """One of the choices of OpenAI's whole answer."""
    entries = [entry for part in parts for entry in part.logprobs]
    return {
        "index": index,
        "message": {"role": "assistant", "content": "".join(part.text for part in parts), "refusal": None},
        "logprobs": _logprobs_object(entries) if has_logprobs else None,
        "finish_reason": reason.value,
    }


def completion_object(
    *, completion_id: str, model: str, created_unix_s: int, choices: Sequence[dict[str, object]], usage: Usage
) -> dict[str, object]:
    """OpenAI's whole answer."""
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": created_unix_s,
        "model": model,
        "choices": list(choices),
        "usage": usage_object(usage),
    }


def _logprobs_object(entries: Sequence[LogprobEntry]) -> dict[str, object]:
    return {"content": list(entries), "refusal": None}


def _named(event: str, body: Mapping[str, object]) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + json.dumps(body).encode() + b"\n\n"

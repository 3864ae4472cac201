"""The frames, word for word where clients depend on them. Whatever holds for all texts is in tests/property."""

import json
from typing import Any

from gateway.answer_text import TextPart
from gateway.sse import EventStream, NamedEventEncoder, OpenAiEncoder, choice_object, completion_object
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.request import FinishReason, Usage

USAGE = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=4)
USAGE_OBJECT = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def openai_stream(*, include_usage: bool) -> EventStream:
    """A started stream."""
    stream = EventStream(
        OpenAiEncoder(completion_id="chatcmpl-A", model="m", created_unix_s=9, include_usage=include_usage)
    )
    stream.start(0)
    return stream


def data_of(frames: bytes) -> list[str]:
    """What stands behind `data: `, event by event."""
    return [line.removeprefix("data: ") for line in frames.decode().split("\n") if line]


def objects_of(frames: bytes) -> list[dict[str, Any]]:
    """All events but the last, parsed."""
    return [json.loads(data) for data in data_of(frames)[:-1]]


def test_the_first_delta_brings_the_role() -> None:
    """A role chunk with empty content, then the text; the second delta comes alone."""
    stream = openai_stream(include_usage=False)
    first, second = data_of(stream.delta(TextPart("Hi"))), data_of(stream.delta(TextPart("!")))

    assert [{"role": "assistant", "content": ""}, {"content": "Hi"}] == [
        json.loads(data)["choices"][0]["delta"] for data in first
    ]
    assert [{"content": "!"}] == [json.loads(data)["choices"][0]["delta"] for data in second]


def test_a_chunk_has_the_fields_of_the_original() -> None:
    """Exactly these, in every chunk of a stream without usage."""
    stream = openai_stream(include_usage=False)
    stream.delta(TextPart("a"))

    assert {
        "id": "chatcmpl-A",
        "object": "chat.completion.chunk",
        "created": 9,
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": "b"}, "logprobs": None, "finish_reason": None}],
    } == json.loads(data_of(stream.delta(TextPart("b")))[0])


def test_usage_is_one_chunk_without_choices_between_finish_and_done() -> None:
    """SSE-03: with include_usage every other chunk says null."""
    stream = openai_stream(include_usage=True)
    chunks = objects_of(stream.delta(TextPart("a")) + stream.finish(FinishReason.LENGTH, USAGE))

    assert [None, None, None, USAGE_OBJECT] == [chunk["usage"] for chunk in chunks]
    assert [1, 1, 1, 0] == [len(chunk["choices"]) for chunk in chunks]
    assert "length" == chunks[2]["choices"][0]["finish_reason"]


def test_without_include_usage_no_chunk_has_one() -> None:
    """SSE-03, the other half."""
    stream = openai_stream(include_usage=False)
    chunks = objects_of(stream.delta(TextPart("a")) + stream.finish(FinishReason.STOP, USAGE))

    assert [] == [chunk for chunk in chunks if "usage" in chunk]


def test_an_empty_answer_has_a_role_chunk_too() -> None:
    """The end may be the first that comes."""
    frames = openai_stream(include_usage=False).finish(FinishReason.STOP, USAGE)

    assert ["assistant", None] == [chunk["choices"][0]["delta"].get("role") for chunk in objects_of(frames)]


def test_an_error_is_data_and_then_done() -> None:
    """No event line and no finish reason: OpenAI's clients look for the `error` key in data."""
    error = ServingError(ErrorCode.WORKER_LOST, "a worker was lost")
    frames = openai_stream(include_usage=True).error(error)

    assert [
        '{"error": {"message": "a worker was lost", "type": "server_error", "param": null, "code": "worker_lost"}}',
        "[DONE]",
    ] == data_of(frames)


ENTRY: dict[str, object] = {"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": []}


def test_log_probabilities_come_with_their_text() -> None:
    """In OpenAI's form, in the chunk of the text; null elsewhere."""
    stream = openai_stream(include_usage=False)
    chunks = objects_of(
        stream.delta(TextPart("H", (ENTRY,))) + stream.delta(TextPart("i")) + stream.finish(FinishReason.STOP, USAGE)
    )

    assert [None, {"content": [ENTRY], "refusal": None}, None, None] == [
        chunk["choices"][0]["logprobs"] for chunk in chunks
    ]


def test_log_probabilities_of_named_events() -> None:
    """Beside the text, only where there are any."""
    stream = EventStream(NamedEventEncoder(request_id="R"))
    stream.start(0)
    lines = data_of(stream.delta(TextPart("H", (ENTRY,))) + stream.delta(TextPart("i")))

    assert [{"delta": "H", "logprobs": {"content": [ENTRY], "refusal": None}}, {"delta": "i"}] == [
        json.loads(line) for line in lines if not line.startswith("event")
    ]


def test_log_probabilities_of_a_whole_answer() -> None:
    """All entries in one list, empty where no token had text; null where nobody asked."""
    parts = [TextPart("H", (ENTRY,)), TextPart(""), TextPart("i", (ENTRY,))]
    choices = [
        choice_object(3, parts, FinishReason.LENGTH, has_logprobs=True),
        choice_object(0, [], FinishReason.STOP, has_logprobs=True),
        choice_object(0, [TextPart("a")], FinishReason.STOP, has_logprobs=False),
    ]

    assert [{"content": [ENTRY, ENTRY], "refusal": None}, {"content": [], "refusal": None}, None] == [
        choice["logprobs"] for choice in choices
    ]
    assert (3, "length") == (choices[0]["index"], choices[0]["finish_reason"])


def test_one_choice_of_several_writes_no_end() -> None:
    """Its number in every chunk; usage and [DONE] are for the stream that they share, and so is an error."""
    encoder = OpenAiEncoder(completion_id="chatcmpl-A", model="m", created_unix_s=9, include_usage=True, choice=2)
    stream, broken = EventStream(encoder), EventStream(encoder)
    stream.start(0)
    broken.start(0)
    frames = stream.delta(TextPart("a")) + stream.finish(FinishReason.LENGTH, USAGE)
    chunks = [json.loads(data) for data in data_of(frames)]

    assert [(2, None), (2, None), (2, "length")] == [
        (chunk["choices"][0]["index"], chunk["choices"][0]["finish_reason"]) for chunk in chunks
    ]
    assert b"" == broken.error(ServingError(ErrorCode.INTERNAL, "x"))


def test_the_end_of_a_shared_stream() -> None:
    """Usage where it was asked for, then [DONE]."""
    encoders = [
        OpenAiEncoder(completion_id="chatcmpl-A", model="m", created_unix_s=9, include_usage=include_usage)
        for include_usage in (True, False)
    ]
    with_usage, without = (data_of(encoder.end(USAGE)) for encoder in encoders)

    assert ([], USAGE_OBJECT, "[DONE]") == (
        json.loads(with_usage[0])["choices"],
        json.loads(with_usage[0])["usage"],
        with_usage[1],
    )
    assert ["[DONE]"] == without


def test_named_events_are_named() -> None:
    """The stream of /api/chat, word for word."""
    stream = EventStream(NamedEventEncoder(request_id="R"))
    frames = stream.start(2) + stream.delta(TextPart("Hi")) + stream.finish(FinishReason.STOP, USAGE)

    assert [
        ": queued 2",
        "",
        "event: delta",
        'data: {"delta": "Hi"}',
        "",
        "event: done",
        "data: " + json.dumps({"finish_reason": "stop", "usage": USAGE_OBJECT, "request_id": "R"}),
        "",
        "",
    ] == frames.decode().split("\n")


def test_a_named_error_has_no_done() -> None:
    """`error` is its own end."""
    stream = EventStream(NamedEventEncoder(request_id="R"))
    stream.start(0)
    frames = stream.error(ServingError(ErrorCode.INTERNAL, "the server failed"))

    assert "event: error" == frames.decode().split("\n")[0]
    assert b"done" not in frames


def test_a_whole_answer_has_the_fields_of_the_original() -> None:
    """Exactly these."""
    choice = choice_object(0, [TextPart("H"), TextPart("i")], FinishReason.STOP, has_logprobs=False)
    answer = completion_object(completion_id="chatcmpl-A", model="m", created_unix_s=9, choices=[choice], usage=USAGE)

    assert {
        "id": "chatcmpl-A",
        "object": "chat.completion",
        "created": 9,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE_OBJECT,
    } == answer


def test_an_id_stands_before_each_text_of_a_resumable_stream() -> None:
    """In both dialects; the role chunk, the end and what the client has carry none, and an empty text is no event."""
    encoder = OpenAiEncoder(completion_id="chatcmpl-A", model="m", created_unix_s=9, include_usage=False)
    stream = EventStream(encoder, 0)
    stream.start(0)
    role, text = stream.deltas([TextPart(""), TextPart("a")], 1).split(b"\n\n")[:2]
    assert (True, True) == (role.startswith(b"data: "), text.startswith(b"id: 2\ndata: "))
    assert b"id:" not in stream.finish(FinishReason.STOP, USAGE)
    named = EventStream(NamedEventEncoder(request_id="r"), 2)
    named.start(0)
    assert b"" == named.delta(TextPart("a"), 2)
    assert b'id: 3\nevent: delta\ndata: {"delta": "b"}\n\n' == named.delta(TextPart("b"), 3)

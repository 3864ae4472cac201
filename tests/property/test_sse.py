"""Event streams, whatever the text and wherever the network cuts it."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answer_text import TextPart
from gateway.sse import EventStream, IllegalEvent, NamedEventEncoder, OpenAiEncoder, StreamState
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.request import FinishReason, Usage
from tests.support.sse_lines import Block, BlockSplitter

TEXTS = st.lists(st.text(st.characters(exclude_categories=("Cs",))), max_size=8)
HARD_TEXT = "p\u2028q\u2029r\u0085s\u000bt\r\n\n data: x\r"
USAGE = Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=2)
ERROR = ServingError(ErrorCode.WORKER_LOST, "a worker was lost")
CALLS = st.lists(st.sampled_from(["start", "delta", "empty", "finish", "error"]), max_size=8)


def openai_stream(include_usage: bool = False) -> EventStream:
    """A stream of chunks with fixed names."""
    return EventStream(
        OpenAiEncoder(completion_id="chatcmpl-1", model="m", created_unix_s=1, include_usage=include_usage)
    )


def blocks_of(data: bytes, cuts: list[int]) -> list[Block]:
    """Reads `data` in the pieces that the cuts make."""
    splitter = BlockSplitter()
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = [data[start:end] for start, end in pairwise(places)]
    blocks = [block for piece in pieces for block in splitter.feed(piece, at=0.0)]
    assert "" == splitter.rest
    return blocks


def call(stream: EventStream, name: str) -> bytes:
    """One call of the machine."""
    match name:
        case "start":
            return stream.start(3)
        case "delta":
            return stream.delta(TextPart(HARD_TEXT))
        case "empty":
            return stream.delta(TextPart(""))
        case "finish":
            return stream.finish(FinishReason.STOP, USAGE)
        case _:
            return stream.error(ERROR)


@given(texts=TEXTS, cuts=st.lists(st.integers(0, 10_000), max_size=5), include_usage=st.booleans())
def test_a_reader_gets_the_text_whatever_is_in_it(texts: list[str], cuts: list[int], include_usage: bool) -> None:
    """One event per chunk at every cut, joined content equal to the text, one line per event and all of it ASCII."""
    stream = openai_stream(include_usage)
    data = stream.start(0) + b"".join(stream.delta(TextPart(text)) for text in [*texts, HARD_TEXT])
    data += stream.finish(FinishReason.LENGTH, USAGE)

    blocks = blocks_of(data, cuts)
    payloads = [block.data for block in blocks if block.data is not None]
    chunks: list[dict[str, Any]] = [json.loads(payload) for payload in payloads[:-1]]
    contents = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]

    assert data.isascii()
    assert "[DONE]" == payloads[-1]
    assert "".join([*texts, HARD_TEXT]) == "".join(contents)
    assert all(len(block.lines) == 1 for block in blocks)
    assert 1 + sum(map(bool, texts)) + 1 + 1 + include_usage == len(chunks)


@given(texts=TEXTS)
def test_named_events_carry_the_same_text(texts: list[str]) -> None:
    """`delta` events joined give the text; `done` is the one end."""
    stream = EventStream(NamedEventEncoder(request_id="R"))
    data = (
        stream.start(0)
        + b"".join(stream.delta(TextPart(text)) for text in texts)
        + stream.finish(FinishReason.STOP, USAGE)
    )

    blocks = [block for block in blocks_of(data, []) if block.data is not None]
    deltas = [json.loads(block.data or "")["delta"] for block in blocks if block.event == "delta"]

    assert "".join(texts) == "".join(deltas)
    assert ["done"] == [block.event for block in blocks if block.event != "delta"]


@given(calls=CALLS)
def test_there_is_at_most_one_terminal_and_nothing_after_it(calls: list[str]) -> None:
    """An illegal call raises and changes nothing; what was written is a valid stream at every moment."""
    stream = openai_stream()
    written = b""
    for name in calls:
        before = stream.state
        is_legal = before is (StreamState.NOT_STARTED if name == "start" else StreamState.STREAMING)
        try:
            written += call(stream, name)
        except IllegalEvent:
            assert before is stream.state
            assert not is_legal
        else:
            assert is_legal or name == "empty"

    blocks = blocks_of(written, [])
    names = {name for block in blocks for name, _ in block.fields}
    ends = [block.data for block in blocks if block.data == "[DONE]"]

    assert names <= {"", "data"}
    assert (1 if stream.is_over else 0) == len(ends)
    if stream.is_over:
        assert "[DONE]" == blocks[-1].data


@pytest.mark.parametrize("end", ["finish", "error"])
def test_after_an_end_every_call_is_illegal(end: str) -> None:
    """DONE and ERRORED are final."""
    stream = openai_stream()
    stream.start(0)
    call(stream, end)

    for name in ("start", "delta", "finish", "error"):
        with pytest.raises(IllegalEvent):
            call(stream, name)

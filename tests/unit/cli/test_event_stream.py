"""Events out of bytes."""

import pytest

from cli.event_stream import MAX_EVENT_BYTES, EventSplitter, StreamEvent

STREAM = (
    ": queued 0\n\n"
    'id: 1\ndata: {"a": "häß 鸡"}\n\n'
    "event: delta\r\ndata: two\r\ndata:lines\r\n\r\n"
    "data: a\u2028b\rid: 12\r\r"
    "retry: 5\n\n"
    "id: 13\n\n"
    "data:\n\n"
    "data: cut\n"
).encode()
EVENTS = [
    StreamEvent(data='{"a": "häß 鸡"}', event_id="1"),
    StreamEvent(data="two\nlines"),
    StreamEvent(data="a\u2028b", event_id="12"),
    StreamEvent(data=""),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_reads_of_any_size_give_the_same_events(size: int) -> None:
    """All three line ends; comments and blocks without data are no events, and what was cut at the end is none."""
    splitter = EventSplitter()

    events = [event for start in range(0, len(STREAM), size) for event in splitter.feed(STREAM[start : start + size])]

    assert EVENTS == events


def test_an_event_is_given_with_its_last_byte() -> None:
    """Also where that is a CR, whose LF may follow or not."""
    splitter = EventSplitter()

    assert [] == splitter.feed(b"data: x\r")
    assert [StreamEvent(data="x")] == splitter.feed(b"\n\r")
    assert [StreamEvent(data="y")] == splitter.feed(b"\ndata: y\n\n")


@pytest.mark.parametrize("part", [b"x" * 65536, b"data: " + b"x" * 1000 + b"\n"], ids=["one line", "many lines"])
def test_an_event_without_an_end_is_bounded(part: bytes) -> None:
    """Whatever it is made of."""
    splitter = EventSplitter()

    def feed_for_ever() -> None:
        for _ in range(2 * MAX_EVENT_BYTES // len(part)):
            splitter.feed(part)

    with pytest.raises(ValueError, match="longer than"):
        feed_for_ever()


def test_comments_do_not_add_up() -> None:
    """A stream may stay quiet for hours and say so."""
    splitter = EventSplitter()

    for _ in range(2 * MAX_EVENT_BYTES // 64):
        assert [] == splitter.feed(b": " + b"x" * 61 + b"\n")

"""The reader of event streams that the tests rely on."""

import pytest

from tests.support.sse_lines import Block, BlockSplitter


def feed_all(pieces: list[bytes]) -> list[Block]:
    """Every block of these reads; nothing may be left over."""
    splitter = BlockSplitter()
    blocks = [block for piece in pieces for block in splitter.feed(piece, at=0.0)]
    assert "" == splitter.rest
    return blocks


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_one_event_at_every_cut(line_end: bytes) -> None:
    """SSE-01: wherever the network cuts, one event stays one event, its two data lines joined by LF."""
    raw = line_end.join([b"data: one", b"data: two", b"", b""])
    cuts = [[raw[:i], raw[i:]] for i in range(len(raw) + 1)] + [[raw[i : i + 1] for i in range(len(raw))]]

    for pieces in cuts:
        assert ["one\ntwo"] == [block.data for block in feed_all(pieces)]


def test_text_that_only_looks_like_a_line_end() -> None:
    """SSE-05: U+2028, U+2029, U+0085 and a vertical tab do not end a line, however their bytes are cut."""
    text = "p\u2028q\u2029r\u0085s\vt"
    raw = f"data: {text}\n\n".encode()

    for cut in range(len(raw) + 1):
        assert [text] == [block.data for block in feed_all([raw[:cut], raw[cut:]])]


def test_comments_and_names() -> None:
    """A comment has no data; an event name is read; only one blank after the colon is taken away."""
    blocks = feed_all([b": keep-alive\n\nevent: delta\ndata:  x\n\n"])

    assert [(None, None, True), ("delta", " x", False)] == [(b.event, b.data, b.is_comment) for b in blocks]
    assert (("", "keep-alive"),) == blocks[0].fields


def test_a_torn_end_shows() -> None:
    """What has no empty line after it is not an event, and is not lost silently."""
    splitter = BlockSplitter()

    assert [] == splitter.feed(b"data: x\n", at=0.0)
    assert "data: x" == splitter.rest

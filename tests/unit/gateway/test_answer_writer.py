"""Frames of one answer, and the part of it that a returning client lacks."""

import json
from itertools import islice

import pytest

from gateway.answer import ClientLink, Frame, Head
from gateway.answer_writer import AnswerWriter
from gateway.intake import IntakeReader
from gateway.request_id import Identity
from gateway.served_form import ServedForm
from shared.aio.channel import ChannelClosed
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestId, TokenId
from shared.domain.request import FinishReason
from shared.text.chat import ChatTokenizer
from shared.text.script import SCRIPTED_EOS_ID
from shared.text.script import Script as PlayedScript
from tests.support.script import Script
from tests.support.sse_lines import BlockSplitter

READER = IntakeReader(ChatTokenizer.scripted(), "m")
# Held back: half a character, a possible stop string, half a character at the end.
SCRIPT = Script(pieces=["a", b"\xc3", b"\xa4", "#", "b", "", b"\xe2\x82"])


def make(*, from_index: int = 0, is_resumable: bool = True, form: str = "stream") -> tuple[AnswerWriter, ClientLink]:
    """A writer of an answer to SCRIPT, and where its frames go."""
    body = SCRIPT.body(stop=["##"], resumable=is_resumable)
    if form == "stream":
        body["stream"] = True
    intake = READER.read_completion(json.dumps(body).encode())
    link = ClientLink(on_taken=lambda _: None, on_gone=lambda: None, on_stalled=lambda: None)
    writer = AnswerWriter(
        intake,
        Identity(request_id=RequestId("r"), client_request_id=None),
        ServedForm.of(intake, 1),
        link=link,
        model="m",
        from_index=from_index,
    )
    return writer, link


def output_ids() -> list[TokenId]:
    """The whole answer's tokens without its end token."""
    intake = READER.read_completion(json.dumps(SCRIPT.body()).encode())
    return list(islice(PlayedScript.from_prompt(intake.prompt_ids).output_ids(), SCRIPT.num_pieces))


async def frames(link: ClientLink) -> list[Head | Frame]:
    """Everything that was put."""
    link.out.close()
    found: list[Head | Frame] = []
    try:
        while True:
            found.append(await link.out.get())
    except ChannelClosed:
        return found


def deltas(items: list[Head | Frame]) -> list[tuple[int | None, str]]:
    """Id and text of each delta."""
    data = b"".join(item.data for item in items if isinstance(item, Frame))
    found: list[tuple[int | None, str]] = []
    for block in BlockSplitter().feed(data, at=0.0):
        if block.data is None or block.data == "[DONE]":
            continue
        choice = json.loads(block.data)["choices"][0]
        if text := choice["delta"].get("content"):
            ids = [int(value) for name, value in block.fields if name == "id"]
            found.append((ids[0] if ids else None, text))
    return found


ALL = [(1, "a"), (3, "ä"), (5, "#b"), (8, "\ufffd")]


@pytest.mark.parametrize("from_index", range(10))
async def test_a_returning_client_gets_what_it_lacks(from_index: int) -> None:
    """Each delta behind the number that it names, the flush counting as one token more; whatever the batches."""
    for size in (1, 3, 99):
        writer, link = make(from_index=from_index)
        writer.start(0)
        ids = output_ids()
        for start in range(0, len(ids), size):
            await writer.put(writer.feed(ids[start : start + size], ()))
        await writer.put_end(writer.flush(), FinishReason.STOP, last_index=writer.num_tokens + 1)
        assert [delta for delta in ALL if delta[0] > from_index] == deltas(await frames(link))
        assert len(ids) == writer.usage.completion_tokens


async def test_an_answer_whose_client_left_before_it_began_is_made_all_the_same() -> None:
    """It may be asked for again: nothing is put, and nothing fails."""
    writer, link = make()
    link.out.close()
    writer.start(3)
    await writer.put(writer.feed(output_ids(), ()))
    await writer.put_end(writer.flush(), FinishReason.STOP, last_index=writer.num_tokens)
    assert output_ids() == writer.ids
    assert [] == await frames(link)


async def test_without_resumable_there_are_no_ids() -> None:
    """The same text."""
    writer, link = make(is_resumable=False)
    writer.start(0)
    await writer.put(writer.feed(output_ids(), ()))
    await writer.put_end(writer.flush(), FinishReason.STOP, last_index=writer.num_tokens + 1)
    assert [(None, text) for _, text in ALL] == deltas(await frames(link))


async def test_logged_tokens_are_shown_in_bounded_frames() -> None:
    """A long answer fills no frame with all of it; a stop string at its end is noticed."""
    writer, link = make()
    writer.start(0)
    ids = output_ids()[:1] * 150
    assert not await writer.put_again(ids, ())
    assert await writer.put_again([output_ids()[3]] * 2, ())
    shown = [item for item in await frames(link) if isinstance(item, Frame) and item.has_text]
    assert [64, 128, 150] == [frame.token_index for frame in shown]


async def test_what_was_taken_is_what_the_socket_took() -> None:
    """Frames that are about no tokens change nothing."""
    writer, link = make()
    writer.start(0)
    await writer.put(writer.feed(output_ids()[:1], ()))
    assert not writer.has_taken_all
    taken = [writer.taken(frame) for frame in await frames(link) if isinstance(frame, Frame)]
    assert ([False, True], 1, True) == (taken, writer.taken_index, writer.has_taken_all)


async def test_a_whole_answer_is_one_body() -> None:
    """Its tokens count as taken when they are in it."""
    writer, link = make(is_resumable=False, form="whole")
    await writer.put(writer.feed(output_ids(), ()))
    assert (False, True) == (writer.is_stream, writer.has_taken_all)
    await writer.put_end(writer.flush(), FinishReason.LENGTH, last_index=writer.num_tokens + 1)
    head, body = await frames(link)
    assert isinstance(head, Head)
    assert isinstance(body, Frame)
    choice = json.loads(body.data)["choices"][0]
    assert (200, "aä#b\ufffd", "length") == (head.status, choice["message"]["content"], choice["finish_reason"])


async def test_an_error_is_a_status_before_the_stream_and_an_event_in_it() -> None:
    """And nothing after an end."""
    error = ServingError(ErrorCode.OVERLOADED, "full")
    writer, link = make()
    assert None is writer.last_words(error)
    await writer.tell_error(error)
    head = (await frames(link))[0]
    assert isinstance(head, Head)
    assert 429 == head.status
    writer, link = make()
    writer.start(0)
    assert b"overloaded" in (writer.last_words(error) or b"")
    await writer.tell_error(error)
    assert 2 == len(await frames(link))


def test_what_an_end_by_the_scheduler_must_fit() -> None:
    """As many tokens as were asked for, or a last one without text."""
    writer, _ = make()
    assert not writer.is_whole(FinishReason.STOP)
    writer.feed(output_ids()[:1], ())
    assert not writer.is_whole(FinishReason.STOP)
    assert not writer.is_whole(FinishReason.LENGTH)
    writer.feed([*output_ids()[1:], SCRIPTED_EOS_ID], ())
    assert writer.is_whole(FinishReason.LENGTH)
    assert writer.is_whole(FinishReason.STOP)

"""Frames of one answer, and the part of it that a returning client lacks."""

import asyncio
import json
from itertools import islice
from typing import Any

import pytest

from gateway.answer import MAX_FRAMES, ClientLink, Frame, Head
from gateway.answer_writer import AnswerWriter
from gateway.intake import IntakeReader
from gateway.request_id import Identity
from gateway.served_form import ServedForm
from shared.aio.channel import ChannelClosed
from shared.aio.scope import cancel_and_wait
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


def make(
    *, from_index: int = 0, is_resumable: bool = True, form: str = "stream", **fields: Any
) -> tuple[AnswerWriter, ClientLink]:
    """A writer of an answer to SCRIPT, and where its frames go."""
    body = SCRIPT.body(stop=["##"], resumable=is_resumable, **fields)
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
    """Id and text of each delta; an error is none."""
    data = b"".join(item.data for item in items if isinstance(item, Frame))
    found: list[tuple[int | None, str]] = []
    for block in BlockSplitter().feed(data, at=0.0):
        if block.data is None or block.data == "[DONE]":
            continue
        chunk = json.loads(block.data)
        if "choices" in chunk and (text := chunk["choices"][0]["delta"].get("content")):
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


async def test_a_long_log_holds_nobody_up() -> None:
    """Between its frames the loop goes round."""
    writer, _ = make()
    writer.start(0)
    showing = asyncio.get_running_loop().create_task(writer.put_again(output_ids()[:1] * 640, ()))
    num_rounds = 0
    while not showing.done():
        await asyncio.sleep(0)
        num_rounds += 1
    assert num_rounds >= 10


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
    """As many tokens as were asked for, or an end token behind them."""
    writer, _ = make()
    assert not writer.is_whole(FinishReason.STOP)
    writer.feed(output_ids()[:1], ())
    assert not writer.is_whole(FinishReason.STOP)
    assert not writer.is_whole(FinishReason.LENGTH)
    writer.feed([*output_ids()[1:], SCRIPTED_EOS_ID], ())
    assert writer.is_whole(FinishReason.LENGTH)
    assert writer.is_whole(FinishReason.STOP)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, True), ({"ignore_eos": True}, False), ({"min_tokens": 8}, False), ({"min_tokens": 7}, True)],
)
def test_whether_the_last_token_ends_it(fields: dict[str, Any], expected: bool) -> None:
    """Its seven tokens have an end token behind them, which may be ignored, or come too early."""
    writer, _ = make(**fields)
    assert not writer.has_end_token
    writer.feed(output_ids(), ())
    assert not writer.has_end_token
    writer.feed([SCRIPTED_EOS_ID], ())
    assert expected == writer.has_end_token


async def test_an_error_comes_behind_all_text() -> None:
    """What was held back, with a number of its own, and half a character as U+FFFD."""
    writer, link = make()
    writer.start(0)
    ids = output_ids()
    await writer.put(writer.feed([*ids[:4], ids[-1]], ()))
    await writer.tell_error(ServingError(ErrorCode.WORKER_LOST, "x"), writer.flush())
    shown = await frames(link)
    data = b"".join(item.data for item in shown if isinstance(item, Frame))
    assert [(1, "a"), (3, "ä"), (6, "#\ufffd")] == deltas(shown)
    assert data.index(b"ufffd") < data.index(b"worker_lost")


async def test_text_that_waited_for_room_is_not_lost() -> None:
    """Broken off while it waited: it leaves with whatever comes next, once, in its place."""
    writer, link = make()
    writer.start(0)
    while link.out.try_put(Frame(data=b"")):
        pass
    first, *others = output_ids()
    waiting = asyncio.get_running_loop().create_task(writer.put(writer.feed([first], ())))
    await asyncio.sleep(0)
    await cancel_and_wait(waiting)
    for _ in range(MAX_FRAMES):
        await link.out.get()
    await writer.put(writer.feed(others[:2], ()))
    await writer.tell_error(ServingError(ErrorCode.WORKER_LOST, "x"))
    assert [(1, "a"), (3, "ä")] == deltas(await frames(link))


async def test_behind_the_last_words_nothing_comes() -> None:
    """A client that stalled has been told; what is still under way is counted and not shown."""
    writer, link = make()
    writer.start(0)
    writer.last_words(ServingError(ErrorCode.SLOW_CLIENT, "x"))
    await writer.put(writer.feed(output_ids(), ()))
    await writer.tell_error(ServingError(ErrorCode.SLOW_CLIENT, "x"), writer.flush())
    assert (len(output_ids()), []) == (writer.num_tokens, deltas(await frames(link)))
